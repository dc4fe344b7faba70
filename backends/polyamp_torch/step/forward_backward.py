"""First half of a training step: the scaled loss, its backward pass, and the gradients (S6, S7, S23)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.autograd.graph import get_gradient_edge

from polyamp.errors import LossError, UnsupportedError
from polyamp.results import Gradients, LossFunction
from polyamp.rules import loss_weights, step_checks
from polyamp.rules.accumulation import Accumulation
from polyamp.rules.loss_weights import LossCount, LossOutput, WeightFunction
from polyamp.trees import map_tree
from polyamp_torch.arrays import DTYPES, XP, detach_leaf, dtype_name, to_device
from polyamp_torch.compat import foreach_mul_, local_tensor_of, open_mode_count
from polyamp_torch.distributed.replicas import guard_states
from polyamp_torch.precision.autocast import backward_region, matmul_precision
from polyamp_torch.precision.torch_only.autocast_region_stack import shield
from polyamp_torch.step.grad_stats import bucket_by_device_and_dtype as bucketed
from polyamp_torch.step.grad_stats import cast_scalar_for_bucket
from polyamp_torch.step.loss_weights import (
    LossWeighting,
    make_loss_weighting,
    nonzero_total,
    row_count,
    total_scale,
)
from polyamp_torch.step.parameter_writes import ParameterSnapshot
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only import buffers
from polyamp_torch.step.torch_only.complex_parameters import real_views, resolve_conjugates
from polyamp_torch.step.torch_only.critical_section import DeferInterrupts, acquire_all
from polyamp_torch.step.torch_only.foreign_grads import ForeignGrads, GraphSizeCache, autograd_node_count
from polyamp_torch.step.torch_only.random_state import generator_states, restore_generator_states

NamedGradients = dict[str, torch.Tensor | None]
_LAYOUT: Final = operator.attrgetter("layout")
_GRAD: Final = operator.attrgetter("grad")
_BOUND: Final = operator.attrgetter("bound")
_READER: Final = operator.attrgetter("reader")
_ADDS_LOSSES: Final = operator.attrgetter("adds_losses")
_STRIDED_LAYOUTS: Final = {torch.strided}
_FLOAT_DTYPES: Final = frozenset(DTYPES.values())


class PassSnapshot:
    """Buffers and parameters of a state before one pass, or before all passes of a step.

    Args:
        state: the state.
        loss_fn: the loss function of the passes; None for a trial, after which every parameter is restored.

    Attributes:
        buffers: the buffers.
        parameters: the parameters.
    """

    __slots__ = ("buffers", "parameters")

    def __init__(self, state: TorchState, loss_fn: Any = None) -> None:
        self.buffers = buffers.snapshot(state.buffer_owners)
        if loss_fn is None:
            self.parameters = ParameterSnapshot(state.writes, first_key=object())  # all are copied
        else:
            key = (getattr(loss_fn, "__code__", type(loss_fn)), state.model.training)
            self.parameters = ParameterSnapshot(
                state.writes, first_key=key if key not in state.writes.checked else None
            )

    def settle(self, finite: torch.Tensor | None) -> None:
        """Keep the changes if `finite` is true or None; otherwise undo them."""
        buffers.commit_or_rollback(self.buffers, finite)
        self.parameters.settle(finite)

    def undo(self) -> None:
        """Undo the changes."""
        self.settle(torch.zeros((), dtype=torch.bool))


@contextlib.contextmanager
def stash_grads(parameters: Sequence[torch.Tensor], *, used_up: bool = False) -> Iterator[None]:
    """Context manager that sets every `.grad` to None at its start, and restores the old gradients on exit.

    `torch.autograd.grad` would be shorter. But its gradients may share memory, or have other strides than their
    parameters, which in-place division and the fused kernels do not support. `.grad` keeps torch's layout contract.

    Args:
        parameters: the parameters whose gradients are stashed.
        used_up: leave None on exit instead, unless the block fails.
    """
    held = list(map(_GRAD, parameters))
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
    """Return the value of `loss_fn` and the unscaled gradients of each state; the states do not change.

    A parameter that several states share is in each of their `Gradients`, with the same tensor.
    """
    with guard_states(states), DeferInterrupts() as interrupts, acquire_all([state.lock for state in states]), shield():
        batch = to_device(batch, states[0].device, states[0].plan.param)
        return _compute_gradients(loss_fn, states, batch, interrupts, weight)


def _compute_gradients(
    loss_fn: LossFunction,
    states: Sequence[TorchState],
    batch: Any,
    interrupts: DeferInterrupts,
    weight: WeightFunction | None,
) -> tuple[Any, list[Gradients]]:
    for state in states:
        state.check_unchanged()
    snapshots = [PassSnapshot(state, loss_fn) for state in states]
    named = list({id(p): (name, p) for state in states for name, p in state.parameters.items()}.values())
    parameters = [p for _, p in named]
    graphs = states[0].graphs if len(states) == 1 else GraphSizeCache()
    weighting = make_loss_weighting(weight, [batch], Accumulation((1,)), states[0].replicas, states[0].device)
    try:
        with (
            stash_grads(parameters),
            ForeignGrads(parameters, graphs, functools.partial(_engine_leaves, states)) as foreign,
        ):
            with contextlib.ExitStack() as engines:
                for state in states:
                    engines.enter_context(state.replicas.engine.window())
                    engines.enter_context(state.replicas.engine.one_pass(last=True))
                writes = [snapshot.parameters for snapshot in snapshots]
                loss, aux = scaled_backward(loss_fn, states, batch, foreign, interrupts, weighting, writes=writes)
                for state in states:
                    state.replicas.fit_gradients(state.parameters)
            found: list[NamedGradients] = [_collect_gradients(state) for state in states]
            if weighting.is_empty:
                found = [{name: torch.zeros_like(p) for name, p in state.parameters.items()} for state in states]
                values = []
            else:
                values = densify_gradients(named)
    except BaseException:
        for snapshot in snapshots:
            snapshot.undo()
        raise
    running = [buffers.restore_buffers(snapshot.buffers) for snapshot in snapshots]
    for snapshot in snapshots:
        snapshot.parameters.compare()
    for own, snapshot in reversed(list(zip(running, snapshots, strict=True))):
        own.update(snapshot.parameters.revert())
    total = states[0].replicas.mean(weighting.total, states[0].device)
    scale = total_scale(states[0].scale_state.scale if states[0].scales else None, nonzero_total(total), loss.device)
    if scale is not None:  # the loss was multiplied by the first state's scale
        factor = scale.double().reciprocal()  # float32, except for float64 gradients (S1)
        held = list(map(local_tensor_of, values))
        if any(state.complex_parameters for state in states):
            held = real_views(held)
        for bucket in bucketed(held):
            foreach_mul_(bucket, cast_scalar_for_bucket(bucket, factor))
    counted = weighting.weight(total)
    grads = [Gradients(values, own, loss, counted) for values, own in zip(found, running, strict=True)]
    return (loss if aux is None else (loss, aux)), grads


def _engine_leaves(states: Sequence[TorchState]) -> list[torch.Tensor]:
    """Return graph leaves that represent parameters of the states but are other tensors."""
    return [leaf for state in states for leaf in state.replicas.engine.leaves()]


def _collect_gradients(state: TorchState) -> NamedGradients:
    """Return the gradients by path, copied if the engine reuses their memory."""
    if state.replicas.engine.reuses_gradient_memory:
        for p in state.parameters.values():
            p.grad = None if p.grad is None else p.grad.clone()
    return {name: p.grad for name, p in state.parameters.items()}


def scaled_backward(
    loss_fn: LossFunction,
    states: Sequence[TorchState],
    batch: Any,
    foreign: ForeignGrads,
    interrupts: DeferInterrupts,
    weighting: LossWeighting,
    between: Callable[[torch.Tensor], None] | None = None,
    writes: Sequence[ParameterSnapshot] = (),
    *,
    counts: bool = True,
) -> tuple[torch.Tensor, Any]:
    """Run a micro-batch's forward and backward pass; return the float32 loss and aux.

    The gradients of the scaled loss, times the micro-batch's weight (S8), are added to the parameters' `.grad` (S6).
    A micro-batch of weight 0 has the loss 0. On one device its backward pass is omitted if the host knows the weight.

    The casts stay installed during the backward pass, in which activation checkpointing recomputes the model.
    Interrupts are delivered only while `loss_fn` or the backward pass runs. `between` is called with the loss between
    the two. Writes of the pass to casts of parameters are copied to the parameters and recorded in `writes`.
    """
    plan = states[0].plan
    models = tuple(map(_BOUND, states))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if plan.float32_matmul is not None:
            stack.enter_context(matmul_precision(plan.float32_matmul))
        for model in models:
            stack.enter_context(model.installed())
        read = _run_forward(loss_fn, models, states, batch, foreign, interrupts, weighting)
        for model in models:
            model.check_pass()
        loss = states[0].replicas.full_loss(read.value) if states[0].replicas.sharded else read.value
        wide = (loss.double() if plan.param == "float64" else loss.float()).reshape(())
        factor = weighting.next_factor(read, batch, counts=counts)
        known = isinstance(factor, float)
        scaled = wide * states[0].scale_state.scale.to(wide.device) if states[0].scales else wide
        scaled = scaled if known and factor == 1.0 else scaled * factor
        foreign.stash(wide)
        value = weighting.shown_loss(wide.detach().float(), factor)
        if between is not None:
            between(value)
        if not (weighting.omits and known and factor == 0.0):
            # where nobody but the mode below would see the call: of a tensor that mode sees each attribute torch reads
            is_unseen = type(scaled) is torch.Tensor and not open_mode_count()
            root = get_gradient_edge(scaled) if is_unseen else scaled
            with backward_region(plan, states[0].device.type), interrupts.allowed:
                torch.autograd.backward(root)
            for state in states:
                if state.complex_parameters:
                    resolve_conjugates(state.complex_parameters)
        if plan.cast:
            for model, own in zip(models, writes, strict=True):
                own.note(model.commit())
    return value, None if read.aux is None else map_tree(detach_leaf, read.aux)


def _run_forward(
    loss_fn: LossFunction,
    models: tuple[Any, ...],
    states: Sequence[TorchState],
    batch: Any,
    foreign: ForeignGrads,
    interrupts: DeferInterrupts,
    weighting: LossWeighting,
) -> LossOutput:
    """Run `loss_fn`, and return its loss.

    Only the first pass of a loss function shows whether its loss is a sum of means over several micro-batches (S8).
    That pass is then undone, and runs again after the passes that count.
    """
    state, model = states[0], models[0] if len(models) == 1 else models

    def run() -> tuple[Any, Sequence[LossCount]]:
        with loss_scopes(states), interrupts.allowed:
            return loss_weights.call_loss_fn(loss_fn, model, batch)

    def count(part: Any) -> list[Any]:
        with states[0].bound.region(), interrupts.allowed:
            return _mean_counts(loss_fn, model, states, part)

    code = getattr(loss_fn, "__code__", type(loss_fn))
    is_first = weighting.among_others and not weighting.factors  # of several passes
    sums_means = state.sums_means.get(code) if is_first else False
    trial = _DryRunSnapshot(states) if sums_means is None else None
    if sums_means:
        weighting.count_others(count)
    probes = _probe_parameters(state, foreign.began)
    before = list(map(_GRAD, probes))
    nodes = autograd_node_count()
    result, found = run()
    if trial is not None:
        state.sums_means[code] = loss_weights.is_sum_of_means(result)
        if state.sums_means[code]:
            del result, found  # frees the graph for the counting passes
            trial.restore()
            weighting.count_others(count)
            nodes = autograd_node_count()
            result, found = run()
    size = autograd_node_count() - nodes
    if foreign.have_new_grads(loss_fn, size) or any(map(operator.is_not, map(_GRAD, probes), before)):
        raise LossError(
            "loss_fn must not run the backward pass: polyamp does, on the scaled loss, and would add its gradients "
            "to those that are there. Drop loss.backward(), and optimizer.step() and zero_grad() with it."
        )
    read = weighting.read(result, found, batch, count)
    if weighting.among_others and (weighting.is_unclear or loss_weights.has_unclear_count(read, found)):
        loss_weights.warn_unclear_count(loss_fn, loss_weights.count_line(found))
    loss = read.value
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise LossError(
            "loss_fn must return a tensor that depends on the model's parameters. "
            f"Received: {type(loss).__name__} without a gradient. Is it detached, or under torch.no_grad()?"
        )
    if loss.dim() or loss.dtype not in _FLOAT_DTYPES:
        step_checks.check_loss(tuple(loss.shape), dtype_name(loss.dtype))
    state.reader.check_loss(loss, state.plan)
    return read


def loss_scopes(states: Sequence[TorchState]) -> contextlib.AbstractContextManager[Any]:
    """Return the context manager around a call of `loss_fn`: the region of the first state's policy, and what each
    model needs."""
    region: contextlib.AbstractContextManager[Any] = states[0].bound.region()
    adding = list(filter(_ADDS_LOSSES, map(_READER, states)))
    if not adding:
        return region
    stack = contextlib.ExitStack()
    stack.enter_context(region)
    stack.enter_context(adding[0].loss_scope(adding))
    return stack


def _mean_counts(loss_fn: LossFunction, model: Any, states: Sequence[TorchState], part: Any) -> list[Any]:
    """Return the counts of a sum of means for another micro-batch, from a forward pass without side effects."""
    trial = _DryRunSnapshot(states)
    try:
        with torch.no_grad():
            result, found = loss_weights.call_loss_fn(loss_fn, model, part)
            return loss_weights.term_counts(loss_weights.parse_loss_output(result, found, XP), row_count(part, 1))
    finally:
        trial.restore()


class _DryRunSnapshot:
    """Snapshot of buffers, parameters and random streams before a forward pass that is undone."""

    def __init__(self, states: Sequence[TorchState]) -> None:
        self._states = states
        self._snapshots = [PassSnapshot(state) for state in states]
        self._random = generator_states(states[0].device)
        streams = [stream for state in states for stream in state.reader.random_streams().values()]
        self._streams = [(stream, stream.detach().clone()) for stream in streams]

    def restore(self) -> None:
        """Restore the snapshot, in casts too."""
        restore_generator_states(self._random, self._states[0].device)
        for stream, value in self._streams:
            stream.detach().copy_(value)
        for state, snapshot in zip(self._states, self._snapshots, strict=True):
            snapshot.parameters.compare()
            snapshot.undo()
            state.bound.discard()


def _probe_parameters(state: TorchState, began: bool) -> list[torch.Tensor]:
    """Return two parameters whose `.grad` usually shows whether `loss_fn` ran a backward pass itself.

    They are the first and the last parameter; if accumulation has begun, of those that have a gradient. For the other
    cases see `ForeignGrads.have_new_grads`."""
    parameters = state.parameters
    found: list[torch.Tensor] = []
    for names in (iter(parameters), reversed(parameters)):
        first = parameters[next(names)]
        if began and first.grad is None:
            first = next((p for name in names if (p := parameters[name]).grad is not None), first)
        found.append(first)
    return found


def densify_gradients(parameters: Iterable[tuple[str, torch.Tensor]], *, needed: bool = True) -> list[torch.Tensor]:
    """Return the gradients of the backward pass; a parameter that the loss does not depend on has none (S23).

    Raises:
        LossError: there is no gradient, and one is needed.
        UnsupportedError: a gradient is sparse; the message names it.
    """
    values = [grad for _, p in parameters if (grad := p.grad) is not None]
    if needed and not values:
        raise LossError("loss_fn depends on none of the model's trainable parameters, so there is nothing to update.")
    if not _STRIDED_LAYOUTS.issuperset(map(_LAYOUT, values)):
        name = next(name for name, p in parameters if p.grad is not None and p.grad.layout != torch.strided)
        raise UnsupportedError(
            f"the gradient of {name!r} is sparse. The step's kernels take whole tensors, and fused optimizers no "
            "sparse ones. Build the layer with sparse=False, or write the loop yourself with polyamp_torch.GradScaler."
        )
    return values
