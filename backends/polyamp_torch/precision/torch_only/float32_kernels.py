"""Float32 islands in torch's dispatcher: kernels of the sensitive operations alone, which act inside a region (S4).

A `TorchFunctionMode` sees every call, so every operation of a model pays for it. A kernel under a dispatch key is
called for its own operation only, and also where C++, TorchScript or `torch.func` call it. The key is
`AutocastPrivateUse1`, which stands above the keys of torch's own autocast. A region includes it in the state of its
thread. Outside of regions no kernel runs. torch treats the key as autocast for one more device: it is off where
autocast is off, `torch.compile` guards its graphs by it, and its caches have it in their keys.

- A Python function of torch is seen as the operations that it calls.
- An operation that calls sensitive ones in C++ is listed itself, or in `OPAQUE_OPERATIONS`, whose inner operations are
  hidden. In a backward pass, the formulas of autograd are left alone; hooks and custom functions are not.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch.nn import functional

from polyamp_torch.arrays import HALF_TENSOR_DTYPES
from polyamp_torch.precision.op_list import TORCH_OP_FAMILIES, TorchOpFamily
from polyamp_torch.precision.torch_only import activation_checkpointing, compat
from polyamp_torch.precision.torch_only.compat import (
    ENGINE_CODE,
    FUSED_ATTENTION,
    FUSED_ENCODER_LAYER,
    NO_CPU_LSTM,
    OPERATION_NAMES,
    SPARSE_PREFIX,
    AutocastOff,
    Kernel,
    KernelMaker,
    exclude_key,
    include_key,
    register_kernels,
    running_backward,
    saved_tensor_hooks,
)
from polyamp_torch.precision.torch_only.float32_gathers import FLOAT32_GATHERS, gather_source
from polyamp_torch.precision.torch_only.fused_attention import encoder_layer, multi_head_attention
from polyamp_torch.precision.torch_only.product_classification import PRODUCT_CLASSIFIERS, ProductKind

_OWN_MODULES: Final = (__name__, compat.__name__)
_AUTOCAST_DTYPES: Final = {*HALF_TENSOR_DTYPES, torch.float32}


class KernelIslands:
    """Islands of one device type that the kernels serve, in one thread.

    Args:
        device_type: "cpu", "cuda", ...
        reopen: makes a context manager that opens the islands again, for activation checkpointing.

    Attributes:
        acting: False while a region with torch's own op list is open inside; set by `switch`.
        key: identifies the islands of this device type for `carry_into_checkpoint`.
    """

    def __init__(self, device_type: str, reopen: Callable[[], AbstractContextManager[None]]) -> None:
        self.device_type = device_type
        self.reopen = reopen
        self.acting = True
        self.key = ("islands", device_type)

    def switch(self, acting: bool) -> None:
        """Let the kernels act in this thread, or not."""
        self.acting = acting
        _update_key()

    def open(self) -> None:
        """Let the kernels act in this thread."""
        _register_once()
        KERNEL_ISLANDS.by_device[self.device_type] = self
        include_key(True)
        exclude_key(False)

    def close(self) -> None:
        """End what `open` began. A second call has no effect."""
        KERNEL_ISLANDS.by_device.pop(self.device_type, None)
        _update_key()


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[str, KernelIslands] = {}


KERNEL_ISLANDS: Final = _ThreadState()
"""The islands that are open in a thread, by device type."""


class KernelsOff:
    """Context manager around code that computes in float32 by itself: no kernel acts inside."""

    def __enter__(self) -> None:
        exclude_key(True)

    def __exit__(self, *_: object) -> None:
        _update_key()


def _update_key() -> None:
    """Include the key in the state of this thread where islands act on any device type, else exclude it."""
    on = False
    for islands in KERNEL_ISLANDS.by_device.values():
        on = on or islands.acting
    include_key(on)
    exclude_key(not on)


def _acts(device_type: str) -> bool:
    islands = KERNEL_ISLANDS.by_device.get(device_type)
    # A thread of torch's own has the state of the one that started it, and so the key, but no islands by name.
    is_acting = islands.acting if islands is not None else not KERNEL_ISLANDS.by_device
    if not is_acting or not torch.is_autocast_enabled(device_type):
        return False
    # In a backward pass: hooks and the backward passes of custom functions, not the formulas of autograd.
    return running_backward() == -1 or _caller() not in (None, ENGINE_CODE)


def _caller() -> CodeType | None:
    """Return the code that calls the operation of the running kernel; None in a thread of autograd's engine."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _OWN_MODULES:
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _carry_into_checkpoint(device_type: str) -> None:
    if saved_tensor_hooks(True) is None and torch.is_grad_enabled():
        return
    islands = KERNEL_ISLANDS.by_device.get(device_type)
    if islands is not None and not torch.compiler.is_compiling():
        reentrant = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        activation_checkpointing.carry_into_checkpoint(islands.key, islands.reopen, everywhere=reentrant)


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            found.extend(value)
    return found


