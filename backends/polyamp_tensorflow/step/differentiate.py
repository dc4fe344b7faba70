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
from polyamp.rules import batches, refusals
from polyamp.rules.batches import check_has_rows
from polyamp.rules.window import joins
from polyamp_tensorflow.arrays import at_least_float32, dense_wide, leaves, raw
from polyamp_tensorflow.interrupts import ending
from polyamp_tensorflow.precision.autocast import layer_policies
from polyamp_tensorflow.precision.bound import BoundModel
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.additions import awaited
from polyamp_tensorflow.step.distribution import check_used, mean, several, stacked, used
from polyamp_tensorflow.step.measure import scale_loss
from polyamp_tensorflow.step.state import States, TensorFlowState
from polyamp_tensorflow.step.writes import ForwardWrites, Written


class _Scaled(NamedTuple):
    """Float32 loss, aux, and the float32 gradients of the scaled loss by state and parameter; parameters on which the
    loss does not depend are left out (S23)."""

    loss: Any
    aux: Any
    gradients: list[dict[str, Any]]


def differentiate(states: States, loss_fn: LossFunction, batch: Any, count: int) -> tuple[Any, Any, list[Gradients]]:
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

    try:
        scaled = _accumulated(states, loss_fn, batch, count)
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
    mean_loss, sums, after = _reduced(states, scaled, after)
    scaler = states[0].recipe.loss_scaler
    scale = states[0].scale_state.scale if scaler.scales else None
    found = []
    for state, values, running in zip(states, sums, after, strict=True):
        unscaled: dict[str, Any] = dict.fromkeys(state.variables.parameters)
        for name, value in values.items():
            divided = value if scale is None else value / tf.cast(scale, value.dtype)
            unscaled[name] = tf.cast(divided, state.variables.parameters[name].dtype)
        found.append(Gradients(unscaled, running, mean_loss))
    return mean_loss, stacked(scaled.aux), found


def _reduced(states: States, own: _Scaled, after: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]], Any]:
    """Loss, scaled gradients and running statistics as means over the replicas, in one reduction (S9); gradients of
    what any replica uses (S23)."""
    if not several(states[0].strategy):
        return own.loss, own.gradients, after
    every = [list(state.variables.parameters) for state in states]
    taken = used(every, own.gradients)
    whole = [_with_zeros(values, state) for values, state in zip(own.gradients, states, strict=True)]
    sent = [{n: values[n] for n in names} for values, names in zip(whole, taken.sent, strict=True)]
    loss, sums, after, flags = mean([own.loss, sent, after, taken.flags])
    check_used(every, flags)
    return loss, [{n: values[n] for n in names} for values, names in zip(sums, taken.here, strict=True)], after


def _put_back(states: States, values: Sequence[Any]) -> None:
    for state, own in zip(states, values, strict=True):
        state.put_back(own)


def _accumulated(states: States, loss_fn: LossFunction, batch: Any, count: int) -> _Scaled:
    """Mean loss, stacked aux and mean scaled gradients, each micro-batch by its share of the rows (S8).

    What any of them uses is used (S23).
    """
    if count == 1:
        return _scaled(states, loss_fn, batch)
    window, runs = batches.in_runs(
        batch, count, shapes=_shapes, tree_map=_map_present, stack=tf.stack, reshape=tf.reshape
    )
    done = [_summed(states, loss_fn, parts, len(run), window.shares[run.start]) for run, parts in runs]
    loss = sum(own.loss * window.shares[run.start] for own, (run, _) in zip(done, runs, strict=True)) / window.total
    gradients: list[dict[str, Any]] = [{} for _ in states]
    for own in done:
        for total, more in zip(gradients, own.gradients, strict=True):
            total.update({name: total[name] + value if name in total else value for name, value in more.items()})
    mean = [{name: value / tf.cast(window.total, value.dtype) for name, value in own.items()} for own in gradients]
    aux = done[0].aux
    if len(done) > 1:
        columns = iter(zip(*(present(own.aux) for own in done), strict=True))
        aux = _map_present(lambda _: _joined(next(columns)), aux)
    return _Scaled(loss, aux, mean)


def _summed(states: States, loss_fn: LossFunction, parts: Any, count: int, share: float) -> _Scaled:
    """Sums over a run of equal micro-batches, and their stacked aux: the first one, then a loop over the others.

    The first one stands before the loop because it tells the loop the structure of aux; the graph holds two copies of
    the model whatever the number of micro-batches. Both tell which parameters have gradients, since `loss_fn` is run
    for each copy: what either of them uses is used.
    """

    def part(index: Any) -> _Scaled:
        return _scaled(states, loss_fn, _map_present(lambda leaf: leaf[index], parts), share)

    first = part(0)
    if count == 1:
        return first._replace(aux=_map_present(lambda leaf: leaf[tf.newaxis], first.aux))
    used = [set(own) for own in first.gradients]
    sums = [first.loss, [_with_zeros(own, state) for own, state in zip(first.gradients, states, strict=True)]]
    stacks = [
        tf.TensorArray(leaf.dtype, count, element_shape=leaf.shape, clear_after_read=False).write(0, leaf)
        for leaf in present(first.aux)
    ]

    def body(index: Any, sums: Any, stacks: Any) -> Any:
        other = part(index)
        loss, totals = sums
        added = [loss + other.loss, [dict(own) for own in totals]]
        for names, own, more in zip(used, added[1], other.gradients, strict=True):
            names.update(more)
            own.update({name: own[name] + value for name, value in more.items()})
        written = [s.write(index, leaf) for s, leaf in zip(stacks, present(other.aux), strict=True)]
        return index + 1, added, written

    _, sums, stacks = tf.while_loop(
        lambda index, *_: index < count, body, (tf.constant(1), sums, stacks), parallel_iterations=1
    )
    loss, totals = sums
    gradients = [{n: value for n, value in own.items() if n in names} for own, names in zip(totals, used, strict=True)]
    stacked = iter([stack.stack() for stack in stacks])
    return _Scaled(loss, _map_present(lambda _: next(stacked), first.aux), gradients)


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


def _scaled(states: States, loss_fn: LossFunction, batch: Any, share: float = 1.0) -> _Scaled:
    """Loss of one micro-batch, and scaled gradients times its share. `loss_fn` runs with the models' layers under
    their policies.

    Raises:
        LossError: no scalar loss, or one that depends on no parameter.
    """
    scaler = states[0].recipe.loss_scaler
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
            loss, aux = refusals.split_result(loss_fn(bound(states), batch))
        loss = scale_loss(loss, None, what="loss_fn")
        scaled = loss * states[0].scale_state.scale if scaler.scales else loss
        scaled = scaled if share == 1.0 else scaled * share
    flat = iter(tape.gradient(scaled, watched))  # a parameter that several states share gets its whole gradient in each
    found = [{n: (v, g) for n, v in own.items() if (g := next(flat)) is not None} for own in parameters]
    refusals.check_depends(any(found))
    gradients = [{name: dense_wide(value, variable) for name, (variable, value) in own.items()} for own in found]
    return _Scaled(loss, _map_present(_as_aux, aux), gradients)


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
