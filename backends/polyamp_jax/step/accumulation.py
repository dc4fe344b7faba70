"""First half of the step: scaled gradients over one pass or several (S6 to S8).

`accumulate_gradients` (or `loss_and_gradients`, for several states) returns gradients of the unscaled loss; `update`
does the rest. All functions are traceable and never wait for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.results import Gradients, LossFunction
from polyamp.rules import batches, loss_weights
from polyamp.rules.accumulation import Accumulation, is_concatenated
from polyamp.rules.loss_weights import TermTotals, WeightFunction
from polyamp_jax.arrays import named_leaves
from polyamp_jax.distributed.replicas import AxisName, ShardMapReplicas, find_replicas
from polyamp_jax.models.running_state import RunningState
from polyamp_jax.step.forward_backward import (
    PassResult,
    active_loss_scale,
    compute_parameters,
    run_pass,
)
from polyamp_jax.step.grad_stats import unscale_leaf
from polyamp_jax.step.loss_weights import LossWeighting, batch_shapes, multiply_by_weight, weight_divisor
from polyamp_jax.step.optimizers import leaves_like, widen_parameters
from polyamp_jax.step.state import JaxState

_ScanCarry = tuple[RunningState, Any]


class _UncarriedWriteError(Exception):
    """Raised while a scan is traced: a micro-batch writes parameters (S12) that the carry does not contain yet."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__(f"not carried: {sorted(paths)}")
        self.paths = paths


def loss_and_gradients(
    loss_fn: LossFunction,
    states: Sequence[JaxState],
    batch: Any,
    axis_name: AxisName = None,
    what: str = "value_and_grad",
    weight: WeightFunction | None = None,
) -> tuple[Any, list[Gradients]]:
    """Return the output of `loss_fn` and the unscaled gradients, for one or several states (S6, S7)."""
    replicas = find_replicas(what, axis_name, batch, [state.params for state in states])
    before, params = [state.running for state in states], [compute_parameters(s) for s in states]
    weighing = LossWeighting(weight)
    done = run_pass(loss_fn, states, params, before, batch, replicas, weighing)
    if replicas is not None and done.counts:
        weighing = LossWeighting(totals=replicas.totals(loss_weights.term_totals([done.counts])))
        done = run_pass(loss_fn, states, params, before, batch, replicas, weighing)
    weight_of_batch = done.weight
    is_local = replicas is not None and bool(replicas.local_axes)  # the gradients are not reduced over the replicas yet
    if weight_of_batch is not None:
        values = done.values
        if is_local:
            values = jax.tree.map(lambda g: multiply_by_weight(g, weight_of_batch), widen_parameters(values))
        done = done._replace(loss=done.loss * weight_of_batch, values=values)
    loss, gradients = _finish_gradients(replicas, states, done, weighing.totals, are_weighted=is_local)
    return (loss if done.aux is None else (loss, done.aux)), gradients


def _finish_gradients(
    replicas: ShardMapReplicas | None,
    states: Sequence[JaxState],
    done: PassResult,
    totals: TermTotals | None,
    *,
    are_weighted: bool,
) -> tuple[Any, list[Gradients]]:
    """Return the loss and the unscaled gradients of a pass, reduced over the replicas (S9).

    Args:
        replicas: the replicas, or None.
        states: the states.
        done: the result. If it has a weight, the loss is already multiplied by it.
        totals: divisors of the terms of a sum of means, or None.
        are_weighted: whether the gradients are already multiplied by the weight too.
    """
    loss, values, running, weight = done.loss, done.values, done.running, done.weight
    if replicas is not None:
        loss, values, weight = replicas.reduce_gradients(loss, values, [state.params for state in states], weight)
        pairs = zip(running, states, strict=True)
        running = [_average_running_state(replicas, own, state) for own, state in pairs]
    if weight is not None:
        loss = loss / weight_divisor(weight)
        values = _divide(values, weight_divisor(weight)) if are_weighted else values
    if totals is not None:
        weight = sum(totals.counts)
    scale = active_loss_scale(states[0])
    gradients = [
        Gradients(_place_gradients(unscale_gradients(own, scale, state.params), state), after, loss, weight)
        for own, after, state in zip(values, running, states, strict=True)
    ]
    return loss, gradients


def _average_running_state(replicas: ShardMapReplicas, running: RunningState, state: JaxState) -> RunningState:
    """Average the running statistics and the parameters that a pass wrote over the replicas."""
    statistics, written = replicas.statistics(running.statistics, state.running.statistics), running.written
    if written is not None:
        params = named_leaves(state.params)
        written = replicas.statistics(dict(written), {path: params[path] for path in written})
    return running._replace(statistics=statistics, written=written)


