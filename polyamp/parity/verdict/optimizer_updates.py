"""`OptimizerUpdates`: comparison of parameters and optimizer slots after an update.

A tiny difference of a gradient may change an update a lot: Adam moves a parameter by the sign of a gradient that is
rounding alone. So a parameter is compared only in *steady* elements, whose gradients have been far larger than their
allowed distance at every step so far. The tenth of the elements that differs most is left out too: a fault of an
optimizer affects all of them.

Under a 16-bit policy few elements are steady, and the updates are compared by their projections as well: the rounding
of gradients hides an update's difference in most of its elements, but it is of random sign. Along one direction it adds
up to little, while another rate, decay or momentum adds up in every element: the other update is a multiple of the
first, or has a multiple of the weight or of the gradient more. Only elements count in which the gradients of both sides
have agreed to a tenth at every step: elsewhere a right update may have another sign.

Both use the samples of the sketches, which have the same indices for a parameter, its gradient and its slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.float_formats import FORMATS
from polyamp.parity.trace.trace import NOT_SLOTS
from polyamp.parity.verdict.distances import EntryComparison, EntryPair
from polyamp.parity.verdict.tolerances import FACTOR, PhaseTolerance

Array = np.ndarray[Any, Any]
_STEADY_FACTOR: Final = 30.0
"""Size of a steady gradient element, in multiples of its allowed distance."""
_TRIM_SHARE: Final = 0.1
"""Share of elements that is left out: those that differ most."""
_MIN_COSINE: Final = 0.99
"""Least cosine of two arrays that count as multiples of each other."""
_MIN_ELEMENTS: Final = 4
"""Least number of elements from which a multiple is derived."""
_FLOAT32_ROUNDOFF: Final = FORMATS["float32"].unit_roundoff
"""Unit roundoff of float32, the dtype of masters and slots."""

_BETA_ROUNDING: Final = _FLOAT32_ROUNDOFF / 1e-3
"""Relative distance that a slot may have because its weight 1 - beta is computed from a float32 beta, as in
TensorFlow's kernel: 0.999 is rounded by up to 2^-24, and 1 - 0.999 by a thousand times as much. The bias correction
removes it from the update."""
_MAX_GRADIENT_DISTANCE: Final = 0.1
"""Largest relative distance of a gradient's element on both sides with which the element of the update counts."""
_MIN_PROJECTED: Final = 8
"""Least number of such elements from which a projection is judged."""
_MIN_PROJECTED_SHARE: Final = 0.1
"""Least share of such elements: two arrays that have nothing in common agree to a tenth in one of 40."""
_DEVIATIONS: Final = 6.0
"""Largest accepted projection, in standard deviations of a sum of differences with random signs."""


