"""Common factors of two arrays, in all elements or in those that are not 0."""

from __future__ import annotations

from typing import Final

import numpy as np

from polyamp.parity.trace.sketch import Sketch
from polyamp.parity.verdict.causes.cause import Cause

FACTOR_TOLERANCE: Final = 1e-4
"""Largest relative distance of two factors that count as equal."""
_ZEROS_TOLERANCE: Final = 1e-2
"""The same, of elements around others that are 0."""
_MIN_ELEMENTS: Final = 4


def common_factor(a: Sketch, b: Sketch) -> float | None:
    """Return the factor between the elements of both sides; None if there is no common factor, or if it is 1."""
    x, y = a.samples(), b.samples()
    large = np.abs(x) > 1e-3 * (np.max(np.abs(x)) if x.size else 0.0)
    if x.shape != y.shape or int(large.sum()) < 2:
        return None
    ratios = y[large] / x[large]
    middle = float(np.median(ratios))
    spread = float(np.max(np.abs(ratios - middle)))
    return middle if spread < FACTOR_TOLERANCE * abs(middle) and abs(middle - 1.0) > 10 * FACTOR_TOLERANCE else None


def explain_zeros(labels: tuple[str, str], a: Sketch, b: Sketch, where: str) -> Cause | None:
    """Return that other elements are 0 and the rest agrees up to a factor; None if it is not so.

    A dropout multiplies what it keeps, or keeps other elements on either side. Equal elements besides zeros on one side
    alone are those of a mask.

    Args:
        labels: of both sides.
        a, b: arrays of both.
        where: the place, in words.
    """
    x, y = a.samples(), b.samples()
    both = (x != 0) & (y != 0)
    if a.zeros == b.zeros or int(both.sum()) < _MIN_ELEMENTS:
        return None
    ratios = y[both] / x[both]
    factor = float(np.median(ratios))
    if not np.max(np.abs(ratios - factor)) < _ZEROS_TOLERANCE * abs(factor):
        return None
    counts = f"{a.zeros} of {a.size} are 0 in {labels[0]}, {b.zeros} in {labels[1]}."
    is_masked = bool(np.all(x[y != 0])) or bool(np.all(y[x != 0]))
    if is_masked and abs(factor - 1.0) <= FACTOR_TOLERANCE:
        label = labels[0] if a.zeros > b.zeros else labels[1]
        return Cause("formula", f"{label} sets elements to 0 {where}, and the rest agrees: a mask.", [counts])
    return Cause(
        "randomness", f"Other elements are 0 {where}, and the rest agrees up to a factor: a dropout.", [counts]
    )