def _divide(values: Any, by: Any) -> Any:
    return jax.tree.map(lambda g: g / by.astype(g.dtype), values)


def accumulate_gradients(
    loss_fn: LossFunction,
    state: JaxState,
    batch: Any,
    axis_name: AxisName = None,
    shards: tuple[int, ...] | None = None,
    weight: WeightFunction | None = None,
) -> tuple[Any, Any, Gradients]:
    """Return mean loss, stacked aux and unscaled mean gradients of one state over its micro-batches (S8).

    In cast mode the parameters are cast once for all micro-batches. The running state passes from one to the next.

    Args:
        loss_fn: the loss.
        state: the state.
        batch: the whole batch, or a list of micro-batches.
        axis_name: see `find_replicas`.
        shards: number of shards of each array of the batch along axis 0, if known.
        weight: `weight=` of `train_step`.
    """
    count = state.recipe.accumulate_steps
    if count == 1:
        value, (gradients,) = loss_and_gradients(loss_fn, [state], batch, axis_name, "train_step", weight)
        return *(value if isinstance(value, tuple) else (value, None)), gradients
    replicas = find_replicas("train_step", axis_name, batch, state.params, window=True)
    params = compute_parameters(state)
    window, parts = batches.micro_batch_runs(
        batch,
        count,
        shapes=batch_shapes,
        tree_map=jax.tree.map,
        stack=jnp.stack,
        reshape=functools.partial(_fold_rows, shards={} if shards is None else _shards_by_array(batch, shards)),
    )
    done = _run_micro_batches(loss_fn, state, params, window, parts, replicas, LossWeighting(weight))
    totals = None
    if done.counts and (len(window.sizes) > 1 or replicas is not None):
        totals = loss_weights.term_totals(done.counts)
        totals = totals if replicas is None else replicas.totals(totals)
        done = _run_micro_batches(loss_fn, state, params, window, parts, replicas, LossWeighting(weight, totals=totals))
    loss, (gradients,) = _finish_gradients(replicas, [state], done, totals, are_weighted=True)
    return loss, done.aux, gradients


def _run_micro_batches(
    loss_fn: LossFunction,
    state: JaxState,
    params: Any,
    window: Accumulation,
    parts: Sequence[tuple[range, Any]],
    replicas: ShardMapReplicas | None,
    weighing: LossWeighting,
) -> PassResult:
    """Run all micro-batches of a window and combine their losses and scaled gradients.

    Without weights these are means weighted by rows; with weights, weighted sums. The counts of a sum of means are one
    list per micro-batch.
    """
    own: Callable[[Any], Any] = replicas.mark_varying if replicas is not None else lambda tree: tree
    unused: list[Any] = []  # per run, the unused parameters: its micro-batches are one program
    unchanged: list[Any] = []  # per run, the running statistics that it does not change

    def one(how: LossWeighting, carry: tuple[RunningState, Any], part: Any) -> tuple[tuple[RunningState, Any], Any]:
        running, total = carry
        done = run_pass(loss_fn, [state], [params], [running], part, replicas, how)
        if missing := frozenset(done.running[0].written or {}) - frozenset(running.written or {}):
            raise _UncarriedWriteError(missing)
        unused[-1:] = [jax.tree.map(lambda _, g: g is None, total, done.values[0])]
        by = done.weight
        total = jax.tree.map(
            lambda t, g: t if g is None else t + multiply_by_weight(g.astype(t.dtype), by), total, *done.values
        )
        after = done.running[0]
        unchanged[-1:] = [jax.tree.map(lambda a, b: a is b, after.statistics, running.statistics)]
        carry = (after._replace(statistics=own(after.statistics)), _place_gradients(total, state))
        return carry, (done.loss, done.aux, done.weight, list(done.counts))

    start = state.running._replace(statistics=own(state.running.statistics))
    carry = (start, _place_gradients(own(jax.tree.map(jnp.zeros_like, widen_parameters(state.params))), state))
    shares = [1.0 if weighing.totals is not None else window.weights[run.start] for run, _ in parts]
    outputs = []
    for share, (run, members) in zip(shares, parts, strict=True):
        unused.append(None)
        unchanged.append(None)
        how = weighing._replace(share=share, rows=window.sizes[run.start])
        carry, output = _scan_micro_batches(functools.partial(one, how), carry, members, own(state.params))
        outputs.append(output)
    running, total = carry
    losses, auxes, given, counts = (list(column) for column in zip(*outputs, strict=True))
    loss: Any
    weight: Any
    if any(item is None for item in given):
        loss_weights.check_consistent_weights([item is not None for item in given])
        whole, weight = sum(share * len(run) for share, (run, _) in zip(shares, parts, strict=True)), None
        if len(parts) == 1:
            loss = jnp.mean(losses[0])
        else:
            loss = sum(share * jnp.sum(own) for share, own in zip(shares, losses, strict=True)) / whole
        total = jax.tree.map(lambda t, *none: None if all(none) else t / whole, total, *unused)
    else:
        loss = sum(jnp.sum(by * own) for by, own in zip(given, losses, strict=True))
        weight = sum(jnp.sum(by) for by in given)
        total = jax.tree.map(lambda t, *none: None if all(none) else t, total, *unused)
    aux = auxes[0] if len(parts) == 1 else jax.tree.map(_join_runs, *auxes)
    if replicas is not None:  # unchanged statistics are the state's own arrays again and are not averaged
        kept = jax.tree.map(
            lambda old, new, *alone: old if all(alone) else new,
            state.running.statistics,
            running.statistics,
            *unchanged,
        )
        running = running._replace(statistics=kept)
    every = [
        [column[n] for column in group]
        for group, (run, _) in zip(counts, parts, strict=True)
        for n in range(len(run) if group else 0)
    ]
    return PassResult(loss, aux, [total], [running], weight, every)


