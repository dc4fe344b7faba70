"""`Sketch`: summary of an array in a few kilobytes, from which the distance of two arrays is estimated.

A small array is stored whole. For a larger one the sketch stores sample values, and sums of all elements with random
signs in a few hundred buckets. The distance between the sums of two arrays equals that of the arrays to about 6 %
(Alon, Matias and Szegedy, "The space complexity of approximating the frequency moments", 1996). So two processes can
compare arrays without sending them. Both must use the same element order: canonical layout.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import msgspec
import numpy as np

from polyamp.float_formats import FORMATS

Array = np.ndarray[Any, Any]
MAX_EXACT_SIZE: Final = 1024
"""Largest number of elements of an array that is stored whole; also the number of samples of a larger one."""
BUCKETS: Final = 256
_CHUNK: Final = 1 << 18
"""Elements that are processed at a time: as many as fit in a processor's cache."""
_SIGN_ROW_LENGTH: Final = 1 << 20
"""Length of the row of random signs."""
_OFFSET_PERIOD: Final = 4096
"""Number of chunks after which offsets in the row repeat: a billion elements."""
_PROBE_SIZE: Final = 64
"""Number of leading elements that are tested first; in most arrays they rule out a dtype."""
_SEED: Final = 20_26
_WIDTHS: Final = tuple(sorted(FORMATS, key=lambda name: FORMATS[name].fraction_bits))
"""Names of the formats, the least precise first."""