class OptimizerUpdates:
    """Comparison of the updates of one phase.

    Args:
        tolerance: tolerance of the phase.

    Attributes:
        has_moved: whether an update has changed a parameter of either side.
    """

    def __init__(self, tolerance: PhaseTolerance) -> None:
        self._tolerance = tolerance
        self._steady_elements: dict[tuple[str, str], Array] = {}
        self._gradient_tolerance: dict[tuple[str, str], float] = {}
        self._gradients: dict[tuple[str, str], Array] = {}
        self._gradient_distances: dict[tuple[str, str], Array] = {}
        self._before: dict[tuple[str, str], tuple[Array, Array]] = {}
        self._update_rms: dict[tuple[str, str], float] = {}
        self._parameter_distance: dict[tuple[str, str], tuple[float, float]] = {}
        self._updated: set[tuple[str, str]] = set()
        self._judged: set[tuple[str, str]] = set()
        self.has_moved = False

    def count(self) -> tuple[int, int]:
        """Return the number of parameters of which an update was judged, and of those that were updated."""
        return len(self._judged), len(self._updated)

    def drift(self, outputs: Mapping[str, float]) -> float:
        """Return the relative distance of both sides' parameters after the last step.

        All elements count, steady or not. Kernels are relative to their own size, biases to that of the outputs to
        which they are added.

        Args:
            outputs: module -> root mean square of its output.
        """
        total = 0.0
        for (module, name), (distance, size) in self._parameter_distance.items():
            against = outputs.get(module, 0.0) if "bias" in name else size
            total += min(distance / against, 1.0) ** 2 if against else 0.0
        return math.sqrt(total)

    def record_gradient(self, pair: EntryPair, allowed: float) -> None:
        """Record a gradient and its allowed distance, before the update that it causes is compared."""
        key = pair.array
        each = allowed / math.sqrt(max(pair.sketches[0].size, 1))
        a, b = pair.samples
        least = np.minimum(np.abs(a), np.abs(b))
        apart = relative_distances(a, b)
        self._gradients[key] = a
        self._gradient_distances[key] = np.maximum(apart, self._gradient_distances.get(key, apart))
        steady = least >= _STEADY_FACTOR * each
        self._steady_elements[key] = steady & self._steady_elements.get(key, steady)
        share = allowed / pair.scale if pair.scale else 0.0
        self._gradient_tolerance[key] = max(self._gradient_tolerance.get(key, 0.0), share)

    def compare_slot(self, pair: EntryPair) -> EntryComparison | None:
        """Compare a slot of the optimizer, or a running statistic."""
        one, two, own, scale = pair.one, pair.two, pair.own, pair.scale
        if pair.sketches[0].size != pair.sketches[1].size:
            return None
        gradient_share = 2.0 * min(self._gradient_tolerance.get(pair.array, 0.0), 1.0)
        same_inputs = one.step <= 1
        allowed = max(
            self._tolerance.allowed(own, float(one.step), scale, same_inputs=same_inputs), gradient_share * scale
        )
        if one.what not in NOT_SLOTS:
            allowed = max(allowed, _BETA_ROUNDING * scale)
        return EntryComparison(one, two, pair.distance, allowed, scale, own)

    def compare_parameter(self, pair: EntryPair) -> EntryComparison | None:
        """Compare a parameter after an update; None if rounding hides the update in all of its elements."""
        one, two = pair.sketches
        if one.size != two.size:
            return None
        key, is_updated = pair.array, pair.one.step > 0
        a, b = pair.samples
        before = self._before.get(key, (a, b))
        moved = max(_rms(a - before[0]), self._update_rms.get(key, 0.0))
        self._update_rms[key], self._before[key] = moved, (a, b)
        self._parameter_distance[key] = (pair.distance / math.sqrt(max(one.size, 1)), max(one.rms, two.rms))
        if is_updated:
            self._updated.add(key)
            self.has_moved |= bool((a != before[0]).any() or (b != before[1]).any())
        if one.nonfinite != two.nonfinite:
            return EntryComparison(pair.one, pair.two, math.inf, 0.0, one.rms, (None, None))
        found = [self._compare_steady(pair, before[0])]
        if is_updated and not self._tolerance.wide:
            found.append(self._compare_projections(pair, before))
        judged = [each for each in found if each is not None]
        if judged and is_updated:
            self._judged.add(key)
        return max(judged, key=lambda each: (each.counts, each.ratio), default=None)

    def _compare_steady(self, pair: EntryPair, before: Array) -> EntryComparison | None:
        """Compare the steady elements of a parameter; None if there are none."""
        one, two, key = pair.one, pair.two, pair.array
        a, b = pair.samples
        steady = self._steady_elements.get(key)
        if steady is None:
            steady = np.ones(a.shape, bool)
        if not steady.any():
            return None
        chosen = _trimmed_rms(a - b, steady)
        own = [
            None if w is None or w.sketch is None else _trimmed_rms(side - w.sketch.samples(), steady)
            for side, w in zip((a, b), pair.wide, strict=True)
        ]
        scale = max(each.rms for each in pair.sketches)
        gradient_share = min(self._gradient_tolerance.get(key, 0.0), 1.0) * self._update_rms[key]
        arithmetic = FACTOR * _FLOAT32_ROUNDOFF * math.sqrt(max(one.step, 1)) * scale
        same_inputs = one.step <= 1
        own_share = 0.0
        if any(each is not None for each in own):
            own_share = self._tolerance.allowed((own[0], own[1]), 0.0, 0.0, same_inputs=same_inputs)
        allowed = max(own_share, gradient_share, arithmetic)
        why = _explain_update(a, b, before, steady) if chosen > allowed and one.step else ""
        return EntryComparison(one, two, chosen, allowed, scale, (own[0], own[1]), why=why)

    def _compare_projections(self, pair: EntryPair, before: tuple[Array, Array]) -> EntryComparison | None:
        """Compare the updates of a parameter by their projections; None if too few elements can be judged."""
        apart = self._gradient_distances.get(pair.array)
        chosen = None if apart is None else elements_that_count(apart)
        if apart is None or chosen is None:
            return None
        ours, theirs = (now[chosen] - old[chosen] for now, old in zip(pair.samples, before, strict=True))
        update = max(ours, theirs, key=_rms)
        rounding = max(FORMATS[each.dtype].unit_roundoff for each in pair.sketches)
        scale = max(each.rms for each in pair.sketches)
        projections = project(
            (ours, theirs),
            {"update": update, "weight": before[0][chosen], "gradient": self._gradients[pair.array][chosen]},
            apart[chosen],
            self._tolerance.roundoff,
            FACTOR * rounding * scale,
        )
        nearest = max(projections, key=lambda each: (each.ratio > 1.0, each.distance), default=None)
        if nearest is None:
            return None
        why = "" if nearest.ratio <= 1.0 else _explain_projection(nearest, _rms(ours) >= _rms(theirs))
        return EntryComparison(pair.one, pair.two, nearest.distance, nearest.allowed, scale, (None, None), why=why)


