"""Fast array copies for transposed and strided data: `as_contiguous`, `aligned_copy` and `copy_into`.

NumPy copies a transposed matrix of 2-byte numbers element by element, at 0.3 GB/s where memory reaches ten. Every read
is of another cache line, and where rows are a power of two long, all of these lines share one place in the cache. Here
a few rows at a time are copied into a buffer with padded rows and transposed from there, which is eight times faster.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from polyamp.porting.layouts.lazy_array import Array

_ROWS: Final = 128
_SMALL: Final = 1 << 16
"""Bytes below which NumPy's own copy is as fast."""
_BUFFER: Final = 1 << 20
"""Approximate bytes of the buffer, which stay in the cache."""
_LARGE: Final = 1 << 22
"""Bytes from which several threads copy."""
_PADDING: Final = 64
"""Bytes between the buffer's rows: one cache line."""
_ALIGNMENT: Final = 64
"""Alignment in bytes that XLA requires of memory that it takes over."""


def as_contiguous(array: Array) -> Array:
    """Return the values in C order: the array itself if it is contiguous, otherwise a fast copy.

    Example:
        >>> import numpy as np
        >>> as_contiguous(np.arange(6).reshape(2, 3).T).tolist()
        [[0, 3], [1, 4], [2, 5]]
    """
    if array.flags.c_contiguous:
        return array
    out = np.empty(array.shape, array.dtype)
    copy_into(out, array)
    return out


def aligned_copy(array: Array) -> Array:
    """Return a copy in C order, with exclusively owned memory that is aligned to 64 bytes. A framework that can take
    over NumPy's memory, as JAX on the CPU, then needs no further copy.

    Example:
        >>> import numpy as np
        >>> copy = aligned_copy(np.arange(6).reshape(2, 3).T)
        >>> copy.tolist(), copy.flags.c_contiguous, copy.ctypes.data % 64
        ([[0, 3], [1, 4], [2, 5]], True, 0)
    """
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    out = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy_into(out, array)
    return out


def copy_into(out: Array, array: Array) -> None:
    """Copy values into an array of the same shape and dtype, fast also if one is the other's transpose.

    Args:
        out: destination array; any strides.
        array: the values.

    Raises:
        ValueError: another shape or dtype.
    """
    if out.shape != array.shape or out.dtype != array.dtype:
        raise ValueError(f"{array.dtype}{list(array.shape)} does not go into {out.dtype}{list(out.shape)}")
    size = array.dtype.itemsize
    if array.dtype.isbuiltin != 1 and size in (1, 2, 4, 8) and not array.dtype.hasobject:
        # NumPy copies extension dtypes, such as bfloat16, with one call per element
        out, array = out.view(f"u{size}"), array.view(f"u{size}")
    if array.nbytes < _SMALL:
        np.copyto(out, array)
        return
    order = sorted(range(array.ndim), key=lambda axis: -abs(out.strides[axis]))
    out, array = out.transpose(order), array.transpose(order)
    last = abs(array.strides[-1])
    faster = [axis for axis in range(array.ndim - 1) if abs(array.strides[axis]) < last and array.shape[axis] > 1]
    if not faster or array.shape[-1] == 1 or last < _PADDING:
        np.copyto(out, array)
        return
    blocks = list(_blocks(out, array))
    workers = _thread_count() if array.nbytes >= _LARGE else 1
    if workers == 1:
        _copy_transposed(blocks)
        return
    if len(blocks) < workers:  # each thread takes a section of the last axis
        step = -(-array.shape[-1] // (workers * _ROWS)) * _ROWS
        starts = range(0, array.shape[-1], step)
        blocks = [(to[..., at : at + step], of[..., at : at + step]) for to, of in blocks for at in starts]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(workers) as pool:  # NumPy copies without the GIL
        list(pool.map(lambda number: _copy_transposed(blocks[number::workers]), range(workers)))


def _blocks(out: Array, array: Array) -> Iterator[tuple[Array, Array]]:
    """Yield parts of both arrays whose `_ROWS` of the last axis fit into the cache, cut along the axis with the largest
    strides."""
    rows = max(1, array.shape[-1] // _ROWS)
    if array.nbytes <= 2 * rows * _BUFFER:
        yield out, array
        return
    axis = max((axis for axis in range(array.ndim - 1) if array.shape[axis] > 1), key=lambda a: abs(array.strides[a]))
    step = max(1, array.shape[axis] * rows * _BUFFER // array.nbytes)
    for start in range(0, array.shape[axis], step):
        cut = (*(slice(None),) * axis, slice(start, start + step))
        yield from _blocks(out[cut], array[cut])


def _copy_transposed(blocks: Sequence[tuple[Array, Array]]) -> None:
    """Copy through a buffer in the source's order, in which the axis next to the last one is padded."""
    for out, array in blocks:
        lying = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
        number = lying.index(array.ndim - 1)
        lengths = [array.shape[axis] for axis in lying]
        lengths[number] = min(_ROWS, array.shape[-1])
        padded = list(lengths)
        if number + 1 < array.ndim:
            padded[number + 1] += -(-_PADDING // (array.dtype.itemsize * math.prod(lengths[number + 2 :])))
        cut = tuple(slice(length) for length in lengths)
        back = sorted(range(array.ndim), key=lying.__getitem__)
        buffer = np.empty(padded, array.dtype)[cut].transpose(back)
        for start in range(0, array.shape[-1], _ROWS):
            rows = array[..., start : start + _ROWS]
            held = buffer[..., : rows.shape[-1]]
            np.copyto(held, rows)
            np.copyto(out[..., start : start + _ROWS], held)


def _thread_count() -> int:
    """Return the number of threads of a copy; memory is not faster with more."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, 4)
