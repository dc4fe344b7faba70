"""`JaxProbe`: the doctor's operations in JAX, compiled, on the devices of every platform (`CapabilityProbe`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.doctor.measurements import BASELINE, FORMATS_MEASURED, KnownTrap, Operation
from polyamp.doctor.probe import CapabilityProbe, HostArray, OperationPrograms, ProbeDevice
from polyamp_jax.arrays import device_name
from polyamp_jax.observe.known_traps import TRAPS

_DTYPES: Final = {name: getattr(jnp, BASELINE if name == "tf32" else name) for name in FORMATS_MEASURED}


class JaxProbe:
    """`CapabilityProbe` for JAX: programs that XLA compiles, as training steps are."""

    tf32_switch = 'jax.config.update("jax_default_matmul_precision", "tensorfloat32")'
    traps: Sequence[KnownTrap] = TRAPS

    def devices(self) -> Sequence[ProbeDevice]:
        found = list(jax.devices())
        if all(device.platform != "cpu" for device in found):
            found += jax.devices("cpu")
        return [
            ProbeDevice(name, device.platform, name if device.platform == "cpu" else device.device_kind)
            for device, name in ((device, device_name(device)) for device in found)
        ]

    def dtypes(self) -> Sequence[str]:
        return tuple(_DTYPES)

    def programs(self, operation: Operation, dtype: str, device: str, inputs: Sequence[HostArray]) -> OperationPrograms:
        if operation == "matmul" and dtype.startswith("float8"):
            return _narrow_product_programs(inputs, dtype, device)
        arrays = [_place(_device_order(operation, array), dtype, device) for array in inputs]
        function = _FUNCTIONS[operation](_sum_dtype(dtype))
        with _precision(dtype):
            shape = jax.eval_shape(function, *arrays)
        cotangent = _place(np.ones(shape.shape, np.float32), shape.dtype.name, device)
        forward = _compiled(function, device)
        gradients = _compiled(lambda cotangent, *values: jax.vjp(function, *values)[1](cotangent), device)
        return OperationPrograms(
            _repeat(lambda: forward(*arrays), dtype), _repeat(lambda: gradients(cotangent, *arrays), dtype)
        )

    def product(self, dtype: str, device: str, a: HostArray, b: HostArray) -> HostArray:
        function = _matmul(_sum_dtype(dtype))
        with _precision(dtype):
            found = _compiled(lambda a, b: function(a, b).astype(jnp.float32), device)(
                _place(a, dtype, device), _place(b, dtype, device)
            )
        return np.asarray(found)


def _matmul(sums: Any) -> Callable[..., Any]:
    return lambda a, b: jnp.matmul(a, b, preferred_element_type=sums)


def _narrow_product_programs(inputs: Sequence[HostArray], dtype: str, device: str) -> OperationPrograms:
    """Return the products of a layer in 8 bits as float8 training runs them: GPUs multiply no two arrays of
    float8_e5m2, so that gradients are in float8_e5m2 and all else in float8_e4m3fn."""
    left = _place(inputs[0], dtype, device)
    right = _place(inputs[1], "float8_e4m3fn", device)
    cotangent = _place(np.ones((left.shape[0], right.shape[1]), np.float32), "float8_e5m2", device)

    def both(left: Any, right: Any, cotangent: Any) -> Any:
        partner = left.astype(jnp.float8_e4m3fn)
        return _narrow_product(left, right), _narrow_product(cotangent, right.T), _narrow_product(partner.T, cotangent)

    forward, forward_backward = _compiled(_narrow_product, device), _compiled(both, device)
    return OperationPrograms(
        _repeat(lambda: forward(left, right), dtype), _repeat(lambda: forward_backward(left, right, cotangent), dtype)
    )


def _narrow_product(left: Any, right: Any) -> Any:
    return jax.lax.dot(left, right, preferred_element_type=jnp.float32)


def _convolution(sums: Any) -> Callable[..., Any]:
    return lambda images, kernels: jax.lax.conv_general_dilated(
        images,
        kernels,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        preferred_element_type=sums,
    )


def _attention(sums: Any) -> Callable[..., Any]:
    return lambda query, key, value: jax.nn.dot_product_attention(query, key, value)


_FUNCTIONS: Final[dict[Operation, Callable[[Any], Callable[..., Any]]]] = {
    "matmul": _matmul,
    "convolution": _convolution,
    "attention": _attention,
}


def _sum_dtype(dtype: str) -> Any:
    """Return the dtype of a product's result: float32 for 8-bit formats, as in training; else None (that of inputs)."""
    return jnp.float32 if dtype.startswith("float8") else None


def _device_order(operation: Operation, array: HostArray) -> HostArray:
    """Return an input in JAX's order of axes: channels last, and heads after the length."""
    if operation == "convolution":
        return array.transpose(0, 2, 3, 1) if array.shape[-1] != 3 else array.transpose(2, 3, 1, 0)
    return array.transpose(0, 2, 1, 3) if operation == "attention" else array


def _compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return the function, compiled by XLA when it is called.

    On a GPU products are those of its library. XLA would otherwise try a hundred kernels of its own for each, which
    takes 20 s for a float32 product on an H100. The kernels that it still tries are compiled on all cores.
    """
    options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_force_compilation_parallelism": os.cpu_count()}
    return jax.jit(function, compiler_options=options if device.startswith("gpu") else None)


def _repeat(function: Callable[[], Any], dtype: str) -> Callable[[int], None]:
    def run(count: int) -> None:
        with _precision(dtype):
            for _ in range(count):
                last = function()
            for result in jax.tree.leaves(last):
                result.block_until_ready()

    return run


def _precision(dtype: str) -> Any:
    """Return the context in which float32 products use TF32, for "tf32", or do not; other dtypes have the default."""
    precision = {"float32": "float32", "tf32": "tensorfloat32"}.get(dtype)
    return contextlib.nullcontext() if precision is None else jax.default_matmul_precision(precision)


def _place(array: HostArray, dtype: str, device: str) -> Any:
    # the cast is on the host, which needs no program of XLA's
    return jax.device_put(array.astype(_DTYPES[dtype]), find_device(device))


def find_device(name: str) -> Any:
    """Return the device of this name."""
    return next(found for found in _all_devices() if device_name(found) == name)


def _all_devices() -> list[Any]:
    return [*jax.devices(), *jax.devices("cpu")]


PROBE: Final[CapabilityProbe] = JaxProbe()
