"""The first half of a torch step: the scaled loss, its backward pass, and the gradients that it leaves (S6, S7, S23).

Called by the step, by `compile_trial`, and, for people who run the two halves, by the backend.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from polyamp.errors import LossError, UnsupportedError
from polyamp.results import Gradients, LossFunction
from polyamp.rules import refusals, weights
from polyamp.rules.weights import WeightFunction
from polyamp.rules.window import Window
from polyamp.trees import map_tree
from polyamp_torch.arrays import XP, dtype_name, to_device
from polyamp_torch.compat import foreach_mul_, local_of
from polyamp_torch.precision.autocast import matmul_precision, opened
from polyamp_torch.precision.shield import shield
from polyamp_torch.step import running as buffers
from polyamp_torch.step.bystanders import Bystanders, Graphs, made
from polyamp_torch.step.complex_parameters import real_views, resolve_conjugates
from polyamp_torch.step.interrupts import Undisturbed
from polyamp_torch.step.measure import buckets as bucketed
from polyamp_torch.step.measure import scalar_for
from polyamp_torch.step.parameter_writes import BeforePass, settle
from polyamp_torch.step.replicas import guarded
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.turns import together
from polyamp_torch.step.weighing import Weighing, divisor, rows_of, weighed, weighing_of
from polyamp_torch.step.window import produced_by

Values = dict[str, torch.Tensor | None]
_LAYOUT: Final = operator.attrgetter("layout")
_STRIDED: Final = {torch.strided}


@contextlib.contextmanager
def set_aside(parameters: Sequence[torch.Tensor], *, used_up: bool = False) -> Iterator[None]:
    """A block at whose start every `.grad` is None, and after which they are what they were.

    `torch.autograd.grad` would be shorter, but its gradients may share memory with each other and be laid out unlike
    their parameters, which in-place division and the fused kernels cannot take; `.grad` keeps torch's layout contract.

    Args:
        parameters: whose gradients.
        used_up: leave None behind instead, unless the block fails.
    """
    held = [p.grad for p in parameters]
    if any(map(operator.is_not, held, itertools.repeat(None))):
        for p in parameters:
            p.grad = None
    try:
        yield
    except BaseException:
        used_up = False
        raise
    finally:
        for p, old in zip(parameters, held, strict=True):
            p.grad = None if used_up else old


def value_and_grad(
    loss_fn: LossFunction, states: Sequence[TorchState], batch: Any, weight: WeightFunction | None = None
) -> tuple[Any, list[Gradients]]:
    """The value of `loss_fn` and the unscaled gradients of each state; the states stay as they are.

    A parameter that several states share is in each of their `Gradients`, with the same tensor.
    """
    with guarded(states), Undisturbed() as quiet, together([state.turn for state in states]), shield():
        batch = to_device(batch, states[0].device, states[0].plan.param)
        return _differentiated(loss_fn, states, batch, quiet, weight)


def _differentiated(
    loss_fn: LossFunction,
    states: Sequence[TorchState],
    batch: Any,
    quiet: Undisturbed,
    weight: WeightFunction | None,
) -> tuple[Any, list[Gradients]]:
    for state in states:
        state.check_unchanged()
    saved = [buffers.snapshot(state.buffer_owners) for state in states]
    writes = [state.writes.before(loss_fn, training=state.model.training) for state in states]
    named = list({id(p): (name, p) for state in states for name, p in state.parameters.items()}.values())
    parameters = [p for _, p in named]
    graphs = states[0].graphs if len(states) == 1 else Graphs()
    weighing = weighing_of(weight, [batch], Window((1,)), states[0].replicas, states[0].device)
    try:
        with set_aside(parameters), Bystanders(parameters, graphs, functools.partial(_leaves, states)) as others:
            with contextlib.ExitStack() as engines:
                for state in states:
                    state.replicas.enter(engines)
                loss, aux = scaled_backward(loss_fn, states, batch, others, quiet, weighing, writes=writes)
                for state in states:
                    state.replicas.fit(state.parameters)
            found: list[Values] = [_gradients(state) for state in states]
            total = weighing.total
            if weighing.omits and isinstance(total, float) and total == 0.0:  # nothing counts, and no backward pass ran
                found = [{name: torch.zeros_like(p) for name, p in state.parameters.items()} for state in states]
                values = []
            else:
                values = dense(named)
    except BaseException:
        for item, before in zip(saved, writes, strict=True):
            settle(item, before, torch.zeros((), dtype=torch.bool))
        raise
    running = [buffers.taken_back(item) for item in saved]
    for before in writes:
        before.compare()
    for own, before in reversed(list(zip(running, writes, strict=True))):
        own.update(before.take_back())
    if states[0].replicas.count > 1:
        total = states[0].replicas.mean(total, states[0].device)
    scale = produced_by(states[0].scale_state.scale if states[0].scaler.scales else None, divisor(total), loss.device)
    if scale is not None:  # the loss was multiplied by the first's scale
        factor = scale.double().reciprocal()  # float32 but for float64 gradients (S1)
        held = list(map(local_of, values))
        if any(state.complex_parameters for state in states):
            held = real_views(held)
        for bucket in bucketed(held):
            foreach_mul_(bucket, scalar_for(bucket, factor))
    counted = weighing.weight(total)
    grads = [Gradients(values, own, loss, counted) for values, own in zip(found, running, strict=True)]
    return (loss if aux is None else (loss, aux)), grads


def _leaves(states: Sequence[TorchState]) -> list[torch.Tensor]:
    """Leaves of the graph that stand for parameters of the states, where they are not those themselves."""
    return [leaf for state in states if state.replicas.held is not None for leaf in state.replicas.held.leaves()]


def _gradients(state: TorchState) -> Values:
    """What the backward pass left. What the engine writes its next gradients into is copied."""
    held = state.replicas.held
    if held is None or not held.keeps_gradients:
        return {name: p.grad for name, p in state.parameters.items()}
    for p in state.parameters.values():
        p.grad = None if p.grad is None else p.grad.clone()
    return {name: p.grad for name, p in state.parameters.items()}


def scaled_backward(
    loss_fn: LossFunction,
    states: Sequence[TorchState],
    batch: Any,
    others: Bystanders,
    quiet: Undisturbed,
    weighing: Weighing,
    between: Callable[[torch.Tensor], None] | None = None,
    writes: Sequence[BeforePass] = (),
    *,
    counts: bool = True,
) -> tuple[torch.Tensor, Any]:
    """The float32 loss and aux; the gradients of the scaled loss, times what a micro-batch counts (S8), are added to
    the parameters' `.grad` (S6). One that counts for nothing has the loss 0, and on one device no backward pass where
    that is known on the host.

    The casts stay installed during the backward pass, in which activation checkpointing runs the model again. An
    interrupt arrives while `loss_fn` or the backward pass runs. `between` is called with the loss between the two.
    What the pass wrote to casts of parameters goes to the parameters, and is noted in `writes`.
    """
    plan, scaler = states[0].plan, states[0].scaler
    models = tuple(state.bound for state in states)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(matmul_precision(plan.float32_matmul))
        for model in models:
            stack.enter_context(model.installed())
        given = models[0] if len(models) == 1 else models

        def count(part: Any) -> list[Any]:
            with opened(plan, states[0].device.type), quiet.disturbed:
                return _counts(loss_fn, given, states, part)

        code, trial = getattr(loss_fn, "__code__", type(loss_fn)), None
        if weighing.begins and code in states[0].sums_means:
            if states[0].sums_means[code]:
                weighing.count_others(count)
        elif weighing.begins:
            trial = _Trial(states)
        ends = _ends(states[0], others.began)
        held = [p.grad for p in ends]
        while True:
            before = made()
            with opened(plan, states[0].device.type), quiet.disturbed:
                result, found = weights.call(loss_fn, given, batch)
            if trial is None:
                break
            states[0].sums_means[code] = weights.is_sum(result)
            if states[0].sums_means[code]:  # the graph is in the way of the passes that count: once again behind them
                del result, found
                trial.take_back()
                weighing.count_others(count)
            else:
                break
            trial = None
        size = made() - before
        ran = any(p.grad is not grad for p, grad in zip(ends, held, strict=True))
        if ran or others.were_given(loss_fn, size):
            raise LossError(
                "loss_fn must not run the backward pass: polyamp does, on the scaled loss, and would add its gradients "
                "to those that are there. Drop loss.backward(), and optimizer.step() and zero_grad() with it."
            )
        read = weighing.read(result, found, batch, count)
        if weighing.among_others and (weighing.is_unclear or weights.is_unclear(read, found)):
            weights.warn_unclear(loss_fn, weights.line_of(found))
        loss, aux = read.value, read.aux
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise LossError(
                "loss_fn must return a tensor that depends on the model's parameters. "
                f"Received: {type(loss).__name__} without a gradient. Is it detached, or under torch.no_grad()?"
            )
        refusals.check_loss(tuple(loss.shape), dtype_name(loss.dtype))
        for model in models:
            model.check_overrides_ran()
        if states[0].replicas.sharded:
            loss = states[0].replicas.whole(loss)
        wide = (loss.double() if plan.param == "float64" else loss.float()).reshape(())
        factor = weighing.counted(read, batch, counts=counts)
        scaled = wide * states[0].scale_state.scale.to(wide.device) if scaler.scales else wide
        scaled = scaled if isinstance(factor, float) and factor == 1.0 else scaled * factor
        others.look(loss_fn, wide, size)
        value = wide.detach().float()
        if not isinstance(factor, float) or factor == 0.0:
            value = weighed([value], [0.0 if isinstance(factor, float) else factor > 0.0])
        if between is not None:
            between(value)
        if not (weighing.omits and isinstance(factor, float) and factor == 0.0):
            with quiet.disturbed:
                torch.autograd.backward(scaled)
            for state in states:
                if state.complex_parameters:
                    resolve_conjugates(state.complex_parameters)
        if plan.cast:
            for model, own in zip(models, writes, strict=True):
                own.note(model.commit())
    return value, map_tree(_detached, aux)


def _counts(loss_fn: LossFunction, model: Any, states: Sequence[TorchState], part: Any) -> list[Any]:
    """The counts of a sum of means for another micro-batch, by a forward pass that leaves nothing behind."""
    trial = _Trial(states)
    try:
        with torch.no_grad():
            result, found = weights.call(loss_fn, model, part)
            return weights.counts_of(weights.read(result, found, XP), rows_of(part, 1))
    finally:
        trial.take_back()


class _Trial:
    """What there is before a forward pass that is to leave nothing behind: buffers, parameters, random streams."""

    def __init__(self, states: Sequence[TorchState]) -> None:
        self._states = states
        self._saved = [(buffers.snapshot(state.buffer_owners), state.writes.before_trial()) for state in states]
        self._random = torch.get_rng_state()
        on_device = states[0].device.type == "cuda"
        self._random_on_device = torch.cuda.get_rng_state(states[0].device) if on_device else None

    def take_back(self) -> None:
        """Put it back, in casts too."""
        torch.set_rng_state(self._random)
        if self._random_on_device is not None:
            torch.cuda.set_rng_state(self._random_on_device, self._states[0].device)
        for state, (item, before) in zip(self._states, self._saved, strict=True):
            before.compare()
            settle(item, before, torch.zeros((), dtype=torch.bool))
            state.bound.discard()


def _ends(state: TorchState, began: bool) -> list[torch.Tensor]:
    """The first and the last parameter, in a window that has begun of those with a gradient: whether `loss_fn` ran a
    backward pass of its own shows in one of them, as a rule; for the others see `Bystanders.were_given`."""
    parameters = state.parameters
    found: list[torch.Tensor] = []
    for names in (iter(parameters), reversed(parameters)):
        first = parameters[next(names)]
        if began and first.grad is None:
            first = next((p for name in names if (p := parameters[name]).grad is not None), first)
        found.append(first)
    return found


def dense(parameters: Iterable[tuple[str, torch.Tensor]], *, needed: bool = True) -> list[torch.Tensor]:
    """The gradients that the backward pass left; a parameter that the loss does not depend on has none (S23).

    Raises:
        LossError: there is none at all, and one is needed.
        UnsupportedError: a sparse one, by name.
    """
    values = [grad for _, p in parameters if (grad := p.grad) is not None]
    if needed and not values:
        raise LossError("loss_fn depends on none of the model's trainable parameters, so there is nothing to update.")
    if not _STRIDED.issuperset(map(_LAYOUT, values)):
        name = next(name for name, p in parameters if p.grad is not None and p.grad.layout != torch.strided)
        raise UnsupportedError(
            f"the gradient of {name!r} is sparse. The step's kernels take whole tensors, and fused optimizers no "
            "sparse ones. Build the layer with sparse=False, or write the loop yourself with polyamp_torch.GradScaler."
        )
    return values


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
