"""The first half of a step as graph code: loss and gradients over micro-batches and replicas (S6 to S9).

loss * scale -> gradients, summed over micro-batches and replicas -> / (scale * N)

The variables that a forward pass writes are restored after it (S12); `Gradients` contain their new values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from polyamp.results import Gradients, LossFunction
from polyamp.rules import batches, loss_weights
from polyamp.rules.accumulation import is_concatenated
from polyamp.rules.loss_weights import WeightFunction
from polyamp_keras.arrays import leaves_with_paths
from polyamp_tensorflow.arrays import at_least_float32
from polyamp_tensorflow.distributed import replicas
from polyamp_tensorflow.distributed.all_reduce import all_reduce_sums_and_means, all_reduce_totals
from polyamp_tensorflow.distributed.replicas import has_several_replicas
from polyamp_tensorflow.distributed.tensorflow_only.distributed_step import (
    check_used_parameters,
    find_used_parameters,
    stack_over_replicas,
)
from polyamp_tensorflow.step.forward_backward import (
    ParameterKey,
    PassResult,
    StateGradients,
    check_rows,
    map_present,
    present_leaves,
    run_pass,
    state_parameters,
)
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
    running = [RunningState(state) for state in states]
    averages = count > 1 or has_several_replicas(states[0].strategy)
    weighing = LossWeighting(weight)
    try:
        own = _accumulate(states, loss_fn, batch, count, weighing)
        if own.counts and averages:
            _restore_running_states(running, with_rng=True)  # that pass computed the divisors of a sum of means
            weighing = weighing._replace(totals=all_reduce_totals(own.counts, count))
            own = _accumulate(states, loss_fn, batch, count, weighing)
        after = [each.values_after() for each in running]
    except BaseException:
        if tf.executing_eagerly():
            for each in running:
                each.find_writes()
        _restore_running_states(running, with_rng=True)
        raise
    _restore_running_states(running, with_rng=False)
    loss, sums, after, total = _reduce_over_replicas(states, own, after, batch)
    if total is not None and averages:
        by = tf.where(total > 0.0, total, 1.0)
        loss = loss / by
        sums = {key: value / tf.cast(by, value.dtype) for key, value in sums.items()}
    if own.weight is None:  # rows, which every batch has
        total = None if weighing.totals is None else sum(weighing.totals.counts)
    unscaled = _unscale(states, sums)
    found = [Gradients(values, more, loss, total) for values, more in zip(unscaled, after, strict=True)]
    return loss, stack_over_replicas(own.aux), found


def _unscale(states: States, sums: StateGradients) -> list[dict[str, Any]]:
    """Return the gradients of each state in the parameters' dtypes, divided by the scale; None without one."""
    scale = states[0].scale_state.scale if states[0].recipe.loss_scaler.scales else None
    unscaled: list[dict[str, Any]] = [dict.fromkeys(state.variables.parameters) for state in states]
    for (number, name), value in sums.items():
        divided = value if scale is None else value / tf.cast(scale, value.dtype)
        unscaled[number][name] = tf.cast(divided, states[number].variables.parameters[name].dtype)
    return unscaled


def _reduce_over_replicas(
    states: States, own: PassResult, after: list[dict[str, Any]], batch: Any
) -> tuple[Any, StateGradients, list[dict[str, Any]], Any]:
    """Reduce loss, scaled gradients, running statistics and weight over the replicas in one reduction (S9).

    Statistics are averaged, weighted values summed. The weight is None if nothing is weighted. Gradients are those of
    parameters that any replica uses (S23).
    """
    if not has_several_replicas(states[0].strategy):
        return own.loss, own.gradients, after, own.weight
    parameters = state_parameters(states)
    used = find_used_parameters(list(parameters), own.gradients)
    sent = _fill_with_zeros(own.gradients, {key: parameters[key] for key in used.reduced})
    loss, weight = own.loss, own.weight
    if weight is None:
        rows = sum(map(batch_rows, batch)) if isinstance(batch, list) else batch_rows(batch)
        weight = tf.cast(own.size or rows, tf.float32)
        loss = loss * weight
        sent = {key: value * tf.cast(weight, value.dtype) for key, value in sent.items()}
    (loss, weight, sums), (after, flags) = all_reduce_sums_and_means([loss, weight, sent], [after, used.flags])
    check_used_parameters(list(parameters), flags)
    return loss, {key: sums[key] for key in used.local}, after, weight


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
    gradients: StateGradients = {}
    for own in done:
        for key, value in own.gradients.items():
            gradients[key] = gradients[key] + value if key in gradients else value
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
    mean = {key: value / tf.constant(whole, value.dtype) for key, value in gradients.items()}
    sizes = [own.size * len(run) for own, (run, _) in zip(done, runs, strict=True) if own.size is not None]
    size = sum(sizes) if len(sizes) == len(done) else None
    return PassResult(loss, aux, mean, None, size, counts)


