"""Keras on torch: what Keras itself does not offer on all of its backends (`polyamp_keras.engine`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import torch

from polyamp.array_namespace import array_namespace
from polyamp.errors import UnsupportedError
from polyamp.float_formats import HALF_DTYPES, ML_DTYPES
from polyamp.recipe.float8 import SECOND_DERIVATIVES
from polyamp.rules.process_setting import ProcessSetting
from polyamp_keras.arrays import dtype_name, native_variable
from polyamp_keras.compat import replace_assignments, stored_value
from polyamp_keras.engines.differentiation import Differentiation, HostArray, ObservedCall
from polyamp_keras.engines.torch_compat import foreach_divide, foreach_norm

FRAMEWORK: Final = "torch"
DTYPE_ERRORS: Final = (RuntimeError,)
DTYPE_MESSAGE: Final = r"[^\n]*(?:same dtype|expected scalar type)[^\n]*"
LOSS_REACHES_APPLY: Final = True
KEEPS_FIT_STATE: Final = False
ONE_DTYPE_CODE: Final = "torch.randn_like(z) or noise.to(z.dtype)"
XP: Final = array_namespace(
    torch,
    lambda value, like: torch.as_tensor(value, dtype=like.dtype, device=like.device),
    power=torch.pow,
    norm=torch.linalg.vector_norm,
    mean=lambda x, axis: torch.mean(x, axis, keepdim=True),
    matmul=torch.matmul,
    swapaxes=torch.swapaxes,
    astype=lambda x, dtype: x.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype.dtype),
)
"""torch's array namespace; scalars stay on their device."""


def is_float32_constant(value: Any) -> bool:
    """Return whether a value is a float32 tensor."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, and no parameter."""
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def gather_in_float32(call: Callable[..., Any], x: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a gather of a 16-bit `x`, whose gradient is summed in float32 and rounded once. A gather
    computes nothing, so that its result in float32 has the same numbers."""
    return call(x.to(torch.float32), *args, **kwargs).to(x.dtype)


def bitcast(x: Any, dtype: str) -> Any:
    """Return the bits of a tensor as another dtype of the same size."""
    return x.view(getattr(torch, dtype))


def custom_vjp(
    forward: Callable[..., Any], backward: Callable[..., Any], x: Any, w: Any, watch: Callable[[Any], Any] | None = None
) -> Any:
    """Return the result of `forward(x, w) -> (result, residuals)`, whose gradients are `backward(residuals, g)`.

    Raises:
        UnsupportedError: in a backward pass that makes a graph, for gradients of the gradients.
    """
    return _CustomVjp.apply(forward, backward, watch, x, w)  # type: ignore[no-untyped-call]  # torch does not annotate apply


class _CustomVjp(torch.autograd.Function):
    """Function of two tensors with given gradients."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], watch: Any, x: Any, w: Any) -> Any:
        result, residuals = forward(x, w)
        ctx.save_for_backward(*residuals)
        ctx.gradients, ctx.watch = backward, watch
        return result

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError(SECOND_DERIVATIVES)
        dx, dw, *figures = ctx.gradients(ctx.saved_tensors, g)
        if figures:
            ctx.watch(*figures)
        return None, None, None, dx, dw


@contextlib.contextmanager
def integer_casts(given: Sequence[Any]) -> Iterator[list[str]]:
    """Context manager that records the integer dtypes to which `to` and its like cast these tensors themselves."""
    known, found = set(map(id, given)), list[str]()

    class Casts(torch.overrides.TorchFunctionMode):
        """Mode that sees every function of torch that a layer calls."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            is_integer = isinstance(result, torch.Tensor) and not (
                result.dtype.is_floating_point or result.dtype.is_complex or result.dtype == torch.bool
            )
            if is_integer and args and id(args[0]) in known and function in _CASTS:
                found.append(str(result.dtype).removeprefix("torch."))
            return result

    with Casts():
        yield found


_CASTS: Final = (torch.Tensor.to, torch.Tensor.long, torch.Tensor.int, torch.Tensor.type)
"""Functions that a layer casts with; `keras.ops.cast` calls the first."""
_SMALLEST: Final = 2.0**-126
"""Smallest normal float32."""
_MATMUL_PRECISION: Final[ProcessSetting[str]] = ProcessSetting(
    "float32_matmul", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
)


def matmul_precision(setting: str | None) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that sets torch's precision of float32 matrix products, which is process-wide."""
    if setting is None:
        return contextlib.nullcontext()
    return _MATMUL_PRECISION.temporary_value(setting)


def to_dense(gradient: Any, like: Any) -> Any:
    """Return a gradient as it is: Keras has dense ones on this backend."""
    return gradient


def host_values(variable: Any) -> HostArray:
    """Return a copy of the values of a variable or tensor on the host."""
    value = native_variable(variable).detach().cpu()
    name = dtype_name(value)
    foreign = name in ML_DTYPES  # which torch does not exchange with NumPy
    values: HostArray = np.array((value.float() if foreign else value).numpy())
    return values.astype(name) if foreign else values


def from_host(values: HostArray) -> Any:
    """Return a copy in C order: torch takes neither reversed axes nor, without a warning, read-only memory."""
    return np.array(values, order="C")


def cast_variable(variable: Any, dtype: str) -> Any:
    """Return a new parameter in another dtype."""
    value = native_variable(variable)
    return torch.nn.Parameter(value.detach().to(getattr(torch, dtype)), requires_grad=value.requires_grad)


def trace_state() -> None:
    """Return None: torch runs a pass operation by operation."""


def differentiate(
    call: ObservedCall, variables: Sequence[Any], cotangents: Callable[[Sequence[HostArray]], Any]
) -> Differentiation:
    """Return outputs and gradients of a call; see `KerasEngine.differentiate`."""
    values = [native_variable(variable) for variable in variables]
    frozen = [value for value in values if not value.requires_grad]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(values[0].device.type if values else "cpu", enabled=False))
        stack.enter_context(torch.backends.cudnn.flags(torch.backends.cudnn.enabled, allow_tf32=False))
        for value in frozen:
            stack.callback(value.requires_grad_, False)
            value.requires_grad_(True)
        outputs, observed = call()
        given = [host_values(output) for output in outputs]
        pairs = [
            (output, torch.as_tensor(np.asarray(factor), dtype=output.dtype, device=output.device))
            for output, factor in zip(outputs, cotangents(given), strict=True)
            if output.requires_grad
        ]
        found: Sequence[Any] = [None] * len(values)
        if pairs and values:
            results, factors = zip(*pairs, strict=True)
            found = torch.autograd.grad(results, values, factors, allow_unused=True)
    gradients = [
        np.zeros(tuple(value.shape), np.float32) if gradient is None else host_values(gradient.float())
        for value, gradient in zip(values, found, strict=True)
    ]
    return Differentiation(given, gradients, {key: host_values(value) for key, value in observed.items()})


