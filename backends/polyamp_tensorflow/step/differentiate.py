"""The first half of a step as graph code: loss and gradients (S6 to S8).

    loss * scale -> gradients, summed over micro-batches and replicas -> / (scale * N)

Called by the backend and by the whole step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from polyamp.errors import LossError, described
from polyamp.results import Gradients, LossFunction
from polyamp.rules import batches, refusals, weights
from polyamp.rules.batches import check_has_rows
from polyamp.rules.plan import NARROW
from polyamp.rules.weights import Totals, WeightFunction
from polyamp.rules.window import joins
from polyamp_tensorflow.arrays import XP, at_least_float32, dense_wide, leaves, raw
from polyamp_tensorflow.interrupts import ending
from polyamp_tensorflow.precision.autocast import layer_policies
from polyamp_tensorflow.precision.bound import BoundModel
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.additions import awaited
from polyamp_tensorflow.step.distribution import all_totals, check_used, reduced, several, stacked, used
from polyamp_tensorflow.step.measure import scale_loss
from polyamp_tensorflow.step.state import States, TensorFlowState
from polyamp_tensorflow.step.writes import ForwardWrites, Written


class _Scaled(NamedTuple):
    """Float32 loss, aux, and the float32 gradients of the scaled loss by state and parameter; parameters on which the
    loss does not depend are left out (S23).

    Attributes:
        weight: what the loss is a mean over, float32 scalar (S8); None where it counts by its rows. One pass's loss and
            gradients do not hold it yet, those of a window do.
        size: the number of elements that the mean is over at most; None where nobody says.
        counts: of each term of a sum of means; empty for any other loss.
    """

    loss: Any
    aux: Any
    gradients: list[dict[str, Any]]
    weight: Any = None
    size: Any = None
    counts: Sequence[Any] = ()


class _Weighing(NamedTuple):
    """What a batch counts (S8, S9).

    Attributes:
        function: `weight=` of the user's, or None.
        share: for a micro-batch that counts by its rows: they over those of the largest.
        rows: of the batch; None where it is the only one.
        totals: what the terms of a sum of means are divided by, or None.
    """

    function: WeightFunction | None
    share: float = 1.0
    rows: Any = None
    totals: Totals | None = None


def differentiate(
    states: States, loss_fn: LossFunction, batch: Any, count: int, weight: WeightFunction | None = None
) -> tuple[Any, Any, list[Gradients]]:
    """Unscaled loss, aux and gradients over `count` micro-batches and all replicas. The states' variables end as they
    began, but for the random-number streams: they have moved on by `count` forward passes (S12). An error takes
    them back, unless it comes while a graph runs."""
    check_rows(batch)
    streams = [state.read_rng() for state in states]
    statistics = [state.read_statistics() for state in states]
    writes = [ForwardWrites(state.variables, state.eager_reads, state.computes_in) for state in states]
    written: list[dict[str, Written]] = [{} for _ in states]

    def put_back(*, failed: bool) -> None:
        values = [{**own, **more} for own, more in zip(statistics, streams, strict=True)] if failed else statistics
        values = [
            {**own, **{name: each.before for name, each in more.items()}}
            for own, more in zip(values, written, strict=True)
        ]
        replicas.together(lambda _, values: _put_back(states, values), values)

    weighing = _Weighing(weight)
    try:
        scaled = _accumulated(states, loss_fn, batch, count, weighing)
        if scaled.counts and (count > 1 or several(states[0].strategy)):
            put_back(failed=True)  # that pass told what the terms of a sum of means are divided by
            weighing = weighing._replace(totals=all_totals(scaled.counts, count))
            scaled = _accumulated(states, loss_fn, batch, count, weighing)
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
    loss, sums, after, whole = _reduced(states, scaled, after, batch)
    if whole is not None and (count > 1 or several(states[0].strategy)):
        by = tf.where(whole > 0.0, whole, 1.0)
        loss = loss / by
        sums = [{name: value / tf.cast(by, value.dtype) for name, value in own.items()} for own in sums]
    if scaled.weight is None:  # rows, which no batch is without
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
    return loss, stacked(scaled.aux), found


def _reduced(
    states: States, own: _Scaled, after: list[dict[str, Any]], batch: Any
) -> tuple[Any, list[dict[str, Any]], Any, Any]:
    """Loss, scaled gradients, running statistics and weight over the replicas, in one reduction (S9): the statistics'
    means, and sums of what holds its weight, which is None where nothing does. Gradients are those of what any replica
    uses (S23)."""
    if not several(states[0].strategy):
        return own.loss, own.gradients, after, own.weight
    every = [list(state.variables.parameters) for state in states]
    taken = used(every, own.gradients)
    whole = [_with_zeros(values, state) for values, state in zip(own.gradients, states, strict=True)]
    sent = [{n: values[n] for n in names} for values, names in zip(whole, taken.sent, strict=True)]
    loss, weight = own.loss, own.weight
    if weight is None:
        rows = sum(map(_rows, batch)) if isinstance(batch, list) else _rows(batch)
        weight = tf.cast(own.size or rows, tf.float32)
        loss = loss * weight
        sent = [{name: value * tf.cast(weight, value.dtype) for name, value in values.items()} for values in sent]
    (loss, weight, sums), (after, flags) = reduced([loss, weight, sent], [after, taken.flags])
    check_used(every, flags)
    sums = [{n: values[n] for n in names} for values, names in zip(sums, taken.here, strict=True)]
    return loss, sums, after, weight


def _put_back(states: States, values: Sequence[Any]) -> None:
    for state, own in zip(states, values, strict=True):
        state.put_back(own)


def _accumulated(states: States, loss_fn: LossFunction, batch: Any, count: int, weighing: _Weighing) -> _Scaled:
    """Over the micro-batches the stacked aux and, where they count by their rows, the means of loss and scaled
    gradients; where they have weights, the sums by these (S8). What any of them uses is used (S23)."""
    if count == 1:
        own = _scaled(states, loss_fn, batch, weighing)
        if several(states[0].strategy):
            return own if own.weight is None else _weighed(own)
        return own if own.weight is None else own._replace(loss=tf.where(own.weight > 0.0, own.loss, 0.0))
    window, runs = batches.in_runs(
        batch, count, shapes=_shapes, tree_map=_map_present, stack=tf.stack, reshape=tf.reshape
    )
    shares = [1.0 if weighing.totals is not None else window.shares[run.start] for run, _ in runs]
    done = [
        _summed(states, loss_fn, parts, len(run), weighing._replace(share=share, rows=window.sizes[run.start]))
        for share, (run, parts) in zip(shares, runs, strict=True)
    ]
    weights.check_alike([own.weight is not None for own in done])
    gradients: list[dict[str, Any]] = [{} for _ in states]
    for own in done:
        for total, more in zip(gradients, own.gradients, strict=True):
            total.update({name: total[name] + value if name in total else value for name, value in more.items()})
    aux = done[0].aux
    if len(done) > 1:
        columns = iter(zip(*(present(own.aux) for own in done), strict=True))
        aux = _map_present(lambda _: _joined(next(columns)), aux)
    counts = weights.totals_of([own.counts for own in done]).counts
    if done[0].weight is not None:
        total = sum(own.weight for own in done)
        return _Scaled(sum(own.loss for own in done), aux, gradients, total, None, counts)
    whole = sum(share * len(run) for share, (run, _) in zip(shares, runs, strict=True))
    loss = sum(own.loss * share for share, own in zip(shares, done, strict=True)) / whole
    mean = [{name: value / tf.constant(whole, value.dtype) for name, value in own.items()} for own in gradients]
    sizes = [own.size * len(run) for own, (run, _) in zip(done, runs, strict=True) if own.size is not None]
    size = sum(sizes) if len(sizes) == len(done) else None
    return _Scaled(loss, aux, mean, None, size, counts)


def _weighed(own: _Scaled) -> _Scaled:
    """Loss and gradients times their weight; zeros where that is 0, whatever they hold."""
    weight = own.weight

    def times(value: Any) -> Any:
        return tf.where(weight > 0.0, value * tf.cast(weight, value.dtype), tf.zeros_like(value))

    gradients = [{name: times(value) for name, value in values.items()} for values in own.gradients]
    return own._replace(loss=times(own.loss), gradients=gradients)


def _summed(states: States, loss_fn: LossFunction, parts: Any, count: int, weighing: _Weighing) -> _Scaled:
    """Sums over a run of equal micro-batches, and their stacked aux: the first one, then a loop over the others.

    The first one stands before the loop because it tells the loop the structure of aux; the graph holds two copies of
    the model whatever the number of micro-batches. Both tell which parameters have gradients, since `loss_fn` is run
    for each copy: what either of them uses is used.
    """

    def part(index: Any) -> _Scaled:
        own = _scaled(states, loss_fn, _map_present(lambda leaf: leaf[index], parts), weighing)
        return own if own.weight is None else _weighed(own)

    first = part(0)
    if count == 1:
        return first._replace(aux=_map_present(lambda leaf: leaf[tf.newaxis], first.aux))
    used = [set(own) for own in first.gradients]
    extra = [*first.counts] if first.weight is None else [first.weight, *first.counts]
    gradients = [_with_zeros(own, state) for own, state in zip(first.gradients, states, strict=True)]
    sums = [first.loss, gradients, extra]
    stacks = [
        tf.TensorArray(leaf.dtype, count, element_shape=leaf.shape, clear_after_read=False).write(0, leaf)
        for leaf in present(first.aux)
    ]

    def body(index: Any, sums: Any, stacks: Any) -> Any:
        other = part(index)
        loss, totals, extra = sums
        weights.check_alike([first.weight is not None, other.weight is not None])
        more_extra = [*other.counts] if other.weight is None else [other.weight, *other.counts]
        added = [
            loss + other.loss,
            [dict(own) for own in totals],
            [total + more for total, more in zip(extra, more_extra, strict=True)],
        ]
        for names, own, more in zip(used, added[1], other.gradients, strict=True):
            names.update(more)
            own.update({name: own[name] + value for name, value in more.items()})
        written = [s.write(index, leaf) for s, leaf in zip(stacks, present(other.aux), strict=True)]
        return index + 1, added, written

    _, sums, stacks = tf.while_loop(
        lambda index, *_: index < count, body, (tf.constant(1), sums, stacks), parallel_iterations=1
    )
    loss, totals, extra = sums
    weight = None if first.weight is None else extra.pop(0)
    gradients = [{n: value for n, value in own.items() if n in names} for own, names in zip(totals, used, strict=True)]
    aux = iter([stack.stack() for stack in stacks])
    return _Scaled(loss, _map_present(lambda _: next(aux), first.aux), gradients, weight, first.size, extra)


def _joined(runs: Sequence[Any]) -> Any:
    """A leaf of aux over runs of micro-batches, each with a leading axis of its own (S8)."""
    if joins([tuple(run.shape[1:]) for run in runs]):
        runs = [tf.reshape(run, (-1, *run.shape[2:])) for run in runs]
    return tf.concat(runs, axis=0)


def _with_zeros(gradients: dict[str, Any], state: TensorFlowState) -> dict[str, Any]:
    """One for every parameter."""
    return {
        name: gradients[name] if name in gradients else tf.zeros(variable.shape, at_least_float32(variable.dtype))
        for name, variable in state.variables.parameters.items()
    }


def _shapes(batch: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(path, tuple(leaf.shape)) for path, leaf in leaves(batch)]


def _scaled(states: States, loss_fn: LossFunction, batch: Any, weighing: _Weighing) -> _Scaled:
    """Loss of one micro-batch, and scaled gradients times its share of the rows. `loss_fn` runs with the models' layers
    under their policies.

    Raises:
        LossError: no scalar loss, or one that depends on no parameter.
    """
    scaler = states[0].recipe.loss_scaler
    given = weights.of_batch(weighing.function, batch)
    parameters = [state.variables.parameters for state in states]
    watched = [raw(variable) for own in parameters for variable in own.values()]
    with contextlib.ExitStack() as stack:
        tape = tf.GradientTape(watch_accessed_variables=False)
        stack.enter_context(ending(functools.partial(tape.__exit__, None, None, None)))
        tape.__enter__()
        tape.watch(watched)
        for state in states:  # inside the tape, which must see the casts of variables
            stack.enter_context(layer_policies(state.model, state.plan))
        with awaited(states):
            result, found = weights.call(loss_fn, bound(states), batch)
        rows = _rows(batch) if weighing.rows is None else weighing.rows
        among_others = weighing.rows is not None or several(states[0].strategy)
        own = weights.read(result, found, XP, weight=given, totals=weighing.totals, rows=rows)
        counts = tf.is_tensor(own.size) or (among_others and tf.executing_eagerly() and own.size is not None)
        if own.weight is None and counts:  # of a selection, or of rows that nobody counted
            own = own._replace(weight=own.size, size=None)
        _check_width(own.value, states)
        loss = scale_loss(own.value, None, what="loss_fn")
        wide = tf.reshape(tf.cast(raw(own.value), tf.float64), ()) if states[0].plan.param == "float64" else loss
        scaled = wide * tf.cast(states[0].scale_state.scale, wide.dtype) if scaler.scales else wide
        if weighing.share != 1.0 and own.weight is None:
            scaled = scaled * weighing.share
    selects = weighing.rows is not None and own.own is None and any(tf.is_tensor(item.size) for item in found)
    if among_others and (selects or weights.is_unclear(own, found)):
        weights.warn_unclear(loss_fn, weights.line_of(found))
    flat = iter(tape.gradient(scaled, watched))  # a parameter that several states share gets its whole gradient in each
    made = [{n: (v, g) for n, v in own.items() if (g := next(flat)) is not None} for own in parameters]
    refusals.check_depends(any(made))
    gradients = [{name: dense_wide(value, variable) for name, (variable, value) in own.items()} for own in made]
    counts = [_constant(count) for count in weights.counts_of(own, rows)] if among_others else []
    weight = None if own.weight is None else _constant(own.weight)
    return _Scaled(loss, _map_present(_as_aux, own.aux), gradients, weight, own.size, counts)


def _constant(value: Any) -> Any:
    """A number or a scalar in float32, without a gradient."""
    return tf.stop_gradient(tf.cast(raw(value), tf.float32))


def _rows(batch: Any) -> Any:
    """The rows of a batch, a number or a scalar; 1 where its arrays do not agree."""
    arrays = [leaf for _, leaf in leaves(batch) if tf.is_tensor(leaf) and leaf.shape.rank]
    lengths = {leaf.shape[0] for leaf in arrays}
    if len(lengths) != 1:
        return 1
    known = lengths.pop()
    return tf.cast(tf.shape(arrays[0])[0], tf.float32) if known is None else known


def _check_width(loss: Any, states: States) -> None:
    """Refuse a loss that was computed in 16 bits where the models' outputs are wider (S6): nothing widens what
    `loss_fn` does by itself.

    Raises:
        LossError: says what to write.
    """
    narrow = getattr(getattr(loss, "dtype", None), "name", None)
    if narrow in NARROW and not any(state.plan.output in NARROW for state in states):
        raise LossError(
            f"loss_fn returned a loss in {narrow}, though the model's outputs are {states[0].plan.output}: it was "
            "computed in 16 bits, where a sum has three digits. Cast what it is made of, "
            "keras.ops.cast(x, 'float32'), or use polyamp.losses, which compute in float32."
        )


def _as_aux(leaf: Any) -> Any:
    """A leaf of aux as a tensor.

    Raises:
        LossError: it cannot be one.
    """
    try:
        return tf.convert_to_tensor(raw(leaf))
    except (TypeError, ValueError) as error:
        raise LossError(
            f"a leaf of aux is {described(leaf)}. What loss_fn returns beside the loss must be tensors, numbers and "
            "strings, in dicts, tuples and lists."
        ) from error


def _map_present(function: Callable[..., Any], *trees: Any) -> Any:
    return keras.tree.map_structure(lambda *leaves: None if leaves[0] is None else function(*leaves), *trees)


def present(tree: Any) -> list[Any]:
    """The leaves of `aux` that are not None."""
    return [leaf for leaf in keras.tree.flatten(tree) if leaf is not None]


def bound(states: States) -> Any:
    """What `loss_fn` gets: one model, or a tuple of them."""
    models = tuple(BoundModel(s.model, s.plan, s.variables.parameters if s.is_ready else None) for s in states)
    return models[0] if len(models) == 1 else models


def check_rows(batch: Any) -> None:
    """Refuse an empty batch, when a shape is traced for the first time."""
    check_has_rows(leaf.shape[0] for _, leaf in leaves(batch) if tf.is_tensor(leaf) and leaf.shape.rank)
