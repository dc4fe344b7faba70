"""Forward and backward pass over one or several models: the loss, its weight and scaled gradients (S6, S7)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import TraceError
from polyamp.results import LossFunction
from polyamp.rules import loss_weights, step_checks
from polyamp.rules.batches import check_has_rows
from polyamp_jax import compat
from polyamp_jax.arrays import XP, dtype_name, is_array, matmul_precision
from polyamp_jax.distributed.replicas import ShardMapReplicas, check_known_shards
from polyamp_jax.models.parameter_writes import conform_writes, overlay_writes
from polyamp_jax.models.running_state import RandomKeys, RunningState
from polyamp_jax.precision.cast_mode import compute_params
from polyamp_jax.precision.jax_only.policy_engine import PolicyEngine, forward_scopes
from polyamp_jax.precision.policy_module import make_policy_module
from polyamp_jax.step.error_hints import check_aux
from polyamp_jax.step.loss_weights import LossWeighting, batch_rows, batch_shapes, to_weight
from polyamp_jax.step.output_figures import PassFigures, WatchedLoss
from polyamp_jax.step.state import JaxState
from polyamp_jax.step.unused_parameters import gradient_mask, reduce_scatter_mask


class PassResult(NamedTuple):
    """Result of one forward and backward pass over several models.

    Attributes:
        loss: unscaled loss, float32 scalar.
        aux: the auxiliary output of `loss_fn`.
        values: per model, gradients of the scaled loss in the dtypes of the computation; None for a parameter on which
            the loss does not depend (S23).
        running: per model, its running state afterwards.
        weight: the weight of the loss in a mean, float32 scalar (S8); None if the number of rows is the weight. The
            gradients are not multiplied by it yet: it could overflow in 16 bits and in the scaled loss.
        counts: count of each term of a sum of means; empty for any other loss.
    """

    loss: Any
    aux: Any
    values: list[Any]
    running: list[RunningState]
    weight: Any = None
    counts: Sequence[Any] = ()


def scale_loss_value(loss: Any, scale: Any | None, *, what: str = "loss_fn") -> tuple[jax.Array, jax.Array]:
    """Return (scaled loss, loss), both float32 scalars (S6).

    Raises:
        LossError: not a floating scalar.
    """
    step_checks.check_loss(jnp.shape(loss) if is_array(loss) else (), dtype_name(loss), what=what)
    wide = jnp.asarray(loss, jnp.float32).reshape(())
    return (wide if scale is None else wide * scale), wide


def run_pass(
    loss_fn: LossFunction,
    states: Sequence[JaxState],
    params: Sequence[Any],
    running: Sequence[RunningState],
    batch: Any,
    replicas: ShardMapReplicas | None,
    weighing: LossWeighting,
) -> PassResult:
    """Run one forward and backward pass.

    Of a `WatchedLoss`, `aux` is the pair of its aux and the figures of the pass.

    Raises:
        LossError: the loss is not a floating scalar, or none of the parameters has a gradient (S23).
        TraceError: `loss_fn` changes an nnx object that it did not create.
    """
    check_has_rows(shape[0] for _, shape in batch_shapes(batch) if shape)
    watched = loss_fn if isinstance(loss_fn, WatchedLoss) else None
    loss_fn = loss_fn if watched is None else watched.loss_fn
    tagged, engine_class = (
        (contextlib.nullcontext, PolicyEngine)
        if watched is None
        else (watched.watch.tagged, watched.watch.engine_class)
    )
    keys = [pass_keys(state, own.draws) for state, own in zip(states, running, strict=True)]
    scale = active_loss_scale(states[0])
    before, given = running, loss_weights.batch_loss_weight(weighing.function, batch)
    several = replicas is not None or weighing.rows is not None
    if replicas is not None:
        keys, running = [replicas.keys(own) for own in keys], [replicas.enter_pass(own) for own in running]

    # in cast mode loss_fn may use both a parameter's cast and, by model.params, the master itself
    wrote = [item.written or {} for item in running]  # by earlier micro-batches of the window
    masters = [
        None if own is state.params else overlay_writes(state.params, written)
        for own, state, written in zip(params, states, wrote, strict=True)
    ]
    params = [overlay_writes(own, conform_writes(written, own)) for own, written in zip(params, wrote, strict=True)]

    def loss_of(params: Sequence[Any], masters: Sequence[Any]) -> tuple[Any, Any]:
        engines = [
            engine_class(state.setup.adapter, state.setup.plan, *parts, masters=own)
            for state, own, *parts in zip(states, masters, params, running, keys, strict=True)
        ]
        models = tuple(map(make_policy_module, engines))
        with matmul_precision(states[0].setup.plan), tagged(), forward_scopes(engines):
            result, found = loss_weights.call_loss_fn(loss_fn, models[0] if len(models) == 1 else models, batch)
        loss = loss_weights.parse_loss_output(
            result, found, XP, weight=given, totals=weighing.totals, rows=weighing.rows or batch_rows(batch)
        )
        if several and loss_weights.has_unclear_count(loss, found):
            loss_weights.warn_unclear_count(loss_fn, loss_weights.count_line(found))
        check_aux(loss.aux)
        _, wide = scale_loss_value(loss.value, None)
        if states[0].recipe.policy.param == "float64":  # the scale is float64 as well (S1)
            wide = jnp.asarray(loss.value, jnp.float64).reshape(())
        weight = None if loss.weight is None else to_weight(loss.weight)
        if weight is not None:
            wide = jnp.where(weight > 0.0, wide, 0.0)
        if replicas is not None:
            wide, weight = replicas.loss(wide, weight)
        scaled = wide if scale is None else wide * scale
        if weighing.share != 1.0 and weight is None:
            scaled = scaled * weighing.share
        counts = [to_weight(count) for count in loss_weights.term_counts(loss, weighing.rows or batch_rows(batch))]
        wide = wide.astype(jnp.float32)
        return scaled, (wide, loss.aux, [engine.running for engine in engines], weight, counts if several else [])

    trees = (params, masters) if replicas is None else replicas.mark_varying((list(params), masters))
    function = loss_of if watched is None else _with_figures(watched.watch.measured(loss_of, watched.due))
    products: dict[str, Any] = {}

    def run_watched(program: compat.ClosedJaxpr, cotangent: Any) -> list[Any]:
        assert watched is not None
        flat, found = watched.watch.run_backward(program, cotangent)
        products.update(found)
        return flat

    measures = watched is not None and watched.watch.selection.products
    run = run_watched if measures else _run_program
    values, _, (loss, aux, after, weight, counts) = take_gradients(function, *trees, run=run)
    if watched is not None:
        outputs = aux[1] if watched.watch.selection.activations else None
        aux = aux[0], PassFigures(outputs, products if measures else None)
    if replicas is not None:
        after = [replicas.leave_pass(*own) for own in zip(after, running, before, strict=True)]
    made = [jax.tree.unflatten(jax.tree.structure(own), flat) for own, flat in zip(params, values, strict=True)]
    moved = [own._replace(draws=own.draws + 1) for own in after]
    return PassResult(loss, aux, made, moved, weight, counts)


def _with_figures(measured: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Return the function of a pass with (aux, figures) for aux."""

    def function(params: Sequence[Any], masters: Sequence[Any]) -> tuple[Any, Any]:
        (scaled, (loss, aux, *rest)), figures = measured(params, masters)
        return scaled, (loss, (aux, figures), *rest)

    return function


