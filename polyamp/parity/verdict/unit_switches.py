"""`UnitSwitches`: how much of a gradient belongs to units that rounding has switched on one side alone.

A ReLU or a maximum passes a gradient on or stops it, and an input within rounding of its threshold may fall on either
side of it. Such a unit shows: an element of the gradient with respect to an output, or of a gradient where no row
passes the unit any more, is 0 on one side and not on the other. Zeros that both sides have (masks, padding, rows that
the loss does not take) are none, and neither are zeros of a model whose recorded operations have no such threshold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from polyamp.contract.casting_report import OperationCount
from polyamp.parity.trace.sketch import Sketch
from polyamp.parity.trace.trace import Trace

_THRESHOLDS: Final = """
relu relu6 prelu rrelu threshold hardtanh hardswish hardsigmoid hardshrink softshrink maximum minimum max min amax amin
clamp clampmin clampmax clip clipbyvalue maxpool maxpool1d maxpool2d maxpool3d maxpoolwithindices maxpoolv2
adaptivemaxpool1d adaptivemaxpool2d adaptivemaxpool3d reducewindowmax reducemax reducemin selectn
"""
"""The frameworks' operations with a threshold or a choice, in lower case without underscores."""
_IN_SOFTMAX: Final = frozenset({"reducemax", "amax"})
"""What a softmax that is written out takes from its inputs before the exponential, which changes no gradient."""
_MAX_SHARE: Final = 8.0
"""Largest share of elements that rounding switches, in multiples of `rounding_share`."""
_FEW: Final = 3
"""Number of elements that rounding may switch in any array."""


class UnitSwitches:
    """Units that switched on one side alone, in one phase.

    Args:
        traces: of both sides.
        roundoff: the unit roundoff of the phase.
    """

    def __init__(self, traces: Sequence[Trace], roundoff: float) -> None:
        recorded = [trace.operations for trace in traces if trace.operations]
        self.are_possible = not recorded or any(map(has_thresholds, recorded))
        self.share = 0.0
        self._roundoff = roundoff

    def begin_backward_pass(self) -> None:
        """Forget what switched in the last step: its effect is in the parameters."""
        self.share = 0.0

    def record(self, one: Sketch, two: Sketch, depth: int) -> None:
        """Record the gradients with respect to an output or a parameter.

        `share` is from here on at least the norm of the elements that are 0 on one side alone, relative to the whole;
        unless they are more than rounding switches.

        Args:
            one, two: of both sides.
            depth: approximate number of roundings before.
        """
        import numpy as np

        if not self.are_possible or one.size != two.size:
            return
        a, b = one.samples(), two.samples()
        switched = (a == 0.0) != (b == 0.0)
        count = int(np.count_nonzero(switched))
        whole = float(max(np.linalg.norm(a), np.linalg.norm(b)))
        most = _MAX_SHARE * rounding_share(self._roundoff, depth) * switched.size
        if whole and count <= max(_FEW, most):
            self.share = max(self.share, float(np.linalg.norm((a - b)[switched])) / whole)


def rounding_share(roundoff: float, depth: float) -> float:
    """Return the share of units that are within rounding of their threshold."""
    return roundoff * math.sqrt(max(depth, 1.0))


def has_thresholds(operations: Iterable[OperationCount]) -> bool:
    """Return whether a side's operations have a threshold at which a gradient is stopped."""
    thresholds = set(_THRESHOLDS.split())
    by_module: dict[str, set[str]] = {}
    for row in operations:
        plain = row.name.lower().replace("_", "").replace(".", "")
        by_module.setdefault(row.module, set()).add(plain)
    return any(found & (thresholds - _IN_SOFTMAX if "exp" in found else thresholds) for found in by_module.values())