def keep_assignments(variables: Sequence[Any]) -> AbstractContextManager[None]:
    """Return a context manager in which what a layer in 16 bits assigns to a variable in its call is kept (S12). On
    torch Keras writes it to a cast copy. Elements that are written with the same 16-bit number keep their digits."""
    return replace_assignments(variables, _assign)


def _assign(variable: Any, value: Any) -> None:
    whole, dtype = stored_value(variable), getattr(torch, variable.dtype)
    with torch.no_grad():
        if variable.dtype in HALF_DTYPES and whole.dtype != dtype:
            is_narrow = torch.all(value.to(dtype).to(value.dtype) == value)
            value = torch.where(is_narrow & (value == whole.to(dtype).to(value.dtype)), whole, value)
        whole.copy_(value)


def check_gradients(kinds: Collection[str], call: str, instead: str) -> None:
    """Do nothing: every gradient can be computed."""


def kernel_update(spec: Any, rate: Any, counts: Any) -> None:
    """Return None: a spec's own formula is run, for all parameters of one set of values."""


# A step.


def no_gradients() -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which torch records nothing for a backward pass."""
    return torch.no_grad()


def read_without_wait(flag: Any) -> bool | None:
    """Return a boolean scalar on the host; None if reading it would wait for a device."""
    return bool(flag) if flag.device.type == "cpu" else None


def read_vector(values: Any) -> Any:
    """Return the elements of a vector on the host, which may wait for a device."""
    return values.tolist()


def copy_value(variable: Any) -> Any:
    """Return a variable's value, which later writes do not change."""
    return variable.value.detach().clone()


def divide(gradients: Sequence[Any], divisor: Any) -> list[Any]:
    """Return gradients over a scalar, one kernel for those of a dtype."""
    if len({gradient.dtype for gradient in gradients}) == 1:
        return list(foreach_divide(list(gradients), divisor.to(gradients[0].dtype)))
    return [gradient / divisor.to(gradient.dtype) for gradient in gradients]


