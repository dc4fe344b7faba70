"""`Compared`: two entries beside each other, and how far they are apart. Made by `verdict` and `updates`, read by
`likeness`."""

from __future__ import annotations

import math
from typing import NamedTuple

from polyamp.parity.sketch import apart
from polyamp.parity.trace import Entry


class Compared(NamedTuple):
    """What two runs showed at one entry.

    Attributes:
        one, two: the entries.
        distance: absolute.
        allowed: absolute.
        scale: what relative numbers are relative to.
        own: of either side from its judge, absolute.
        kind: "" where numbers decide, else "dtype", "operations", "randomness", "missing".
        why: what in an optimizer explains it, a sentence.
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
        """Whether it is a difference."""
        return bool(self.kind) or not self.distance <= self.allowed

    @property
    def ratio(self) -> float:
        """How many times what is allowed."""
        if not math.isfinite(self.distance):
            return math.inf
        return self.distance / self.allowed if self.allowed else (math.inf if self.distance else 0.0)


def exactly(found: Compared, wide: tuple[Entry | None, Entry | None], allowed: float) -> Compared:
    """What was found, or how far the float64 runs are apart where that is more than float32 explains: they differ by
    nothing but their formulas, and constants that a program rounds to float32."""
    one, two = (None if entry is None else entry.sketch for entry in wide)
    if one is None or two is None or one.size != two.size:
        return found
    distance = apart(one, two)
    if not math.isfinite(distance) or distance <= allowed:
        return found
    return found._replace(distance=distance, allowed=allowed)


def own_distance(entry: Entry, wide: Entry | None) -> float | None:
    """How far a side is from its own wider run; None where there is none, or where it is not finite."""
    if wide is None or wide.sketch is None or entry.sketch is None or wide.sketch.size != entry.sketch.size:
        return None
    found = apart(entry.sketch, wide.sketch)
    return found if math.isfinite(found) else None


def far(one: float, other: float) -> float:
    """How far two numbers are apart; infinite where one alone is not finite, or both in another way."""
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other)
    return 0.0 if one == other or (math.isnan(one) and math.isnan(other)) else math.inf
