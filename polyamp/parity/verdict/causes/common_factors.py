"""Common factors of two arrays, in all elements or in those that are not 0."""

from __future__ import annotations

from typing import Final

from polyamp.parity.trace.sketch import Sketch

FACTOR_TOLERANCE: Final = 1e-4
"""Largest relative distance of two factors that count as equal."""


def common_factor(a: Sketch, b: Sketch) -> float | None:
    """Return the factor between the elements of both sides; None if there is no common factor, or if it is 1."""
    import numpy as np

    x, y = a.samples(), b.samples()
    large = np.abs(x) > 1e-3 * (np.max(np.abs(x)) if x.size else 0.0)
    if x.shape != y.shape or int(large.sum()) < 2:
        return None
    ratios = y[large] / x[large]
    middle = float(np.median(ratios))
    spread = float(np.max(np.abs(ratios - middle)))
    return middle if spread < FACTOR_TOLERANCE * abs(middle) and abs(middle - 1.0) > 10 * FACTOR_TOLERANCE else None


def has_common_factor_where_nonzero(a: Sketch, b: Sketch) -> bool:
    """Return whether the elements that are nonzero on both sides agree up to a factor."""
    import numpy as np

    x, y = a.samples(), b.samples()
    both = (x != 0) & (y != 0)
    if int(both.sum()) < 4:
        return False
    ratios = y[both] / x[both]
    return bool(np.max(np.abs(ratios - np.median(ratios))) < 1e-2 * abs(np.median(ratios)))
