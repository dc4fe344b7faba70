"""`differing_indices`: at which indices of an axis two arrays differ, such as the rows of a mask, and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from polyamp.parity.trace.sketch import Sketch, sample_indices

Array = np.ndarray[Any, Any]
_MAX_LENGTH: Final = 4096
_MIN_SAMPLES: Final = 3
"""Least number of stored elements of an index of an axis from which it is judged."""
_EQUAL_SHARE: Final = 1e-3
"""Largest root mean square of the differences at an index, relative to that of all, at which it counts as equal."""


def differing_indices(one: Sketch, two: Sketch, allowed: float) -> dict[int, Array]:
    """Return axis -> which of its indices differ, for axes at some of whose indices the arrays agree.

    Args:
        one, two: the arrays.
        allowed: largest distance of the whole arrays that rounding explains.
    """
    if one.shape != two.shape or len(one.shape) < 2 or not one.size:
        return {}
    apart = np.square(one.samples() - two.samples())
    least = max(allowed**2 / one.size, _EQUAL_SHARE**2 * float(apart.mean()))
    places = np.unravel_index(sample_indices(one.size), one.shape)
    found = {}
    for axis, (place, length) in enumerate(zip(places, one.shape, strict=True)):
        if not 1 < length <= _MAX_LENGTH:
            continue
        counts = np.bincount(place, minlength=length)
        if counts.min() < _MIN_SAMPLES:
            continue
        differs = np.bincount(place, weights=apart, minlength=length) / counts > least
        if differs.any() and not differs.all():
            found[axis] = differs
    return found


def index_evidence(profile: Mapping[int, Array]) -> list[str]:
    """Return the result of `differing_indices` as a sentence; empty if there is no such axis."""
    texts = [f"{_ranges(mask)} of axis {axis} (length {mask.size})" for axis, mask in profile.items()]
    return [f"They differ only at {', and at '.join(texts)}."] if texts else []


def attention_evidence(profile: Mapping[int, Array]) -> list[str]:
    """Return what the indices say of an attention's output of shape (rows, positions, channels), a sentence each."""
    found = []
    rows, positions, channels = (profile.get(axis) for axis in range(3))
    if positions is not None and not positions[0] and positions[1:].all():
        found.append(
            "Position 0, which attends to itself alone, agrees: the scores differ (scale, rotation or positions, a "
            "bias), and not the values."
        )
    if positions is not None and not positions[-1] and positions[:-1].all():
        found.append("The last position, which sees all others, agrees: the causal mask differs.")
    if rows is not None:
        found.append("Some rows of the batch agree, such as those without padding: the padding mask differs.")
    if channels is not None:
        found.append("Some channels agree: some heads are given the keys, values or scores of others.")
    return found


def _ranges(mask: Array) -> str:
    """Return the places of a mask as text.

    >>> import numpy as np
    >>> _ranges(np.array([True, True, False, True]))
    'index 0 to 1, 3'
    """
    places = np.flatnonzero(mask)
    parts = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    texts = [f"{part[0]}" if part.size == 1 else f"{part[0]} to {part[-1]}" for part in parts]
    shown = texts if len(texts) <= 4 else [*texts[:3], f"{len(texts) - 3} more"]
    return f"index {', '.join(shown)}"