class Sketch(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of an array.

    Attributes:
        dtype: the dtype it had in its framework.
        shape: in canonical layout.
        mean: of its finite elements.
        rms: root of the mean square of its finite elements.
        largest: the largest absolute value of a finite element.
        nonfinite: number of elements that are inf or NaN. They count as 0 in everything else.
        zeros: number of elements that are 0.
        width: the narrowest of bfloat16, float16, float32 and float64 that represents every element exactly.
        values: all elements, or samples, raw bytes of float64 or, where `half` is set, float32.
        half: whether `values` are float32.
        sums: the bucket sums, raw bytes of float64; empty where `values` are all elements.
    """

    dtype: str
    shape: tuple[int, ...]
    mean: float
    rms: float
    largest: float
    nonfinite: int
    zeros: int
    width: str
    values: bytes
    half: bool
    sums: bytes

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def norm(self) -> float:
        """L2 norm of the finite elements."""
        return self.rms * math.sqrt(self.size)

    def samples(self) -> Array:
        """Return the stored elements, float64: all, or those at indices that depend on the size alone."""
        return np.frombuffer(self.values, np.float32 if self.half else np.float64).astype(np.float64)


def sketch(array: Array, dtype: str) -> Sketch:
    """Return the sketch of a floating or integer array in canonical layout.

    Args:
        array: NumPy array.
        dtype: its dtype in its framework, which may differ from that of `array`.

    Example:
        >>> import numpy as np
        >>> one = sketch(np.arange(5, dtype="f4"), "bfloat16")
        >>> one.largest, one.zeros, one.width
        (4.0, 1, 'bfloat16')
    """
    flat = np.asarray(array).reshape(-1)
    if flat.dtype.kind != "f" or flat.dtype.itemsize < 4:
        flat = flat.astype(np.float64 if flat.dtype.itemsize > 4 else np.float32)
    total = squares = 0.0
    largest = 0.0
    nonfinite = zeros = 0
    width, widest = 0, 2 if flat.dtype == np.float32 else 3
    sums = np.zeros(BUCKETS)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        wide = part.astype(np.float64)
        finite = np.isfinite(wide)
        bad = wide.size - int(np.count_nonzero(finite))
        if bad:
            nonfinite += bad
            wide[~finite] = 0.0
        zeros += wide.size - bad - int(np.count_nonzero(wide))
        if width < widest:
            width = _width(wide, width, widest)
        total += float(wide.sum())
        squares += float(wide @ wide)
        largest = max(largest, float(wide.max()), -float(wide.min()))
        if flat.size > MAX_EXACT_SIZE:
            sums += _signed_sums(wide, start // _CHUNK)
    kept = flat if flat.size <= MAX_EXACT_SIZE else flat[sample_indices(flat.size)]
    half = kept.dtype == np.float32
    count = max(flat.size, 1)
    return Sketch(
        dtype=dtype,
        shape=np.shape(array),
        mean=total / count,
        rms=math.sqrt(squares / count),
        largest=largest,
        nonfinite=nonfinite,
        zeros=zeros,
        width=_WIDTHS[width],
        values=np.where(np.isfinite(kept), kept, kept.dtype.type(0)).tobytes(),
        half=half,
        sums=sums.tobytes() if flat.size > MAX_EXACT_SIZE else b"",
    )


def sketch_distance(one: Sketch, other: Sketch) -> float:
    """Return the estimated L2 norm of the difference of two arrays.

    It is infinite if their sizes or their numbers of non-finite elements differ.

    Example:
        >>> import numpy as np
        >>> x = np.random.default_rng(0).standard_normal(100_000).astype("f4")
        >>> found = sketch_distance(sketch(x, "float32"), sketch(x * np.float32(1.5), "float32"))
        >>> bool(abs(found / np.linalg.norm(x) - 0.5) < 0.1)
        True
    """
    has_equal_size = one.shape == other.shape or one.size == other.size
    if not has_equal_size or one.nonfinite != other.nonfinite:
        return math.inf
    if one.sums:
        return float(np.linalg.norm(np.frombuffer(one.sums) - np.frombuffer(other.sums)))
    return float(np.linalg.norm(one.samples() - other.samples()))


def sample_indices(size: int) -> Array:
    """Return the sorted flat indices of the elements that the sketch of an array of this size stores."""
    if size <= MAX_EXACT_SIZE:
        return np.arange(size)
    return np.sort(np.random.default_rng(_SEED).integers(0, size, MAX_EXACT_SIZE))


def _width(wide: Array, known: int, widest: int) -> int:
    """Return the index of the narrowest dtype that represents these values exactly, at least `known`.

    Args:
        wide: values, float64.
        known: index for the values so far.
        widest: index of the dtype in which they were given.
    """
    import ml_dtypes  # noqa: F401  # gives NumPy the name of bfloat16

    with np.errstate(over="ignore", invalid="ignore"):
        probe = wide[:_PROBE_SIZE]
        for number, dtype in enumerate(_WIDTHS[known:widest], known):
            is_exact = np.array_equal(probe.astype(dtype).astype(np.float64), probe)
            if is_exact and np.array_equal(wide.astype(dtype).astype(np.float64), wide):
                return number
    return widest


@functools.cache
def _sign_row() -> Array:
    bits = np.unpackbits(np.frombuffer(np.random.default_rng(_SEED).bytes(_SIGN_ROW_LENGTH // 8), np.uint8))
    row = 1.0 - 2.0 * bits
    return np.concatenate([row, row[:_CHUNK]])


@functools.cache
def _chunk_offsets() -> list[tuple[int, int]]:
    rng = np.random.default_rng(_SEED + 1)
    return list(
        zip(
            rng.integers(0, _SIGN_ROW_LENGTH, _OFFSET_PERIOD).tolist(),
            rng.integers(0, 2, _OFFSET_PERIOD).tolist(),
            strict=True,
        )
    )


def _signed_sums(wide: Array, number: int) -> Array:
    """Return the bucket sums of one chunk.

    Each chunk starts at a random offset of one long row of signs, and has a random sign. With equal signs in two
    chunks, equal differences in both would add up or cancel.
    """
    begin, sign = _chunk_offsets()[number % _OFFSET_PERIOD]
    signed = wide * _sign_row()[begin : begin + wide.size]
    whole = signed.size - signed.size % BUCKETS
    found: Array = signed[:whole].reshape(-1, BUCKETS).sum(0)
    found[: signed.size - whole] += signed[whole:]
    return found if sign else -found
