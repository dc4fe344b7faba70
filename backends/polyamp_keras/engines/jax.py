"""Keras on JAX: what Keras itself does not offer on all of its backends (`polyamp_keras.engine`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend import core as extend_core

from polyamp.array_namespace import array_namespace
from polyamp.errors import UnsupportedError
from polyamp.recipe.float8 import SECOND_DERIVATIVES
from polyamp_keras.arrays import native_variable
from polyamp_keras.compat import free_state_shapes, is_keras_code, is_nnx_enabled, set_fit_state
from polyamp_keras.engines.differentiation import Differentiation, HostArray, ObservedCall
from polyamp_keras.interrupts import replace_methods

FRAMEWORK: Final = "JAX"
DTYPE_ERRORS: Final = ()
DTYPE_MESSAGE: Final = ""
LOSS_REACHES_APPLY: Final = False
"""The loss is computed inside of the function that is differentiated, and `apply` is called outside."""
KEEPS_FIT_STATE: Final = True
ONE_DTYPE_CODE: Final = ""
_SMALLEST: Final = 2.0**-126
_LOWEST_SQUARES: Final = 2.0**-60
"""A sum of squares below it may have lost squares that are too small for float32."""
"""Smallest normal float32; XLA flushes smaller values to zero."""
_MATMUL_PRECISION: Final = {"highest": "float32", "high": "tensorfloat32", "medium": "bfloat16"}
"""`Policy.float32_matmul` -> JAX's name; XLA uses the nearest precision that the device has."""
XP: Final = array_namespace(
    jnp,
    lambda value, like: jnp.asarray(value, jnp.result_type(like)),
    norm=lambda x: jnp.sqrt(jnp.sum(x * x)),
    mean=lambda x, axis: jnp.mean(x, axis, keepdims=True),
    matmul=lambda x, y: jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST),
    swapaxes=jnp.swapaxes,
    astype=lambda x, dtype: x.astype(dtype if isinstance(dtype, str) else dtype.dtype),
)
"""The array namespace of jax.numpy."""


def is_float32_constant(value: Any) -> bool:
    """Return whether a value is a float32 array, and no tracer."""
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and value.dtype == jnp.float32


def is_tensor(value: Any) -> bool:
    """Return whether a value is an array or a tracer."""
    return isinstance(value, jax.Array)


