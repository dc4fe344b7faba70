"""`scaled_value_and_grad`: loss scaling for people who keep their own JAX training loop. Called by users and by
`LossScaler.native("jax")`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import LossScaleError
from polyamp.recipe.scaler import LossScaler
from polyamp.rules import stuck
from polyamp.rules.scale import LossScaleState
from polyamp.rules.stuck import Watch
from polyamp_jax.arrays import named_leaves, to_numpy
from polyamp_jax.own_loop.differentiation import gradients
from polyamp_jax.step.measure import unscaled_leaf
from polyamp_jax.step.replicas import AxisName, check_axis_name, replicas


def scaled_value_and_grad(
    fun: Callable[..., Any],
    scaler: LossScaler,
    *,
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    axis_name: AxisName = None,
) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """`jax.value_and_grad` of the scaled loss, with the gradients unscaled and tested (S6, S7, S10).

    Args:
        fun: returns a floating scalar, the loss, or `(loss, aux)` with `has_aux`.
        scaler: how the loss is scaled.
        argnums: arguments of `fun` to differentiate by; their floating leaves get float32 gradients. An `nnx.Module`
            is differentiated as by `nnx.value_and_grad` (which also takes `nnx.DiffState` here): the gradients are the
            `nnx.State` of its parameters, and dropout streams and statistics move on in it. An equinox module is
            differentiated as by `eqx.filter_value_and_grad`: by its inexact arrays, and None stands in every other
            place.
        has_aux: whether `fun` returns something beside the loss.
        axis_name: inside `pmap`, or `shard_map` with `check_vma=False`, the axes of the replicas, a name or a tuple of
            names. A `shard_map` that checks needs none.

    Inside `shard_map` and `pmap` the loss and the gradients are the means over the replicas, and `finite` is the same
    on all of them (S9). Gradients by arguments that are sharded there are each shard's own, of that mean.

    Returns:
        A function `(scale_state, *args, **kwargs) -> (value, grads, finite)`: `value` is what `fun` returned, the loss
        in float32; `grads` those of the unscaled loss; `finite` a boolean scalar, which `scaler.update` takes (True,
        untested, where the scaler makes no test). An argument that the loss does not depend on has a gradient of
        zeros, as from `jax.grad`. It runs under `jax.jit`, `vmap` and `scan`; its signature is that of `fun` behind
        `scale_state`, so that `jax.jit(graded, donate_argnames=...)` finds the arguments by name.

    What comes after is chosen by `finite`, or an overflow makes every parameter NaN:
    `polyamp_jax.select(finite, new, old)` of parameters and optimizer states, or
    `polyamp_jax.select(finite, (model, optimizer), before)` of nnx objects that were updated in place, with
    `before = nnx.clone((model, optimizer))` from before the call.

    Raises (from the returned function):
        LossScaleError: the first argument is not a `LossScaleState`.
        LossError: the loss is not a floating scalar.
        UnsupportedError: it is called inside `pmap`, or `shard_map` without checks, and `axis_name` does not name the
            axes; ArgumentError: it names others.
        LossScaleStuckError: see `LossScaler.patience` (S17). The host looks at the `scale_state` that it is given, at
            call `patience`, 2 `patience` + 1, 3 `patience` + 2, ...; inside a `jit` of your own there is no value to
            look at, so read `scale_state.stuck` where your loop logs.

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
    watch = Watch(shared=True)  # one function may serve several scale states

    @functools.wraps(fun)
    def call(scale_state: LossScaleState, *args: Any, **kwargs: Any) -> tuple[Any, Any, jax.Array]:
        if not isinstance(scale_state, LossScaleState):
            raise LossScaleError(
                "the first argument of a function made by scaled_value_and_grad is the loss-scale state, made by "
                f"scaler.init('jax'); the others are those of the loss. Received: {type(scale_state).__name__}."
            )
        around = replicas("scaled_value_and_grad", axis_name, [args, kwargs], ())

        @functools.wraps(fun)
        def scaled(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
            loss, aux = fun(*args, **kwargs) if has_aux else (fun(*args, **kwargs), None)
            product, wide = scaler.scale(loss, scale_state), LossScaler.off().scale(loss, scale_state)
            if around is not None:
                product, wide = around.loss(product)[0], around.loss(wide)[0]
            return product, (wide, aux)

        grads, (loss, aux) = gradients(scaled, argnums, args, kwargs)
        if around is not None:
            loss, (grads,), _ = around.reduced(loss, [grads], [grads])
        if scaler.checks:
            grads, finite = scaler.unscale(grads, scale_state)
        else:  # S19: neither a division nor a test
            grads, finite = jax.tree.map(lambda grad: unscaled_leaf(grad, None), grads), jnp.asarray(True)
        if not isinstance(scale_state.stuck, jax.core.Tracer) and watch.due(scaler):
            named = named_leaves(grads)
            stuck.check(
                int(scale_state.stuck),
                scaler,
                lambda: [name for name, grad in named.items() if not np.isfinite(to_numpy(grad)).all()],
                where="the loss",
            )
        return ((loss, aux) if has_aux else loss), grads, finite

    shown: Any = call
    try:
        shown.__signature__ = _behind_scale_state(inspect.signature(fun))
    except ValueError:  # a builtin has none, and what `wraps` left would be looked up there
        del shown.__wrapped__
    return call


def _behind_scale_state(signature: inspect.Signature) -> inspect.Signature:
    """The signature with the scale state in front; JAX finds the arguments that it donates by name."""
    parameters = list(signature.parameters.values())
    named = "scale_state" not in signature.parameters and all(
        parameter.kind is not inspect.Parameter.POSITIONAL_ONLY for parameter in parameters
    )
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if named else inspect.Parameter.POSITIONAL_ONLY
    name = "scale_state" if "scale_state" not in signature.parameters else "loss_scale_state"
    first = inspect.Parameter(name, kind, annotation=LossScaleState)
    return signature.replace(parameters=[first, *parameters], return_annotation=inspect.Signature.empty)
