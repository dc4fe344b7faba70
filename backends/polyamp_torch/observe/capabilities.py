"""`TorchProbe`: the doctor's operations in torch, on the CPU and on CUDA devices (`CapabilityProbe`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from polyamp.doctor.measurements import BASELINE, FORMATS_MEASURED, KnownTrap, Operation
from polyamp.doctor.probe import CapabilityProbe, HostArray, OperationPrograms, ProbeDevice
from polyamp_torch.observe.known_traps import TRAPS

_DTYPES: Final = {name: getattr(torch, BASELINE if name == "tf32" else name) for name in FORMATS_MEASURED}


class TorchProbe:
    """`CapabilityProbe` for torch: eager operations, as most training steps run them."""

    tf32_switch = 'torch.set_float32_matmul_precision("high")'
    traps: Sequence[KnownTrap] = TRAPS

    def devices(self) -> Sequence[ProbeDevice]:
        cuda = [
            ProbeDevice(f"cuda:{number}", "cuda", torch.cuda.get_device_name(number))
            for number in range(torch.cuda.device_count())
        ]
        return [*cuda, ProbeDevice("cpu", "cpu", "cpu")]

    def dtypes(self) -> Sequence[str]:
        """Return all; 8-bit formats, which have no other product with a public name, from torch 2.10."""
        has_scaled_product = hasattr(functional, "scaled_mm")
        return tuple(name for name, dtype in _DTYPES.items() if dtype.itemsize > 1 or has_scaled_product)

    def programs(self, operation: Operation, dtype: str, device: str, inputs: Sequence[HostArray]) -> OperationPrograms:
        tensors = [_tensor(array, dtype, device) for array in inputs]
        if operation == "matmul" and _DTYPES[dtype].itemsize == 1:
            return _narrow_product_programs(tensors, dtype, device)
        function = _FUNCTIONS[operation]
        with _tf32(dtype):
            cotangent = torch.ones_like(function(*tensors))
        leaves = [tensor.requires_grad_() for tensor in tensors]

        def forward() -> None:
            with torch.no_grad():
                function(*leaves)

        def forward_backward() -> None:
            torch.autograd.grad(function(*leaves), leaves, cotangent)

        return OperationPrograms(_repeat(forward, dtype, device), _repeat(forward_backward, dtype, device))

    def product(self, dtype: str, device: str, a: HostArray, b: HostArray) -> HostArray:
        left, right = _tensor(a, dtype, device), _tensor(b, dtype, device)
        with _tf32(dtype), torch.no_grad():
            if left.element_size() == 1:
                found = _scaled_product(left, _column_major(_scaled_partner(right, dtype)))
            else:
                found = left @ right
            host: HostArray = found.float().cpu().numpy()
        return host


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


def _convolution(images: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(images, kernels, padding=1)


_FUNCTIONS: Final[dict[Operation, Callable[..., torch.Tensor]]] = {
    "matmul": torch.matmul,
    "convolution": _convolution,
    "attention": _attention,
}


def _narrow_product_programs(tensors: Sequence[torch.Tensor], dtype: str, device: str) -> OperationPrograms:
    """Return the products of a layer in 8 bits as float8 training runs them: torch has no gradient of a scaled product,
    and GPUs multiply no two arrays of float8_e5m2, so that gradients are in float8_e5m2 and all else in float8_e4m3fn.
    """
    left, right = tensors[0], _scaled_partner(tensors[1], dtype)
    cotangent = torch.ones(left.shape[0], right.shape[1], device=device).to(torch.float8_e5m2)
    partner = torch.float8_e4m3fn
    kernel, kernel_t = _column_major(right), _column_major(right.t())
    left_t, cotangent_columns = left.t().to(partner).contiguous(), _column_major(cotangent)

    def forward() -> None:
        _scaled_product(left, kernel)

    def forward_backward() -> None:
        _scaled_product(left, kernel)
        _scaled_product(cotangent, kernel_t)
        _scaled_product(left_t, cotangent_columns)

    return OperationPrograms(_repeat(forward, dtype, device), _repeat(forward_backward, dtype, device))


def _scaled_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of two 8-bit matrices with scales of 1, in bfloat16; `b` is column-major."""
    scale, kind = torch.ones((), device=a.device), functional.ScalingType.TensorWise
    return functional.scaled_mm(a, b, scale, kind, scale, kind, output_dtype=torch.bfloat16)


def _scaled_partner(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the second factor of a product whose first is in an 8-bit format."""
    return tensor.to(torch.float8_e4m3fn) if dtype == "float8_e5m2" else tensor


def _column_major(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.t().contiguous().t()


def _repeat(function: Callable[[], None], dtype: str, device: str) -> Callable[[int], None]:
    on_cuda = torch.device(device).type == "cuda"

    def run(count: int) -> None:
        with _tf32(dtype):
            for _ in range(count):
                function()
            if on_cuda:
                torch.cuda.synchronize(device)

    return run


@contextlib.contextmanager
def _tf32(dtype: str) -> Iterator[None]:
    """Turn TF32 on for "tf32" and off for other dtypes, and then back to what it was."""
    with contextlib.ExitStack() as stack:
        for owner, name, on, off in _tf32_switches():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, on if dtype == "tf32" else off)
        yield


def _tf32_switches() -> list[tuple[Any, str, Any, Any]]:
    """Return (object, attribute, value with TF32, value without) of each switch.

    torch 2.9 has a switch for each operation of each library, and refuses to mix them with the older ones.
    """
    backends: Any = torch.backends
    if hasattr(backends, "fp32_precision"):
        owners = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
        return [(owner, "fp32_precision", "tf32", "ieee") for owner in owners]
    return [(owner, "allow_tf32", True, False) for owner in (backends.cuda.matmul, backends.cudnn)]


def _tensor(array: HostArray, dtype: str, device: str) -> Any:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device).to(_DTYPES[dtype])


PROBE: Final[CapabilityProbe] = TorchProbe()