def _narrow_device(args: Any) -> str | None:
    """Return the device type of the first 16-bit tensor among the arguments, or None."""
    for value in args:
        if isinstance(value, torch.Tensor):
            if value.dtype in HALF_TENSOR_DTYPES:
                return value.device.type
        elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            found = _narrow_device(value)
            if found is not None:
                return found
    return None


def _call_in_float32(call: Kernel, args: Any, kwargs: dict[str, Any]) -> Any:
    args = [_to_float32(value) for value in args]
    return call(*args, **{name: _to_float32(value) for name, value in kwargs.items()}) if kwargs else call(*args)


def _to_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALF_TENSOR_DTYPES else value
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):  # operands, the weights of an LSTM
        return [_to_float32(item) for item in value]
    return value


# Makers of kernels: each takes the operation to call and returns its kernel, in which the key is off. The key is
# switched inside of `try`, so that an interrupt leaves it on.


def _widen(call: Kernel, *, on_cuda: bool) -> Kernel:
    """Kernel that casts 16-bit arguments to float32. torch's own autocast does that for some operations on CUDA."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            exclude_key(True)
            kind = _narrow_device(args)
            if kind is None or (on_cuda and kind == "cuda") or not _acts(kind):
                return call(*args, **kwargs)
            _carry_into_checkpoint(kind)
            return _call_in_float32(call, args, kwargs)
        finally:
            exclude_key(False)

    return kernel


def _isolate(call: Kernel) -> Kernel:
    """Kernel that casts like `_widen`, with autocast off inside, because the operation computes matrix products."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            exclude_key(True)
            tensors = _tensors(args)
            kind = tensors[0].device.type if tensors else "cpu"
            if "dtype" in kwargs or not _acts(kind):
                return call(*args, **kwargs)
            _carry_into_checkpoint(kind)
            with AutocastOff():
                return _call_in_float32(call, args, kwargs)
        finally:
            exclude_key(False)

    return kernel


def _statistics(call: Kernel) -> Kernel:
    """Kernel that casts like `_widen` unless an argument is float32: then the operation computes in float32 itself."""
    widen = _widen(call, on_cuda=False)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                return _hidden(call, args, kwargs)
        return widen(*args, **kwargs)

    return kernel


def _lstm(call: Kernel) -> Kernel:
    """Kernel that isolates an LSTM on the CPU in a dtype of which torch has none there and raises."""
    isolate = _isolate(call)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if args[0].device.type == "cpu" and torch.get_autocast_dtype("cpu") in NO_CPU_LSTM:
            return isolate(*args, **kwargs)
        return _hidden(call, args, kwargs)

    return kernel


def _product(call: Kernel, classify: Callable[..., ProductKind | None]) -> Kernel:
    """Kernel of a product: an inner product in float32, a multiplication in its operands' dtype (S4)."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            exclude_key(True)
            product = classify(*args)
            if product is None:
                return call(*args, **kwargs)
            operands = _tensors(args)
            dtypes = {operand.dtype for operand in operands}
            kinds = {operand.device.type for operand in operands}
            if len(kinds) != 1 or not dtypes <= _AUTOCAST_DTYPES or not _acts(kind := kinds.pop()):
                return call(*args, **kwargs)
            _carry_into_checkpoint(kind)
            with AutocastOff():
                if product == "sum" or len(dtypes) > 1:
                    return _call_in_float32(call, args, kwargs)
                return call(*args, **kwargs)
        finally:
            exclude_key(False)

    return kernel


def _matmul(call: Kernel) -> Kernel:
    """Kernel of `matmul`, in which most calls are products with a matrix. A layer without a bias is one, too."""
    product = _product(call, PRODUCT_CLASSIFIERS[torch.matmul])

    def kernel(left: torch.Tensor, right: torch.Tensor) -> Any:
        if right.dim() != 2 or left.dim() < 2 or left.size(-1) == 1:
            return product(left, right)
        try:
            exclude_key(True)
            return call(left, right)
        finally:
            exclude_key(False)

    return kernel


def _gather(call: Kernel, function: Any) -> Kernel:
    """Kernel that accumulates the gradient of a gather in float32."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            exclude_key(True)
            reads = (args[0], tuple(args[1])) if function is torch.Tensor.__getitem__ else args
            narrow = gather_source(function, reads, kwargs)
            if narrow is None or not _acts(narrow.device.type):
                return call(*args, **kwargs)
            _carry_into_checkpoint(narrow.device.type)
            if function in FLOAT32_GATHERS:
                return FLOAT32_GATHERS[function](*args, **kwargs)
            return call(*(narrow.float() if value is narrow else value for value in args), **kwargs).to(narrow.dtype)
        finally:
            exclude_key(False)

    return kernel


