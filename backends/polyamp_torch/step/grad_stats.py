"""Multi-tensor kernels over gradients: global norm with finite check, unscaling and clipping.

On the CPU some of them read a scalar to choose the cheapest correct method. On other devices, and in a compiled graph,
no value is read.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from polyamp.rules.clip import GradientClip
from polyamp_torch.arrays import XP, can_read_without_sync
from polyamp_torch.compat import (
    flatten_dense_tensors,
    foreach_div_,
    foreach_norm,
)

_PIECE_SIZE: Final = 65536
"""Elements in one sum: short sums are exact to 1e-6, while a sum over millions of elements is off by 1e-4."""
_ROW_SIZE: Final = 16384
"""Contiguous tensors above `_PIECE_SIZE` are summed in rows of this length."""
_ELEMENT_COUNT: Final = torch.Tensor.numel
_TINY_SIZE: Final = 2048
"""Tensors up to this size are concatenated and summed by one kernel. For larger ones the copy costs more than it
saves."""


class TorchGradStats(NamedTuple):
    """Statistics of the gradients from one pass over them.

    Attributes:
        norm: L2 norm of all unscaled gradients, float64 scalar; inf or NaN if a gradient is.
        finite: whether every unscaled gradient is finite in its dtype (S10), boolean scalar.
    """

    norm: torch.Tensor
    finite: torch.Tensor


def global_norm_and_finite(
    grads: list[torch.Tensor], scale: torch.Tensor | None = None, *, least: float = 0.0, alike: bool = False
) -> TorchGradStats:
    """Return norm and finite flag of the gradients divided by `scale`; the gradients do not change.

    Args:
        grads: dense floating-point tensors, on any devices.
        scale: positive scalar divisor; None for 1.
        least: a lower bound of `scale` that is known without reading it. If it is at least 1, no quotient can overflow,
            which saves a second pass on devices other than the CPU.
        alike: whether all gradients have one device and dtype.

    Returns:
        Scalars on the first gradient's device.

    Example:
        >>> norm, finite = global_norm_and_finite([torch.tensor([3.0, 4.0]) * 8], torch.tensor(8.0))
        >>> norm.item(), finite.item()
        (5.0, True)
    """
    found = [grads] if alike else bucket_by_device_and_dtype(grads)
    norm = _bucket_norm(found[0]) if len(found) == 1 else _combine_norms(list(map(_bucket_norm, found)))
    if can_read_without_sync(norm.device):  # by Python, which is faster than torch's five operations
        finite = torch.scalar_tensor(math.isfinite(norm.item()), dtype=torch.bool)
    else:
        finite = torch.isfinite(norm)
    if scale is None:
        return TorchGradStats(norm, finite)
    norm = norm / scale.to(norm.device, torch.float64)
    if least >= 1.0:
        return TorchGradStats(norm, finite)
    if can_read_without_sync(norm.device) and not norm.item() > min(
        torch.finfo(bucket[0].dtype).max for bucket in found
    ):
        return TorchGradStats(norm, finite)
    return TorchGradStats(norm, finite & _is_quotient_finite(found, scale, norm.device))


def global_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of all gradients as a float64 scalar, finite exactly if every 16- or 32-bit gradient is.

    On the CPU a fast pass accumulates in float32; if its squares leave float32's range, a float64 pass follows. On
    other devices the only pass is in float64, so that the host does not wait for the device.
    """
    return _combine_norms([_bucket_norm(bucket) for bucket in bucket_by_device_and_dtype(grads)])


