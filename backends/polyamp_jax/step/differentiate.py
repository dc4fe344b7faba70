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
from polyamp.rules import batches, refusals
from polyamp.rules.batches import check_has_rows
from polyamp.rules.window import joins
from polyamp_jax import compat
from polyamp_jax.arrays import dtype_name, is_array, matmul_precision
from polyamp_jax.models.parts import Keys, Running
from polyamp_jax.precision.bound import Engine
from polyamp_jax.precision.cast_mode import compute_params
from polyamp_jax.precision.reading import bound_model
from polyamp_jax.step.dependence import gradients_made, scattered
from polyamp_jax.step.failures import check_aux
from polyamp_jax.step.measure import unscaled_leaf
from polyamp_jax.step.optimizers import like, widened
from polyamp_jax.step.replicas import AxisName, Replicas, check_whole, replicas
from polyamp_jax.step.state import JaxState


class Pass(NamedTuple):
    """What one forward and backward pass over several models gives.

    Attributes:
        loss: unscaled loss, float32 scalar.
        aux: what `loss_fn` returned beside it.
        values: per model, gradients of the scaled loss in the dtypes of the computation; None for a parameter on which
            the loss does not depend (S23).
        running: per model, its running state afterwards.
    """

    loss: Any
    aux: Any
    values: list[Any]
    running: list[Running]


def separate(
    loss_fn: LossFunction,
    states: Sequence[JaxState],
    batch: Any,
    axis_name: AxisName = None,
    what: str = "value_and_grad",
) -> tuple[Any, list[Gradients]]:
    """The first half for one or several states: what `loss_fn` returned, and unscaled gradients (S6, S7)."""
    around = replicas(what, axis_name, batch, [state.params for state in states])
    before = [state.running for state in states]
    done = _differentiated(loss_fn, states, [computed(s) for s in states], before, batch, around)
    loss, values, running = _together(around, states, done.loss, done.values, done.running)
    scale = scale_of(states[0])
    gradients = [
        Gradients(placed(unscaled(own, scale, state.params), state), after, loss)
        for own, after, state in zip(values, running, states, strict=True)
    ]
    return (loss if done.aux is None else (loss, done.aux)), gradients


def _together(
    around: Replicas | None, states: Sequence[JaxState], loss: Any, values: list[Any], running: list[Running]
) -> tuple[Any, list[Any], list[Running]]:
    """Loss, gradients and running state as the means over the replicas (S9)."""
    if around is None:
        return loss, values, running
    loss, values = around.mean(loss, values, [state.params for state in states])
    pairs = zip(running, states, strict=True)
    meant = [own._replace(statistics=around.statistics(own.statistics, s.running.statistics)) for own, s in pairs]
    return loss, values, meant


def accumulated(
    loss_fn: LossFunction,
    state: JaxState,
    batch: Any,
    axis_name: AxisName = None,
    shards: tuple[int, ...] | None = None,
) -> tuple[Any, Any, Gradients]:
    """The first half for one state over its micro-batches (S8): mean loss, stacked aux, unscaled mean gradients.

    In cast mode the parameters are cast once for all micro-batches; running state flows from one to the next.

    Args:
        loss_fn: the loss.
        state: the state.
        batch: the whole batch, or a list of micro-batches.
        axis_name: see `replicas`.
        shards: into how many shards each array of the batch is divided along axis 0, where that is known.
    """
    count = state.recipe.accumulate_steps
    if count == 1:
        value, (gradients,) = separate(loss_fn, [state], batch, axis_name, "train_step")
        return *(value if isinstance(value, tuple) else (value, None)), gradients
    around = replicas("train_step", axis_name, batch, state.params, window=True)
    own: Callable[[Any], Any] = around.own if around is not None else lambda tree: tree
    params = computed(state)
    window, parts = batches.in_runs(
        batch,
        count,
        shapes=_shapes,
        tree_map=jax.tree.map,
        stack=jnp.stack,
        reshape=functools.partial(_folded, shards={} if shards is None else _by_array(batch, shards)),
    )
    runs = [(window.shares[run.start], members) for run, members in parts]
    idle: list[Any] = []  # of each run, what it does not depend on: its micro-batches are one program
    still: list[Any] = []  # and which running statistics it leaves alone

    def one(share: float, carry: tuple[Running, Any], part: Any) -> tuple[tuple[Running, Any], tuple[Any, Any]]:
        running, total = carry
        done = _differentiated(loss_fn, [state], [params], [running], part, around, share)
        idle[-1:] = [jax.tree.map(lambda _, g: g is None, total, done.values[0])]
        total = jax.tree.map(lambda t, g: t if g is None else t + g.astype(t.dtype), total, done.values[0])
        after = done.running[0]
        still[-1:] = [jax.tree.map(lambda a, b: a is b, after.statistics, running.statistics)]
        return (after._replace(statistics=own(after.statistics)), placed(total, state)), (done.loss, done.aux)

    start = state.running._replace(statistics=own(state.running.statistics))
    carry = (start, placed(own(jax.tree.map(jnp.zeros_like, widened(state.params))), state))
    losses, auxes = [], []
    for share, parts in runs:
        idle.append(None)
        still.append(None)
        carry, (loss, aux) = jax.lax.scan(functools.partial(one, share), carry, parts)
        losses.append(loss)
        auxes.append(aux)
    running, total = carry
    mean = jax.tree.map(lambda t, *none: None if all(none) else t / window.total, total, *idle)
    if len(runs) == 1:
        loss, aux = jnp.mean(losses[0]), auxes[0]
    else:
        weighed = [share * jnp.sum(own) for (share, _), own in zip(runs, losses, strict=True)]
        loss, aux = sum(weighed) / window.total, jax.tree.map(_joined, *auxes)
    if around is not None:  # what nobody wrote is the state's own array again, and takes no part in a mean
        kept = jax.tree.map(
            lambda old, new, *alone: old if all(alone) else new, state.running.statistics, running.statistics, *still
        )
        running = running._replace(statistics=kept)
    loss, (mean,), (running,) = _together(around, [state], loss, [mean], [running])
    return loss, aux, Gradients(placed(unscaled(mean, scale_of(state), state.params), state), running, loss)


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