def _explain_update(a: Array, b: Array, before: Array, steady: Array) -> str:
    """Return the optimizer setting that explains the difference of two updates, as a sentence; "" if none does.

    Args:
        a, b: the parameter after the step.
        before: the parameter before it.
        steady: mask of the elements that count.
    """
    difference, update, weight = (each[steady] for each in (b - a, a - before, before))
    rate, decay = _scalar_multiple(difference, update), _scalar_multiple(difference, weight)
    if rate is not None:
        return (
            f"The second side's update is {1 + rate:.4g} times the first's: another learning rate or bias correction."
        )
    if decay is not None:
        return f"They differ by {decay:.2e} times the parameter as it was: another weight decay."
    return ""


def _explain_projection(projection: Projection, is_first: bool) -> str:
    """Return what a projection says of two updates, as a sentence.

    Args:
        projection: one that rounding does not explain.
        is_first: whether "update" is the first side's.
    """
    if projection.direction == "weight":
        return f"They differ by {projection.multiple:.2e} times the parameter as it was: another weight decay."
    if projection.direction == "gradient":
        return f"They differ by {projection.multiple:.2e} times the gradient."
    if not is_first and projection.multiple == 1.0:
        return "The second side's update is not 0, and the first's is."
    ratio = 1 + projection.multiple if is_first else 1 / (1 - projection.multiple)
    return f"The second side's update is {ratio:.4g} times the first's: another learning rate or bias correction."


def _scalar_multiple(difference: Array, of: Array) -> float | None:
    """Return the factor by which an array is a multiple of another one; None if it is not a multiple."""
    lengths = float(np.linalg.norm(difference) * np.linalg.norm(of))
    product = float(difference @ of)
    if difference.size < _MIN_ELEMENTS or not lengths or abs(product) < _MIN_COSINE * lengths:
        return None
    return product / float(of @ of)


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _trimmed_rms(difference: Array, steady: Array) -> float:
    """Return the root mean square of the steady elements, without the largest."""
    found = np.sort(np.abs(difference[steady]))
    return _rms(found[: found.size - int(_TRIM_SHARE * found.size)])


class Projection(NamedTuple):
    """Projection of the difference of two updates.

    Attributes:
        direction: "update", "weight" or "gradient".
        multiple: the difference along it, in multiples of it.
        distance: absolute value of the projection, as a root mean square over the elements.
        allowed: the largest that rounding explains.
    """

    direction: str
    multiple: float
    distance: float
    allowed: float

    @property
    def ratio(self) -> float:
        """Distance in multiples of the allowed one."""
        return self.distance / self.allowed if self.allowed else (math.inf if self.distance else 0.0)


def elements_that_count(gradient_distances: Array) -> Array | None:
    """Return the mask of the elements whose updates can be judged; None if they are too few.

    Args:
        gradient_distances: as for `project`, of all elements.
    """
    found: Array = gradient_distances <= _MAX_GRADIENT_DISTANCE
    count = int(np.count_nonzero(found))
    return found if count >= max(_MIN_PROJECTED, _MIN_PROJECTED_SHARE * found.size) else None


def relative_distances(one: Array, two: Array) -> Array:
    """Return the distance of each pair of elements, relative to the larger; 0 where both are 0."""
    larger = np.maximum(np.abs(one), np.abs(two))
    found: Array = np.abs(one - two) / np.where(larger > 0.0, larger, 1.0)
    return found


def project(
    updates: tuple[Array, Array],
    directions: Mapping[str, Array],
    gradient_distances: Array,
    roundoff: float,
    arithmetic: float,
) -> list[Projection]:
    """Return the projections of the difference of two updates on each direction that is not 0.

    What rounding explains is the sum of three parts: `_DEVIATIONS` standard deviations of the differences that are left
    without the projection; the update's size times what its gradients are apart, or times a few roundings where that is
    more, because these need not be of random sign; and the rounding of the parameter. Rounding follows a gradient, and
    no weight: along the weight the second part is at most what is left without the projection.

    Args:
        updates: of both sides, one dimension, the elements that count.
        directions: name -> array of the same elements.
        gradient_distances: relative distance of the gradients, element by element, the largest of all steps.
        roundoff: unit roundoff of the phase.
        arithmetic: rounding of an element of the parameter.
    """
    one, two = updates
    difference, count = two - one, len(one)
    larger = max(updates, key=lambda update: float(np.linalg.norm(update)))
    systematic = max(
        FACTOR * roundoff * float(np.linalg.norm(larger)), float(np.linalg.norm(gradient_distances * larger))
    )
    found = []
    for name, array in directions.items():
        length = float(np.linalg.norm(array))
        if not length:
            continue
        unit = array / length
        along = float(difference @ unit)
        rest = difference - along * unit
        spread = float(np.linalg.norm(rest * unit)) * math.sqrt(count / (count - 1))
        share = min(systematic, float(np.linalg.norm(rest))) if name == "weight" else systematic
        allowed = _DEVIATIONS * spread + share + arithmetic * math.sqrt(count)
        root = math.sqrt(count)
        found.append(Projection(name, along / length, abs(along) / root, allowed / root))
    return found
