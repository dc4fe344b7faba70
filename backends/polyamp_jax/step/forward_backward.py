"""One forward and backward pass over one model or several: the loss, its weight, and scaled gradients (S6, S7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import TraceError
from polyamp.results import LossFunction
from polyamp.rules import refusals, weights
from polyamp.rules.batches import check_has_rows
from polyamp.rules.weights import Totals, WeightFunction
from polyamp_jax import compat
from polyamp_jax.arrays import XP, dtype_name, is_array, matmul_precision
from polyamp_jax.models.parameter_writes import conformed, overlaid
from polyamp_jax.models.parts import Keys, Running
from polyamp_jax.precision.bound import Engine
from polyamp_jax.precision.cast_mode import compute_params
from polyamp_jax.precision.reading import bound_model
from polyamp_jax.step.dependence import gradients_made, scattered
from polyamp_jax.step.failures import check_aux
from polyamp_jax.step.replicas import Replicas, check_whole
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
            not hold it yet: in 16 bits, and in the scaled loss, it could be too large.
        counts: of each term of a sum of means; empty for any other loss.
    """

    loss: Any
    aux: Any
    values: list[Any]
    running: list[Running]
    weight: Any = None
    counts: Sequence[Any] = ()


class Weighing(NamedTuple):
    """What a batch counts (S8, S9).

    Attributes:
        function: `weight=` of the user's, or None.
        share: for a micro-batch that counts by its rows: they over those of the largest.
        rows: of the batch; None where it is the only one.
        totals: what the terms of a sum of means are divided by, or None.
    """

    function: WeightFunction | None = None
    share: float = 1.0
    rows: int | None = None
    totals: Totals | None = None


def scaled_loss(loss: Any, scale: Any | None, *, what: str = "loss_fn") -> tuple[jax.Array, jax.Array]:
    """(scaled loss, loss), both float32 scalars (S6).

    Raises:
        LossError: not a floating scalar.
    """
    refusals.check_loss(jnp.shape(loss) if is_array(loss) else (), dtype_name(loss), what=what)
    wide = jnp.asarray(loss, jnp.float32).reshape(())
    return (wide if scale is None else wide * scale), wide


def run_pass(
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
    check_has_rows(shape[0] for _, shape in shapes_of(batch) if shape)
    keys = [keys_of(state, own.draws) for state, own in zip(states, running, strict=True)]
    scale = scale_of(states[0])
    before, given = running, weights.of_batch(weighing.function, batch)
    several = around is not None or weighing.rows is not None
    if around is not None:
        keys, running = [around.keys(own) for own in keys], [around.entering(own) for own in running]

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
        loss = weights.read(result, found, XP, weight=given, totals=weighing.totals, rows=weighing.rows or _rows(batch))
        if several and weights.is_unclear(loss, found):
            weights.warn_unclear(loss_fn, weights.line_of(found))
        check_aux(loss.aux)
        _, wide = scaled_loss(loss.value, None)
        if states[0].recipe.policy.param == "float64":  # what it is multiplied by is float64 as well (S1)
            wide = jnp.asarray(loss.value, jnp.float64).reshape(())
        weight = None if loss.weight is None else _constant(loss.weight)
        if weight is not None:
            wide = jnp.where(weight > 0.0, wide, 0.0)
        if around is not None:
            wide, weight = around.loss(wide, weight)
        scaled = wide if scale is None else wide * scale
        if weighing.share != 1.0 and weight is None:
            scaled = scaled * weighing.share
        counts = [_constant(count) for count in weights.counts_of(loss, weighing.rows or _rows(batch))]
        wide = wide.astype(jnp.float32)
        return scaled, (wide, loss.aux, [engine.running for engine in engines], weight, counts if several else [])

    trees = (params, masters) if around is None else (around.own(list(params)), around.own(masters))
    values, _, (loss, aux, after, weight, counts) = taken(loss_of, *trees)
    if around is not None:
        after = [around.leaving(*own) for own in zip(after, running, before, strict=True)]
    made = [jax.tree.unflatten(jax.tree.structure(own), flat) for own, flat in zip(params, values, strict=True)]
    moved = [own._replace(draws=own.draws + 1) for own in after]
    return Pass(loss, aux, made, moved, weight, counts)


def _constant(value: Any) -> jax.Array:
    """A number or a scalar in float32, without a gradient."""
    return jax.lax.stop_gradient(jnp.asarray(value, jnp.float32))


def _rows(batch: Any) -> int:
    """The rows of a batch; 1 where its arrays do not agree."""
    lengths = {shape[0] for _, shape in shapes_of(batch) if shape}
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
    one: Any = np.ones((), scaled.dtype)
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


def shapes_of(batch: Any) -> list[tuple[str, tuple[int, ...]]]:
    """(path, shape) of every array of a batch."""
    return [(jax.tree_util.keystr(path), jnp.shape(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)]
