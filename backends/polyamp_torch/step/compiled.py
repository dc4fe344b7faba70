"""`train_step(compile=True)`: forward, loss, backward, norm and flag, clip, update and scale adjustment in one graph.

The graph is a function of tensors: parameters, optimizer slots, buffers, loss-scale state and batch. It differentiates
with `torch.func`, runs the optimizer specs' own formulas, selects by the flag, and writes the new values in place. No
number that changes from step to step is a Python number, so that neither a skip nor a new scale or rate compiles it
again. Called by `compiled_step`.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from polyamp.errors import PolyampError, UnsupportedError
from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction, StepResult
from polyamp.rules import decide, weights
from polyamp.rules.scale import LossScaleState
from polyamp.rules.weights import WeightFunction
from polyamp.rules.window import Window
from polyamp.trees import map_tree
from polyamp_torch.arrays import XP
from polyamp_torch.compat import buffers_in, constant_when_compiled, parameters_in, tree_flatten, tree_unflatten
from polyamp_torch.precision.attention import Attention
from polyamp_torch.precision.autocast import matmul_precision, opened
from polyamp_torch.precision.bound import BoundModule
from polyamp_torch.precision.paths import plan_for
from polyamp_torch.precision.regions import OPENED
from polyamp_torch.step import optimizers
from polyamp_torch.step import running as buffers
from polyamp_torch.step.compile_trial import Watch, traced_again, tried
from polyamp_torch.step.compile_weights import is_unclear, of_selection
from polyamp_torch.step.complex_parameters import real_view, real_views
from polyamp_torch.step.interrupts import Undisturbed
from polyamp_torch.step.measure import divisor, measured
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.weighing import weighed
from polyamp_torch.step.window import NARROW, produced_by, stacked

Tensors = dict[str, torch.Tensor]


class Groups(NamedTuple):
    """The options of an optimizer's parameter groups as a graph has them.

    Attributes:
        specs: of each group, with the options that stand in it.
        numbers: path of a parameter -> its group.
    """

    specs: list[Any]
    numbers: dict[str, int]

    @classmethod
    def of(cls, state: TorchState) -> Groups:
        """Those of a state, as they are now."""
        groups = state.optimizer.param_groups
        if len(groups) == 1:
            return cls([optimizers.current(state.groups.distinct[0].spec, groups[0])], {})
        found = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        specs = [optimizers.current(optimizers.spec_of(state.groups, n), group) for n, group in enumerate(groups)]
        return cls(specs, {name: found[id(p)] for name, p in state.parameters.items()})


class Graph:
    """The compiled step of one state, traced at its first call.

    Args:
        part: a micro-batch, on which `loss_fn` is first tried without compiling and without an update: what the eager
            step refuses is then refused in the same words.
        groups: the optimizer's specs, with the options that stand in its parameter groups; None for an optimizer of
            torch's own.
        weight: `weight=` of the user's, or None.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        recipe: Recipe,
        options: Mapping[str, Any],
        state: TorchState,
        part: Any,
        groups: Groups | None,
        weight: WeightFunction | None = None,
    ) -> None:
        if not state.one_device:
            raise UnsupportedError("train_step(compile=...) needs all parameters on one device. Use compile=False.")
        if groups is not None:
            optimizers.part_counts(state.optimizer)
        self.groups = groups
        self._recipe = recipe
        self._scaler = state.scaler
        self._weight = weight
        self._loss_fn = loss_fn
        self._device = state.device.type
        self._dtype = torch.float64 if recipe.policy.param == "float64" else torch.float32  # of rates and counts (S1)
        self._plan = plan = plan_for(state.model, recipe.policy.replace(float32_matmul=None))  # set around the graph
        self._bound = BoundModule(state.model, plan, state.device)
        self._program = _Program(state.model, self._bound, loss_fn)
        self._casts = _cast_dtypes(state) if plan.cast else {}
        found = tried(loss_fn, state, part)
        self._used, self._attends, written, _ = found
        self._written = [_module_name(name) for name in written if name in self._used]
        self._more_running = {
            _module_name(name): state.writes.named[name].detach() for name in written if name not in self._used
        }
        self._watch = Watch(loss_fn, found)
        compiler: Any = torch.compile  # torch annotates it for plain functions only
        self._run = compiler(_with_own_code(self._traced), fullgraph=True, **options)

    def step(self, state: TorchState, batches: list[Any], window: Window, quiet: Undisturbed) -> StepResult:
        """One step; the state's tensors are written in place. An interrupt arrives while the step is compiled."""
        assert self.groups is not None
        parameters = {_module_name(name): p.detach() for name, p in state.parameters.items() if name in self._used}
        slots = [
            {
                slot: real_view(state.optimizer.state[state.parameters[name]][optimizers.slot_name(slot)])
                for slot in self.groups.specs[0].slots
            }
            for name in self._used
        ]
        counts = [
            state.optimizer.state[state.parameters[name]]["step"]
            for name in self._used
            if "step" in state.optimizer.state[state.parameters[name]]
        ]
        groups = state.optimizer.param_groups
        rates = [group["lr"] for group in groups] if state.rates is None else state.rates.multiples()
        running = buffers.writable(state.buffer_owners) | self._more_running
        fixed = self._fixed({id(state.parameters[name]) for name in self._used} | set(map(id, running.values())))
        loss, auxes, norm, scale_state, step, skipped, weight = self._called(
            state,
            batches,
            quiet,
            parameters,
            fixed,
            slots,
            counts,
            running,
            state.scale_state,
            state.step,
            [torch.as_tensor(rate, dtype=self._dtype, device=state.device) for rate in rates],
            batches,
            shares_of(window, state.device),
        )
        state.scale_state, state.step = LossScaleState(*scale_state), step
        torch.clear_autocast_cache()
        aux = map_tree(_detached, stacked(auxes, stack=self._recipe.accumulate_steps > 1))
        return StepResult(loss, aux, norm, state.scale_state.scale, skipped, step, weight)

    def _called(self, state: TorchState, batches: list[Any], quiet: Undisturbed, *arguments: Any) -> Any:
        """The compiled function's results, or what is to be raised."""
        with torch.no_grad(), matmul_precision(state.plan.float32_matmul), self._installed():
            self._watch.given = (state, batches[0])
            self._watch.quiet = quiet
            try:
                return self._run(*arguments)
            except PolyampError:
                raise
            except Exception as error:
                if self._watch.refusal is not None:
                    raise self._watch.refusal from error
                raise _refusal(error, self._watch.changing) from error
            finally:
                self._watch.given = self._watch.refusal = self._watch.quiet = None

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """Overrides in their places; in cast mode the casts are part of the graph, and the model is only marked."""
        if not self._plan.cast:
            with self._bound.installed():
                yield
            return
        OPENED.bound.append(self._bound)
        try:
            yield
        finally:
            OPENED.bound.pop()

    def _traced(
        self,
        parameters: Tensors,
        fixed: Tensors,
        slots: list[Tensors],
        counts: list[torch.Tensor],
        running: Tensors,
        scale_state: LossScaleState,
        step: torch.Tensor,
        rates: list[torch.Tensor],
        batches: list[Any],
        shares: torch.Tensor | None,
    ) -> Any:
        """The whole step; what a compiler sees. `shares` are None for micro-batches of equal rows."""
        traced_again(self._watch)
        recipe, scaler = self._recipe, self._scaler
        loss, auxes, total, now, whole, weight = self._summed(
            parameters, fixed, running, scale_state.scale, batches, shares
        )
        current = real_views(now.get(name, p) for name, p in parameters.items())
        total = real_views(total)
        scale = produced_by(scale_state.scale if scaler.scales else None, whole, step.device)
        norm, finite = measured(total, scale, least=scaler.min_scale if weight is None else 0.0, alike=True)
        by = divisor(norm, scale, recipe.clip_norm)
        if by is not None:
            narrow = by if total[0].dtype == torch.float64 else by.float()
            finite = finite & torch.isfinite(narrow)
            total = [_wide(value) / narrow for value in total]
        some = None if weight is None else weight > 0.0
        flag = finite if scaler.checks else None
        decision = decide.concluded(scaler, scale_state, step, flag, finite, XP, some)
        checked = decision.finite
        self._update(real_views(parameters.values()), current, total, slots, counts, rates, step, checked)
        for name, old in running.items():
            old.copy_(now[name] if checked is None else torch.where(checked, now[name], old))
        skipped = torch.zeros_like(finite) if checked is None else decision.skipped
        return loss, auxes, norm.float(), tuple(decision.scale_state), decision.step, skipped, weight

    def _summed(
        self,
        parameters: Tensors,
        fixed: Tensors,
        running: Tensors,
        scale: torch.Tensor,
        batches: list[Any],
        shares: torch.Tensor | None,
    ) -> tuple[torch.Tensor, list[Any], list[torch.Tensor], Tensors, Any, torch.Tensor | None]:
        """The loss, auxes, the sum of the scaled gradients over the micro-batches, what these left in buffers, and in
        parameters that they write to, what the sum is to be divided by beside the scale, and the weight where it
        depends on values (S8)."""
        losses, auxes, total, now = [], [], None, running
        given: list[Any] = []
        several = len(batches) > 1
        for number, part in enumerate(batches):
            share = None if shares is None else shares[number]
            running = {name: value for name, value in now.items() if name not in parameters}
            grads, loss, aux, now, weight = self._gradients(parameters, fixed, running, scale, part, share, several)
            parameters = {name: now.get(name, p) for name, p in parameters.items()}
            if several:
                grads = list(map(_wide, grads))  # summed in float32, whatever the parameters are stored in (S8)
                if weight is not None:
                    grads = [torch.where(weight > 0.0, grad * weight, torch.zeros_like(grad)) for grad in grads]
            total = grads if total is None else [one + other for one, other in zip(total, grads, strict=True)]
            losses.append(loss)
            auxes.append(aux)
            given.append(weight)
        assert total is not None
        weights.check_alike([weight is not None for weight in given])
        if not several:
            return losses[0], auxes, total, now, 1.0, given[0]
        if given[0] is None:
            factors: Any = [1.0] * len(batches) if shares is None else list(shares)
            whole = float(len(batches)) if shares is None else shares.sum()
            return weighed(losses, factors) / whole, auxes, total, now, whole, None
        by = torch.stack(given).sum()
        whole = torch.where(by > 0.0, by, torch.ones_like(by))
        return weighed(losses, given) / whole, auxes, total, now, whole, by

    def _gradients(
        self,
        parameters: Tensors,
        fixed: Tensors,
        running: Tensors,
        scale: torch.Tensor,
        part: Any,
        share: torch.Tensor | None,
        several: bool,
    ) -> tuple[list[torch.Tensor], torch.Tensor, Any, Tensors, torch.Tensor | None]:
        """Gradients of the scaled loss, times the share of one that counts by its rows; the loss, aux, after the
        forward pass the buffers, and the parameters that it writes to; and the weight."""

        kept: list[Any] = []
        count = weights.of_batch(self._weight, part)

        def run(named: Tensors, part: Any) -> Any:
            return torch.func.functional_call(self._program, named, (part,))

        def scaled_loss(values: Tensors) -> Any:
            with torch.enable_grad(), self._attention(), opened(self._plan, self._device):
                given = {name: self._cast(name, value) for name, value in {**fixed, **values}.items()}
                before = {name: self._cast(name, value.clone()) for name, value in running.items()}
                before |= {name: given[name] for name in self._written}
                own = {name: value.clone() for name, value in before.items()}
                named = {f"module.{name}": value for name, value in {**given, **own}.items()}
                with self._bound.around(values):
                    result, found = weights.call(run, named, part)
            read = of_selection(weights.read(result, found, XP, weight=count, selects=True), part if several else None)
            if several and is_unclear(read, found, part):
                _warn_unclear(self._loss_fn, weights.line_of(found))
            loss, aux = read.value, read.aux
            wide = loss.float().reshape(())
            weight = read.weight
            if weight is not None:
                weight = torch.as_tensor(weight, dtype=torch.float32, device=wide.device)
                wide = torch.where(weight > 0.0, wide, torch.zeros_like(wide))
            masters = {**running, **values}
            after = {name: _changed(masters[name], before[name], own[name]).detach() for name in before}
            leaves, structure = tree_flatten(aux)
            kept.append((leaves, structure))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            scaled = wide * scale if self._scaler.scales else wide
            if share is not None and weight is None:
                scaled = scaled * share
            return scaled, (wide, tensors, after, [] if weight is None else [weight])

        grads, (_, (loss, tensors, after, given)) = torch.func.grad_and_value(scaled_loss, has_aux=True)(parameters)
        leaves, structure = kept[0]
        found = iter(tensors)
        aux = tree_unflatten([next(found) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)
        return list(grads.values()), loss.detach(), aux, after, next(iter(given), None)

    def _attention(self) -> contextlib.AbstractContextManager[Any]:
        return Attention(self._device) if self._attends else contextlib.nullcontext()

    def _fixed(self, seen: set[int]) -> Tensors:
        """What mode "cast" casts beside the tensors seen: parameters that are not trained, and a shared one once."""
        found: Tensors = {}
        for name in self._casts:
            owner, _, own = name.rpartition(".")
            part = self._program.module.get_submodule(owner)
            tensor = parameters_in(part).get(own, buffers_in(part).get(own))
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor.detach()
        return found

    def _cast(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """In cast mode, a parameter or buffer in the dtype that the model computes in (S3)."""
        return value.to(self._casts[name]) if name in self._casts else value

    def _update(
        self,
        parameters: list[torch.Tensor],
        current: list[torch.Tensor],
        grads: list[torch.Tensor],
        slots: list[Tensors],
        counts: list[torch.Tensor],
        rates: list[torch.Tensor],
        step: torch.Tensor,
        finite: torch.Tensor | None,
    ) -> None:
        """The specs' formula for every parameter, from its `current` value, kept where `finite` says so."""
        assert self.groups is not None
        specs, numbers = self.groups
        wide_step = step.to(self._dtype)  # of an integer the formulas make float32
        now = [
            spec.rate(wide_step, XP) * rate if callable(spec.learning_rate) else rate
            for spec, rate in zip(specs, rates, strict=True)
        ]
        taken = counts if len(counts) == len(parameters) else [step] * len(parameters)
        for name, p, held, grad, own, count in zip(self._used, parameters, current, grads, slots, taken, strict=True):
            spec, rate = specs[numbers.get(name, 0)], now[numbers.get(name, 0)]
            wide = {slot: _wide(value) for slot, value in own.items()}
            new, after = spec.update(XP, _wide(held), _wide(grad), wide, rate, (count + 1).to(self._dtype))
            for old, value in [(p, new), *((own[slot], after[slot]) for slot in own)]:
                old.copy_(value if finite is None else torch.where(finite, value, old))
        for count in counts:
            count.add_(1.0 if finite is None else finite.float())


class _Program(nn.Module):
    """`loss_fn` on the bound model as a module, so that `torch.func.functional_call` reaches the model's tensors
    however `loss_fn` uses it."""

    def __init__(self, module: nn.Module, bound: BoundModule, loss_fn: LossFunction) -> None:
        super().__init__()
        self.module = module
        self._call = (loss_fn, bound)

    def forward(self, part: Any) -> Any:
        """What `loss_fn` returns."""
        loss_fn, bound = self._call
        return loss_fn(bound, part)


def _with_own_code(method: Any) -> Any:
    """A method with a code object of its own: torch counts recompilations by code, and graphs do not share one."""
    function = method.__func__
    copied = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return types.MethodType(copied, method.__self__)


def _cast_dtypes(state: TorchState) -> dict[str, torch.dtype]:
    """Which parameters and buffers mode "cast" gives which dtype, as the binding installs them."""
    found: dict[str, torch.dtype] = {}
    before = {
        f"{path}.{name}" if path else name: value
        for path, part in state.model.named_modules()
        for name, value in [*parameters_in(part).items(), *buffers_in(part).items()]
        if value is not None
    }
    with torch.no_grad(), state.bound.installed():
        for path, part in state.model.named_modules():
            for name, value in [*parameters_in(part).items(), *buffers_in(part).items()]:
                whole = f"{path}.{name}" if path else name
                if value is not None and value.dtype != before[whole].dtype:
                    found[whole] = value.dtype
    return found


def _changed(master: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """A buffer's new value: what the forward pass wrote, and the master's own digits where a cast hid them."""
    if before.dtype == master.dtype:
        return after
    return torch.where(after == before, master, after.to(master.dtype))


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in NARROW else value


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


@constant_when_compiled
def _warn_unclear(loss_fn: LossFunction, line: str) -> None:
    """While tracing; a compiler does not look inside."""
    weights.warn_unclear(loss_fn, line)


def shares_of(window: Window, device: torch.device) -> torch.Tensor | None:
    """What the micro-batches weigh, as a vector that the graph takes; None where all weigh 1."""
    return None if window.even else torch.tensor(window.shares, device=device)


def _module_name(path: str) -> str:
    return path.replace("/", ".")


def _refusal(error: Exception, changing: Sequence[str]) -> UnsupportedError:
    """What to say when torch.compile gives up: its own first words, and what to do."""
    if changing and "RecompileLimit" in type(error).__name__:
        return UnsupportedError(
            f"train_step(compile=...): every pass of loss_fn changes {', '.join(changing[:3])}. Python state is a "
            f"constant of the graph, so each step is compiled anew, and torch gives up: {type(error).__name__}. Keep a "
            "counter in a buffer (self.register_buffer, self.n += 1) or outside of loss_fn, or use compile=False."
        )
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    return UnsupportedError(
        f"train_step(compile=...) could not compile the step into one graph. torch says: {type(error).__name__}: "
        f"{' '.join(lines[:3])[:400]}. Keep Python side effects, data-dependent branches, backward() and autograd "
        "functions without setup_context out of loss_fn and the model, or use compile=False. (Without a C++ compiler: "
        "compile={'backend': 'aot_eager'}.)"
    )
