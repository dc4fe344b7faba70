"""`scaled_value_and_grad`: loss scaling for people who keep their own JAX training loop. Called by users and by
`LossScaler.native("jax")`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.errors import LossScaleError
from polyamp.loss_scale import LossScaler, LossScaleState
from polyamp_jax.step import unscaled_leaf


def scaled_value_and_grad(
    fun: Callable[..., Any], scaler: LossScaler, *, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """`jax.value_and_grad` of the scaled loss, with the gradients unscaled and tested (S6, S7, S10).

    Args:
        fun: returns a floating scalar, the loss, or `(loss, aux)` with `has_aux`.
        scaler: how the loss is scaled.
        argnums: arguments of `fun` to differentiate by; their floating leaves get float32 gradients.
        has_aux: whether `fun` returns something beside the loss.

    Returns:
        A function `(scale_state, *args, **kwargs) -> (value, grads, finite)`: `value` is what `fun` returned, the loss
        in float32; `grads` those of the unscaled loss; `finite` a boolean scalar, which `scaler.update` takes (True,
        untested, where the scaler makes no test). It runs under `jax.jit`, `vmap` and `scan`.

    Raises (from the returned function):
        LossScaleError: the first argument is not a `LossScaleState`.
        LossError: the loss is not a floating scalar.

    Example:
        >>> import jax.numpy as jnp, polyamp
        >>> scaler = polyamp.LossScaler(init_scale=2.0**15)
        >>> loss_fn = polyamp.Policy("mixed_float16").autocast(lambda w, x: jnp.mean(x @ w), backend="jax")
        >>> graded = scaled_value_and_grad(loss_fn, scaler)
        >>> scale_state = scaler.init("jax")
        >>> loss, grads, finite = graded(scale_state, jnp.ones((2, 1)), jnp.ones((4, 2)))
        >>> float(loss), grads.dtype.name, grads.ravel().tolist(), bool(finite)
        (2.0, 'float32', [1.0, 1.0], True)
        >>> scale_state = scaler.update(scale_state, finite)
    """

    @functools.wraps(fun)
    def call(scale_state: LossScaleState, *args: Any, **kwargs: Any) -> tuple[Any, Any, jax.Array]:
        if not isinstance(scale_state, LossScaleState):
            raise LossScaleError(
                "the first argument of a function made by scaled_value_and_grad is the loss-scale state, made by "
                f"scaler.init('jax'); the others are those of the loss. Received: {type(scale_state).__name__}."
            )

        @functools.wraps(fun)
        def scaled(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
            loss, aux = fun(*args, **kwargs) if has_aux else (fun(*args, **kwargs), None)
            return scaler.scale(loss, scale_state), (LossScaler.off().scale(loss, scale_state), aux)

        grads, (loss, aux) = jax.grad(scaled, argnums, has_aux=True)(*args, **kwargs)
        if scaler.checks:
            grads, finite = scaler.unscale(grads, scale_state)
        else:  # S19: neither a division nor a test
            grads, finite = jax.tree.map(lambda grad: unscaled_leaf(grad, None), grads), jnp.asarray(True)
        return ((loss, aux) if has_aux else loss), grads, finite

    return call