def gather_in_float32(call: Callable[..., Any], x: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a gather of a 16-bit `x`, whose gradient is summed in float32 and rounded once. A gather
    computes nothing, so that its result in float32 has the same numbers."""
    return call(x.astype(jnp.float32), *args, **kwargs).astype(x.dtype)


def bitcast(x: Any, dtype: str) -> Any:
    """Return the bits of an array as another dtype of the same size."""
    return jax.lax.bitcast_convert_type(x, dtype)


def custom_vjp(
    forward: Callable[..., Any], backward: Callable[..., Any], x: Any, w: Any, watch: Callable[[Any], Any] | None = None
) -> Any:
    """Return the result of `forward(x, w) -> (result, residuals)`, whose gradients are `backward(residuals, g)`.

    Raises:
        UnsupportedError: in a gradient of the gradients.
    """
    gradients = jax.custom_vjp(backward)
    gradients.defvjp(lambda residuals, g: (backward(residuals, g), None), _refuse_second_derivatives)

    def watched(residuals: Any, g: Any) -> tuple[Any, Any]:
        dx, dw, *figures = gradients(residuals, g)
        if watch is not None:
            kept = (dx, dw, watch(*figures))  # a gradient keeps its figures
            dx, dw, _ = jax.lax.optimization_barrier(kept)  # type: ignore[no-untyped-call]  # JAX does not annotate it
        return dx, dw

    product = jax.custom_vjp(lambda x, w: forward(x, w)[0])
    product.defvjp(forward, watched)
    return product(x, w)


def _refuse_second_derivatives(*_: Any) -> Any:
    raise UnsupportedError(SECOND_DERIVATIVES)


@contextlib.contextmanager
def integer_casts(given: Sequence[Any]) -> Iterator[list[str]]:
    """Context manager that records nothing: JAX reports no operation to its user while it runs."""
    yield []


def matmul_precision(setting: str | None) -> contextlib.AbstractContextManager[None]:
    """Return a context manager with JAX's precision of float32 matrix products; of this thread alone."""
    if setting is None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(_MATMUL_PRECISION[setting])  # type: ignore[no-any-return]  # untyped in JAX


def to_dense(gradient: Any, like: Any) -> Any:
    """Return a gradient as it is: Keras has dense ones on this backend."""
    return gradient


def host_values(variable: Any) -> HostArray:
    """Return the values of a variable or array on the host, which JAX does not change."""
    return np.asarray(native_variable(variable))


def from_host(values: HostArray) -> Any:
    """Return an array of JAX's own, which shares no memory with the given one."""
    return jnp.array(values)


def cast_variable(variable: Any, dtype: str) -> Any:
    """Return an array in another dtype."""
    return native_variable(variable).astype(dtype)


def trace_state() -> Any:
    """Return an identifier of the current trace. It is equal for two calls in one trace."""
    module: Any = extend_core if hasattr(extend_core, "get_opaque_trace_state") else jax.core
    return module.get_opaque_trace_state(convention="flax")


def differentiate(
    call: ObservedCall, variables: Sequence[Any], cotangents: Callable[[Sequence[HostArray]], Any]
) -> Differentiation:
    """Return outputs and gradients of a call; see `KerasEngine.differentiate`."""
    keys: list[Any] = []

    @jax.jit
    def run(values: Sequence[Any]) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            outputs, observed = call()
        keys[:] = observed
        return list(outputs), list(observed.values())

    outputs, backward, observed = jax.vjp(run, [native_variable(variable) for variable in variables], has_aux=True)
    given = [np.asarray(output) for output in outputs]
    factors = [
        jnp.asarray(factor, output.dtype)
        if jnp.issubdtype(output.dtype, jnp.inexact)
        else np.zeros(output.shape, jax.dtypes.float0)
        for output, factor in zip(outputs, cotangents(given), strict=True)
    ]
    (gradients,) = backward(factors)
    return Differentiation(
        given,
        [np.asarray(gradient, np.float32) for gradient in gradients],
        dict(zip(keys, map(np.asarray, observed), strict=True)),
    )


def check_gradients(kinds: Collection[str], call: str, instead: str) -> None:
    """Do nothing: every gradient can be computed."""


def kernel_update(spec: Any, rate: Any, counts: Any) -> None:
    """Return None: a spec's own formula is run, for all parameters of one set of values."""


# A step.


def no_gradients() -> contextlib.AbstractContextManager[None]:
    """Return a context manager that does nothing: JAX differentiates functions."""
    return contextlib.nullcontext()


def read_without_wait(flag: Any) -> bool | None:
    """Return None: a traced scalar has no value, and reading another waits for the computation."""
    return None


def read_vector(values: Any) -> Any:
    """Return the elements of a vector on the host, or None in a trace, which has no values."""
    return None if isinstance(values, jax.core.Tracer) else values.tolist()


def copy_value(variable: Any) -> Any:
    """Return a variable's value: JAX's arrays do not change."""
    return variable.value


def divide(gradients: Sequence[Any], divisor: Any) -> list[Any]:
    """Return gradients over a scalar."""
    return [gradient / divisor.astype(gradient.dtype) for gradient in gradients]


def update_if(applies: Any, written: Sequence[Any], read: Sequence[Any], body: Callable[[], None]) -> None:
    """Run `body`, and take the values that it wrote or those from before by a flag on the device.

    A program for a CPU branches: to choose each element it would copy every old tensor first. On another device the
    host would wait for the branch.
    """
    before = [variable.value for variable in written]
    if jax.default_backend() == "cpu":
        after = jax.lax.cond(applies, lambda _: _written_values(written, read, body), lambda old: old, before)
    else:
        after = [
            jnp.where(applies, new, old) for new, old in zip(_written_values(written, read, body), before, strict=True)
        ]
    for variable, value in zip(written, after, strict=True):
        variable.assign(value)


def _written_values(written: Sequence[Any], read: Sequence[Any], body: Callable[[], None]) -> list[Any]:
    """Return the values that variables have after `body`, which changes none of them."""
    known = {id(variable): (variable, variable.value) for variable in (*written, *read)}
    with keras.StatelessScope(state_mapping=[*known.values()]) as scope:
        body()
        return [scope.get_current_value(variable) for variable in written]


def finite_flags(gradients: Sequence[Any]) -> Any:
    """Return for each gradient whether all of its elements are finite, a boolean vector.

    A maximum over many numbers loses a NaN under XLA, and a sum does not. On a CPU a sum of squares is quicker than one
    of flags, so the flags are computed only if a sum is not finite. On a GPU the host would wait for that choice.
    """
    wide = _in_one_dtype(gradients)
    return jax.lax.platform_dependent(wide, cpu=_flags_by_squares, default=_exact_flags)


def _exact_flags(gradients: Sequence[Any]) -> Any:
    return jnp.stack([jnp.all(jnp.isfinite(gradient)) for gradient in gradients])


def _flags_by_squares(gradients: Sequence[Any]) -> Any:
    sums = jnp.stack(_sums_of_squares(gradients))
    known = jnp.ones(len(gradients), bool)
    return jax.lax.cond(jnp.all(jnp.isfinite(sums)), lambda _: known, _exact_flags, gradients)


def global_norm(gradients: Sequence[Any]) -> Any:
    """Return the global L2 norm, which is inf or NaN only if one of the gradients is.

    Where a sum of squares leaves the range of float32, the gradients are divided by the largest magnitude before they
    are squared.
    """
    wide = _in_one_dtype(gradients)
    return jax.lax.platform_dependent(wide, cpu=_norm_by_squares, default=_scaled_norm)


def _norm_by_squares(gradients: Sequence[Any]) -> Any:
    total = jnp.stack(_sums_of_squares(gradients)).sum()
    in_range = jnp.isfinite(total) & (total >= _LOWEST_SQUARES)
    return jax.lax.cond(in_range, lambda _: jnp.sqrt(total), _scaled_norm, gradients)


def _scaled_norm(gradients: Sequence[Any]) -> Any:
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(gradient), initial=0.0) for gradient in gradients]))
    usable = jnp.isfinite(largest) & (largest >= _SMALLEST)
    unit = jnp.where(usable, largest, jnp.ones_like(largest))
    return unit * jnp.sqrt(jnp.stack(_sums_of_squares([gradient / unit for gradient in gradients])).sum())


