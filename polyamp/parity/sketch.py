"""`Sketch`: an array as a comparison needs it, in a few kilobytes whatever its size.

A small array is kept whole. Of a larger one there are sample values, and sums of all its elements with random signs in
a few hundred buckets: the sums of two arrays are as far apart as the arrays are, but for some 6 % (Alon, Matias and
Szegedy, "The space complexity of approximating the frequency moments", 1996), so that two processes can compare what
neither sends. Both need one order of the elements: canonical layout.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

WHOLE: Final = 1024
"""Arrays of up to so many elements are kept whole; of larger ones so many values are samples."""
BUCKETS: Final = 256
_CHUNK: Final = 1 << 18
"""Elements that are looked at together: what a processor's cache holds."""
_ROW: Final = 1 << 20
"""Length of the row of random signs."""
_BEGINS: Final = 4096
"""Chunks until places in the row come again: a billion elements."""
_LOOK: Final = 64
"""Elements by which most arrays show that a dtype does not hold them."""
_SEED: Final = 20_26
_WIDTHS: Final = ("bfloat16", "float16", "float32", "float64")


class Sketch(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of an array.

    Attributes:
        dtype: the dtype it had in its framework.
        shape: in canonical layout.
        mean: of its finite elements.
        rms: root of the mean square of its finite elements.
        largest: the largest absolute value of a finite element.
        nonfinite: how many elements are inf or NaN. They count as 0 in everything else.
        zeros: how many elements are 0.
        width: the narrowest of bfloat16, float16, float32 and float64 that holds every element exactly.
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
        """The kept elements, float64: all of them, or those at places that depend on the size alone."""
        import numpy as np

        return np.frombuffer(self.values, np.float32 if self.half else np.float64).astype(np.float64)

    def _sums(self) -> Array:
        import numpy as np

        return np.frombuffer(self.sums, np.float64) if self.sums else self.samples()


def sketch(array: Array, dtype: str) -> Sketch:
    """The sketch of an array of floating or whole numbers, in canonical layout.

    Args:
        array: NumPy array.
        dtype: the dtype that it had in its framework, where it is another here.

    Example:
        >>> import numpy as np
        >>> one = sketch(np.arange(5, dtype="f4"), "bfloat16")
        >>> one.largest, one.zeros, one.width
        (4.0, 1, 'bfloat16')
    """
    import numpy as np

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
        if flat.size > WHOLE:
            sums += _signed_sums(wide, start // _CHUNK)
    kept = _kept(flat)
    half = kept.dtype == np.float32
    count = max(flat.size, 1)
    return Sketch(
        dtype=dtype,
        shape=tuple(int(length) for length in np.shape(array)),
        mean=total / count,
        rms=math.sqrt(squares / count),
        largest=largest,
        nonfinite=nonfinite,
        zeros=zeros,
        width=_WIDTHS[width],
        values=np.where(np.isfinite(kept), kept, kept.dtype.type(0)).tobytes(),
        half=half,
        sums=sums.tobytes() if flat.size > WHOLE else b"",
    )


def apart(one: Sketch, other: Sketch) -> float:
    """The L2 norm of the difference of two arrays; infinite where they differ in shape or where one alone is not
    finite.

    Example:
        >>> import numpy as np
        >>> x = np.random.default_rng(0).standard_normal(100_000).astype("f4")
        >>> found = apart(sketch(x, "float32"), sketch(x * np.float32(1.5), "float32"))
        >>> bool(abs(found / np.linalg.norm(x) - 0.5) < 0.1)
        True
    """
    import numpy as np

    if one.size != other.size or one.nonfinite != other.nonfinite:
        return math.inf
    return float(np.linalg.norm(one._sums() - other._sums()))


def places(size: int) -> Array:
    """The flat indices of the elements that a sketch of an array of this size keeps, sorted."""
    import numpy as np

    if size <= WHOLE:
        return np.arange(size)
    return np.sort(np.random.default_rng(_SEED).integers(0, size, WHOLE))


def _kept(flat: Array) -> Array:
    return flat[places(flat.size)]


def _width(wide: Array, known: int, widest: int) -> int:
    """The number of the narrowest dtype that holds these values, no narrower than what is known already.

    Args:
        wide: values, float64.
        known: of the values before.
        widest: of the dtype that they came in.
    """
    import ml_dtypes
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        for number, dtype in enumerate((ml_dtypes.bfloat16, np.float16, np.float32)[known:widest], known):
            if all(np.array_equal(each.astype(dtype).astype(np.float64), each) for each in (wide[:_LOOK], wide)):
                return number
    return widest


@functools.cache
def _signs() -> Array:
    import numpy as np

    bits = np.unpackbits(np.frombuffer(np.random.default_rng(_SEED).bytes(_ROW // 8), np.uint8))
    row = 1.0 - 2.0 * bits
    return np.concatenate([row, row[:_CHUNK]])


@functools.cache
def _begins() -> list[tuple[int, int]]:
    import numpy as np

    rng = np.random.default_rng(_SEED + 1)
    return list(zip(rng.integers(0, _ROW, _BEGINS).tolist(), rng.integers(0, 2, _BEGINS).tolist(), strict=True))


def _signed_sums(wide: Array, number: int) -> Array:
    """The bucket sums of one chunk. Each chunk begins at a random place of one long row of signs, and has a sign of its
    own: had two chunks the same ones, what differs alike in both would count twice or not at all."""

    begin, sign = _begins()[number % _BEGINS]
    signed = wide * _signs()[begin : begin + wide.size]
    whole = signed.size - signed.size % BUCKETS
    found: Array = signed[:whole].reshape(-1, BUCKETS).sum(0)
    found[: signed.size - whole] += signed[whole:]
    return found if sign else -found
