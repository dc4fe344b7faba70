"""`contiguous` and `fresh`: the copies that moving a model is made of. Called by `tensors`, which writes files, and by
backends whose arrays are filled from NumPy's.

NumPy copies a transposed matrix of 2-byte numbers element by element, at 0.3 GB/s where memory gives ten: every read is
of another line of the cache, and where rows are a power of two long all of these lines share one place in it. Copying a
few rows at a time into a buffer whose rows lie a little farther apart, and transposing from there, is eight times
faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_ROWS: Final = 128
_SMALL: Final = 1 << 16
"""Bytes below which NumPy's own copy is as fast."""
_PADDING: Final = 64
"""Bytes between the buffer's rows: one line of the cache."""
_ALIGNED: Final = 64
"""What XLA asks of memory that it takes over."""


def contiguous(array: Array) -> Array:
    """The values in C order: the array itself if it is so already, otherwise a copy, made fast.

    Example:
        >>> import numpy as np
        >>> contiguous(np.arange(6).reshape(2, 3).T).tolist()
        [[0, 3], [1, 4], [2, 5]]
    """
    if array.flags.c_contiguous:
        return array
    import numpy as np

    out = np.empty(array.shape, array.dtype)
    copy_into(out, array)
    return out


def fresh(array: Array) -> Array:
    """A copy in C order whose memory nobody else has, and begins where a framework's own would (at a multiple of 64):
    one that takes over NumPy's memory where it can, as JAX does on the CPU, then needs no copy of its own.

    Example:
        >>> import numpy as np
        >>> copy = fresh(np.arange(6).reshape(2, 3).T)
        >>> copy.tolist(), copy.flags.c_contiguous, copy.ctypes.data % 64
        ([[0, 3], [1, 4], [2, 5]], True, 0)
    """
    import numpy as np

    memory = np.empty(array.nbytes + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    out = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy_into(out, array)
    return out


def copy_into(out: Array, array: Array) -> None:
    """Copy values into an array of the same shape and dtype, fast where one is the other's transposed.

    Args:
        out: what is written to; any strides.
        array: the values.

    Raises:
        ValueError: another shape or dtype.
    """
    import numpy as np

    if out.shape != array.shape or out.dtype != array.dtype:
        raise ValueError(f"{array.dtype}{list(array.shape)} does not go into {out.dtype}{list(out.shape)}")
    size = array.dtype.itemsize
    if array.dtype.isbuiltin != 1 and size in (1, 2, 4, 8) and not array.dtype.hasobject:
        # NumPy copies others' dtypes, such as bfloat16, by a call for each element
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
    # the axes as they lie in the source, the written one's neighbour padded
    lying = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    number = lying.index(array.ndim - 1)
    lengths = [array.shape[axis] for axis in lying]
    lengths[number] = min(_ROWS, array.shape[-1])
    padded = list(lengths)
    inner = size
    for length in lengths[number + 2 :]:
        inner *= length
    padded[number + 1] += -(-_PADDING // inner)
    cut = tuple(slice(length) for length in lengths)
    back = sorted(range(array.ndim), key=lying.__getitem__)
    buffer = np.empty(padded, array.dtype)[cut].transpose(back)
    for start in range(0, array.shape[-1], _ROWS):
        rows = array[..., start : start + _ROWS]
        held = buffer[..., : rows.shape[-1]]
        np.copyto(held, rows)
        np.copyto(out[..., start : start + _ROWS], held)