def _place_gradients(values: Any, state: JaxState) -> Any:
    """Place gradients like the parameters, if the layout is known."""
    if state.layout is None:
        return values
    return jax.tree.unflatten(
        jax.tree.structure(state.params), state.layout.keep_shardings(leaves_like(values, state.params))
    )


def _shards_by_array(batch: Any, shards: tuple[int, ...]) -> dict[int, int]:
    leaves = jax.tree.leaves(batch)
    return {id(leaf): count for leaf, count in zip(leaves, shards, strict=len(leaves) == len(shards))}


def _fold_rows(rows: Any, shape: tuple[int, ...], *, shards: dict[int, int]) -> Any:
    """Reshape rows to (micro-batches, rows of each, ...).

    If the array is sharded along axis 0, each micro-batch takes rows from every shard. Consecutive rows would be on
    some of the devices only and would have to be moved.
    """
    count, size = shape[:2]
    parts = shards.get(id(rows), 1)
    if parts == 1 or size % parts:
        return jnp.reshape(rows, shape)
    split = jnp.reshape(rows, (parts, count, size // parts, *shape[2:]))
    return jnp.reshape(jnp.swapaxes(split, 0, 1), shape)


def unscale_gradients(values: Any, scale: Any | None, params: Any) -> Any:
    """Return gradients of the unscaled loss, each in its parameter's dtype or float32, whichever is wider."""
    return jax.tree.map(
        lambda p, g: None if g is None else unscale_leaf(g, scale, jnp.promote_types(p.dtype, jnp.float32)),
        params,
        values,
    )


def _join_runs(*runs: Any) -> Any:
    """Join a leaf of aux over runs of micro-batches, each of which has its own leading axis (S8)."""
    if is_concatenated([jnp.shape(run)[1:] for run in runs]):
        runs = tuple(jnp.reshape(run, (-1, *jnp.shape(run)[2:])) for run in runs)
    return jnp.concatenate(runs)


def _scan_micro_batches(
    body: Callable[[_ScanCarry, Any], tuple[_ScanCarry, Any]], carry: _ScanCarry, parts: Any, params: Any
) -> tuple[_ScanCarry, Any]:
    """Run `jax.lax.scan(body, carry, parts)` with written parameters in the carry.

    Tracing shows which parameters the body writes. The scan is then traced once more with these in the carry.

    Args:
        body: the scanned function, which raises `_UncarriedWriteError` for a write that is not in the carry.
        carry: the running state and further carried values.
        parts: the micro-batches, stacked.
        params: the parameters before the first write.
    """
    while True:
        try:
            made: tuple[_ScanCarry, Any] = jax.lax.scan(body, carry, parts)
            return made
        except _UncarriedWriteError as found:
            running, rest = carry
            first = named_leaves(params)
            written = {**{path: first[path] for path in found.paths}, **(running.written or {})}
            carry = running._replace(written=written), rest