def _sums_of_squares(gradients: Sequence[Any]) -> list[Any]:
    return [jnp.sum(jnp.square(gradient)) for gradient in gradients]


def _in_one_dtype(gradients: Sequence[Any]) -> list[Any]:
    dtype = jnp.float64 if any(gradient.dtype == jnp.float64 for gradient in gradients) else jnp.float32
    return [gradient.astype(dtype) for gradient in gradients]


def value_counts(values: Any, length: int) -> Any:
    """Return how many elements of an integer vector are 0, 1, ..., length - 1."""
    return jnp.bincount(values, length=length)


def is_traced(value: Any) -> bool:
    """Return whether a value belongs to a trace."""
    return isinstance(value, jax.core.Tracer)


# `fit`.


def write_fit_state(model: Any) -> None:
    """Write the values of the last step of `fit`, which keeps them in a state of its own, to a model's variables."""
    model.jax_state_sync()


def store_fit_state(model: Any, result: Any) -> None:
    """Write the state that a train function of `fit` returned to the model's variables."""
    set_fit_state(model, result[1])
    model.jax_state_sync()


def check_fit(jit_compile: Any) -> None:
    """Raise for ways of running `fit` that polyamp does not support.

    Raises:
        UnsupportedError: nnx-enabled Keras, or `keras.distribution`.
    """
    if is_nnx_enabled():
        raise UnsupportedError(
            "polyamp does not train nnx-enabled Keras models, whose train step is the class's and no object's. "
            "Received: keras.config.is_nnx_enabled(). Unset KERAS_NNX_ENABLED, or train the model as a "
            "flax.nnx module with polyamp.train_step."
        )
    if keras.distribution.distribution() is not None:
        raise UnsupportedError(
            "polyamp does not place the state of a LossScaleOptimizer on a keras.distribution. Received: "
            f"{type(keras.distribution.distribution()).__name__}. Train on one device, or a JAX model with "
            "polyamp.train_step, which follows its sharding."
        )