def _run_program(program: compat.ClosedJaxpr, cotangent: Any) -> list[Any]:
    """Return the results of the program of a backward pass."""
    flat: list[Any] = compat.jaxpr_as_fun(program)(cotangent)
    return flat


def take_gradients(
    function: Callable[..., tuple[Any, Any]],
    params: Sequence[Any],
    masters: Sequence[Any],
    *others: Any,
    run: Callable[[compat.ClosedJaxpr, Any], list[Any]] = _run_program,
) -> tuple[list[list[Any]], list[Any], Any]:
    """Return the gradients of `function(params, masters, *others) -> (scaled loss, rest)`.

    Args:
        function: the forward pass.
        params: per model, the parameters that it computes with.
        masters: per model, its master weights if they differ from `params`, else None.
        *others: further pytrees to differentiate with respect to.
        run: runs the program of the backward pass on the cotangent of the loss.

    Returns:
        Three values: per model, the gradients with respect to the leaves of its parameters, each None if the loss does
        not depend on the leaf (S23); the gradients with respect to the leaves of `others`; and the rest.
    """
    try:
        scaled, backward, rest = jax.vjp(function, list(params), list(masters), *others, has_aux=True)
    except Exception as error:
        _refuse_nnx_changes(error)
        raise
    program = jax.make_jaxpr(backward)(scaled)
    made = gradient_mask(program)
    if compat.mapped_axes():
        check_known_shards(reduce_scatter_mask(program), [params, masters, *others])
    step_checks.check_loss_dependence(any(made))
    one: Any = np.ones((), scaled.dtype)
    if own := compat.varying_axes(scaled):  # the loss differs between replicas
        one = compat.vary_over_axes(one, sorted(own))
    found = iter([gradient if depends else None for gradient, depends in zip(run(program, one), made, strict=True)])
    values = [[next(found) for _ in jax.tree.leaves(own)] for own in params]
    for number, own in enumerate(masters):
        if own is not None:
            values[number] = [_sum_gradients(of_cast, next(found)) for of_cast in values[number]]
    return values, list(found), rest


def _sum_gradients(of_cast: Any, of_master: Any) -> Any:
    """Add a parameter's gradients through its cast and through its master. Each may be None (no dependence)."""
    if of_cast is None or of_master is None:
        return of_master if of_cast is None else of_cast
    return of_cast.astype(of_master.dtype) + of_master


def _refuse_nnx_changes(error: BaseException) -> None:
    """Raise `TraceError` with advice if flax reports that `loss_fn` changes an nnx object from outside the step."""
    cause: BaseException | None = error
    while cause is not None and not compat.is_flax_trace_error(cause):
        cause = cause.__cause__
    if cause is not None:
        raise TraceError(
            "loss_fn changes an nnx object that is not the model's: one that it closes over, or that is in the batch. "
            "A step is a traced function, and the change would be lost. Random streams: polyamp.init(model, recipe, "
            "rngs=nnx.Rngs(...)), and model(x) in loss_fn without them: the state keeps the streams and passes rngs= "
            "by itself. Metrics: return their values as aux and update them outside. Other modules (an average of the "
            f"weights, a teacher): call them in evaluation mode. Received from flax: {str(cause).splitlines()[0]}"
        ) from error


def compute_parameters(state: JaxState) -> Any:
    """Return the parameters that a pass computes with. In mode "cast" these are the cast parameters."""
    return compute_params(state.params, state.setup.adapter, state.setup.plan)


def active_loss_scale(state: JaxState) -> Any | None:
    """Return the loss scale, or None if the loss is not scaled."""
    return state.scale_state.scale if state.recipe.loss_scaler.scales else None


def pass_keys(state: JaxState, draws: Any) -> RandomKeys:
    """Return the random keys of one pass. Every attempted step, skipped ones included, and micro-batch has new keys."""
    return {
        name: jax.random.fold_in(jax.random.fold_in(key, state.attempts), draws) for name, key in state.rngs.items()
    }
