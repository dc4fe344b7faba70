"""`EntryPair`: two matching entries; `EntryComparison`: their distance and the distance that rounding allows."""

from __future__ import annotations

import functools
import math
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.parity.trace.sketch import Sketch, sketch_distance
from polyamp.parity.trace.trace import Entry

Array = np.ndarray[Any, Any]
_ROUNDING_GRADIENT_SHARE: Final = 1e-2
"""Largest norm of a float32 gradient, relative to that under the policy, at which the latter is rounding alone."""


class EntryPair:
    """Two matching entries, with what is computed once of them.

    Attributes:
        one, two: the entries.
        wide: the same quantity of each side's own wider run; None if there is none.
        module: path of the module, without the number of its call.
        array: names of the layer and of the array in it.
    """

    def __init__(self, one: Entry, two: Entry, wide: tuple[Entry | None, Entry | None] = (None, None)) -> None:
        self.one, self.two, self.wide = one, two, wide
        self.module = one.module.partition("#")[0]
        self.array = one.module, one.name

    @functools.cached_property
    def sketches(self) -> tuple[Sketch, Sketch]:
        """The sketches of two arrays."""
        return self.one.array_sketch, self.two.array_sketch

    @functools.cached_property
    def samples(self) -> tuple[Array, Array]:
        """The stored elements of two arrays."""
        one, two = self.sketches
        return one.samples(), two.samples()

    @functools.cached_property
    def distance(self) -> float:
        """Absolute distance of two arrays."""
        return sketch_distance(*self.sketches)

    @functools.cached_property
    def scale(self) -> float:
        """Norm of the larger array."""
        one, two = self.sketches
        return max(one.norm, two.norm)

    @functools.cached_property
    def own(self) -> tuple[float | None, float | None]:
        """Distance of each side from its own wider run; None if there is none, or if it is not finite."""
        return _own_distance(self.one, self.wide[0]), _own_distance(self.two, self.wide[1])


class EntryComparison(NamedTuple):
    """Comparison of two matching entries.

    Attributes:
        one, two: the entries.
        distance: absolute.
        allowed: absolute.
        scale: magnitude to which relative numbers refer.
        own: absolute distance of each side from its own wider run.
        kind: "" where numbers decide, else "dtype", "operations", "randomness", "missing".
        why: the part of an optimizer that explains it, a sentence.
    """

    one: Entry
    two: Entry
    distance: float
    allowed: float
    scale: float
    own: tuple[float | None, float | None]
    kind: str = ""
    why: str = ""

    @property
    def counts(self) -> bool:
        """Whether it counts as a difference."""
        return bool(self.kind) or not self.distance <= self.allowed

    @property
    def ratio(self) -> float:
        """Distance in multiples of the allowed one."""
        if not math.isfinite(self.distance):
            return math.inf
        return self.distance / self.allowed if self.allowed else (math.inf if self.distance else 0.0)


def prefer_float64_distance(
    comparison: EntryComparison, wide: tuple[Entry | None, Entry | None], allowed: float
) -> EntryComparison:
    """Return `comparison`, with the distance of the float64 runs if that exceeds `allowed`.

    The float64 runs differ only by their formulas, and by constants that a program rounds to float32.
    """
    one, two = (None if entry is None else entry.sketch for entry in wide)
    if one is None or two is None:
        return comparison
    distance = sketch_distance(one, two)
    if not math.isfinite(distance) or distance <= allowed:
        return comparison
    return comparison._replace(distance=distance, allowed=allowed)


def _own_distance(entry: Entry, wide: Entry | None) -> float | None:
    if wide is None or wide.sketch is None or entry.sketch is None:
        return None
    found = sketch_distance(entry.sketch, wide.sketch)
    return found if math.isfinite(found) else None


def scalar_distance(one: float, other: float) -> float:
    """Return the distance of two numbers; infinite if only one is finite, or if they are non-finite and differ."""
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other)
    return 0.0 if one == other or (math.isnan(one) and math.isnan(other)) else math.inf


def is_rounding_only(pair: EntryPair) -> bool:
    """Return whether a gradient is rounding alone on both sides, as their float32 runs show. Example: the bias of a
    convolution before a batch normalization, whose terms add up to 0."""
    return all(
        each is not None and each.sketch is not None and each.sketch.norm <= _ROUNDING_GRADIENT_SHARE * side.norm
        for side, each in zip(pair.sketches, pair.wide, strict=True)
    )


def has_equal_layout(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether two shapes are equal up to axes of length 1, or one is a flattened form of the other."""
    if one == other:
        return True
    some, others = ([length for length in shape if length != 1] for shape in (one, other))
    return math.prod(some) == math.prod(others) and (some == others or len(some) != len(others))
