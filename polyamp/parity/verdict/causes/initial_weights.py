"""`explain_initial_weight`: where the values came from with which a side's parameter began, if not from its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from polyamp.parity.trace.sketch import Sketch, sketch_distance
from polyamp.parity.trace.trace import Entry
from polyamp.parity.verdict.causes.cause import Cause

Array = np.ndarray[Any, Any]
_EQUAL: Final = 1e-6
_ROUNDED: Final = 1e-5
"""Largest relative distance of arrays that were computed in other orders."""
_MAX_SHIFT: Final = 64


def explain_initial_weight(labels: tuple[str, str], entries: tuple[Entry, Entry], first: Iterable[Entry]) -> Cause:
    """Return how a parameter of the second side differs before the first step.

    Args:
        labels: of both sides.
        entries: of the parameter, of both sides.
        first: all entries of the first side before the first step.
    """
    a, b = (entry.array_sketch for entry in entries)
    entry = entries[0]
    what = f"{entry.what} {entry.name!r} of {entry.module!r}"
    scale = max(a.norm, b.norm) or 1.0
    text = f"relative distance {sketch_distance(a, b) / scale:.1e} before the first step."
    others = [each for each in first if (each.module, each.name) != (entry.module, entry.name)]
    for other in others:
        if other.sketch is not None and other.sketch.size == b.size and _is_same(other.sketch, b):
            path = f"{other.name!r} of {other.module!r}"
            return Cause("layout", f"{labels[1]} began with the values of {path} as {what}: exchanged.", [text])
    if is_permutation(a, b):
        order = find_order(a, b) or "in another order"
        return Cause("layout", f"{labels[1]} began with the values of {what} {order}.", [text])
    if a.width != b.width:
        widths = "; ".join(f"all values of {x} are numbers of {y.width}" for x, y in zip(labels, (a, b), strict=True))
        return Cause("dtype", f"{labels[1]} began with {what} in fewer digits.", [f"{widths}.", text])
    return Cause("layout", f"{labels[1]} began with other values of {what}.", [text])


def is_permutation(a: Sketch, b: Sketch) -> bool:
    """Return whether two arrays seem to hold the same numbers in other orders."""

    def near(one: float, other: float) -> bool:
        return abs(one - other) <= 1e-5 * max(abs(one), abs(other), a.rms)

    if a.size < 2 or not (near(a.mean, b.mean) and near(a.rms, b.rms) and near(a.largest, b.largest)):
        return False
    if not a.sums:
        return bool(np.allclose(np.sort(a.samples()), np.sort(b.samples()), rtol=1e-4, atol=1e-5 * a.rms))
    return bool(np.linalg.norm(a.samples() - b.samples()) > 0.1 * np.linalg.norm(a.samples()))


def find_order(a: Sketch, b: Sketch) -> str:
    """Return in words how the second array is a rearranged first one; "" if it is not known."""
    return next((words for words, array in _rearranged(a) if _is_equal(array, b)), "")


def _is_same(a: Sketch, b: Sketch) -> bool:
    return a.largest > 0.0 and sketch_distance(a, b) <= _EQUAL * b.norm


def _rearranged(sketch: Sketch) -> Iterator[tuple[str, Array]]:
    """Yield words and values of an array that is stored whole, with its axes exchanged, turned round or shifted."""
    array = sketch.samples()
    if array.size != math.prod(sketch.shape):
        return
    array = array.reshape(sketch.shape)
    for one, two in itertools.combinations(range(array.ndim), 2):
        if array.shape[one] == array.shape[two]:
            yield f"with axes {one} and {two} exchanged (transposed)", np.swapaxes(array, one, two)
    for count in range(1, array.ndim + 1):
        for axes in itertools.combinations(range(array.ndim), count):
            yield f"turned round along axis {' and '.join(map(str, axes))}", np.flip(array, axes)
    for axis, length in enumerate(array.shape):
        for shift in range(1, min(length, _MAX_SHIFT)):
            yield f"shifted by {shift} of {length} along axis {axis}", np.roll(array, shift, axis)


def _is_equal(array: Array, sketch: Sketch) -> bool:
    apart = array.ravel() - sketch.samples() if array.size == sketch.samples().size else array
    return float(np.linalg.norm(apart)) <= _ROUNDED * sketch.norm
