"""Training state of a torch model: the user's module with its optimizer, loss-scale state and counters."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic

import numpy as np
import torch
from torch import nn

from polyamp.contract.backend import Backend
from polyamp.display import StateClass, StateDisplayMixin
from polyamp.errors import ModelError, StateError
from polyamp.recipe.recipe import Recipe
from polyamp.rules import refresh, step_checks
from polyamp.rules.averages import averages_in_place_error
from polyamp.rules.group_members import resolve_group_members
from polyamp.rules.stuck_scale import StuckScaleMonitor
from polyamp_torch.arrays import dtype_name
from polyamp_torch.distributed.replicas import find_replicas
from polyamp_torch.precision.policy_module import module_device
from polyamp_torch.step import optimizer_metadata, optimizers
from polyamp_torch.step.averages import MovingAverages
from polyamp_torch.step.parameter_writes import ParameterWriteTracker
from polyamp_torch.step.torch_only import complex_parameters, state_arrays
from polyamp_torch.step.torch_only.critical_section import DeferInterrupts, StateLock
from polyamp_torch.step.torch_only.foreign_grads import GraphSizeCache
from polyamp_torch.step.torch_only.optimizer_kernels import FusedKernels
from polyamp_torch.step.torch_only.random_state import random_state_arrays
from polyamp_torch.step.torch_only.reader_selection import model_reader

Array = np.ndarray[Any, Any]
_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")
_SHAPE_DTYPE_DEVICE: Final = operator.attrgetter("shape", "dtype", "device")
_SHAPE: Final = operator.attrgetter("shape")
_DTYPE: Final = operator.attrgetter("dtype")
_DEVICE: Final = operator.attrgetter("device")
_STRIDES: Final = torch.Tensor.stride
_CONTIGUOUS: Final = torch.Tensor.is_contiguous
_IS_CPU: Final = operator.attrgetter("is_cpu")
_END_MARK: Final = object()
_PARAMS: Final = operator.itemgetter("params")
_flatten: Final = itertools.chain.from_iterable


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    ModuleT = TypeVar("ModuleT", bound=nn.Module, default=nn.Module)
else:
    from typing import TypeVar

    ModuleT = TypeVar("ModuleT", bound=nn.Module)


class TorchState(StateDisplayMixin, Generic[ModuleT], metaclass=StateClass):
    """Training state of a torch model. A step updates the state, the module and the optimizer in place.

    Attributes:
        model: the user's module, of the type that `TorchState[Net]` names.
        reader: what reads the module, by its kind.
        recipe: the training recipe.
        plan: the recipe's policy, resolved against the model's modules.
        scaler: the recipe's loss scaler.
        scales: whether it scales the loss.
        optimizer: the `torch.optim.Optimizer` in use.
        groups: the hyperparameters of each parameter (S27).
        common_clip: the limits of all gradients together (S11).
        optimizer_settings: the options of the optimizer's groups at `init`, for checkpoints.
        shards: the optimizer's local tensors as real tensors; only for a spec with sharded or complex parameters.
        kernels: the optimizer's fused kernels, for a spec.
        rates: the learning rates of the optimizer's groups, if the recipe has a schedule.
        scale_state: the loss-scale state, tensors on the module's device.
        step: number of applied updates, int32 tensor.
        averages: moving averages of the parameters (S34); None without `Recipe(ema=...)`.
        parameters: the trainable parameters by `/`-separated path, in the model's order.
        complex_parameters: the complex ones among the trainable parameters.
        one_device: whether all trainable parameters are on one device. They always have one dtype, the policy's; for
            complex ones it is the dtype of both parts.
        buffer_owners: the modules that own buffers, for `buffers.snapshot`.
        writes: the parameters that forward passes write to.
        lock: lock that serialises steps, exports and restores.
        watch: schedule of the host's checks for a stuck scale (S17).
        graphs: the losses whose graphs lead only to the state's own parameters.
        replicas: the processes that train the model together.
    """

    _shown = ("averages", "optimizer", "parameters", "plan")

    def __init__(self, model: ModuleT, recipe: Recipe, backend: Backend) -> None:
        self.reader = reader = model_reader(model)
        self.replicas = find_replicas(model)
        reader.check(recipe, self.replicas.engine.name)
        trained = reader.trained()
        named = list(trained.items())
        step_checks.check_parameters([(name, dtype_name(p.dtype)) for name, p in named], recipe, complex_numbers=True)
        for name, p in named:
            if 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True)) < p.numel():
                raise ModelError(
                    f"parameter {name!r} is expanded: several of its {p.numel()} elements are one number in memory, "
                    "which no optimizer can update. Make the small tensor the parameter, and expand it in forward()."
                )
        reader.check_listing(recipe, trained)
        self.backend: Final = backend
        self.lock = StateLock()
        self.watch = StuckScaleMonitor()
        self.graphs = GraphSizeCache()
        self.device = module_device(model)
        self.model = model
        self.recipe = recipe
        self.plan = reader.plan(recipe.policy)
        self.scaler = recipe.loss_scaler
        self.scales = self.scaler.scales
        self.bound = reader.bind(self.plan, self.device)
        self.parameters = trained
        self.complex_parameters = [p for _, p in named if p.is_complex()]
        if self.complex_parameters:
            path = next(name for name, p in named if p.is_complex())
            complex_parameters.check_complex_training(path, recipe.optimizer, self.replicas.engine.name)
        self._frozen = list(reader.frozen().items())
        self._forms = list(map(_SHAPE_DTYPE_DEVICE, self.parameters.values()))
        self._shapes, self._dtypes, self._devices = (list(part) for part in zip(*self._forms, strict=True))
        self._strides = list(map(_STRIDES, self.parameters.values()))
        self._contiguous = all(map(_CONTIGUOUS, self.parameters.values()))  # these two checks are faster
        self._on_cpu = all(map(_IS_CPU, self.parameters.values()))
        self._places = reader.slots()
        self._members = list(_slot_values(self._places))
        self.one_device = len({p.device for p in self.parameters.values()}) == 1
        self.buffer_owners = reader.buffer_owners()
        self.writes = ParameterWriteTracker({**self.parameters, **dict(self._frozen)})
        self.sums_means: dict[Any, bool] = {}
        self.groups = resolve_group_members(
            recipe,
            self.parameters,
            lambda: reader.leaves(self.parameters),
            backend="torch",
            modules=reader.module_paths,
        )
        self.common_clip = self.groups.common_clip(recipe.clip)
        self.optimizer = optimizers.build_optimizer(self.groups, self.parameters)
        self.optimizer_settings = optimizer_metadata.optimizer_metadata(self.optimizer)
        self.shards = complex_parameters.local_tensor_views(
            self.optimizer,
            recipe.optimizer,
            sharded=self.replicas.sharded,
            complex_numbers=bool(self.complex_parameters),
        )
        self.kernels = self._kernels()
        self.rates = optimizers.group_learning_rates(self.optimizer, self.groups)
        self._group_options = optimizers.group_options(recipe.optimizer)
        self._record_groups()
        self._retired = False
        self.scale_state = self.scaler.init(like=torch.zeros((), device=self.device))
        self.step = torch.zeros((), dtype=torch.int32, device=self.device)
        self.averages = None if recipe.ema is None else MovingAverages(self, recipe.ema)

    def _place(self) -> tuple[str, int]:
        return str(self.device), sum(p.numel() for p in self.parameters.values())

    def __getstate__(self) -> Any:
        """Return the contents for `pickle` and `copy`.

        Raises:
            StateError: the state has connections to other processes, or a Keras model, which cannot be copied with it.
        """
        self.reader.check_copy()
        engine = self.replicas.engine.name
        if engine is not None:
            whole = "state.model.module" if engine == "ddp" else None
            weights = (
                f"Weights alone: copy.deepcopy({whole}), or torch.save({whole}.state_dict(), path)."
                if whole
                else "Weights alone: torch.distributed.checkpoint.state_dict.get_model_state_dict(state.model)."
            )
            raise StateError(
                f"a state of a model under {engine} cannot be pickled or copied: it holds connections "
                "to other processes. To keep it: polyamp.save(state, path), and polyamp.restore(state, path) into what "
                f"polyamp.init gives. {weights}"
            )
        return super().__getstate__()

    def check_unchanged(self) -> None:
        """Raise if the parameters of the model or the optimizer have changed since `init`.

        Raises:
            ModelError: a parameter was replaced, frozen, unfrozen, reshaped, cast, moved or given other strides; the
                message names the first.
            UnsupportedError: the optimizer's groups have an option that the spec does not have.
        """
        self.replicas.engine.prepare()
        # compared as objects, not by id: a new object may have the id of a freed one
        if not all(map(operator.is_, _slot_values(self._places), self._members)):
            self._refresh_records()
        changed = self.reader.changed()
        if changed is not None:
            raise ModelError(
                f"{changed} than at init, of which the optimizer does not know. Go on with state = "
                "polyamp.refresh(state): what stayed keeps its optimizer state."
            )
        parts = list(map(_PARAMS, self.optimizer.param_groups))
        if list(map(len, parts)) != self._group_sizes or not all(map(operator.is_, _flatten(parts), self._held)):
            self._check_groups()
        parameters = self.parameters.values()  # compared lazily: new lists would be work for the garbage collector
        layouts: Iterator[bool] = map(_CONTIGUOUS, parameters)
        if not self._contiguous:
            layouts = map(operator.eq, map(_STRIDES, parameters), self._strides)
        devices: Iterator[bool] = map(_IS_CPU, parameters)
        if not self._on_cpu:
            devices = map(operator.eq, map(_DEVICE, parameters), self._devices)
        if not (
            all(map(operator.is_, map(_DTYPE, parameters), self._dtypes))
            and all(map(operator.eq, map(_SHAPE, parameters), self._shapes))
            and all(layouts)
            and all(devices)
        ):
            self._refuse_form()
        if self._group_options is not None:
            optimizers.check_group_options(self.optimizer, self._group_options, self.groups)
        if not all(map(_REQUIRES_GRAD, self.parameters.values())):
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
            before, now = (
                [str(item) for item in (tuple(shape), *rest)] for shape, *rest in (form, _SHAPE_DTYPE_DEVICE(p))
            )
            if before == now:
                before, now = [f"laid out with strides {strides}"], [f"strides {p.stride()}"]
            if _SHAPE_DTYPE_DEVICE(p) != form or p.stride() != strides:
                raise ModelError(
                    f"parameter {name!r} was {', '.join(before)} at init. Received: {', '.join(now)}. The optimizer's "
                    "state is that of init: change the model first, then call polyamp.init, or go on with state = "
                    "polyamp.refresh(state)."
                )

    def _check_groups(self) -> None:
        """Check changed groups: only the order, or the group of a parameter, may differ."""
        if not self.groups.is_uniform:
            raise ModelError(
                "the optimizer's parameter groups were changed after init; they are those of the recipe. Change the "
                "recipe's groups, and call polyamp.init again."
            )
        now = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        if len(now) != len(self._held) or set(now) != set(map(id, self._held)):
            raise ModelError(
                "the optimizer's parameter groups were changed after init, so it does not hold exactly the model's "
                "trainable parameters. Go on with state = polyamp.refresh(state)."
            )
        self.accept_moved_groups()

    def _refresh_records(self) -> None:
        """Update the records after modules were moved, which is allowed as long as the parameters are the same."""
        self.check_alive()
        if self.replicas.engine.name is not None:
            self.replicas.engine.reshard()
            if all(map(operator.is_, _slot_values(self._places), self._members)):
                return
        known = {id(p) for p in self.parameters.values()} | {id(p) for _, p in self._frozen}
        now = self.reader.parameters()
        strange = next((name for name, p in now.items() if id(p) not in known), None)
        held = {id(p) for p in now.values()}
        lost = next((name for name, p in self.parameters.items() if id(p) not in held), None)
        if strange is not None or lost is not None:
            raise ModelError(
                f"parameter {strange or lost!r} was {'put into' if strange else 'taken out of'} the model after init, "
                "so the optimizer does not know of it. Go on with state = polyamp.refresh(state): what stayed keeps "
                "its optimizer state."
            )
        self._places = self.reader.slots()
        self._members = list(_slot_values(self._places))
        self.buffer_owners = self.reader.buffer_owners()

    def check_alive(self) -> None:
        """Raise if the state was refreshed, or its model has its averages in place of the trained parameters."""
        refresh.check_not_refreshed(self._retired)
        if self.averages is not None and self.averages.in_place:
            raise averages_in_place_error()

    def refuse_steps(self) -> list[Any]:
        """Have every step find that the state cannot be trained (`check_alive`); return what `allow_steps` takes."""
        members, self._members = self._members, [_END_MARK, _END_MARK]
        return members

    def allow_steps(self, members: list[Any]) -> None:
        """Undo `refuse_steps`."""
        self._members = members

    def retire(self) -> None:
        """Refuse all further steps; the check of the model in every step detects it."""
        self._retired = True
        self.refuse_steps()

    def shapes(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return path -> (identity, shape at `init`) of every trained parameter."""
        pairs = zip(self.parameters.items(), self._shapes, strict=True)
        return {name: (id(p), tuple(shape)) for (name, p), shape in pairs}

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer of a spec by this object, which takes over its groups and arrays."""
        made = self.optimizer
        optimizer.defaults, optimizer.param_groups, optimizer.state = made.defaults, made.param_groups, made.state
        self.optimizer = optimizer
        if self.kernels is not None:
            self.kernels = self._kernels()
        if self.rates is not None:
            self.rates.use_optimizer(optimizer)

    def _kernels(self) -> FusedKernels | None:
        parameters: list[Any] = list(self.parameters.values())
        if self.shards is None:
            return optimizers.fused_kernels(self.optimizer, self.recipe.optimizer, parameters)
        with self.shards.inside(self.optimizer):
            plain: list[Any] = list(map(self.shards.plain, parameters))
            return optimizers.fused_kernels(self.optimizer, self.recipe.optimizer, plain)

    def plain(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors as kernels need them: local shards, and complex tensors as real ones."""
        if self.replicas.sharded:
            from polyamp_torch.distributed.torch_only.sharded_tensors import local_tensors

            tensors = local_tensors(tensors)
        return complex_parameters.real_views(tensors) if self.complex_parameters else tensors

    def accept_moved_groups(self) -> None:
        """Accept groups that contain the same parameters in another order or division.

        The kernels, whose lists have the old order, are dropped: `optimizer.step()` follows the groups."""
        self._record_groups()
        self.kernels = None

    def _record_groups(self) -> None:
        """Record which parameters the optimizer's groups hold now, in their order."""
        parts = [group["params"] for group in self.optimizer.param_groups]
        self._group_sizes, self._held = list(map(len, parts)), list(_flatten(parts))

    def export(self) -> dict[str, Array]:
        """Return every array by name, including torch's random-number states, so that dropout resumes exactly.

        It waits for a step in another thread. All processes of a distributed model must call it.
        """
        with DeferInterrupts(), self.lock:
            self.check_alive()
            return {**state_arrays.state_arrays_by_name(self), **random_state_arrays(self.device)}

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Restore exported arrays in place; no step runs at the same time."""
        with DeferInterrupts(), self.lock:
            self.check_alive()
            state_arrays.write_state_arrays(self, arrays)

    @property
    def frozen(self) -> list[tuple[str, Any]]:
        """(path, parameter) of each parameter that was not trained at `init`."""
        return self._frozen


def _slot_values(places: list[dict[str, Any]]) -> Iterator[Any]:
    """Yield every parameter and child, then an end mark, so that a comparison also detects another length."""
    return itertools.chain(_flatten(map(dict.values, places)), (_END_MARK,))
