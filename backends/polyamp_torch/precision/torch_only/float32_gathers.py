"""Gathers: functions that may read a row many times, so that their gradient is a sum over the reads (S4).

torch scatters a gradient in the gradient's dtype, and a large 16-bit sum loses small addends. `gather_in_float32`
accumulates in float32. It changes neither the result nor what the forward pass saves for backward.

Slices, single rows and masks read no row twice, and are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional

from polyamp_torch.arrays import HALF_TENSOR_DTYPES
from polyamp_torch.compat import has_active_transforms, is_forward_mode_enabled

GATHER_FUNCTIONS: Final = (
    *(torch.index_select, torch.Tensor.index_select, torch.gather, torch.Tensor.gather, torch.take, torch.Tensor.take),
    *(torch.take_along_dim, torch.Tensor.take_along_dim, torch.repeat_interleave, torch.Tensor.repeat_interleave),
    *(torch.Tensor.__getitem__, torch.Tensor.unfold, functional.unfold, torch.embedding),
)
_SINGLE_INDEX_TYPES: Final = (int, slice)
_SPARSE_ARGUMENT: Final = 4
"""Position of `sparse` of `torch.embedding`; a sparse gradient lists the reads and does not sum them."""


def gather_source(function: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the 16-bit tensor that a call gathers from and that gets a gradient, or None if there is none."""
    if function is torch.Tensor.__getitem__ and not _may_repeat(args[1]):
        return None
    if function is torch.embedding and (
        kwargs.get("sparse") or (len(args) > _SPARSE_ARGUMENT and args[_SPARSE_ARGUMENT])
    ):
        return None
    found = args[0] if args else kwargs.get("weight" if function is torch.embedding else "input")
    if not isinstance(found, torch.Tensor) or found.dtype not in HALF_TENSOR_DTYPES:
        return None
    if not torch.is_grad_enabled() or not (found.requires_grad or has_active_transforms()):
        return None
    return found


def _may_repeat(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.dtype not in (torch.bool, torch.uint8)
    if isinstance(index, tuple):
        return len(index) > 0 and (_may_repeat(index[0]) or _may_repeat(index[1:]))
    return index is not None and index is not Ellipsis and not isinstance(index, _SINGLE_INDEX_TYPES)


class _Gather(torch.autograd.Function):
    """`torch.gather` that saves only the index, and scatters in float32."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dim = source.shape, dim
        return torch.gather(source, dim, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (index,) = ctx.saved_tensors
        zeros = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        return zeros.scatter_add(ctx.dim, index, grad.float()).to(grad.dtype), None, None


def _gather(
    input: torch.Tensor,  # noqa: A002  # torch's name
    dim: int,
    index: torch.Tensor,
    *,
    sparse_grad: bool = False,
) -> torch.Tensor:
    transformed = has_active_transforms() or is_forward_mode_enabled()
    if sparse_grad or transformed or torch.compiler.is_compiling():  # a compiler saves only what it needs
        return torch.gather(input.float(), dim, index, sparse_grad=sparse_grad).to(input.dtype)
    result: torch.Tensor = _Gather.apply(input, dim, index)  # type: ignore[no-untyped-call]  # torch's
    return result


def _take(input: torch.Tensor, index: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
    return input.float().reshape(-1)[index].to(input.dtype)


def _take_along_dim(
    input: torch.Tensor,  # noqa: A002  # torch's name
    indices: torch.Tensor,
    dim: int | None = None,
) -> torch.Tensor:
    if dim is None:
        return _take(input, indices.reshape(-1))
    if input.dim() != indices.dim():
        return torch.take_along_dim(input, indices, dim)  # which raises
    sizes, reads = list(input.shape), list(indices.shape)
    along, read = sizes[dim], reads[dim]
    sizes[dim] = reads[dim] = 1
    shape = list(torch.broadcast_shapes(sizes, reads))  # type: ignore[no-untyped-call]  # torch's
    shape[dim] = along
    source = input.expand(shape)
    shape[dim] = read
    return _gather(source, dim, indices.expand(shape))


FLOAT32_GATHERS: Final[dict[Any, Callable[..., torch.Tensor]]] = {
    **dict.fromkeys((torch.gather, torch.Tensor.gather), _gather),
    **dict.fromkeys((torch.take, torch.Tensor.take), _take),
    **dict.fromkeys((torch.take_along_dim, torch.Tensor.take_along_dim), _take_along_dim),
}
"""Replacements of functions whose torch version saves its input for backward."""


def gather_in_float32(function: Any, args: Any, kwargs: dict[str, Any], narrow: torch.Tensor) -> torch.Tensor:
    """Call `function` with `narrow` in float32, and return its result in the dtype of `narrow`. Only the gradient's sum
    changes.

    The float32 copies live only during the call: neither a cast nor the functions called here save their input.
    `gather` would, so it has its own rule.
    """
    if function in FLOAT32_GATHERS:
        return FLOAT32_GATHERS[function](*args, **kwargs)
    wide = narrow.float()
    args = [wide if value is narrow else value for value in args]
    kwargs = {name: wide if value is narrow else value for name, value in kwargs.items()}
    result: torch.Tensor = function(*args, **kwargs).to(narrow.dtype)
    return result
