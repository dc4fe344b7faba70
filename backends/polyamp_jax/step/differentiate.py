"""The first half of the step: scaled gradients over one pass or several (S6 to S8). Called by `step`.

`accumulated` (or `separate`, for several states) makes gradients of the unscaled loss; `update` does the rest. All of
it is traceable and never waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import TraceError
from polyamp.results import Gradients, LossFunction
from polyamp.rules import batches, refusals, weights
from polyamp.rules.batches import check_has_rows
from polyamp.rules.weights import Totals, WeightFunction
from polyamp.rules.window import Window, joins
from polyamp_jax import compat
from polyamp_jax.arrays import XP, dtype_name, is_array, matmul_precision, named_leaves
from polyamp_jax.models.parameter_writes import conformed, overlaid
from polyamp_jax.models.parts import Keys, Running
from polyamp_jax.precision.bound import Engine
from polyamp_jax.precision.cast_mode import compute_params
from polyamp_jax.precision.reading import bound_model
from polyamp_jax.step.dependence import gradients_made, scattered
from polyamp_jax.step.failures import check_aux
from polyamp_jax.step.measure import unscaled_leaf
from polyamp_jax.step.optimizers import like, widened
from polyamp_jax.step.replicas import AxisName, Replicas, check_whole, replicas
from polyamp_jax.step.scan import check_carried, scan
from polyamp_jax.step.state import JaxState


class Pass(NamedTuple):
    """What one forward and backward pass over several models gives.

    Attributes:
        loss: unscaled loss, float32 scalar.
        aux: what `loss_fn` returned beside it.
        values: per model, gradients of the scaled loss in the dtypes of the computation; None for a parameter on which
            the loss does not depend (S23).
        running: per model, its running state afterwards.
        weight: what the loss is a mean over, float32 scalar (S8); None where it counts by its rows. The gradients do
            not hold it yet, unless replicas add them up by themselves.
        counts: of each term of a sum of means; empty for any other loss.
        unit: what the weight is counted in.
    """

    loss: Any
    aux: Any
    values: list[Any]
    running: list[Running]
    weight: Any = None
    counts: Sequence[Any] = ()
    unit: float = 1.0


class Weighing(NamedTuple):
    """What a batch counts (S8, S9).

    Attributes:
        function: `weight=` of the user's, or None.
        share: for a micro-batch that counts by its rows: they over those of the largest.
        rows: of the batch; None where it is the only one.
        most: rows of the largest micro-batch; None where there is only one.
        totals: what the terms of a sum of means are divided by, or None.
    """

    function: WeightFunction | None = None
    share: float = 1.0
    rows: int | None = None
    most: int | None = None
    totals: Totals | None = None


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
    done = _differentiated(loss_fn, states, params, before, batch, around, weighing)
    if around is not None and done.counts:
        weighing = Weighing(totals=around.totals(weights.totals_of([done.counts])))
        done = _differentiated(loss_fn, states, params, before, batch, around, weighing)
    own = done.loss if done.weight is None else done.loss * done.weight
    loss, values, running, whole = _together(around, states, own, done.values, done.running, done.weight)
    if whole is not None:
        loss = loss / _divisor(whole)
        values = values if around is None or not around.later else _divided(values, _divisor(whole))
        whole = whole * done.unit
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
        shapes=_shapes,
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
        loss, mean, whole = loss / _divisor(whole), _divided(mean, _divisor(whole)), whole * done.unit
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
    units = [1.0]

    def one(how: Weighing, carry: tuple[Running, Any], part: Any) -> tuple[tuple[Running, Any], Any]:
        running, total = carry
        done = _differentiated(loss_fn, [state], [params], [running], part, around, how)
        check_carried(done.running[0].written, running.written)
        idle[-1:] = [jax.tree.map(lambda _, g: g is None, total, done.values[0])]
        by = None if around is not None and around.later else done.weight
        total = jax.tree.map(lambda t, g: t if g is None else t + _times(g.astype(t.dtype), by), total, *done.values)
        after = done.running[0]
        still[-1:] = [jax.tree.map(lambda a, b: a is b, after.statistics, running.statistics)]
        carry = (after._replace(statistics=own(after.statistics)), placed(total, state))
        units[:] = [done.unit]
        return carry, (done.loss, done.aux, done.weight, list(done.counts))

    start = state.running._replace(statistics=own(state.running.statistics))
    carry = (start, placed(own(jax.tree.map(jnp.zeros_like, widened(state.params))), state))
    shares = [1.0 if weighing.totals is not None else window.shares[run.start] for run, _ in parts]
    outputs = []
    for share, (run, members) in zip(shares, parts, strict=True):
        idle.append(None)
        still.append(None)
        how = weighing._replace(share=share, rows=window.sizes[run.start], most=max(window.sizes))
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
    return Pass(loss, aux, [total], [running], weight, every, units[0])


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


def scaled_loss(loss: Any, scale: Any | None, *, what: str = "loss_fn") -> tuple[jax.Array, jax.Array]:
    """(scaled loss, loss), both float32 scalars (S6).

    Raises:
        LossError: not a floating scalar.
    """
    refusals.check_loss(jnp.shape(loss) if is_array(loss) else (), dtype_name(loss), what=what)
    wide = jnp.asarray(loss, jnp.float32).reshape(())
    return (wide if scale is None else wide * scale), wide


def _differentiated(
    loss_fn: LossFunction,
    states: Sequence[JaxState],
    params: Sequence[Any],
    running: Sequence[Running],
    batch: Any,
    around: Replicas | None,
    weighing: Weighing,
) -> Pass:
    """One forward and backward pass.

    Raises:
        LossError: not a floating scalar, or none of the parameters has a gradient (S23).
        TraceError: `loss_fn` changes an nnx object that it did not make.
    """
    check_has_rows(shape[0] for _, shape in _shapes(batch) if shape)
    keys = [keys_of(state, own.draws) for state, own in zip(states, running, strict=True)]
    scale = scale_of(states[0])
    before, given = running, weights.of_batch(weighing.function, batch)
    several = around is not None or weighing.rows is not None
    units = [1.0]
    if around is not None:
        keys, running = [around.keys(own) for own in keys], [around.entering(own) for own in running]

    def unit(loss: weights.Loss) -> float:
        """What the weight of the largest micro-batch is at most, the same number on all replicas."""
        rows = weighing.rows or _rows(batch)
        return (loss.size or rows) / rows * (weighing.most or rows)

    # in cast mode loss_fn may use both a parameter's cast and, by model.params, the master itself
    wrote = [item.written or {} for item in running]  # by earlier micro-batches of the window
    masters = [
        None if own is state.params else overlaid(state.params, written)
        for own, state, written in zip(params, states, wrote, strict=True)
    ]
    params = [overlaid(own, conformed(written, own)) for own, written in zip(params, wrote, strict=True)]

    def loss_of(params: Sequence[Any], masters: Sequence[Any]) -> tuple[Any, Any]:
        engines = [
            Engine(state.setup.adapter, state.setup.plan, *parts, masters=own)
            for state, own, *parts in zip(states, masters, params, running, keys, strict=True)
        ]
        models = tuple(map(bound_model, engines))
        with matmul_precision(states[0].setup.plan):
            result, found = weights.call(loss_fn, models[0] if len(models) == 1 else models, batch)
        loss = weights.read(result, found, XP, weight=given, totals=weighing.totals, rows=weighing.rows or 1)
        if several and weights.is_unclear(loss, found):
            weights.warn_unclear(loss_fn, weights.line_of(found))
        check_aux(loss.aux)
        _, wide = scaled_loss(loss.value, None)
        weight = None if loss.weight is None else _constant(loss.weight)
        if weight is not None:
            wide = jnp.where(weight > 0.0, wide, 0.0)
        if around is not None:
            if weight is not None and around.later:  # the scaled loss holds it, and stays about as large
                weight = weight / unit(loss)
            wide, weight = around.loss(wide, weight)
        scaled = wide if scale is None else wide * scale
        if weight is not None and around is not None and around.later:
            units[:] = [unit(loss)]
            scaled = scaled * weight
        elif weighing.share != 1.0 and weight is None:
            scaled = scaled * weighing.share
        counts = [_constant(count) for count in weights.counts_of(loss, weighing.rows or _rows(batch))]
        return scaled, (wide, loss.aux, [engine.running for engine in engines], weight, counts if several else [])

    trees = (params, masters) if around is None else (around.own(list(params)), around.own(masters))
    values, _, (loss, aux, after, weight, counts) = taken(loss_of, *trees)
    if around is not None:
        after = [around.leaving(*own) for own in zip(after, running, before, strict=True)]
    made = [jax.tree.unflatten(jax.tree.structure(own), flat) for own, flat in zip(params, values, strict=True)]
    moved = [own._replace(draws=own.draws + 1) for own in after]
    return Pass(loss, aux, made, moved, weight, counts, units[0])


def _constant(value: Any) -> jax.Array:
    """A number or a scalar in float32, without a gradient."""
    return jax.lax.stop_gradient(jnp.asarray(value, jnp.float32))


def _rows(batch: Any) -> int:
    """The rows of a batch; 1 where its arrays do not agree."""
    lengths = {shape[0] for _, shape in _shapes(batch) if shape}
    return lengths.pop() if len(lengths) == 1 else 1


def taken(
    function: Callable[..., tuple[Any, Any]], params: Sequence[Any], masters: Sequence[Any], *others: Any
) -> tuple[list[list[Any]], list[Any], Any]:
    """The gradients of `function(params, masters, *others) -> (scaled loss, rest)`.

    Args:
        function: the forward pass.
        params: per model, what it computes with.
        masters: per model, its master weights where these are others, or None.
        *others: pytrees of whatever else is differentiated by.

    Returns:
        Per model, the gradients by the leaves of its parameters, each None where the loss does not depend on it (S23);
        those by the leaves of `others`; and the rest.
    """
    try:
        scaled, backward, rest = jax.vjp(function, list(params), list(masters), *others, has_aux=True)
    except Exception as error:
        _refuse_changed_nnx(error)
        raise
    program = jax.make_jaxpr(backward)(scaled)
    made = gradients_made(program)
    if compat.mapped_axes():
        check_whole(scattered(program), [params, masters, *others])
    refusals.check_depends(any(made))
    one: Any = np.ones((), np.float32)
    if own := compat.varying(scaled):  # a loss that is each replica's own
        one = compat.vary(one, sorted(own))
    flat = compat.jaxpr_as_fun(program)(one)
    found = iter([gradient if depends else None for gradient, depends in zip(flat, made, strict=True)])
    values = [[next(found) for _ in jax.tree.leaves(own)] for own in params]
    for number, own in enumerate(masters):
        if own is not None:
            values[number] = [_sum(of_cast, next(found)) for of_cast in values[number]]
    return values, list(found), rest


def _sum(of_cast: Any, of_master: Any) -> Any:
    """A parameter's gradient by its cast and by itself, each None where the loss does not depend on it."""
    if of_cast is None or of_master is None:
        return of_master if of_cast is None else of_cast
    return of_cast.astype(of_master.dtype) + of_master