def _multiply_by_weight(own: PassResult) -> PassResult:
    """Multiply loss and gradients by their weight. A weight of 0 gives zeros even for inf and NaN."""
    weight = own.weight

    def times(value: Any) -> Any:
        return tf.where(weight > 0.0, value * tf.cast(weight, value.dtype), tf.zeros_like(value))

    gradients = {key: times(value) for key, value in own.gradients.items()}
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
    used = set(first.gradients)
    extra = [*first.counts] if first.weight is None else [first.weight, *first.counts]
    sums = [first.loss, _fill_with_zeros(first.gradients, state_parameters(states)), extra]
    stacks = [
        tf.TensorArray(leaf.dtype, count, element_shape=leaf.shape, clear_after_read=False).write(0, leaf)
        for leaf in present_leaves(first.aux)
    ]

    def body(index: Any, sums: Any, stacks: Any) -> Any:
        other = part(index)
        loss, totals, extra = sums
        loss_weights.check_consistent_weights([first.weight is not None, other.weight is not None])
        more_extra = [*other.counts] if other.weight is None else [other.weight, *other.counts]
        used.update(other.gradients)
        added = [
            loss + other.loss,
            {**totals, **{key: totals[key] + value for key, value in other.gradients.items()}},
            [total + more for total, more in zip(extra, more_extra, strict=True)],
        ]
        written = [s.write(index, leaf) for s, leaf in zip(stacks, present_leaves(other.aux), strict=True)]
        return index + 1, added, written

    _, sums, stacks = tf.while_loop(
        lambda index, *_: index < count, body, (tf.constant(1), sums, stacks), parallel_iterations=1
    )
    loss, totals, extra = sums
    weight = None if first.weight is None else extra.pop(0)
    gradients = {key: value for key, value in totals.items() if key in used}
    aux = iter([stack.stack() for stack in stacks])
    return PassResult(loss, map_present(lambda _: next(aux), first.aux), gradients, weight, first.size, extra)


def _join_runs(runs: Sequence[Any]) -> Any:
    """Join a leaf of aux over runs of micro-batches, each with its own leading axis (S8)."""
    if is_concatenated([tuple(run.shape[1:]) for run in runs]):
        runs = [tf.reshape(run, (-1, *run.shape[2:])) for run in runs]
    return tf.concat(runs, axis=0)


def _fill_with_zeros(gradients: StateGradients, parameters: Mapping[ParameterKey, Any]) -> StateGradients:
    """Return a gradient for each of these parameters, zeros for those without one."""
    return {
        key: gradients[key] if key in gradients else tf.zeros(variable.shape, at_least_float32(variable.dtype))
        for key, variable in parameters.items()
    }


def _batch_shapes(batch: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(path, tuple(leaf.shape)) for path, leaf in leaves_with_paths(batch)]


class RunningState:
    """Variables of one state that a forward pass writes, recorded from before the pass.

    Args:
        state: the state.
    """

    def __init__(self, state: TensorFlowState) -> None:
        self.state = state
        self._rng = state.read_rng()
        self._statistics = state.read_statistics()
        self._tracker = ForwardWriteTracker(state.variables, state.eager_reads, state.compute_dtypes)
        self._writes: dict[str, ParameterWrite] = {}

    def find_writes(self) -> None:
        """Find the parameters that the pass wrote; `values_before` includes them from then on."""
        self._writes = self._tracker.find_writes()

    def values_before(self, *, with_rng: bool) -> dict[str, Any]:
        """Return the values before the pass, those of the random streams only if `with_rng`."""
        written = {name: each.before for name, each in self._writes.items()}
        return {**self._statistics, **(self._rng if with_rng else {}), **written}

    def values_after(self) -> dict[str, Any]:
        """Return the values after the pass, which take effect if the update is applied; without the random streams."""
        self.find_writes()
        return {**self.state.read_statistics(), **{name: each.after for name, each in self._writes.items()}}


def _restore_running_states(running: Sequence[RunningState], *, with_rng: bool) -> None:
    """Write the values from before the pass. Call it in a replica."""

    def write(_: replicas.ReplicaRun, values: list[dict[str, Any]]) -> None:
        for each, before in zip(running, values, strict=True):
            each.state.restore_running_state(before)

    replicas.merge_replica_calls(write, [each.values_before(with_rng=with_rng) for each in running])