def guarded_train_step(
    model: Any, step: Callable[..., Any], scaled: type[Any], count: Callable[..., AbstractContextManager[None]]
) -> Callable[..., Any]:
    """Return a `train_step(state, data)` that restores running statistics after a skipped update.

    Args:
        model: the model.
        step: the `train_step` of its class.
        scaled: class of the optimizers that can skip; with another one the step is Keras's.
        count: `(optimizer, data)` -> context manager in which the micro-batch has its weight.
    """

    def train_step(state: Any, data: Any) -> Any:
        optimizer = model.optimizer
        if not isinstance(optimizer, scaled):  # the user may have recompiled the model
            return step(model, state, data)
        with count(optimizer, data):
            logs, (weights, others, variables, metrics) = step(model, state, data)
        others, variables = optimizer.stateless_keep_statistics(model, state[1], others, variables)
        return logs, (weights, others, variables, metrics)

    return train_step


def run_with_variables(function: Callable[..., Any], variables: Sequence[Any], arguments: Any) -> Any:
    """Return the result of a train function whose step reads and writes further variables: the last ones of
    `optimizer.variables` while it is traced, of which the state that `fit` keeps knows nothing."""
    (weights, others, state, metrics), data = arguments
    copies = [jnp.copy(variable.value) for variable in variables]  # a step consumes what it is given
    logs, (weights, others, after, metrics) = function((weights, others, [*state, *copies], metrics), data)
    for variable, value in zip(variables, after[len(state) :], strict=True):
        variable.assign(value)
    return logs, (weights, others, after[: len(state)], metrics)


def monitored_train_step(model: Any, step: Callable[..., Any], figures: Any) -> Callable[..., Any]:
    """Return a `train_step(state, data)` that hands the losses of its forward passes on to figures.

    The losses leave the differentiated function behind the model's other variables, in each pass of Keras's own
    `compute_loss_and_updates`. Of a function of the user's own they are unknown.
    """

    def train_step(state: Any, data: Any) -> Any:
        count, optimizer = len(state[1]), model.optimizer
        with _append_losses(model, count):
            logs, (weights, others, variables, metrics) = step(state, data)
        own = optimizer.variables
        with keras.StatelessScope(state_mapping=list(zip(own, variables, strict=True))) as scope:
            figures.write_losses(others[count:])
        return logs, (weights, others[:count], [scope.get_current_value(variable) for variable in own], metrics)

    return train_step


@contextlib.contextmanager
def _append_losses(model: Any, count: int) -> Iterator[None]:
    """Context manager in which `compute_loss_and_updates` of a model returns its loss, before it is scaled, behind the
    `count` other variables of the model, and behind the losses of earlier passes."""
    own, methods = model.compute_loss_and_updates, free_state_shapes(model)

    def compute(weights: Any, others: Any, *arguments: Any, **options: Any) -> Any:
        scaled, (loss, output, after, metrics) = own(weights, others[:count], *arguments, **options)
        return scaled, (loss, output, [*after, *others[count:], loss], metrics)

    if is_keras_code(own):
        methods["compute_loss_and_updates"] = compute
    with replace_methods(model, methods):
        yield