def _opaque(call: Kernel) -> Kernel:
    """Kernel that hides what the operation calls."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _hidden(call, args, kwargs)

    return kernel


def _hidden(call: Kernel, args: Any, kwargs: dict[str, Any]) -> Any:
    try:
        exclude_key(True)
        return call(*args, **kwargs)
    finally:
        exclude_key(False)


def _part_of(call: Kernel, function: Any) -> Kernel:
    """Kernel of an operation that is sensitive where one of torch's Python functions calls it, and nowhere else."""
    code = function.__code__
    widen = _widen(call, on_cuda=False)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return widen(*args, **kwargs) if _caller() is code else _hidden(call, args, kwargs)

    return kernel


def _fused(call: Kernel, composition: Callable[..., Any]) -> Kernel:
    """Kernel that replaces an operation, whose softmax is in 16 bits, by the operations that it consists of."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return composition(*args, **kwargs) if _acts(args[0].device.type) else _hidden(call, args, kwargs)

    return kernel


_PREFIXES: Final[dict[Any, str]] = {
    torch.special: "special_",
    torch.linalg: "linalg_",
    torch.fft: "fft_",
    torch.sparse: SPARSE_PREFIX,
}
OPAQUE_OPERATIONS: Final = (
    *("scaled_dot_product_attention", "bilinear", "square", "ldexp", "mvlgamma"),
    *("gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
)
"""Operations that S4 leaves in their dtype, and that call sensitive ones in C++."""
_PRODUCTS: Final = ("bmm", "mm", "mv", "addmv", "baddbmm", "addbmm", "addr", "dot", "vdot", "inner", "einsum")
_GATHERS: Final = {
    **{name: getattr(torch, name) for name in ("index_select", "gather", "take", "take_along_dim")},
    "repeat_interleave": torch.repeat_interleave,
    "index": torch.Tensor.__getitem__,
    "unfold": torch.Tensor.unfold,
    "im2col": functional.unfold,
    "embedding": torch.embedding,
}


def _classify_tensordot(left: torch.Tensor, right: torch.Tensor, axes: Any, _: Any) -> ProductKind | None:
    return PRODUCT_CLASSIFIERS[torch.tensordot](left, right, (axes,))


def _maker(row: TorchOpFamily) -> KernelMaker:
    makers: dict[str, KernelMaker] = {"isolate": _isolate, "statistics": _statistics, "lstm": _lstm}
    return makers.get(row.rule) or functools.partial(_widen, on_cuda=row.on_cuda)


def _kernel_makers() -> Iterator[tuple[str, KernelMaker]]:
    """Yield the name of each operation that has a kernel, and the kernel's maker. The last of a name counts."""
    for row in TORCH_OP_FAMILIES:
        for name in row.names.split():
            for prefix in {_PREFIXES.get(space, "") for space in row.spaces}:
                for operation in (prefix + name,) if prefix else OPERATION_NAMES.get(name, (name,)):
                    yield operation, _maker(row)
    for name in _PRODUCTS:
        yield name, functools.partial(_product, classify=PRODUCT_CLASSIFIERS[getattr(torch, name)])
    yield "linalg_vecdot", functools.partial(_product, classify=PRODUCT_CLASSIFIERS[torch.linalg.vecdot])
    yield "tensordot", functools.partial(_product, classify=_classify_tensordot)
    yield "matmul", _matmul
    for name, function in _GATHERS.items():
        yield name, functools.partial(_gather, function=function)
    for name in OPAQUE_OPERATIONS:
        yield name, _opaque
    yield "abs", functools.partial(_part_of, function=functional.softsign)
    yield FUSED_ATTENTION, functools.partial(_fused, composition=multi_head_attention)
    yield FUSED_ENCODER_LAYER, functools.partial(_fused, composition=encoder_layer)


_FASTER_CALLS: Final[dict[str, Kernel]] = {
    f"aten::{form}": getattr(torch, form.partition(".")[0])
    for form in (
        *("matmul", "bmm", "embedding", "layer_norm", "batch_norm", "softmax.int", "log_softmax.int", "exp", "log"),
        *("sum", "sum.dim_IntList", "mean", "mean.dim", "pow.Tensor_Scalar", "rsqrt", "sigmoid"),
    )
}
"""Frequent operations in the forms that Python calls: their functions parse arguments faster than `torch.ops`."""


@functools.cache
def _register_once() -> tuple[Any, ...]:
    return register_kernels(dict(_kernel_makers()), _FASTER_CALLS)