def scaled_loss(
    loss: Any, scale: Any | None, *, what: str = "loss_fn", around: Replicas | None = None
) -> tuple[jax.Array, jax.Array]:
    """(scaled loss, loss), both float32 scalars (S6), averaged over replicas as `Replicas.loss` says.

    Raises:
        LossError: not a floating scalar.
    """
    refusals.check_loss(jnp.shape(loss) if is_array(loss) else (), dtype_name(loss), what=what)
    wide = jnp.asarray(loss, jnp.float32).reshape(())
    if around is not None:
        wide = around.loss(wide)
    return (wide if scale is None else wide * scale), wide


def _differentiated(
    loss_fn: LossFunction,
    states: Sequence[JaxState],
    params: Sequence[Any],
    running: Sequence[Running],
    batch: Any,
    around: Replicas | None = None,
    share: float = 1.0,
) -> Pass:
    """One forward and backward pass; the gradients hold what a micro-batch weighs (S8), the loss does not.

    Raises:
        LossError: not a floating scalar, or none of the parameters has a gradient (S23).
        TraceError: `loss_fn` changes an nnx object that it did not make.
    """
    check_has_rows(shape[0] for _, shape in _shapes(batch) if shape)
    keys = [keys_of(state, own.draws) for state, own in zip(states, running, strict=True)]
    scale = scale_of(states[0])
    before = running
    if around is not None:
        keys, running = [around.keys(own) for own in keys], [around.entering(own) for own in running]

    # in cast mode loss_fn may use both a parameter's cast and, by model.params, the master itself
    masters = [None if own is state.params else state.params for own, state in zip(params, states, strict=True)]

    def loss_of(params: Sequence[Any], masters: Sequence[Any]) -> tuple[Any, Any]:
        engines = [
            Engine(state.setup.adapter, state.setup.plan, *parts, masters=own)
            for state, own, *parts in zip(states, masters, params, running, keys, strict=True)
        ]
        models = tuple(map(bound_model, engines))
        with matmul_precision(states[0].setup.plan):
            loss, aux = refusals.split_result(loss_fn(models[0] if len(models) == 1 else models, batch))
        check_aux(aux)
        scaled, wide = scaled_loss(loss, scale, around=around)
        return scaled if share == 1.0 else scaled * share, (wide, aux, [engine.running for engine in engines])

    given = (params, masters) if around is None else (around.own(list(params)), around.own(masters))
    values, _, (loss, aux, after) = taken(loss_of, *given)
    if around is not None:
        after = [around.leaving(*own) for own in zip(after, running, before, strict=True)]
    trees = [jax.tree.unflatten(jax.tree.structure(own), flat) for own, flat in zip(params, values, strict=True)]
    moved = [own._replace(draws=own.draws + 1) for own in after]
    return Pass(loss, aux, trees, moved)


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
