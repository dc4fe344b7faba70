"""Keras on TensorFlow: what Keras itself does not offer on all of its backends (`polyamp_keras.engine`)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from polyamp.array_namespace import array_namespace
from polyamp.errors import UnsupportedError
from polyamp.float_formats import FLOAT_DTYPES
from polyamp.recipe.float8 import SECOND_DERIVATIVES
from polyamp.rules.process_setting import ProcessSetting
from polyamp_keras.arrays import at_least_float32, is_floating, native_variable
from polyamp_keras.compat import split_names
from polyamp_keras.engines.differentiation import Differentiation, HostArray, ObservedCall
from polyamp_keras.engines.tensorflow_compat import EagerTensor, is_in_while_loop, report_operations, stop_recording
from polyamp_keras.engines.tensorflow_kernels import kernel_update as kernel_update

FRAMEWORK: Final = "TensorFlow"
LOSS_REACHES_APPLY: Final = True
DTYPE_ERRORS: Final = (TypeError, ValueError, tf.errors.InvalidArgumentError)
DTYPE_MESSAGE: Final = r"[^\n]*(?:does not match type|was expected to be a|requested dtype)[^\n]*"
ONE_DTYPE_CODE: Final = "tf.random.normal(tf.shape(z), dtype=z.dtype) or tf.cast(noise, z.dtype)"
_CONVOLUTIONS: Final = {"conv", "conv_transpose"}
"""Canonical kinds of layers whose gradients oneDNN computes."""
_ID_PRESERVING_OPERATIONS: Final = split_names(
    "Identity IdentityN EnsureShape StopGradient Reshape Transpose ExpandDims Squeeze StridedSlice Slice Split SplitV "
    "Unpack Pack Concat ConcatV2 Tile Pad PadV2 GatherV2 GatherNd ReverseV2 Roll BroadcastTo Select SelectV2 Cast "
    "Maximum Minimum ClipByValue Relu Abs Neg Add AddV2 Sub Mul Round Rint Floor Ceil FloorMod FloorDiv"
)
"""Operations whose results are still ids, or sums and products of ids."""


def _asarray(value: Any, like: Any) -> Any:
    return tf.cast(value, like.dtype) if tf.is_tensor(value) else tf.constant(value, like.dtype)


def _swap_axes(x: Any, first: int, second: int) -> Any:
    order = list(range(x.shape.rank))
    order[first], order[second] = order[second], order[first]
    return tf.transpose(x, order)


XP: Final = array_namespace(
    tf,
    _asarray,
    power=tf.pow,
    expm1=tf.math.expm1,
    norm=tf.norm,
    mean=lambda x, axis: tf.reduce_mean(x, axis, keepdims=True),
    matmul=tf.linalg.matmul,
    swapaxes=_swap_axes,
    astype=lambda x, dtype: tf.cast(x, dtype if isinstance(dtype, str) else dtype.dtype),
)
"""The array namespace of tensors, eager and inside a `tf.function`."""


def is_float32_constant(value: Any) -> bool:
    """Return whether a value is a float32 tensor with numbers, or a variable."""
    return isinstance(value, EagerTensor | tf.Variable) and bool(value.dtype == tf.float32)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a dense tensor, eager or of a graph."""
    return isinstance(value, tf.Tensor)


