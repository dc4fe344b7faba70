"""Kernels over many gradients at once: their norm, which is also the finite test, and what unscales and clips them.

Called by the step, the compiled step and `GradScaler`. On the CPU some of them look at a scalar to choose the cheapest
way that gives the right result; on other devices, and in a compiled graph, nothing is read.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from polyamp.rules import clip
from polyamp_torch.arrays import XP
from polyamp_torch.compat import foreach_div_, foreach_norm, laid_end_to_end

_PIECE: Final = 65536
"""Elements summed in one go: short sums are exact to 1e-6 where one over millions of elements is off by 1e-4."""
_ROW: Final = 16384
"""Contiguous tensors above `_PIECE` are summed in rows of this length."""
_SIZE: Final = torch.Tensor.numel
_TINY: Final = 2048
"""Tensors up to this size are laid end to end and summed together, one kernel for many; copying more costs more than
the kernels that it spares."""


class Measured(NamedTuple):
    """What one pass over the gradients tells.

    Attributes:
        norm: L2 norm of all unscaled gradients, float64 scalar; inf or NaN where a gradient is.
        finite: whether every unscaled gradient is finite in its dtype (S10), boolean scalar.
    """

    norm: torch.Tensor
    finite: torch.Tensor


def measured(
    grads: list[torch.Tensor], scale: torch.Tensor | None = None, *, least: float = 0.0, alike: bool = False
) -> Measured:
    """The norm and the finite flag that the gradients have once they are divided by `scale`; they stay as they are.

    Args:
        grads: dense floating tensors, on any devices.
        scale: positive scalar that they are to be divided by; None for 1.
        least: a lower bound of `scale` that is known without looking. From 1 on no quotient can overflow, which spares
            devices other than the CPU a second pass.
        alike: the caller knows that all are of one device and dtype.

    Returns:
        Scalars on the first gradient's device.

    Example:
        >>> norm, finite = measured([torch.tensor([3.0, 4.0]) * 8], torch.tensor(8.0))
        >>> norm.item(), finite.item()
        (5.0, True)
    """
    found = [grads] if alike else buckets(grads)
    norm = _together([_norm(bucket) for bucket in found])
    finite = torch.isfinite(norm)
    if scale is None:
        return Measured(norm, finite)
    norm = norm / scale.to(norm.device, torch.float64)
    if least >= 1.0:
        return Measured(norm, finite)
    if looks(norm.device) and not norm.item() > min(torch.finfo(bucket[0].dtype).max for bucket in found):
        return Measured(norm, finite)
    return Measured(norm, finite & _quotients_finite(found, scale, norm.device))


def looks(device: torch.device) -> bool:
    """True where reading a scalar on the host costs no synchronisation, and no compiler is watching."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def global_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of all gradients as a float64 scalar, finite exactly when every 16- or 32-bit gradient is.

    The fast pass accumulates in float32. Where its squares leave float32's range it is taken again in float64; on the
    CPU that is decided by looking, elsewhere the float64 pass is the only one, so that nothing waits for the device.
    """
    return _together([_norm(bucket) for bucket in buckets(grads)])


def buckets(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors by device and dtype, as multi-tensor kernels want them."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(found.values())


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, rounded once: exact for powers of two."""
    return scale.double().reciprocal().float()


def divisor(norm: torch.Tensor, scale: torch.Tensor | None, clip_norm: float | None) -> torch.Tensor | None:
    """The one number that unscales and clips the gradients divided by it: `scale * max(norm, max_norm) / max_norm`.

    Args:
        norm: of the unscaled gradients, float64 scalar.
        scale: what the gradients are multiplied by, or None.
        clip_norm: the largest norm (S11), or None.

    Returns:
        A float64 scalar on the device of `norm`; None where there is nothing to divide by.
    """
    whole = None if scale is None else scale.to(norm.device, torch.float64)
    if clip_norm is None:
        return whole
    factor = clip.factor(norm, clip_norm, XP)
    by: torch.Tensor = factor.reciprocal() if whole is None else whole / factor
    return by


def divide_(grads: list[torch.Tensor], by: torch.Tensor, *, alike: bool = False) -> None:
    """Divide gradients in place by a float64 scalar, which is first rounded to their dtype, float32 at least."""
    for bucket in [grads] if alike else buckets(grads):
        foreach_div_(bucket, scalar_for(bucket, by))


def divide_in_two_steps_(grads: list[torch.Tensor], scale: torch.Tensor | None, factor: torch.Tensor) -> None:
    """Unscale and clip where the combined divisor, or the clip's factor, leaves the range of float32.

    Each gradient is unscaled, rounded to its dtype, and multiplied in float64, one after the other: slow, and for
    gradients that are some 1e30 times larger than the clip allows.
    """
    for grad in grads:
        wide = grad if scale is None else (grad.double() / scale.to(grad.device, torch.float64)).to(grad.dtype)
        grad.copy_(wide.double() * factor.to(grad.device))


