"""Device "sim" in Python, for code that runs where there is no accelerator: its numbers lie in hidden CPU tensors.

It is torch's custom device (PrivateUse1). Every read of a number by the host is counted, with the line of polyamp that
asked for it. Its autocast casts the operands of `linear`, as a device's own kernels would. One process has it for good.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "sim"
READS: list[str] = []
"""One entry per read of a number by the host: the operation, and the innermost line of polyamp."""
PRODUCT_DTYPES: set[torch.dtype] = set()
"""The dtypes in which `linear` was computed."""
_READING = ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero")


class SimulatedTensor(torch.Tensor):
    """Tensor on the simulated device; `numbers` is where they are."""

    numbers: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> SimulatedTensor:
        made: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=f"{NAME}:0",
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, target = str(function), torch.device(kwargs.get("device") or NAME)
        found = function(*pytree.tree_map(_numbers, args), **pytree.tree_map(_numbers, kwargs))
        if name.startswith(_READING) or (name == "aten._to_copy.default" and target.type == "cpu"):
            lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()]
            READS.append(f"{name} {next((line for line in reversed(lines) if 'polyamp_torch' in line), '')}")
            return found
        if not function._schema.is_mutable:
            return pytree.tree_map(_simulated, found)
        return kwargs.get("out", args[0]) if isinstance(found, torch.Tensor) else None


def _numbers(value: Any) -> Any:
    if isinstance(value, SimulatedTensor):
        return value.numbers
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _simulated(value: Any) -> Any:
    return SimulatedTensor(value) if type(value) is torch.Tensor else value


class _Module:
    """What torch asks of `torch.sim`."""

    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed_all = set_rng_state = synchronize = staticmethod(lambda *_: None)
    get_rng_state = staticmethod(lambda *_: torch.zeros(8, dtype=torch.uint8))
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


def _on_device(operation: Any) -> Any:
    return lambda *args, **kwargs: SimulatedTensor(operation(*args, **{**kwargs, "device": "cpu"}))


def _linear(*args: Any) -> torch.Tensor:
    dtype = torch.get_autocast_dtype(NAME)
    with torch.autocast(NAME, enabled=False):
        PRODUCT_DTYPES.add(dtype)
        return nn.functional.linear(*(value if value is None else value.to(dtype) for value in args))


def register() -> list[torch.library.Library]:
    """Make the device known to torch. It ends with the libraries."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    others, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]  # torch's
    for name, key, kernel in (
        ("empty.memory_format", "PrivateUse1", _on_device(torch.ops.aten.empty.memory_format)),
        ("empty_strided", "PrivateUse1", _on_device(torch.ops.aten.empty_strided.default)),
        ("_to_copy", "PrivateUse1", _on_device(torch.ops.aten._to_copy.default)),
        ("linear", "AutocastPrivateUse1", _linear),
    ):
        library.impl(name, kernel, key)  # type: ignore[no-untyped-call]  # torch's
    return [others, library]


def to_device(value: Any) -> Any:
    """Copy a tensor, or a module's parameters and buffers in place, to the device."""
    if not isinstance(value, nn.Module):
        return SimulatedTensor(value.detach().clone())
    for module in value.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(SimulatedTensor(parameter.detach().clone()))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = SimulatedTensor(buffer.clone())
    return value


def to_host(value: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, without a counted read."""
    return value.detach().numbers if isinstance(value.detach(), SimulatedTensor) else value.detach()  # type: ignore[attr-defined]  # isinstance of a call
