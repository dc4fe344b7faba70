"""`TorchState`: the user's own module with its optimizer, loss-scale state and counters on its device."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from polyamp.contract.backend import Backend
from polyamp.errors import ModelError, StateError
from polyamp.recipe.members import members
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.rules import growing, refusals
from polyamp.rules.stuck import Watch
from polyamp.shown import ShownState
from polyamp_torch.arrays import dtype_name
from polyamp_torch.compat import children_in, parameters_in
from polyamp_torch.distributed.mixed_precision import check_precision
from polyamp_torch.precision.bound import BoundModule, device_of
from polyamp_torch.precision.parameter_listing import check_listing, tree_parameters
from polyamp_torch.precision.paths import inner_paths, leaves_of, path_of, plan_for
from polyamp_torch.step import complex_parameters, exporting, optimizers, resuming
from polyamp_torch.step import running as buffers
from polyamp_torch.step.bystanders import Graphs
from polyamp_torch.step.interrupts import Undisturbed
from polyamp_torch.step.kernels import Kernels
from polyamp_torch.step.parameter_writes import ParameterWrites
from polyamp_torch.step.replicas import replicas_of
from polyamp_torch.step.turns import Turn

Array = np.ndarray[Any, Any]
_TRAINED: Final = operator.attrgetter("requires_grad")
_FORM: Final = operator.attrgetter("shape", "dtype", "device")
_SHAPE: Final = operator.attrgetter("shape")
_DTYPE: Final = operator.attrgetter("dtype")
_DEVICE: Final = operator.attrgetter("device")
_STRIDES: Final = torch.Tensor.stride
_CONTIGUOUS: Final = torch.Tensor.is_contiguous
_ON_CPU: Final = operator.attrgetter("is_cpu")
_END: Final = object()


class TorchState(ShownState):
    """A torch model under training. The step updates it, the module and the optimizer in place.

    Attributes:
        model: the user's module.
        recipe: what it is trained with.
        plan: its policy, resolved against the model's modules.
        scaler: the recipe's loss scaler.
        optimizer: the `torch.optim.Optimizer` in use.
        groups: which parameter has which hyperparameters (S27).
        optimizer_settings: its groups' options as they were at `init`, for checkpoints.
        shards: what this process holds of it, as real tensors, where polyamp made it and parameters are sharded or
            complex.
        kernels: its fused kernels, where polyamp made it.
        rates: its groups' learning rates, where the recipe has a schedule.
        scale_state: the loss-scale state, tensors on the module's device.
        step: number of applied updates, int32 tensor.
        parameters: the trainable parameters by `/`-separated path, in the model's order.
        complex_parameters: those of them that are complex.
        one_device: whether all of them are on one device; they always have one dtype, the policy's, in both parts of
            complex ones.
        buffer_owners: where the model's buffers are, for `buffers.snapshot`.
        writes: which parameters forward passes write to.
        turn: a step, an export or a restore at a time.
        watch: when the host looks whether the scale is stuck (S17).
        graphs: which losses lead to its own parameters only.
        replicas: the processes that train it together.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, backend: Backend) -> None:
        if not isinstance(model, nn.Module):
            raise ModelError(f"the torch backend trains an nn.Module. Received: {type(model).__name__}.")
        _refuse_lazy(model)
        self._path = path_of(model)
        self.replicas = replicas_of(model)
        named = [(self._path(name), p) for name, p in tree_parameters(model) if p.requires_grad]
        refusals.check_parameters([(name, dtype_name(p.dtype)) for name, p in named], recipe, complex_numbers=True)
        for name, p in named:
            if 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True)) < p.numel():
                raise ModelError(
                    f"parameter {name!r} is expanded: several of its {p.numel()} elements are one number in memory, "
                    "which no optimizer can update. Make the small tensor the parameter, and expand it in forward()."
                )
        if is_spec(recipe.optimizer):
            check_listing(model, dict(named))
        self.backend: Final = backend
        self.turn = Turn()
        self.watch = Watch()
        self.graphs = Graphs()
        self.device = device_of(model)
        self.model = model
        self.recipe = recipe
        self.plan = plan_for(model, recipe.policy)
        check_precision(model, self.plan)
        self.scaler = recipe.loss_scaler  # a recipe without one makes it anew each time it is asked
        self.bound = BoundModule(model, self.plan, self.device)
        self.parameters = dict(named)
        self.complex_parameters = [p for _, p in named if p.is_complex()]
        if self.complex_parameters:
            path = next(name for name, p in named if p.is_complex())
            complex_parameters.check(path, recipe.optimizer, self.replicas.engine)
        self._frozen = [(self._path(name), p) for name, p in tree_parameters(model) if not p.requires_grad]
        self._forms = list(map(_FORM, self.parameters.values()))
        self._shapes, self._dtypes, self._devices = (list(part) for part in zip(*self._forms, strict=True))
        self._strides = list(map(_STRIDES, self.parameters.values()))
        self._contiguous = all(map(_CONTIGUOUS, self.parameters.values()))  # these two are quicker to ask for
        self._on_cpu = all(map(_ON_CPU, self.parameters.values()))
        self._places = _places(model)
        self._members = list(_members(self._places))
        self.one_device = len({p.device for p in self.parameters.values()}) == 1
        self.buffer_owners = buffers.owners(model)
        self.writes = ParameterWrites({**self.parameters, **dict(self._frozen)})
        self.sums_means: dict[Any, bool] = {}
        self.groups = members(
            recipe,
            self.parameters,
            lambda: leaves_of(model, self.parameters),
            backend="torch",
            modules=lambda: itertools.chain.from_iterable(inner_paths(model).items()),
        )
        self.optimizer = optimizers.build(self.groups, self.parameters)
        self.optimizer_settings = resuming.described(self.optimizer)
        self.shards = complex_parameters.plain_tensors_of(
            self.optimizer,
            recipe.optimizer,
            sharded=self.replicas.sharded,
            complex_numbers=bool(self.complex_parameters),
        )
        self.kernels = self._kernels()
        self.rates = optimizers.rates_of(self.optimizer, self.groups)
        self._held = _held(self.optimizer)
        self._retired = False
        self.scale_state = self.scaler.init(like=torch.zeros((), device=self.device))
        self.step = torch.zeros((), dtype=torch.int32, device=self.device)

    def _place(self) -> tuple[str, int]:
        return str(self.device), sum(p.numel() for p in self.parameters.values())

    def __getstate__(self) -> Any:
        """What `pickle` and `copy` ask for.

        Raises:
            StateError: several processes hold the state together, whose connections belong to this one.
        """
        if self.replicas.held is not None:
            whole = "state.model.module" if self.replicas.engine == "ddp" else None
            weights = (
                f"Weights alone: copy.deepcopy({whole}), or torch.save({whole}.state_dict(), path)."
                if whole
                else "Weights alone: torch.distributed.checkpoint.state_dict.get_model_state_dict(state.model)."
            )
            raise StateError(
                f"a state of a model under {self.replicas.engine} cannot be pickled or copied: it holds connections "
                "to other processes. To keep it: polyamp.save(state, path), and polyamp.restore(state, path) into what "
                f"polyamp.init gives. {weights}"
            )
        return super().__getstate__()

    def check_unchanged(self) -> None:
        """Refuse a model or an optimizer that does not hold the parameters of `init` as they were then.

        Raises:
            ModelError: names the first that was replaced, frozen, unfrozen, reshaped, cast, moved or laid out anew.
            UnsupportedError: an option in the optimizer's groups that a spec does not have.
        """
        if self.replicas.held is not None:
            self.replicas.held.prepare()
        # held and compared as objects: a new one may lie where a freed one lay, and then has its id
        if not all(map(operator.is_, _members(self._places), self._members)):
            self._look_again()
        held = _held(self.optimizer)
        if len(held) != len(self._held) or not all(map(operator.is_, held, self._held)):
            self._look_at_groups(held)
        parameters = self.parameters.values()  # compared one by one: what is kept in lists is garbage to collect
        layouts: Iterator[bool] = map(_CONTIGUOUS, parameters)
        if not self._contiguous:
            layouts = map(operator.eq, map(_STRIDES, parameters), self._strides)
        devices: Iterator[bool] = map(_ON_CPU, parameters)
        if not self._on_cpu:
            devices = map(operator.eq, map(_DEVICE, parameters), self._devices)
        if not (
            all(map(operator.is_, map(_DTYPE, parameters), self._dtypes))
            and all(map(operator.eq, map(_SHAPE, parameters), self._shapes))
            and all(layouts)
            and all(devices)
        ):
            self._refuse_form()
        optimizers.check_options(self.optimizer, self.recipe.optimizer, self.groups)
        if not all(map(_TRAINED, self.parameters.values())):
            name = next(name for name, p in self.parameters.items() if not p.requires_grad)
            raise ModelError(
                f"parameter {name!r} was frozen after init. To train the others, state = polyamp.refresh(state): what "
                "stayed keeps its optimizer state."
            )
        for name, p in self._frozen:
            if p.requires_grad:
                raise ModelError(
                    f"parameter {name!r} was unfrozen after init, so no optimizer holds it. To train it too, state = "
                    "polyamp.refresh(state): what stayed keeps its optimizer state."
                )

    def _refuse_form(self) -> None:
        for (name, p), form, strides in zip(self.parameters.items(), self._forms, self._strides, strict=True):
            before, now = ([str(item) for item in (tuple(shape), *rest)] for shape, *rest in (form, _FORM(p)))
            if before == now:
                before, now = [f"laid out with strides {strides}"], [f"strides {p.stride()}"]
            if _FORM(p) != form or p.stride() != strides:
                raise ModelError(
                    f"parameter {name!r} was {', '.join(before)} at init. Received: {', '.join(now)}. The optimizer's "
                    "state is that of init: change the model first, then call polyamp.init, or go on with state = "
                    "polyamp.refresh(state)."
                )

    def _look_at_groups(self, held: list[Any]) -> None:
        """The groups were changed: that may only be the order, or which group a parameter is in."""
        if not self.groups.alike:
            raise ModelError(
                "the optimizer's parameter groups were changed after init; they are those of the recipe. Change the "
                "recipe's groups, and call polyamp.init again."
            )
        now, before = ([id(p) for p in every if p is not None] for every in (held, self._held))
        if len(now) != len(before) or set(now) != set(before):
            raise ModelError(
                "the optimizer's parameter groups were changed after init, so it does not hold exactly the model's "
                "trainable parameters. Go on with state = polyamp.refresh(state)."
            )
        self.groups_moved()  # without kernels, whose lists are in the old order: `optimizer.step()` follows the groups

    def _look_again(self) -> None:
        """Modules were put elsewhere; that is a model's own business as long as its parameters are the same."""
        self.check_alive()
        if self.replicas.held is not None:
            self.replicas.held.reshard()
            if all(map(operator.is_, _members(self._places), self._members)):
                return
        known = {id(p) for p in self.parameters.values()} | {id(p) for _, p in self._frozen}
        now = {self._path(name): p for name, p in tree_parameters(self.model)}
        strange = next((name for name, p in now.items() if id(p) not in known), None)
        held = {id(p) for p in now.values()}
        lost = next((name for name, p in self.parameters.items() if id(p) not in held), None)
        if strange is not None or lost is not None:
            raise ModelError(
                f"parameter {strange or lost!r} was {'put into' if strange else 'taken out of'} the model after init, "
                "so the optimizer does not know of it. Go on with state = polyamp.refresh(state): what stayed keeps "
                "its optimizer state."
            )
        self._places = _places(self.model)
        self._members = list(_members(self._places))
        self.buffer_owners = buffers.owners(self.model)

    def check_alive(self) -> None:
        """See `growing.check_alive`."""
        growing.check_alive(self._retired)

    def retire(self) -> None:
        """No step from now on; the look at the model, which every step takes anyway, finds it."""
        self._retired = True
        self._members = [_END, _END]

    def shapes(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Path -> identity of every trained parameter, and its shape at `init`."""
        pairs = zip(self.parameters.items(), self._shapes, strict=True)
        return {name: (id(p), tuple(shape)) for (name, p), shape in pairs}

    def hold(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on with this object in the place of its own optimizer of a spec, whose groups and arrays it is given."""
        made = self.optimizer
        optimizer.defaults, optimizer.param_groups, optimizer.state = made.defaults, made.param_groups, made.state
        self.optimizer = optimizer
        if self.kernels is not None:
            self.kernels = self._kernels()
        if self.rates is not None:
            self.rates.serve(optimizer)

    def _kernels(self) -> Kernels | None:
        parameters: list[Any] = list(self.parameters.values())
        if self.shards is None:
            return optimizers.kernels_of(self.optimizer, self.recipe.optimizer, parameters)
        with self.shards.inside(self.optimizer):
            plain: list[Any] = list(map(self.shards.plain, parameters))
            return optimizers.kernels_of(self.optimizer, self.recipe.optimizer, plain)

    def plain(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors as kernels take them: what this process holds of each, and complex ones as real ones."""
        local = self.replicas.local(tensors)
        return complex_parameters.real_views(local) if self.complex_parameters else local

    def groups_moved(self) -> None:
        """The groups hold the same parameters in another order or division, as if by hand."""
        self._held = _held(self.optimizer)
        self.kernels = None

    def export(self) -> dict[str, Array]:
        """Every array by name; torch's random-number states included, so that dropout resumes where it was.

        A step that another thread has begun is finished first. Of a model that several processes hold all call it.
        """
        with Undisturbed(), self.turn:
            self.check_alive()
            return {**exporting.arrays_of(self), **exporting.streams_of(self)}

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Put exported arrays back, in place; no step runs meanwhile."""
        with Undisturbed(), self.turn:
            exporting.put(self, arrays)

    @property
    def frozen(self) -> list[tuple[str, Any]]:
        """(path, parameter) of what was not trained at `init`."""
        return self._frozen


def _refuse_lazy(model: nn.Module) -> None:
    """Refuse what torch makes at the first call of a lazy module.

    Raises:
        ModelError: names the first.
    """
    for kind, named in (("parameter", tree_parameters(model)), ("buffer", nn.Module.named_buffers(model))):
        for name, value in named:
            if nn.parameter.is_lazy(value):
                raise ModelError(
                    f"{kind} {name.replace('.', '/')!r} has no shape yet. Call the model once on a batch, which makes "
                    "the parameters of its lazy modules, then polyamp.init."
                )


def _held(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The parameters that an optimizer holds, and None at the end of each group."""
    return [p for group in optimizer.param_groups for p in (*group["params"], None)]


def _places(model: nn.Module) -> list[dict[str, Any]]:
    """The dicts that hold the parameters and the children of every module."""
    return [slots for module in model.modules() for slots in (parameters_in(module), children_in(module))]


def _members(places: list[dict[str, Any]]) -> Iterator[Any]:
    """Every parameter and child, and a mark of the end, so that one comparison finds another number of them too."""
    return itertools.chain(itertools.chain.from_iterable(map(dict.values, places)), (_END,))