def update_if(applies: Any, written: Sequence[Any], read: Sequence[Any], body: Callable[[], None]) -> None:
    """Run `body`, and choose each value that it wrote or the one from before by a flag on the device."""
    before = [copy_value(variable) for variable in written]
    body()
    for variable, old in zip(written, before, strict=True):
        variable.assign(torch.where(applies, native_variable(variable), old))


def finite_flags(gradients: Sequence[Any]) -> Any:
    """Return for each gradient whether all of its elements are finite, a boolean vector."""
    return torch.isfinite(_largest_magnitudes(_in_one_dtype(gradients)))


def global_norm(gradients: Sequence[Any]) -> Any:
    """Return the global L2 norm, which is inf or NaN only if one of the gradients is.

    The gradients are divided by the largest magnitude before they are squared, so that no finite one overflows.
    """
    wide = _in_one_dtype(gradients)
    largest = _largest_magnitudes(wide).max()
    usable = torch.isfinite(largest) & (largest >= _SMALLEST)
    unit = torch.where(usable, largest, torch.ones_like(largest))
    return unit * torch.linalg.vector_norm(torch.stack(foreach_norm(foreach_divide(wide, unit), 2.0)))


def _largest_magnitudes(gradients: Sequence[Any]) -> Any:
    """Return each gradient's largest magnitude, a vector: NaN or inf if one of its elements is."""
    given = iter(foreach_norm([gradient for gradient in gradients if gradient.numel()], math.inf))
    return torch.stack([next(given) if gradient.numel() else gradient.new_zeros(()) for gradient in gradients])


def _in_one_dtype(gradients: Sequence[Any]) -> list[Any]:
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    return [gradient.to(dtype) for gradient in gradients]


def value_counts(values: Any, length: int) -> Any:
    """Return how many elements of an integer vector are 0, 1, ..., length - 1, without a wait for the device."""
    if values.device.type == "cpu":
        return torch.bincount(values, minlength=length)
    counts = torch.zeros(length, dtype=torch.int64, device=values.device)  # bincount would make the host wait
    return counts.scatter_add_(0, values.long(), torch.ones_like(values, dtype=torch.int64))


def is_traced(value: Any) -> bool:
    """Return False: torch runs a step operation by operation."""
    return False


# `fit`.


def write_fit_state(model: Any) -> None:
    """Do nothing: the variables of a model have the values of its last step."""


def check_fit(jit_compile: Any) -> None:
    """Raise for ways of running `fit` that polyamp does not support.

    Raises:
        UnsupportedError: `jit_compile=True`, or several processes.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UnsupportedError(
            "fit on torch reduces no gradients between processes in Keras, so that each would train its own model. "
            f"Received: torch.distributed with {distributed.get_world_size()} processes. Write a loop around "
            "DistributedDataParallel(model) with polyamp_keras.LossScaleOptimizer, or use Keras on TensorFlow under "
            "tf.distribute."
        )
    if jit_compile is True:
        raise UnsupportedError(
            "jit_compile=True on Keras's torch backend gives the whole step, callbacks' state and all, to torch.compile"
            ", which fails in Keras itself for most models. Received: jit_compile=True. Leave it out."
        )


def guarded_train_step(
    model: Any, step: Callable[..., Any], scaled: type[Any], count: Callable[..., AbstractContextManager[None]]
) -> Callable[..., Any]:
    """Return a `train_step(data)` that restores running statistics after a skipped update.

    Args:
        model: the model.
        step: the `train_step` of its class.
        scaled: class of the optimizers that can skip; with another one the step is Keras's.
        count: `(optimizer, data)` -> context manager in which the micro-batch has its weight.
    """

    def train_step(data: Any) -> Any:
        optimizer = model.optimizer
        if not isinstance(optimizer, scaled):  # the user may have recompiled the model
            return step(model, data)
        with optimizer.keep_statistics(model), count(optimizer, data):
            return step(model, data)

    return train_step


def store_fit_state(model: Any, result: Any) -> None:
    """Do nothing: the variables of a model have the values of its last step."""


def run_with_variables(function: Callable[..., Any], variables: Sequence[Any], arguments: Any) -> Any:
    """Return the result of a train function: a step writes to variables themselves."""
    return function(*arguments)


def monitored_train_step(model: Any, step: Callable[..., Any], figures: Any) -> Callable[..., Any]:
    """Return the step as it is: the loss reaches the figures in `scale_loss`."""
    return step