def gather_in_float32(call: Callable[..., Any], x: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a gather of a 16-bit `x`, whose gradient is summed in float32 and rounded once."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def gather(x: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                wide = tf.zeros(tf.shape(x), tf.float32)  # a gather's gradient needs only its shape
                tape.watch(wide)
                read = call(wide, *args, **kwargs)
            upstream = tf.convert_to_tensor(tf.cast(upstream, tf.float32))
            total = tf.convert_to_tensor(tape.gradient(read, wide, output_gradients=upstream))
            return tf.cast(total, x.dtype)

        return call(x, *args, **kwargs), gradient

    return gather(x)


def bitcast(x: Any, dtype: str) -> Any:
    """Return the bits of a tensor as another dtype of the same size."""
    return tf.bitcast(x, dtype)


def custom_vjp(
    forward: Callable[..., Any], backward: Callable[..., Any], x: Any, w: Any, watch: Callable[[Any], Any] | None = None
) -> Any:
    """Return the result of `forward(x, w) -> (result, residuals)`, whose gradients are `backward(residuals, g)`.

    The tape sees none of their operations, of which it would keep the operands. The gradients depend on x and w by
    scalars, so that gradients of them are refused and not absent.

    Raises:
        UnsupportedError: in a gradient of the gradients.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def product(x: Any, w: Any) -> Any:
        anchors = _anchor(x), _anchor(w)
        with stop_recording():
            result, residuals = forward(x, w)
            residuals = _stackable(residuals) if is_in_while_loop() else residuals

        @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow is untyped
        def gradients(g: Any, *_: Any) -> Any:
            with stop_recording():
                dx, dw, *figures = backward(residuals, g)
                if watch is not None:
                    watch(*figures)
                return (dx, dw), _refuse_second_derivatives

        return result, lambda g: gradients(g, *anchors)

    return product(x, w)


def _stackable(residuals: Any) -> list[Any]:
    """Return tensors that a loop can stack for its backward pass: TensorFlow has no kernel that stacks 8-bit floats.
    bfloat16 has all of their numbers."""
    return [tf.cast(each, tf.bfloat16) if each.dtype.name.startswith("float8") else each for each in residuals]


@tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow is untyped
def _anchor(x: Any) -> Any:
    """Return a scalar that depends on x."""
    return tf.zeros((), x.dtype), _refuse_second_derivatives


def _refuse_second_derivatives(*_: Any) -> Any:
    raise UnsupportedError(SECOND_DERIVATIVES)


@contextlib.contextmanager
def integer_casts(given: Sequence[Any]) -> Iterator[list[str]]:
    """Context manager that records the integer dtypes to which operations cast these tensors, or ids made of them."""
    known = {tensor.ref() for tensor in given}
    found: list[str] = []

    def record(operation: str, inputs: Any, outputs: Any) -> None:
        if operation not in _ID_PRESERVING_OPERATIONS or not any(
            tf.is_tensor(one) and one.ref() in known for one in inputs
        ):
            return
        for output in outputs:
            if output.dtype.name in FLOAT_DTYPES:
                known.add(output.ref())
            elif operation == "Cast" and output.dtype.is_integer:
                found.append(output.dtype.name)

    with report_operations(record):
        yield found


_TF32: Final[ProcessSetting[bool]] = ProcessSetting(
    "float32_matmul (whether TF32 is allowed)",
    tf.config.experimental.tensor_float_32_execution_enabled,
    tf.config.experimental.enable_tensor_float_32_execution,
)


def matmul_precision(setting: str | None) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that sets TensorFlow's TF32 switch, which is process-wide and read at kernel start."""
    if setting is None:
        return contextlib.nullcontext()
    return _TF32.temporary_value(setting != "highest")


def to_dense(gradient: Any, like: Any) -> Any:
    """Return a gradient as a dense tensor. `tf.IndexedSlices`, the gradient of an embedding lookup, are summed by row
    in at least float32 (S4)."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    values = gradient.values
    if is_floating(values):
        values = tf.cast(values, at_least_float32(values))
    return tf.math.unsorted_segment_sum(values, gradient.indices, like.shape[0])


def divide(gradients: Sequence[Any], divisor: Any) -> list[Any]:
    """Return gradients over a scalar."""
    return [gradient / tf.cast(divisor, gradient.dtype) for gradient in gradients]


def host_values(variable: Any) -> HostArray:
    """Return the values of a variable, on the host without a copy."""
    return np.asarray(tf.convert_to_tensor(native_variable(variable)))


def from_host(values: HostArray) -> Any:
    """Return an array, or a tensor of it where its axes are in another order: TensorFlow transposes several times as
    fast as NumPy. Assigning either copies it."""
    if values.flags.c_contiguous or values.ndim < 2:
        return values
    order = sorted(range(values.ndim), key=lambda axis: -values.strides[axis])
    straight = values.transpose(order)
    if not straight.flags.c_contiguous:
        return values
    back = sorted(range(values.ndim), key=order.__getitem__)
    return tf.transpose(tf.convert_to_tensor(straight), back)


def cast_variable(variable: Any, dtype: str) -> Any:
    """Return a new variable of TensorFlow's in another dtype."""
    return tf.Variable(tf.cast(native_variable(variable), dtype), trainable=variable.trainable)


def trace_state() -> Any:
    """Return the graph in which operations run; None if they run eagerly."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def differentiate(
    call: ObservedCall, variables: Sequence[Any], cotangents: Callable[[Sequence[HostArray]], Any]
) -> Differentiation:
    """Return outputs and gradients of a call; see `KerasEngine.differentiate`."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        watched = [native_variable(variable) for variable in variables]
        tape.watch(watched)
        outputs, observed = call()
        with tape.stop_recording():
            against = cotangents([host_values(output) for output in outputs])
        pairs = [(output, factor) for output, factor in zip(outputs, against, strict=True) if is_floating(output)]
        total = tf.add_n([tf.reduce_sum(output * tf.cast(factor, output.dtype)) for output, factor in pairs])
    gradients = tape.gradient(total, watched)
    return Differentiation(
        [host_values(output) for output in outputs],
        [_gradient_array(*pair) for pair in zip(gradients, variables, strict=True)],
        {key: host_values(value) for key, value in observed.items()},
    )


def _gradient_array(gradient: Any, variable: Any) -> HostArray:
    if gradient is None:
        return np.zeros(tuple(variable.shape), np.float32)
    return host_values(tf.cast(to_dense(gradient, variable), tf.float32))


def check_gradients(kinds: Collection[str], call: str, instead: str) -> None:
    """Raise if a model has convolutions and torch is loaded in the process.

    TensorFlow's oneDNN kernels for the gradient of a convolution abort once torch has run its own in the process. This
    was seen with TensorFlow 2.21 and torch 2.13 on the CPU. Without these kernels there is no problem.

    Raises:
        UnsupportedError: names the environment variable that prevents it.
    """
    if "torch" in sys.modules and os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0" and {*kinds} & _CONVOLUTIONS:
        raise UnsupportedError(
            f"{call}: the gradient of TensorFlow's convolutions can end the process once torch runs in it too: their "
            "oneDNN libraries do not agree. Set the environment variable TF_ENABLE_ONEDNN_OPTS=0 before the program "
            f"starts; or {instead}."
        )


def write_fit_state(model: Any) -> None:
    """Do nothing: the variables of a model have the values of its last step."""


def store_fit_state(model: Any, result: Any) -> None:
    """Do nothing: the variables of a model have the values of its last step."""


def run_with_variables(function: Callable[..., Any], variables: Sequence[Any], arguments: Any) -> Any:
    """Return the result of a train function: a step writes to variables themselves."""
    return function(*arguments)


def monitored_train_step(model: Any, step: Callable[..., Any], figures: Any) -> Callable[..., Any]:
    """Return the step as it is: the loss reaches the figures in `scale_loss`."""
    return step
