"""The first half of the step: scaled gradients over one pass or several (S6 to S8). Called by `step`.

`accumulated` (or `separate`, for several states) makes gradients of the unscaled loss; `update` does the rest. All of
it is traceable and never waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.results import Gradients, LossFunction
from polyamp.rules import batches, weights
from polyamp.rules.weights import WeightFunction
from polyamp.rules.window import Window, joins
from polyamp_jax.arrays import named_leaves
from polyamp_jax.models.parts import Running
from polyamp_jax.step.forward_backward import Pass, Weighing, computed, run_pass, scale_of, shapes_of
from polyamp_jax.step.measure import unscaled_leaf
from polyamp_jax.step.optimizers import like, widened
from polyamp_jax.step.replicas import AxisName, Replicas, replicas
from polyamp_jax.step.scan import check_carried, scan
from polyamp_jax.step.state import JaxState


def separate(
    loss_fn: LossFunction,
    states: Sequence[JaxState],
    batch: Any,
    axis_name: AxisName = None,
    what: str = "value_and_grad",
    weight: WeightFunction | None = None,
) -> tuple[Any, list[Gradients]]:
    """The first half for one or several states: what `loss_fn` returned, and unscaled gradients (S6, S7)."""
    around = replicas(what, axis_name, batch, [state.params for state in states])
    before, params = [state.running for state in states], [computed(s) for s in states]
    weighing = Weighing(weight)
    done = run_pass(loss_fn, states, params, before, batch, around, weighing)
    if around is not None and done.counts:
        weighing = Weighing(totals=around.totals(weights.totals_of([done.counts])))
        done = run_pass(loss_fn, states, params, before, batch, around, weighing)
    own, values, by = done.loss, done.values, done.weight
    apart = around is not None and bool(around.later)  # the gradients are still each replica's own
    if by is not None:
        own = own * by
        values = jax.tree.map(lambda g: _times(g, by), widened(values)) if apart else values
    loss, values, running, whole = _together(around, states, own, values, done.running, by)
    if whole is not None:
        loss = loss / _divisor(whole)
        values = _divided(values, _divisor(whole)) if apart else values
    if weighing.totals is not None:
        whole = sum(weighing.totals.counts)
    scale = scale_of(states[0])
    gradients = [
        Gradients(placed(unscaled(own, scale, state.params), state), after, loss, whole)
        for own, after, state in zip(values, running, states, strict=True)
    ]
    return (loss if done.aux is None else (loss, done.aux)), gradients


def _together(
    around: Replicas | None,
    states: Sequence[JaxState],
    loss: Any,
    values: list[Any],
    running: list[Running],
    weight: Any,
) -> tuple[Any, list[Any], list[Running], Any]:
    """Loss, gradients, running state and weight over the replicas (S9): means, but sums of the loss and the gradients
    where these hold their weight."""
    if around is None:
        return loss, values, running, weight
    loss, values, weight = around.reduced(loss, values, [state.params for state in states], weight)
    pairs = zip(running, states, strict=True)
    return loss, values, [_running_mean(around, own, state) for own, state in pairs], weight


def _running_mean(around: Replicas, running: Running, state: JaxState) -> Running:
    """Running statistics, and the parameters that a pass wrote, as the means over the replicas."""
    statistics, written = around.statistics(running.statistics, state.running.statistics), running.written
    if written is not None:
        params = named_leaves(state.params)
        written = around.statistics(dict(written), {path: params[path] for path in written})
    return running._replace(statistics=statistics, written=written)


def _divisor(weight: Any) -> Any:
    """What a sum by weights is divided by; where nothing counts, by 1."""
    return jnp.where(weight > 0.0, weight, 1.0)


def _divided(values: Any, by: Any) -> Any:
    return jax.tree.map(lambda g: g / by.astype(g.dtype), values)


def accumulated(
    loss_fn: LossFunction,
    state: JaxState,
    batch: Any,
    axis_name: AxisName = None,
    shards: tuple[int, ...] | None = None,
    weight: WeightFunction | None = None,
) -> tuple[Any, Any, Gradients]:
    """The first half for one state over its micro-batches (S8): mean loss, stacked aux, unscaled mean gradients.

    In cast mode the parameters are cast once for all micro-batches; running state flows from one to the next.

    Args:
        loss_fn: the loss.
        state: the state.
        batch: the whole batch, or a list of micro-batches.
        axis_name: see `replicas`.
        shards: into how many shards each array of the batch is divided along axis 0, where that is known.
        weight: `weight=` of `train_step`.
    """
    count = state.recipe.accumulate_steps
    if count == 1:
        value, (gradients,) = separate(loss_fn, [state], batch, axis_name, "train_step", weight)
        return *(value if isinstance(value, tuple) else (value, None)), gradients
    around = replicas("train_step", axis_name, batch, state.params, window=True)
    params = computed(state)
    window, parts = batches.in_runs(
        batch,
        count,
        shapes=shapes_of,
        tree_map=jax.tree.map,
        stack=jnp.stack,
        reshape=functools.partial(_folded, shards={} if shards is None else _by_array(batch, shards)),
    )
    done = _window(loss_fn, state, params, window, parts, around, Weighing(weight))
    totals = None
    if done.counts and (len(window.sizes) > 1 or around is not None):
        totals = weights.totals_of(done.counts)
        totals = totals if around is None else around.totals(totals)
        done = _window(loss_fn, state, params, window, parts, around, Weighing(weight, totals=totals))
    loss, (mean,), (running,), whole = _together(around, [state], done.loss, done.values, done.running, done.weight)
    if whole is not None:
        loss, mean = loss / _divisor(whole), _divided(mean, _divisor(whole))
    if totals is not None:
        whole = sum(totals.counts)
    gradients = placed(unscaled(mean, scale_of(state), state.params), state)
    return loss, done.aux, Gradients(gradients, running, loss, whole)


def _window(
    loss_fn: LossFunction,
    state: JaxState,
    params: Any,
    window: Window,
    parts: Sequence[tuple[range, Any]],
    around: Replicas | None,
    weighing: Weighing,
) -> Pass:
    """All micro-batches of a window: the mean of their losses and scaled gradients by the rows; or, where they have
    weights, the sums by these. The counts of a sum of means are one list for each micro-batch."""
    own: Callable[[Any], Any] = around.own if around is not None else lambda tree: tree
    idle: list[Any] = []  # of each run, what it does not depend on: its micro-batches are one program
    still: list[Any] = []  # and which running statistics it leaves alone

    def one(how: Weighing, carry: tuple[Running, Any], part: Any) -> tuple[tuple[Running, Any], Any]:
        running, total = carry
        done = run_pass(loss_fn, [state], [params], [running], part, around, how)
        check_carried(done.running[0].written, running.written)
        idle[-1:] = [jax.tree.map(lambda _, g: g is None, total, done.values[0])]
        by = done.weight
        total = jax.tree.map(lambda t, g: t if g is None else t + _times(g.astype(t.dtype), by), total, *done.values)
        after = done.running[0]
        still[-1:] = [jax.tree.map(lambda a, b: a is b, after.statistics, running.statistics)]
        carry = (after._replace(statistics=own(after.statistics)), placed(total, state))
        return carry, (done.loss, done.aux, done.weight, list(done.counts))

    start = state.running._replace(statistics=own(state.running.statistics))
    carry = (start, placed(own(jax.tree.map(jnp.zeros_like, widened(state.params))), state))
    shares = [1.0 if weighing.totals is not None else window.shares[run.start] for run, _ in parts]
    outputs = []
    for share, (run, members) in zip(shares, parts, strict=True):
        idle.append(None)
        still.append(None)
        how = weighing._replace(share=share, rows=window.sizes[run.start])
        carry, output = scan(functools.partial(one, how), carry, members, own(state.params))
        outputs.append(output)
    running, total = carry
    losses, auxes, given, counts = (list(column) for column in zip(*outputs, strict=True))
    loss: Any
    weight: Any
    if any(item is None for item in given):
        weights.check_alike([item is not None for item in given])
        whole, weight = sum(share * len(run) for share, (run, _) in zip(shares, parts, strict=True)), None
        if len(parts) == 1:
            loss = jnp.mean(losses[0])
        else:
            loss = sum(share * jnp.sum(own) for share, own in zip(shares, losses, strict=True)) / whole
        total = jax.tree.map(lambda t, *none: None if all(none) else t / whole, total, *idle)
    else:
        loss = sum(jnp.sum(by * own) for by, own in zip(given, losses, strict=True))
        weight = sum(jnp.sum(by) for by in given)
        total = jax.tree.map(lambda t, *none: None if all(none) else t, total, *idle)
    aux = auxes[0] if len(parts) == 1 else jax.tree.map(_joined, *auxes)
    if around is not None:  # what nobody wrote is the state's own array again, and takes no part in a mean
        kept = jax.tree.map(
            lambda old, new, *alone: old if all(alone) else new, state.running.statistics, running.statistics, *still
        )
        running = running._replace(statistics=kept)
    every = [
        [column[n] for column in group]
        for group, (run, _) in zip(counts, parts, strict=True)
        for n in range(len(run) if group else 0)
    ]
    return Pass(loss, aux, [total], [running], weight, every)


def _times(gradient: Any, weight: Any) -> Any:
    """A gradient times what its micro-batch counts; zeros where that is 0, whatever the gradient holds."""
    if weight is None:
        return gradient
    return jnp.where(weight > 0.0, gradient * weight.astype(gradient.dtype), 0.0)


def placed(values: Any, state: JaxState) -> Any:
    """Gradients where the parameters lie, if that is known."""
    if state.layout is None:
        return values
    return jax.tree.unflatten(jax.tree.structure(state.params), state.layout.kept(like(values, state.params)))


def _by_array(batch: Any, shards: tuple[int, ...]) -> dict[int, int]:
    leaves = jax.tree.leaves(batch)
    return {id(leaf): count for leaf, count in zip(leaves, shards, strict=len(leaves) == len(shards))}


def _folded(rows: Any, shape: tuple[int, ...], *, shards: dict[int, int]) -> Any:
    """Rows as (micro-batches, rows of each, ...).

    Of an array that is divided among devices along axis 0 each micro-batch takes its part from every shard: rows one
    after another would lie on some of the devices only, and be moved.
    """
    count, size = shape[:2]
    parts = shards.get(id(rows), 1)
    if parts == 1 or size % parts:
        return jnp.reshape(rows, shape)
    split = jnp.reshape(rows, (parts, count, size // parts, *shape[2:]))
    return jnp.reshape(jnp.swapaxes(split, 0, 1), shape)


def unscaled(values: Any, scale: Any | None, params: Any) -> Any:
    """Gradients of the unscaled loss, each in its parameter's dtype or float32 where that is wider."""
    return jax.tree.map(
        lambda p, g: None if g is None else unscaled_leaf(g, scale, jnp.promote_types(p.dtype, jnp.float32)),
        params,
        values,
    )


def _joined(*runs: Any) -> Any:
    """A leaf of aux over runs of micro-batches, each with a leading axis of its own (S8)."""
    if joins([jnp.shape(run)[1:] for run in runs]):
        runs = tuple(jnp.reshape(run, (-1, *jnp.shape(run)[2:])) for run in runs)
    return jnp.concatenate(runs)
