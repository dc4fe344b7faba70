"""Compiled training step in one graph: forward, loss, backward, norm and flag, clipping, update and scale update.

The graph is a function of tensors: parameters, optimizer slots, buffers, loss-scale state and batch. It differentiates
with `torch.func`, runs the optimizer specs' formulas, selects by the flag, and writes the new values in place. Numbers
that change between steps are tensors, so that a skip, a new scale or a new rate does not recompile it.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from polyamp.errors import PolyampError, UnsupportedError
from polyamp.monitor.slots import MonitorSelection
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaleState
from polyamp.results import LossFunction, StepResult
from polyamp.rules import loss_weights
from polyamp.rules.accumulation import Accumulation
from polyamp.rules.loss_weights import WeightFunction
from polyamp.rules.update_decision import GradStats, decide
from polyamp.trees import map_tree
from polyamp_torch.arrays import HALF_TENSOR_DTYPES, XP, detach_leaf
from polyamp_torch.compat import assume_constant_result, module_buffers, module_parameters, tree_flatten, tree_unflatten
from polyamp_torch.precision.autocast import matmul_precision, root_region
from polyamp_torch.precision.policy_module import PolicyModule, resolve_policy
from polyamp_torch.precision.torch_only.compiled_attention import AttentionCastMode
from polyamp_torch.precision.torch_only.open_blocks import OPEN_BLOCKS
from polyamp_torch.step import optimizers
from polyamp_torch.step.accumulation import stack_aux
from polyamp_torch.step.error_hints import compile_error
from polyamp_torch.step.grad_stats import global_norm_and_finite, unscale_and_clip_divisor
from polyamp_torch.step.loss_weights import total_scale, weighted_loss_sum
from polyamp_torch.step.monitor_slots import MonitoredUpdate
from polyamp_torch.step.output_figures import OutputHooks, with_output_figures
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only import buffers
from polyamp_torch.step.torch_only.compiled_loss_weights import has_unclear_selection, weigh_selection
from polyamp_torch.step.torch_only.complex_parameters import real_view, real_views
from polyamp_torch.step.torch_only.critical_section import DeferInterrupts
from polyamp_torch.step.torch_only.eager_dry_run import RetraceMonitor, check_retrace, run_trial
from polyamp_torch.step.torch_only.graph_groups import GraphGroups, both, zero_unless
from polyamp_torch.step.torch_only.spec_formulas import slot_name

NamedTensors = dict[str, torch.Tensor]
_GRAPH_NUMBERS: Final = itertools.count()


class CompiledGraph:
    """Compiled step of one state, traced at its first call.

    Args:
        part: a micro-batch for an eager trial of `loss_fn` without an update, which raises the eager step's errors.
        groups: the optimizer's specs with the options of its parameter groups; None for a torch optimizer.
        weight: the user's `weight=`, or None.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        recipe: Recipe,
        options: Mapping[str, Any],
        state: TorchState,
        part: Any,
        groups: GraphGroups | None,
        weight: WeightFunction | None = None,
        monitor: MonitorSelection | None = None,
    ) -> None:
        if not state.one_device:
            raise UnsupportedError("train_step(compile=...) needs all parameters on one device. Use compile=False.")
        if groups is not None:
            optimizers.separate_step_counts(state.optimizer)
        self.groups = groups
        self._recipe = recipe
        self._scaler = state.scaler
        self._weight = weight
        self._monitor = monitor
        self._outputs = OutputHooks(state, monitor, traced=True) if monitor and monitor.activations else None
        self._loss_fn = loss_fn
        self._device = state.device.type
        self._dtype = torch.float64 if recipe.policy.param == "float64" else torch.float32  # of rates and counts (S1)
        self._plan = plan = resolve_policy(
            state.model, recipe.policy.replace(float32_matmul=None)
        )  # set around the graph
        self._bound = PolicyModule(state.model, plan, state.device)
        self._program = _LossModule(state.model, self._bound, loss_fn)
        self._casts = _cast_dtypes(state) if plan.cast else {}
        found = run_trial(loss_fn, state, part)
        self._used, self._attends, written, _ = found
        self._written = [_module_name(name) for name in written if name in self._used]
        self._more_running = {
            _module_name(name): state.writes.named[name].detach() for name in written if name not in self._used
        }
        self._watch = RetraceMonitor(loss_fn, found)
        compiler: Any = torch.compile  # torch annotates it for plain functions only
        self._run = compiler(_copy_method(self._traced), fullgraph=True, **options)

    def step(
        self, state: TorchState, batches: list[Any], window: Accumulation, interrupts: DeferInterrupts
    ) -> StepResult:
        """Run one step; update the state's tensors in place. Interrupts are delivered while the step is compiled."""
        assert self.groups is not None
        parameters = {_module_name(name): p.detach() for name, p in state.parameters.items() if name in self._used}
        slots = [
            {
                slot: real_view(state.optimizer.state[state.parameters[name]][slot_name(slot)])
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
        running = buffers.writable_buffers(state.buffer_owners) | self._more_running
        fixed = self._fixed({id(state.parameters[name]) for name in self._used} | set(map(id, running.values())))
        watch = None if self._monitor is None else MonitoredUpdate(state, self._monitor)
        loss, auxes, norm, scale_state, step, skipped, weight, seen, carried = self._call(
            state,
            batches,
            interrupts,
            parameters,
            fixed,
            slots,
            counts,
            running,
            state.scale_state,
            state.step,
            [torch.as_tensor(rate, dtype=self._dtype, device=state.device) for rate in rates],
            batches,
            micro_batch_weights(window, state.device),
        )
        state.scale_state, state.step = LossScaleState(*scale_state), step
        if state.averages is not None:
            state.averages.move(state, ~skipped)
        torch.clear_autocast_cache()
        aux = map_tree(detach_leaf, stack_aux(auxes, stack=self._recipe.accumulate_steps > 1))
        figures = None
        if watch is not None:
            watch.measure(dict(zip(self._used, seen, strict=True)), carried)
            figures = watch.finish(state)
        result = StepResult(loss, aux, norm, state.scale_state.scale, skipped, step, weight, figures)
        return with_output_figures(result, self._outputs)

    def _call(self, state: TorchState, batches: list[Any], interrupts: DeferInterrupts, *arguments: Any) -> Any:
        """Call the compiled function; return its results, or raise its error as one of polyamp's."""
        hooks = contextlib.nullcontext() if self._outputs is None else self._outputs.installed()
        with torch.no_grad(), matmul_precision(state.plan.float32_matmul), self._installed(), hooks:
            self._watch.given = (state, batches[0])
            self._watch.interrupts = interrupts
            try:
                return self._run(*arguments)
            except PolyampError:
                raise
            except Exception as error:
                if self._watch.refusal is not None:
                    raise self._watch.refusal from error
                raise compile_error(error, self._watch.changing) from error
            finally:
                self._watch.given = self._watch.refusal = self._watch.interrupts = None

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """Context manager that installs overrides; in mode "cast" the graph has the casts, and the model is marked."""
        if not self._plan.cast:
            with self._bound.installed():
                yield
            return
        OPEN_BLOCKS.bound.append(self._bound)
        try:
            yield
        finally:
            OPEN_BLOCKS.bound.pop()

    def _traced(
        self,
        parameters: NamedTensors,
        fixed: NamedTensors,
        slots: list[NamedTensors],
        counts: list[torch.Tensor],
        running: NamedTensors,
        scale_state: LossScaleState,
        step: torch.Tensor,
        rates: list[torch.Tensor],
        batches: list[Any],
        shares: torch.Tensor | None,
    ) -> Any:
        """Run the whole step; this function is compiled. `shares` is None for micro-batches of equal rows."""
        check_retrace(self._watch)
        scaler = self._scaler
        loss, auxes, total, now, whole, weight = self._sum_gradients(
            parameters, fixed, running, scale_state.scale, batches, shares
        )
        current = real_views(now.get(name, p) for name, p in parameters.items())
        assert self.groups is not None
        trains = self.groups.trains(self._used, step)
        total = real_views(map(zero_unless, trains, total))
        scale = total_scale(scale_state.scale if scaler.scales else None, whole, step.device)
        norm, finite = global_norm_and_finite(
            total, scale, least=scaler.min_scale if weight is None else 0.0, alike=True
        )
        seen = [value.clone() for value in total] if self._monitor is not None else []
        by = unscale_and_clip_divisor(norm, scale, self.groups.common_clip)
        if by is not None:
            narrow = by if total[0].dtype == torch.float64 else by.float()
            finite = finite & torch.isfinite(narrow)
            total = [_to_float32(value) / narrow for value in total]
        total = self.groups.clip(self._used, total)
        stats = GradStats(norm.float(), finite, weight)
        decision = decide(scaler, scale_state, step, stats, [finite], "all", XP)
        checked = decision.finite
        self._update(real_views(parameters.values()), current, total, slots, counts, rates, step, checked, trains)
        for name, old in running.items():
            old.copy_(now[name] if checked is None else torch.where(checked, now[name], old))
        after = (tuple(decision.scale_state), decision.step, decision.skipped)
        return loss, auxes, stats.norm, *after, weight, seen, scale if seen else None

    def _sum_gradients(
        self,
        parameters: NamedTensors,
        fixed: NamedTensors,
        running: NamedTensors,
        scale: torch.Tensor,
        batches: list[Any],
        shares: torch.Tensor | None,
    ) -> tuple[torch.Tensor, list[Any], list[torch.Tensor], NamedTensors, Any, torch.Tensor | None]:
        """Return loss, auxes, sum of the scaled gradients, buffers and written parameters after the passes, the sum's
        divisor (without the scale), and the weight if it depends on values (S8)."""
        losses, auxes, total, now = [], [], None, running
        given: list[Any] = []
        several = len(batches) > 1
        for number, part in enumerate(batches):
            share = None if shares is None else shares[number]
            running = {name: value for name, value in now.items() if name not in parameters}
            grads, loss, aux, now, weight = self._gradients(parameters, fixed, running, scale, part, share, several)
            parameters = {name: now.get(name, p) for name, p in parameters.items()}
            if several:
                grads = list(map(_to_float32, grads))  # summed in float32, whatever the parameters' dtype (S8)
                if weight is not None:
                    grads = [torch.where(weight > 0.0, grad * weight, torch.zeros_like(grad)) for grad in grads]
            total = grads if total is None else [one + other for one, other in zip(total, grads, strict=True)]
            losses.append(loss)
            auxes.append(aux)
            given.append(weight)
        assert total is not None
        loss_weights.check_consistent_weights([weight is not None for weight in given])
        if not several:
            return losses[0], auxes, total, now, 1.0, given[0]
        if given[0] is None:
            factors: Any = [1.0] * len(batches) if shares is None else list(shares)
            whole = float(len(batches)) if shares is None else shares.sum()
            return weighted_loss_sum(losses, factors) / whole, auxes, total, now, whole, None
        by = torch.stack(given).sum()
        whole = torch.where(by > 0.0, by, torch.ones_like(by))
        return weighted_loss_sum(losses, given) / whole, auxes, total, now, whole, by

    def _gradients(
        self,
        parameters: NamedTensors,
        fixed: NamedTensors,
        running: NamedTensors,
        scale: torch.Tensor,
        part: Any,
        share: torch.Tensor | None,
        several: bool,
    ) -> tuple[list[torch.Tensor], torch.Tensor, Any, NamedTensors, torch.Tensor | None]:
        """Return gradients of the scaled loss (times any row share), loss, aux, new buffers and parameters, weight."""
        kept: list[Any] = []
        count = loss_weights.batch_loss_weight(self._weight, part)

        def run(named: NamedTensors, part: Any) -> Any:
            return torch.func.functional_call(self._program, named, (part,))

        def scaled_loss(values: NamedTensors) -> Any:
            if self._outputs is not None:
                self._outputs.take()
            with torch.enable_grad(), self._attention(), root_region(self._plan, self._device):
                given = {name: self._cast(name, value) for name, value in {**fixed, **values}.items()}
                before = {name: self._cast(name, value.clone()) for name, value in running.items()}
                before |= {name: given[name] for name in self._written}
                own = {name: value.clone() for name, value in before.items()}
                named = {f"module.{name}": value for name, value in {**given, **own}.items()}
                with self._bound.around(values):
                    result, found = loss_weights.call_loss_fn(run, named, part)
            read = weigh_selection(
                loss_weights.parse_loss_output(result, found, XP, weight=count, selects=True), part if several else None
            )
            if several and has_unclear_selection(read, found, part):
                _warn_unclear_count(self._loss_fn, loss_weights.count_line(found))
            loss, aux = read.value, read.aux
            wide = loss.float().reshape(())
            weight = read.weight
            if weight is not None:
                weight = torch.as_tensor(weight, dtype=torch.float32, device=wide.device)
                wide = torch.where(weight > 0.0, wide, torch.zeros_like(wide))
            masters = {**running, **values}
            after = {name: _changed_buffer(masters[name], before[name], own[name]).detach() for name in before}
            leaves, structure = tree_flatten(aux)
            kept.append((leaves, structure))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            scaled = wide * scale if self._scaler.scales else wide
            if share is not None and weight is None:
                scaled = scaled * share
            outputs = {} if self._outputs is None else self._outputs.take()
            return scaled, (wide, tensors, after, [] if weight is None else [weight], outputs)

        grads, (_, (loss, tensors, after, given, outputs)) = torch.func.grad_and_value(scaled_loss, has_aux=True)(
            parameters
        )
        if self._outputs is not None:
            self._outputs.keep(outputs)
        leaves, structure = kept[0]
        found = iter(tensors)
        aux = tree_unflatten([next(found) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)
        return list(grads.values()), loss.detach(), aux, after, next(iter(given), None)

    def _attention(self) -> contextlib.AbstractContextManager[Any]:
        return AttentionCastMode(self._device) if self._attends else contextlib.nullcontext()

    def _fixed(self, seen: set[int]) -> NamedTensors:
        """Return further tensors that mode "cast" casts, not in `seen`: parameters not trained; shared ones once."""
        found: NamedTensors = {}
        for name in self._casts:
            owner, _, own = name.rpartition(".")
            part = self._program.module.get_submodule(owner)
            tensor = module_parameters(part).get(own, module_buffers(part).get(own))
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor.detach()
        return found

    def _cast(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Cast a parameter or buffer, in mode "cast", to its compute dtype (S3)."""
        return value.to(self._casts[name]) if name in self._casts else value

    def _update(
        self,
        parameters: list[torch.Tensor],
        current: list[torch.Tensor],
        grads: list[torch.Tensor],
        slots: list[NamedTensors],
        counts: list[torch.Tensor],
        rates: list[torch.Tensor],
        step: torch.Tensor,
        finite: torch.Tensor | None,
        trains: list[torch.Tensor | None],
    ) -> None:
        """Run the specs' formula for every parameter, from its `current` value; keep the result if `finite`, and if the
        parameter `trains`."""
        assert self.groups is not None
        specs, numbers = self.groups.specs, self.groups.numbers
        flags = [both(finite, own) for own in trains]
        wide_step = step.to(self._dtype)  # formulas would convert an integer to float32
        now = [
            spec.rate(wide_step, XP) * rate if callable(spec.learning_rate) else rate
            for spec, rate in zip(specs, rates, strict=True)
        ]
        taken = counts if len(counts) == len(parameters) else [step] * len(parameters)
        columns = zip(self._used, parameters, current, grads, slots, taken, flags, strict=True)
        for name, p, held, grad, own, count, flag in columns:
            spec, rate = specs[numbers.get(name, 0)], now[numbers.get(name, 0)]
            wide = {slot: _to_float32(value) for slot, value in own.items()}
            new, after = spec.update(XP, _to_float32(held), _to_float32(grad), wide, rate, (count + 1).to(self._dtype))
            for old, value in [(p, new), *((own[slot], after[slot]) for slot in own)]:
                old.copy_(value if flag is None else torch.where(flag, value, old))
        for count, flag in zip(counts, flags, strict=False):  # of some optimizers none counts
            count.add_(1.0 if flag is None else flag.float())


class _LossModule(nn.Module):
    """Module that calls `loss_fn` on the bound model, so that `torch.func.functional_call` can swap its tensors."""

    def __init__(self, module: nn.Module, bound: PolicyModule, loss_fn: LossFunction) -> None:
        super().__init__()
        self.module = module
        self._call = (loss_fn, bound)

    def forward(self, part: Any) -> Any:
        """Return the result of `loss_fn`."""
        loss_fn, bound = self._call
        return loss_fn(bound, part)


def _copy_method(method: Any) -> Any:
    """Copy a method with code of a name of its own.

    torch counts recompilations per code object. By file, line and name it remembers which numbers and sizes differed
    between compilations, and makes them inputs of later graphs, which then read them on the host in every step."""
    function = method.__func__
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_GRAPH_NUMBERS)}")
    copied = types.FunctionType(code, function.__globals__, code.co_name)
    return types.MethodType(copied, method.__self__)


def _cast_dtypes(state: TorchState) -> dict[str, torch.dtype]:
    """Return the dtypes of the parameters and buffers that mode "cast" casts."""
    found: dict[str, torch.dtype] = {}
    before = {
        f"{path}.{name}" if path else name: value
        for path, part in state.model.named_modules()
        for name, value in [*module_parameters(part).items(), *module_buffers(part).items()]
        if value is not None
    }
    with torch.no_grad(), state.bound.installed():
        for path, part in state.model.named_modules():
            for name, value in [*module_parameters(part).items(), *module_buffers(part).items()]:
                whole = f"{path}.{name}" if path else name
                if value is not None and value.dtype != before[whole].dtype:
                    found[whole] = value.dtype
    return found


def _changed_buffer(master: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return a buffer's new value: the written elements, and the master's full-precision value of unchanged ones."""
    if before.dtype == master.dtype:
        return after
    return torch.where(after == before, master, after.to(master.dtype))


def _to_float32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in HALF_TENSOR_DTYPES else value


@assume_constant_result
def _warn_unclear_count(loss_fn: LossFunction, line: str) -> None:
    """Warn while tracing; the compiler does not trace this function."""
    loss_weights.warn_unclear_count(loss_fn, line)


def micro_batch_weights(window: Accumulation, device: torch.device) -> torch.Tensor | None:
    """Return the weights of the micro-batches as a vector; None if all are 1."""
    return None if window.is_even else torch.tensor(window.weights, device=device)


def _module_name(path: str) -> str:
    return path.replace("/", ".")
