"""Gathers: functions that may read a row many times, so that their gradient is a sum over the reads (S4).

torch scatters a gradient in its own dtype, and 16 bits forget what is added to a large sum. `gathered` accumulates in
float32; what the forward pass keeps for backward, and the result, are what they were. Called by `islands`.

Slices, single rows and masks read no row twice, and are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional

from polyamp_torch.compat import forward_mode_is_on, transforms_are_active

GATHERS: Final = (
    *(torch.index_select, torch.Tensor.index_select, torch.gather, torch.Tensor.gather, torch.take, torch.Tensor.take),
    *(torch.take_along_dim, torch.Tensor.take_along_dim, torch.repeat_interleave, torch.Tensor.repeat_interleave),
    *(torch.Tensor.__getitem__, torch.Tensor.unfold, functional.unfold, torch.embedding),
)
_SINGLE: Final = (int, slice)
_SPARSE: Final = 4
"""Which argument asks `torch.embedding` for a sparse gradient, a list of the reads that sums nothing yet."""


def source(function: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The 16-bit tensor that a call gathers from and that gets a gradient, or None where there is nothing to do."""
    if function is torch.Tensor.__getitem__ and not _may_repeat(args[1]):
        return None
    if function is torch.embedding and (kwargs.get("sparse") or (len(args) > _SPARSE and args[_SPARSE])):
        return None
    found = args[0] if args else kwargs.get("weight" if function is torch.embedding else "input")
    if not isinstance(found, torch.Tensor) or found.dtype not in (torch.float16, torch.bfloat16):
        return None
    if not torch.is_grad_enabled() or not (found.requires_grad or transforms_are_active()):
        return None
    return found


def _may_repeat(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.dtype not in (torch.bool, torch.uint8)
    if isinstance(index, tuple):
        return len(index) > 0 and (_may_repeat(index[0]) or _may_repeat(index[1:]))
    return index is not None and index is not Ellipsis and not isinstance(index, _SINGLE)


class _Gather(torch.autograd.Function):
    """`torch.gather` that keeps the index alone, and scatters in float32."""

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


def _gather(input: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> torch.Tensor:  # noqa: A002  # torch's name
    transformed = transforms_are_active() or forward_mode_is_on()
    if sparse_grad or transformed or torch.compiler.is_compiling():  # a compiler keeps what it needs
        return torch.gather(input.float(), dim, index, sparse_grad=sparse_grad).to(input.dtype)
    result: torch.Tensor = _Gather.apply(input, dim, index)  # type: ignore[no-untyped-call]  # torch's
    return result


def _take(input: torch.Tensor, index: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
    return input.float().reshape(-1)[index].to(input.dtype)


def _take_along_dim(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor:  # noqa: A002  # torch's name
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


_READS: Final[dict[Any, Callable[..., torch.Tensor]]] = {
    **dict.fromkeys((torch.gather, torch.Tensor.gather), _gather),
    **dict.fromkeys((torch.take, torch.Tensor.take), _take),
    **dict.fromkeys((torch.take_along_dim, torch.Tensor.take_along_dim), _take_along_dim),
}
"""What torch's own would keep its input for."""


def gathered(function: Any, args: Any, kwargs: dict[str, Any], narrow: torch.Tensor) -> torch.Tensor:
    """The call with `narrow` in float32, its result in the dtype of `narrow` again: the same numbers, summed wide.

    The float32 copies live as long as the call: neither a cast nor what is called here keeps its input. `gather` would,
    so it has a rule of its own.
    """
    if function in _READS:
        return _READS[function](*args, **kwargs)
    wide = narrow.float()
    args = [wide if value is narrow else value for value in args]
    kwargs = {name: wide if value is narrow else value for name, value in kwargs.items()}
    result: torch.Tensor = function(*args, **kwargs).to(narrow.dtype)
    return result
