"""`scaled_value_and_grad`, the native scaler: loss scaling for custom JAX training loops."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from polyamp.errors import LossScaleError
from polyamp.recipe.scaler import LossScaler, LossScaleState
from polyamp.rules.step_checks import check_options
from polyamp.rules.stuck_scale import StuckScaleMonitor, check_stuck
from polyamp_jax.distributed.replicas import AxisName, check_axis_name, find_replicas
from polyamp_jax.own_loop.gradients import argument_gradients, unscale_gradients
from polyamp_jax.own_loop.skip_report import non_finite_names


def native_scaler(scaler: LossScaler, **options: Any) -> Callable[..., Any]:
    """Return `scaled_value_and_grad` of a scaler as a function transform, as `scaler.native("jax")`."""
    check_options(options, ("argnums", "has_aux"), function="native", backend="jax")
    return functools.partial(scaled_value_and_grad, scaler=scaler, **options)


def scaled_value_and_grad(
    fun: Callable[..., Any],
    scaler: LossScaler,
    *,
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    axis_name: AxisName = None,
) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """Create a `jax.value_and_grad` of the scaled loss that unscales the gradients and checks them (S6, S7, S10).

    Args:
        fun: returns a floating scalar, the loss, or `(loss, aux)` with `has_aux`.
        scaler: how the loss is scaled.
        argnums: arguments of `fun` to differentiate with respect to; their floating leaves get float32 gradients. An
            `nnx.Module` is differentiated as by `nnx.value_and_grad` (which also takes `nnx.DiffState` here): the
            gradients are the `nnx.State` of its parameters, and its dropout streams and statistics advance. An equinox
            module is differentiated with respect to its inexact arrays, as by `eqx.filter_value_and_grad`; all other
            leaves of its gradients are None.
        has_aux: whether `fun` returns auxiliary data with the loss.
        axis_name: inside `pmap`, or `shard_map` with `check_vma=False`, the axes of the replicas, a name or a tuple of
            names. A `shard_map` with `check_vma=True` needs none.

    Inside `shard_map` and `pmap` the loss and the gradients are the means over the replicas, and `finite` is the same
    on all of them (S9). A sharded argument has a sharded gradient: each shard's gradient of that mean.

    Returns:
        A function `(scale_state, *args, **kwargs) -> (value, grads, finite)`:

        - `value`: the result of `fun`, with the loss in float32.
        - `grads`: the gradients of the unscaled loss; zeros for an argument that the loss does not depend on, as from
          `jax.grad`.
        - `finite`: a boolean scalar for `scaler.update`; always True if the scaler does no check.

        It runs under `jax.jit`, `vmap` and `scan`. Its signature is `scale_state` followed by the parameters of `fun`,
        so that `jax.jit(graded, donate_argnames=...)` finds the arguments by name.

    Use `finite` to select the updated values, or an overflow makes every parameter NaN:

    - parameters and optimizer states: `polyamp_jax.select(finite, new, old)`.
    - nnx objects that are updated in place: `polyamp_jax.select(finite, (model, optimizer), before)`, with
      `before = nnx.clone((model, optimizer))` from before the call.

    Raises (from the returned function):
        LossScaleError: the first argument is not a `LossScaleState`.
        LossError: the loss is not a floating scalar.
        UnsupportedError: it is called inside `pmap`, or `shard_map` without checks, and `axis_name` does not name the
            axes.
        ArgumentError: `axis_name` names other axes.
        LossScaleStuckError: see `LossScaler.patience` (S17). The host checks the given `scale_state` at call
            `patience`, 2 `patience` + 1, 3 `patience` + 2, ... Inside your own `jit` there is no concrete value to
            check, so read `scale_state.stuck` where your loop logs.

    Example:
        >>> import jax.numpy as jnp, polyamp, polyamp_jax
        >>> scaler = polyamp.LossScaler(init_scale=2.0**15)
        >>> loss_fn = polyamp.Policy("mixed_float16").autocast(lambda w, x: jnp.mean(x @ w), backend="jax")
        >>> graded = scaled_value_and_grad(loss_fn, scaler)
        >>> scale_state = scaler.init("jax")
        >>> loss, grads, finite = graded(scale_state, jnp.ones((2, 1)), jnp.ones((4, 2)))
        >>> float(loss), grads.dtype.name, grads.ravel().tolist(), bool(finite)
        (2.0, 'float32', [1.0, 1.0], True)
        >>> weights = polyamp_jax.select(finite, jnp.ones((2, 1)) - 0.1 * grads, jnp.ones((2, 1)))
        >>> scale_state = scaler.update(scale_state, finite)
    """

    check_axis_name(axis_name)
    watch = StuckScaleMonitor(shared=True)  # one function may serve several scale states

    @functools.wraps(fun)
    def call(scale_state: LossScaleState, *args: Any, **kwargs: Any) -> tuple[Any, Any, jax.Array]:
        if not isinstance(scale_state, LossScaleState):
            raise LossScaleError(
                "the first argument of a function made by scaled_value_and_grad is the loss-scale state, made by "
                f"scaler.init('jax'); the others are those of the loss. Received: {type(scale_state).__name__}."
            )
        around = find_replicas("scaled_value_and_grad", axis_name, [args, kwargs], ())

        @functools.wraps(fun)
        def scaled(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
            loss, aux = fun(*args, **kwargs) if has_aux else (fun(*args, **kwargs), None)
            product, wide = scaler.scale(loss, scale_state), LossScaler.off().scale(loss, scale_state)
            if around is not None:
                product, wide = around.loss(product)[0], around.loss(wide)[0]
            return product, (wide, aux)

        grads, (loss, aux) = argument_gradients(scaled, argnums, args, kwargs)
        if around is not None:
            loss, (grads,), _ = around.reduce_gradients(loss, [grads], [grads])
        grads, finite = unscale_gradients(scaler, grads, scale_state)
        if not isinstance(scale_state.stuck, jax.core.Tracer) and watch.is_due(scaler):
            check_stuck(int(scale_state.stuck), scaler, lambda: non_finite_names(grads), where="the loss")
        return ((loss, aux) if has_aux else loss), grads, finite

    shown: Any = call
    try:
        shown.__signature__ = _scale_state_signature(inspect.signature(fun))
    except ValueError:  # builtins have no signature; `inspect` would follow `__wrapped__` and fail again
        del shown.__wrapped__
    return call


def _scale_state_signature(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature with the scale state as first parameter; JAX finds donated arguments by name."""
    parameters = list(signature.parameters.values())
    named = "scale_state" not in signature.parameters and all(
        parameter.kind is not inspect.Parameter.POSITIONAL_ONLY for parameter in parameters
    )
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if named else inspect.Parameter.POSITIONAL_ONLY
    name = "scale_state" if "scale_state" not in signature.parameters else "loss_scale_state"
    first = inspect.Parameter(name, kind, annotation=LossScaleState)
    return signature.replace(parameters=[first, *parameters], return_annotation=inspect.Signature.empty)
