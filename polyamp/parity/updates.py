"""`Updates`: what a step made of parameters and of the optimizer's slots, judged. Called by `verdict`.

An update may jump where a gradient hardly differs: Adam moves a parameter by the sign of a gradient that is nothing but
rounding. So parameters are compared where their gradients were *steady*, at every step so far far larger than what is
allowed of them; and without the tenth of the elements that differs most, for a fault of an optimizer is in all of them.
Both are read from the samples of the sketches, which lie at the same places of a parameter, its gradient and its slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from polyamp.parity.distances import Compared, own_distance
from polyamp.parity.sketch import apart
from polyamp.parity.tolerances import FACTOR, Judge
from polyamp.parity.trace import Entry

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_STEADY: Final = 30.0
"""How many times what is allowed of it a gradient's element is where its update is compared."""
_TRIMMED: Final = 0.1
"""The share of elements that is left out, those that differ most."""
_PARALLEL: Final = 0.99
"""Cosine from which on two arrays are multiples of each other."""
_FEW: Final = 4
"""Fewer elements than these tell nothing."""
_MASTER: Final = 2.0**-24
"""Roundoff of float32, in which masters and slots are kept."""

_WEIGHT: Final = _MASTER / 1e-3
"""What a slot may differ by, relatively, because its weight 1 - beta is made of a beta in float32, as TensorFlow's
kernel makes it: 0.999 is rounded by up to 2^-24, and 1 - 0.999 by a thousand times as much. The bias correction takes
it out of the update."""


class Updates:
    """The updates of one phase.

    Args:
        judge: of the phase.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._steady: dict[tuple[str, str], Array] = {}
        self._loose: dict[tuple[str, str], float] = {}
        self._before: dict[tuple[str, str], Array] = {}
        self._moved: dict[tuple[str, str], float] = {}
        self._apart: dict[tuple[str, str], tuple[float, float]] = {}

    def drift(self, outputs: Mapping[str, float]) -> float:
        """How far both sides' parameters are apart, relatively, after the last step: all of their elements, the ones
        that were not steady too. Kernels count by their own size, biases by that of what they are added to.

        Args:
            outputs: module -> root mean square of its output.
        """
        total = 0.0
        for (module, name), (distance, size) in self._apart.items():
            against = outputs.get(module, 0.0) if "bias" in name else size
            total += min(distance / against, 1.0) ** 2 if against else 0.0
        return math.sqrt(total)

    def gradient(self, one: Entry, two: Entry, found: Compared) -> None:
        """A gradient, before what it makes is judged."""
        import numpy as np

        assert one.sketch is not None
        assert two.sketch is not None
        key = (one.module, one.name)
        each = found.allowed / math.sqrt(max(one.sketch.size, 1))
        least = np.minimum(np.abs(one.sketch.samples()), np.abs(two.sketch.samples()))
        steady = least >= _STEADY * each
        self._steady[key] = steady & self._steady.get(key, steady)
        norm = max(one.sketch.norm, two.sketch.norm)
        self._loose[key] = max(self._loose.get(key, 0.0), found.allowed / norm if norm else 0.0)

    def kept(self, one: Entry, two: Entry, wide: tuple[Entry | None, Entry | None]) -> Compared | None:
        """A slot of the optimizer, or a running statistic."""
        a, b = one.sketch, two.sketch
        assert a is not None
        assert b is not None
        if a.size != b.size:
            return None
        own = own_distance(one, wide[0]), own_distance(two, wide[1])
        scale = max(a.norm, b.norm)
        loose = 2.0 * min(self._loose.get((one.module, one.name), 0.0), 1.0)
        alone = one.step <= 1
        allowed = max(self._judge.allowed(own, float(one.step), scale, alone=alone), loose * scale)
        if one.what != "statistic":
            allowed = max(allowed, _WEIGHT * scale)
        return Compared(one, two, apart(a, b), allowed, scale, own)

    def parameter(self, one: Entry, two: Entry, wide: tuple[Entry | None, Entry | None]) -> Compared | None:
        """A parameter, where its gradients were steady; None where they were nowhere."""
        import numpy as np

        assert one.sketch is not None
        assert two.sketch is not None
        if one.sketch.size != two.sketch.size:
            return None
        key = (one.module, one.name)
        a, b = one.sketch.samples(), two.sketch.samples()
        before = self._before.get(key, a)
        moved = max(_rms(a - before), self._moved.get(key, 0.0))
        self._moved[key], self._before[key] = moved, a
        root = math.sqrt(max(one.sketch.size, 1))
        self._apart[key] = apart(one.sketch, two.sketch) / root, max(one.sketch.rms, two.sketch.rms)
        steady = self._steady.get(key)
        if steady is None:
            steady = np.ones(a.shape, bool)
        if not steady.any():
            return None
        if one.sketch.nonfinite != two.sketch.nonfinite:
            return Compared(one, two, math.inf, 0.0, one.sketch.rms, (None, None))
        chosen = _trimmed(a - b, steady)
        owns = [
            None if w is None or w.sketch is None else _trimmed(side - w.sketch.samples(), steady)
            for side, w in zip((a, b), wide, strict=True)
        ]
        scale = max(one.sketch.rms, two.sketch.rms)
        loose = min(self._loose.get(key, 0.0), 1.0) * moved
        arithmetic = FACTOR * _MASTER * math.sqrt(max(one.step, 1)) * scale
        alone = one.step <= 1
        judged = 0.0
        if any(each is not None for each in owns):
            judged = self._judge.allowed((owns[0], owns[1]), 0.0, 0.0, alone=alone)
        allowed = max(judged, loose, arithmetic)
        why = _why(a, b, before, steady) if chosen > allowed and one.step else ""
        return Compared(one, two, chosen, allowed, scale, (owns[0], owns[1]), why=why)


def _why(a: Array, b: Array, before: Array, steady: Array) -> str:
    """What in an optimizer makes two updates of one gradient differ as these do; "" where nothing known does.

    Args:
        a, b: the parameter after the step.
        before: before it.
        steady: which elements count.
    """
    difference, update, weight = (each[steady] for each in (b - a, a - before, before))
    rate, decay = _multiple(difference, update), _multiple(difference, weight)
    if rate is not None:
        return (
            f"The second side's update is {1 + rate:.4g} times the first's: another learning rate or bias correction."
        )
    if decay is not None:
        return f"They differ by {decay:.2e} times the parameter as it was: another weight decay."
    return ""


def _multiple(difference: Array, of: Array) -> float | None:
    """How many times an array another one is; None if it is no multiple of it."""
    import numpy as np

    lengths = float(np.linalg.norm(difference) * np.linalg.norm(of))
    product = float(difference @ of)
    if difference.size < _FEW or not lengths or abs(product) < _PARALLEL * lengths:
        return None
    return product / float(of @ of)


def _rms(values: Array) -> float:
    import numpy as np

    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _trimmed(difference: Array, steady: Array) -> float:
    """The root of the mean square of the steady elements, without the largest."""
    import numpy as np

    found = np.sort(np.abs(difference[steady]))
    return _rms(found[: found.size - int(_TRIMMED * found.size)])
