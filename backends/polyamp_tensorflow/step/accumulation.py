"""The first half of a step as graph code: loss and gradients over micro-batches and replicas (S6 to S9).

loss * scale -> gradients, summed over micro-batches and replicas -> / (scale * N)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from polyamp.results import Gradients, LossFunction
from polyamp.rules import batches, loss_weights
from polyamp.rules.accumulation import is_concatenated
from polyamp.rules.loss_weights import WeightFunction
from polyamp_tensorflow.arrays import at_least_float32, leaves_with_paths
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.distributed_step import (
    all_reduce_sums_and_means,
    all_reduce_totals,
    check_used_parameters,
    find_used_parameters,
    has_several_replicas,
    stack_over_replicas,
)
from polyamp_tensorflow.step.forward_backward import PassResult, check_rows, map_present, present_leaves, run_pass
from polyamp_tensorflow.step.loss_weights import LossWeighting, batch_rows
from polyamp_tensorflow.step.parameter_writes import ForwardWriteTracker, ParameterWrite
from polyamp_tensorflow.step.state import States, TensorFlowState


def accumulate_gradients(
    states: States, loss_fn: LossFunction, batch: Any, count: int, weight: WeightFunction | None = None
) -> tuple[Any, Any, list[Gradients]]:
    """Return unscaled loss, aux and gradients over `count` micro-batches and all replicas.

    The states' variables are restored, except the random streams, which advance by `count` forward passes (S12). An
    error restores these too, unless it occurs while a graph runs.
    """
    check_rows(batch)
    streams = [state.read_rng() for state in states]
    statistics = [state.read_statistics() for state in states]
    writes = [ForwardWriteTracker(state.variables, state.eager_reads, state.computes_in) for state in states]
    written: list[dict[str, ParameterWrite]] = [{} for _ in states]

    def put_back(*, failed: bool) -> None:
        values = [{**own, **more} for own, more in zip(statistics, streams, strict=True)] if failed else statistics
        values = [
            {**own, **{name: each.before for name, each in more.items()}}
            for own, more in zip(values, written, strict=True)
        ]
        replicas.merge_replica_calls(lambda _, values: _restore_running_state(states, values), values)

    weighing = LossWeighting(weight)
    try:
        scaled = _accumulate(states, loss_fn, batch, count, weighing)
        if scaled.counts and (count > 1 or has_several_replicas(states[0].strategy)):
            put_back(failed=True)  # that pass computed the divisors of a sum of means
            weighing = weighing._replace(totals=all_reduce_totals(scaled.counts, count))
            scaled = _accumulate(states, loss_fn, batch, count, weighing)
        after = [state.read_statistics() for state in states]
        written[:] = [own.found() for own in writes]
        for own, more in zip(after, written, strict=True):
            own.update({name: each.after for name, each in more.items()})
    except BaseException:
        if tf.executing_eagerly():
            written[:] = [own.found() for own in writes]
        put_back(failed=True)
        raise
    put_back(failed=False)
    loss, sums, after, whole = _reduce_over_replicas(states, scaled, after, batch)
    if whole is not None and (count > 1 or has_several_replicas(states[0].strategy)):
        by = tf.where(whole > 0.0, whole, 1.0)
        loss = loss / by
        sums = [{name: value / tf.cast(by, value.dtype) for name, value in own.items()} for own in sums]
    if scaled.weight is None:  # rows, which every batch has
        whole = None if weighing.totals is None else sum(weighing.totals.counts)
    scaler = states[0].recipe.loss_scaler
    scale = states[0].scale_state.scale if scaler.scales else None
    found = []
    for state, values, running in zip(states, sums, after, strict=True):
        unscaled: dict[str, Any] = dict.fromkeys(state.variables.parameters)
        for name, value in values.items():
            divided = value if scale is None else value / tf.cast(scale, value.dtype)
            unscaled[name] = tf.cast(divided, state.variables.parameters[name].dtype)
        found.append(Gradients(unscaled, running, loss, whole))
    return loss, stack_over_replicas(scaled.aux), found


def _reduce_over_replicas(
    states: States, own: PassResult, after: list[dict[str, Any]], batch: Any
) -> tuple[Any, list[dict[str, Any]], Any, Any]:
    """Reduce loss, scaled gradients, running statistics and weight over the replicas in one reduction (S9).

    Statistics are averaged, weighted values summed. The weight is None if nothing is weighted. Gradients are those of
    parameters that any replica uses (S23).
    """
    if not has_several_replicas(states[0].strategy):
        return own.loss, own.gradients, after, own.weight
    every = [list(state.variables.parameters) for state in states]
    taken = find_used_parameters(every, own.gradients)
    whole = [_fill_with_zeros(values, state) for values, state in zip(own.gradients, states, strict=True)]
    sent = [{n: values[n] for n in names} for values, names in zip(whole, taken.reduced_names, strict=True)]
    loss, weight = own.loss, own.weight
    if weight is None:
        rows = sum(map(batch_rows, batch)) if isinstance(batch, list) else batch_rows(batch)
        weight = tf.cast(own.size or rows, tf.float32)
        loss = loss * weight
        sent = [{name: value * tf.cast(weight, value.dtype) for name, value in values.items()} for values in sent]
    (loss, weight, sums), (after, flags) = all_reduce_sums_and_means([loss, weight, sent], [after, taken.flags])
    check_used_parameters(every, flags)
    sums = [{n: values[n] for n in names} for values, names in zip(sums, taken.local_names, strict=True)]
    return loss, sums, after, weight


def _restore_running_state(states: States, values: Sequence[Any]) -> None:
    for state, own in zip(states, values, strict=True):
        state.put_back(own)


def _accumulate(states: States, loss_fn: LossFunction, batch: Any, count: int, weighing: LossWeighting) -> PassResult:
    """Return, over the micro-batches, stacked aux, and means of loss and scaled gradients by their rows; with weights,
    weighted sums instead (S8). A parameter that any of them uses counts as used (S23)."""
    if count == 1:
        own = run_pass(states, loss_fn, batch, weighing)
        if has_several_replicas(states[0].strategy):
            return own if own.weight is None else _multiply_by_weight(own)
        return own if own.weight is None else own._replace(loss=tf.where(own.weight > 0.0, own.loss, 0.0))
    window, runs = batches.micro_batch_runs(
        batch, count, shapes=_batch_shapes, tree_map=map_present, stack=tf.stack, reshape=tf.reshape
    )
    shares = [1.0 if weighing.totals is not None else window.weights[run.start] for run, _ in runs]
    done = [
        _sum_micro_batches(
            states, loss_fn, parts, len(run), weighing._replace(share=share, rows=window.sizes[run.start])
        )
        for share, (run, parts) in zip(shares, runs, strict=True)
    ]
    loss_weights.check_consistent_weights([own.weight is not None for own in done])
    gradients: list[dict[str, Any]] = [{} for _ in states]
    for own in done:
        for total, more in zip(gradients, own.gradients, strict=True):
            total.update({name: total[name] + value if name in total else value for name, value in more.items()})
    aux = done[0].aux
    if len(done) > 1:
        columns = iter(zip(*(present_leaves(own.aux) for own in done), strict=True))
        aux = map_present(lambda _: _join_runs(next(columns)), aux)
    counts = loss_weights.term_totals([own.counts for own in done]).counts
    if done[0].weight is not None:
        total = sum(own.weight for own in done)
        return PassResult(sum(own.loss for own in done), aux, gradients, total, None, counts)
    whole = sum(share * len(run) for share, (run, _) in zip(shares, runs, strict=True))
    loss = sum(own.loss * share for share, own in zip(shares, done, strict=True)) / whole
    mean = [{name: value / tf.constant(whole, value.dtype) for name, value in own.items()} for own in gradients]
    sizes = [own.size * len(run) for own, (run, _) in zip(done, runs, strict=True) if own.size is not None]
    size = sum(sizes) if len(sizes) == len(done) else None
    return PassResult(loss, aux, mean, None, size, counts)


def _multiply_by_weight(own: PassResult) -> PassResult:
    """Multiply loss and gradients by their weight. A weight of 0 gives zeros even for inf and NaN."""
    weight = own.weight

    def times(value: Any) -> Any:
        return tf.where(weight > 0.0, value * tf.cast(weight, value.dtype), tf.zeros_like(value))

    gradients = [{name: times(value) for name, value in values.items()} for values in own.gradients]
    return own._replace(loss=times(own.loss), gradients=gradients)


def _sum_micro_batches(
    states: States, loss_fn: LossFunction, parts: Any, count: int, weighing: LossWeighting
) -> PassResult:
    """Return sums over a run of equal micro-batches, and their stacked aux: the first one, then a loop over the others.

    The first one runs before the loop, which needs the structure of aux. So the graph has two copies of the model for
    any number of micro-batches. `loss_fn` is traced for both: a parameter that either of them uses counts as used.
    """

    def part(index: Any) -> PassResult:
        own = run_pass(states, loss_fn, map_present(lambda leaf: leaf[index], parts), weighing)
        return own if own.weight is None else _multiply_by_weight(own)

    first = part(0)
    if count == 1:
        return first._replace(aux=map_present(lambda leaf: leaf[tf.newaxis], first.aux))
    used = [set(own) for own in first.gradients]
    extra = [*first.counts] if first.weight is None else [first.weight, *first.counts]
    gradients = [_fill_with_zeros(own, state) for own, state in zip(first.gradients, states, strict=True)]
    sums = [first.loss, gradients, extra]
    stacks = [
        tf.TensorArray(leaf.dtype, count, element_shape=leaf.shape, clear_after_read=False).write(0, leaf)
        for leaf in present_leaves(first.aux)
    ]

    def body(index: Any, sums: Any, stacks: Any) -> Any:
        other = part(index)
        loss, totals, extra = sums
        loss_weights.check_consistent_weights([first.weight is not None, other.weight is not None])
        more_extra = [*other.counts] if other.weight is None else [other.weight, *other.counts]
        added = [
            loss + other.loss,
            [dict(own) for own in totals],
            [total + more for total, more in zip(extra, more_extra, strict=True)],
        ]
        for names, own, more in zip(used, added[1], other.gradients, strict=True):
            names.update(more)
            own.update({name: own[name] + value for name, value in more.items()})
        written = [s.write(index, leaf) for s, leaf in zip(stacks, present_leaves(other.aux), strict=True)]
        return index + 1, added, written

    _, sums, stacks = tf.while_loop(
        lambda index, *_: index < count, body, (tf.constant(1), sums, stacks), parallel_iterations=1
    )
    loss, totals, extra = sums
    weight = None if first.weight is None else extra.pop(0)
    gradients = [{n: value for n, value in own.items() if n in names} for own, names in zip(totals, used, strict=True)]
    aux = iter([stack.stack() for stack in stacks])
    return PassResult(loss, map_present(lambda _: next(aux), first.aux), gradients, weight, first.size, extra)


def _join_runs(runs: Sequence[Any]) -> Any:
    """Join a leaf of aux over runs of micro-batches, each with its own leading axis (S8)."""
    if is_concatenated([tuple(run.shape[1:]) for run in runs]):
        runs = [tf.reshape(run, (-1, *run.shape[2:])) for run in runs]
    return tf.concat(runs, axis=0)


def _fill_with_zeros(gradients: dict[str, Any], state: TensorFlowState) -> dict[str, Any]:
    """Return a gradient for every parameter, zeros for those without one."""
    return {
        name: gradients[name] if name in gradients else tf.zeros(variable.shape, at_least_float32(variable.dtype))
        for name, variable in state.variables.parameters.items()
    }


def _batch_shapes(batch: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(path, tuple(leaf.shape)) for path, leaf in leaves_with_paths(batch)]