def _refuse_changed_nnx(error: BaseException) -> None:
    """Say what to do where flax found that `loss_fn` changes an nnx object of the world outside the step."""
    cause: BaseException | None = error
    while cause is not None and not compat.flax_refused_a_change(cause):
        cause = cause.__cause__
    if cause is not None:
        raise TraceError(
            "loss_fn changes an nnx object that is not the model's: one that it closes over, or that is in the batch. "
            "A step is a traced function, and the change would be lost. Random streams: polyamp.init(model, recipe, "
            "rngs=nnx.Rngs(...)), and model(x) in loss_fn without them: the state keeps the streams and passes rngs= "
            "by itself. Metrics: return their values as aux and update them outside. Other modules (an average of the "
            f"weights, a teacher): call them in evaluation mode. Received from flax: {str(cause).splitlines()[0]}"
        ) from error


def computed(state: JaxState) -> Any:
    """What a pass computes with: the parameters, or in mode "cast" their casts."""
    return compute_params(state.params, state.setup.adapter, state.setup.plan)


def scale_of(state: JaxState) -> Any | None:
    """The loss scale; None where nothing scales."""
    return state.scale_state.scale if state.recipe.loss_scaler.scales else None


def keys_of(state: JaxState, draws: Any) -> Keys:
    """The random keys of one pass of one attempt: skipped steps and micro-batches all have others."""
    return {
        name: jax.random.fold_in(jax.random.fold_in(key, state.attempts), draws) for name, key in state.rngs.items()
    }


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


def _shapes(batch: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(jax.tree_util.keystr(path), jnp.shape(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)]