def scalar_for(bucket: list[torch.Tensor], by: torch.Tensor) -> torch.Tensor:
    """A float64 scalar for arithmetic with gradients: float32, or float64 where they are (S1)."""
    wide = torch.float64 if bucket[0].dtype == torch.float64 else torch.float32
    return by.to(bucket[0].device, wide)


def _norm(bucket: list[torch.Tensor]) -> torch.Tensor:
    """The norm of gradients of one device and dtype, float64."""
    if not looks(bucket[0].device):
        return _together(_foreach_norm(bucket, torch.float64))
    pieces = _pieces(bucket)
    double = bucket[0].dtype == torch.float64
    if not double:
        norm = _together(pieces.norms(torch.float32))
        if 1e-15 < norm.item() < 1e15:
            return norm.double()
    norm = _together(pieces.norms(torch.float64))
    if double and not 1e-140 < norm.item() < 1e140:
        peak = torch.stack([piece.abs().amax() for piece in (*pieces.whole, *pieces.rows)]).amax()
        if 0.0 < peak.item() < float("inf"):
            return peak * _together(pieces.over(peak).norms(torch.float64))
    return norm


class _Pieces(NamedTuple):
    """Numbers in pieces that are summed one by one.

    Attributes:
        whole: tensors of any shape, each of which is one piece.
        rows: matrices, each row of which is one.
    """

    whole: list[torch.Tensor]
    rows: list[torch.Tensor]

    def norms(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Of every piece."""
        rows = [torch.linalg.vector_norm(matrix, dim=1, dtype=dtype) for matrix in self.rows]
        return [*(_foreach_norm(self.whole, dtype) if self.whole else []), *rows]

    def over(self, by: torch.Tensor) -> _Pieces:
        """Every number divided."""
        return _Pieces([piece / by for piece in self.whole], [matrix / by for matrix in self.rows])


def _foreach_norm(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    found: Any = foreach_norm(tensors, 2, dtype=dtype)
    return list(found)


def _together(norms: list[torch.Tensor]) -> torch.Tensor:
    if len(norms) == 1 and not norms[0].dim():
        return norms[0]
    home = norms[0].device
    scalars = [norm.to(home) for norm in norms if not norm.dim()]
    parts = [norm for norm in norms if norm.dim()]
    if scalars:
        parts.append(torch.stack(scalars))
    together: torch.Tensor = torch.linalg.vector_norm(parts[0] if len(parts) == 1 else torch.cat(parts))
    return together


def _pieces(bucket: list[torch.Tensor]) -> _Pieces:
    """The numbers of a bucket: tiny tensors laid end to end, large ones in rows, the others as they are."""
    found = _Pieces([], [])
    for begin, end, picked in _arranged(tuple(map(_SIZE, bucket))):
        if picked is not None:
            found.whole.append(_end_to_end(picked(bucket)))
            continue
        for tensor in bucket[begin:end]:
            size = tensor.numel()
            if size <= _PIECE or not tensor.is_contiguous():
                found.whole.append(tensor)
                continue
            rest = size % _ROW
            flat = tensor.view(-1)
            found.rows.append((flat[:-rest] if rest else flat).view(-1, _ROW))
            if rest:
                found.whole.append(flat[-rest:])
    return found


@functools.lru_cache(maxsize=256)
def _arranged(sizes: tuple[int, ...]) -> list[tuple[int, int, Callable[[list[torch.Tensor]], Any] | None]]:
    """What becomes of tensors of these sizes, in order: what picks the tiny ones of one piece out of the bucket, or the
    range of one that is not tiny. A model has the same sizes at every step."""
    found: list[tuple[int, int, Callable[[list[torch.Tensor]], Any] | None]] = []
    tiny: list[int] = []
    laid = 0
    for index, size in enumerate(sizes):
        if size > _TINY:
            found.append((index, index + 1, None))
            continue
        tiny.append(index)
        laid += size
        if laid >= _PIECE:
            found.append((0, 0, _picking(tiny)))
            tiny, laid = [], 0
    if laid or not found:
        found.append((0, 0, _picking(tiny)))
    return found


def _picking(indices: list[int]) -> Callable[[list[torch.Tensor]], Any]:
    first, last = indices[0], indices[-1]
    if last - first == len(indices) - 1:
        return operator.itemgetter(slice(first, last + 1))
    return operator.itemgetter(*indices)


def _end_to_end(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One vector of all; a piece at a time, so that the memory is small and used again."""
    flat: torch.Tensor = laid_end_to_end(tensors)
    return flat


def _quotients_finite(found: list[list[torch.Tensor]], scale: torch.Tensor, home: torch.device) -> torch.Tensor:
    """Whether the largest gradient stays finite in its dtype when it is divided by `scale`."""
    flags = []
    for bucket in found:
        filled = [grad for grad in bucket if grad.numel()]
        if filled:
            peak = torch.stack(list(foreach_norm(filled, float("inf")))).amax()
            by = scalar_for(bucket, scale)
            flags.append(torch.isfinite((peak.to(by.dtype) / by).to(peak.dtype)).to(home))
    return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool, device=home)