def bucket_by_device_and_dtype(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by device and dtype, as multi-tensor kernels require."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(found.values())


def scale_reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale, rounded once: exact for powers of two."""
    return scale.double().reciprocal().float()


def unscale_and_clip_divisor(norm: torch.Tensor, scale: torch.Tensor | None, how: GradientClip) -> torch.Tensor | None:
    """Return the divisor that unscales and clips the gradients: the scale over the clip's factor.

    Args:
        norm: norm of the unscaled gradients, float64 scalar.
        scale: the scale of the gradients, or None.
        how: how the gradients are clipped together (S11).

    Returns:
        A float64 scalar on the device of `norm`; None if no division is needed.
    """
    whole = None if scale is None else scale.to(norm.device, torch.float64)
    if how.factor is None:
        return whole
    factor = how.factor(norm, xp=XP)
    by: torch.Tensor = factor.reciprocal() if whole is None else whole / factor
    return by


def divide_gradients_(grads: list[torch.Tensor], by: torch.Tensor, *, alike: bool = False) -> None:
    """Divide gradients in place by a float64 scalar, first rounded to their dtype, at least float32."""
    for bucket in [grads] if alike else bucket_by_device_and_dtype(grads):
        foreach_div_(bucket, cast_scalar_for_bucket(bucket, by))


def unscale_then_clip_(grads: list[torch.Tensor], scale: torch.Tensor | None, factor: torch.Tensor) -> None:
    """Unscale and clip in two steps, for a combined divisor or clip factor outside the range of float32.

    Each gradient is unscaled, rounded to its dtype, and multiplied in float64, one after the other. This is slow, and
    only needed for gradients some 1e30 times larger than the clip norm.
    """
    for grad in grads:
        wide = grad if scale is None else (grad.double() / scale.to(grad.device, torch.float64)).to(grad.dtype)
        grad.copy_(wide.double() * factor.to(grad.device))


def cast_scalar_for_bucket(bucket: list[torch.Tensor], by: torch.Tensor) -> torch.Tensor:
    """Cast a float64 scalar for arithmetic with gradients: to float32, or float64 for float64 gradients (S1)."""
    wide = torch.float64 if bucket[0].dtype == torch.float64 else torch.float32
    return by.to(bucket[0].device, wide)


def _bucket_norm(bucket: list[torch.Tensor]) -> torch.Tensor:
    """Return the float64 norm of gradients of one device and dtype."""
    if not can_read_without_sync(bucket[0].device):
        return _combine_norms(list(foreach_norm(bucket, 2, dtype=torch.float64)))
    pieces = _split_pieces(bucket)
    double = bucket[0].dtype == torch.float64
    if not double:
        norm = _combine_norms(pieces.norms(torch.float32))
        if 1e-15 < norm.item() < 1e15:
            return norm.double()
    norm = _combine_norms(pieces.norms(torch.float64))
    if double and not 1e-140 < norm.item() < 1e140:
        peak = torch.stack([piece.abs().amax() for piece in (*pieces.whole, *pieces.rows)]).amax()
        if 0.0 < peak.item() < float("inf"):
            return peak * _combine_norms(pieces.over(peak).norms(torch.float64))
    return norm


class _NormPieces(NamedTuple):
    """Gradient elements divided into pieces that are summed separately.

    Attributes:
        whole: tensors of any shape; each is one piece.
        rows: matrices; each row is one piece.
    """

    whole: list[torch.Tensor]
    rows: list[torch.Tensor]

    def norms(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the norm of every piece."""
        found: list[torch.Tensor] = list(foreach_norm(self.whole, 2, dtype=dtype)) if self.whole else []
        if self.rows:
            found += [torch.linalg.vector_norm(matrix, dim=1, dtype=dtype) for matrix in self.rows]
        return found

    def over(self, by: torch.Tensor) -> _NormPieces:
        """Return the pieces, divided by a scalar."""
        return _NormPieces([piece / by for piece in self.whole], [matrix / by for matrix in self.rows])


def _combine_norms(norms: list[torch.Tensor]) -> torch.Tensor:
    if len(norms) == 1 and not norms[0].dim():
        return norms[0]
    home = norms[0].device
    scalars = [norm.to(home) for norm in norms if not norm.dim()]
    parts = [norm for norm in norms if norm.dim()]
    if scalars:
        parts.append(torch.stack(scalars))
    together: torch.Tensor = torch.linalg.vector_norm(parts[0] if len(parts) == 1 else torch.cat(parts))
    return together


def _split_pieces(bucket: list[torch.Tensor]) -> _NormPieces:
    """Split a bucket into pieces: tiny tensors concatenated, large ones in rows, the others unchanged."""
    found = _NormPieces([], [])
    for begin, end, picked in _piece_getters(tuple(map(_ELEMENT_COUNT, bucket))):
        if picked is not None:
            found.whole.append(flatten_dense_tensors(picked(bucket)))  # a small memory, which is reused
            continue
        for tensor in bucket[begin:end]:
            size = tensor.numel()
            if size <= _PIECE_SIZE or not tensor.is_contiguous():
                found.whole.append(tensor)
                continue
            rest = size % _ROW_SIZE
            flat = tensor.view(-1)
            found.rows.append((flat[:-rest] if rest else flat).view(-1, _ROW_SIZE))
            if rest:
                found.whole.append(flat[-rest:])
    return found


@functools.lru_cache(maxsize=256)
def _piece_getters(sizes: tuple[int, ...]) -> list[tuple[int, int, Callable[[list[torch.Tensor]], Any] | None]]:
    """Return, in order, for each piece: a getter of its tiny tensors, or the index range of a larger tensor.

    Cached, because a model has the same sizes in every step."""
    found: list[tuple[int, int, Callable[[list[torch.Tensor]], Any] | None]] = []
    tiny: list[int] = []
    laid = 0
    for index, size in enumerate(sizes):
        if size > _TINY_SIZE:
            found.append((index, index + 1, None))
            continue
        tiny.append(index)
        laid += size
        if laid >= _PIECE_SIZE:
            found.append((0, 0, _item_getter(tiny)))
            tiny, laid = [], 0
    if laid or not found:
        found.append((0, 0, _item_getter(tiny)))
    return found


def _item_getter(indices: list[int]) -> Callable[[list[torch.Tensor]], Any]:
    first, last = indices[0], indices[-1]
    if last - first == len(indices) - 1:
        return operator.itemgetter(slice(first, last + 1))
    return operator.itemgetter(*indices)


def _is_quotient_finite(found: list[list[torch.Tensor]], scale: torch.Tensor, home: torch.device) -> torch.Tensor:
    """Return whether the largest gradient is finite in its dtype after division by `scale`."""
    flags = []
    for bucket in found:
        filled = [grad for grad in bucket if grad.numel()]
        if filled:
            peak = torch.stack(list(foreach_norm(filled, float("inf")))).amax()
            by = cast_scalar_for_bucket(bucket, scale)
            flags.append(torch.isfinite((peak.to(by.dtype) / by).to(peak.dtype)).to(home))
    return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool, device=home)
