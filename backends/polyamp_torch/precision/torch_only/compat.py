"""Access to the private names of torch's dispatcher; the package's `compat` has those of the rest.

Torch 2.13 is relied on: a dispatch key in the state of a thread is included or excluded; autocast for a custom device
is on where its key is not excluded; `torch.library` takes kernels for any key of an operation.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import _ops
from torch.autograd.graph import _engine_run_backward

from polyamp_torch.arrays import HALF_TENSOR_DTYPES
from polyamp_torch.compat import HAS_AUTOCAST_CACHE_KEYS, skip_compilation, top_saved_tensor_hooks

Kernel = Callable[..., Any]
KernelMaker = Callable[[Kernel], Kernel]

_KEY_NAME: Final = "AutocastPrivateUse1"
_KEY: Final = getattr(torch._C.DispatchKey, _KEY_NAME)
_TRANSFORM_KEY_NAME: Final = "FuncTorchDynamicLayerFrontMode"
"""The key that is first in every call under one of `torch.func`'s transforms."""
_CUSTOM_DEVICE: Final = "privateuseone"
"""torch's name of the custom device while no library has named it after its own."""

include_key = functools.partial(torch._C._dispatch_tls_set_dispatch_key_included, _KEY)
"""Let (True) or do not let the kernels run for tensors of every device in this thread."""
exclude_key = functools.partial(torch._C._dispatch_tls_set_dispatch_key_excluded, _KEY)
"""Keep (True) or do not keep the kernels from running in this thread, which counts more than `include_key`."""
_is_included = functools.partial(torch._C._dispatch_tls_is_dispatch_key_included, _KEY)
_is_excluded = functools.partial(torch._C._dispatch_tls_is_dispatch_key_excluded, _KEY)
AutocastOff: Final[Any] = torch._C._DisableAutocast
"""Context manager in which autocast is off on every device type, and so are the kernels."""
running_backward: Final[Callable[[], int]] = torch._C._current_graph_task_id
"""Number of the backward pass that runs in this thread, or -1."""
NO_CPU_LSTM: Final = frozenset(HALF_TENSOR_DTYPES) - (
    {torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set()
)
"""16-bit dtypes of which torch has no LSTM on this CPU: of bfloat16 only where oneDNN has none for the processor."""
saved_tensor_hooks: Final[Callable[[bool], Any]] = top_saved_tensor_hooks or (lambda _: None)
"""`(True)` -> the current hooks of saved tensors, or None; torch 2.13 has them."""
ENGINE_CODE: Final = _engine_run_backward.__code__
"""The Python code from which autograd's engine runs its formulas."""
nested_from_mask: Final[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = torch._nested_tensor_from_mask
"""(padded, mask that is True at rows) -> nested tensor."""

SPARSE_PREFIX: Final = "_sparse_"
OPERATION_NAMES: Final = {
    "logsigmoid": ("log_sigmoid",),
    "cross_entropy": ("cross_entropy_loss",),
    "nll_loss": ("nll_loss", "nll_loss_nd"),
    "lu": ("_lu_with_info",),
    "softmax": ("softmax", "_softmax"),
    "log_softmax": ("log_softmax", "_log_softmax"),
}
"""Names of operations that differ from those of the functions, or that C++ calls in their place."""
FUSED_ATTENTION: Final = "_native_multi_head_attention"
FUSED_ENCODER_LAYER: Final = "_transformer_encoder_layer_fwd"


def scaled_product(
    left: torch.Tensor, right: torch.Tensor, left_scale: torch.Tensor, right_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product of two matrices of 8-bit floats times two scales, from tensor cores with float32 sums.

    The kernel takes a row-major left and a column-major right operand, with a contracted size that is a multiple of 16.
    """
    missing = -left.shape[1] % 16
    if missing:
        left = torch.nn.functional.pad(left.view(torch.uint8), (0, missing)).view(left.dtype)
        right = torch.nn.functional.pad(right.view(torch.uint8), (0, 0, 0, missing)).view(right.dtype)
    columns = right.t().contiguous().t()
    made: torch.Tensor = torch._scaled_mm(
        left.contiguous(), columns, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=False
    )
    return made


def uses_kernels() -> bool:
    """Return whether the islands of eager code are kernels, not the mode.

    They need a torch that has the state of autocast in the keys of its compiler's caches, and a process in which no
    other library serves a custom device, whose autocast has the key of the kernels.
    """
    return (
        HAS_AUTOCAST_CACHE_KEYS and torch._C._get_privateuse1_backend_name() == _CUSTOM_DEVICE and not _had_fallback()
    )


@functools.cache
def _had_fallback() -> bool:
    """Return whether the key had a fallback before this package asked first, which is before it registers its own."""
    return bool(torch._C._dispatch_has_backend_fallback(_KEY))


def register_kernels(makers: Mapping[str, KernelMaker], faster_calls: Mapping[str, Kernel]) -> tuple[Any, ...]:
    """Register the kernel of each named operation, in all its forms but in-place ones and `out=`.

    Args:
        makers: name -> maker of the kernel, given the operation to call. Names that torch lacks are skipped.
        faster_calls: name of a form -> a function that does the same as the operation, with less work in Python.

    Returns:
        torch's libraries; the registration ends with them.
    """
    make_library: Any = torch.library.Library  # torch does not annotate it
    others, library = make_library("_", "IMPL"), make_library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY_NAME)
    _let_higher_order_operators_pass()
    known = set(torch._C._dispatch_get_all_op_names())  # TorchScript has more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has one kernel under the transforms' key, which is called here
        for name, make in makers.items():
            packet = getattr(torch.ops.aten, name, None)
            for overload in () if packet is None else packet.overloads():
                operation = getattr(packet, overload)
                if operation.name() in known and _computes_from_tensors(operation._schema):
                    kernel = make(faster_calls.get(operation.name(), operation._op))
                    first = _before_transforms(kernel, torch.library.get_kernel(operation, _TRANSFORM_KEY_NAME))
                    skip_compilation(kernel, first)
                    library.impl(operation, kernel, _KEY_NAME)
                    library.impl(operation, first, _TRANSFORM_KEY_NAME, with_keyset=True)
    return others, library


def _let_higher_order_operators_pass() -> None:
    """Let operators that take functions (`flex_attention`, `cond`) ignore the key, as they do those of other devices.

    They are dispatched in Python, where the fallback of the key is unknown; those to come read a list of torch's.
    """
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)
    operators: Any = _ops._higher_order_ops.values()
    for operator in operators:
        operator.fallthrough(_KEY)


def _computes_from_tensors(schema: Any) -> bool:
    return not schema.is_mutable and any("Tensor" in str(argument.type) for argument in schema.arguments)


def _before_transforms(kernel: Kernel, plain: Any) -> Kernel:
    """Return the kernel for `torch.func`, whose transforms replace an operation by others: first the islands."""

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_excluded() or not _is_included():
            return plain.call_boxed(keyset, *args, **kwargs)
        return kernel(*args, **kwargs)

    return call


def returned_values(name: str) -> list[Any]:
    """Return the tensors in the schemas of an operation, over its forms that write to no operand; [] if torch has no
    such operation. `alias_info` of a value is None if it is no view of an operand."""
    packet = getattr(torch.ops.aten, name, None)
    forms = [] if packet is None else [getattr(packet, form)._schema for form in packet.overloads()]
    returned = [value for schema in forms if not schema.is_mutable for value in schema.returns]
    return [value for value in returned if "Tensor" in str(value.type)]


def compiled_code_runs_eagerly() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which what `torch.compile` made runs uncompiled. Imports no compiler."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
