"""`project`: the difference of two updates along the update, the weight and the gradient.

Under 16 bits the rounding of gradients hides an update's difference in most of its elements, but it is of random sign.
Along one direction it adds up to little, while another rate, decay or momentum adds up in every element: the other
update is a multiple of the first, or has a multiple of the weight or of the gradient more. Only elements count in which
the gradients of both sides have agreed to a tenth at every step: elsewhere a right update may have another sign.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.parity.verdict.tolerances import FACTOR

Array = np.ndarray[Any, Any]
_MAX_GRADIENT_DISTANCE: Final = 0.1
"""Largest relative distance of a gradient's element on both sides with which the element of the update counts."""
_MIN_ELEMENTS: Final = 8
"""Least number of such elements from which a projection is judged."""
_MIN_SHARE: Final = 0.1
"""Least share of such elements: two arrays that have nothing in common agree to a tenth in one of 40."""
_DEVIATIONS: Final = 6.0
"""Largest accepted projection, in standard deviations of a sum of differences with random signs."""


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
    return found if count >= max(_MIN_ELEMENTS, _MIN_SHARE * found.size) else None


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
