"""`UnitSwitches`: how much of a gradient belongs to units that rounding has switched on one side alone.

A ReLU or a maximum passes a gradient on or stops it, and an input within rounding of its threshold may fall on either
side of it. Such a unit shows: an element of the gradient with respect to an output, or of a gradient where no row
passes the unit any more, is 0 on one side and not on the other. Zeros that both sides have (masks, padding, rows that
the loss does not take) are none, and neither are zeros of a model whose recorded operations have no such threshold.

Where an activation is inside a layer on one side, no gradient with respect to its output is compared. There the switch
shows in the output, and its effect in the columns of the layer's own gradients that belong to the switched units. Of an
output with more elements than a sketch stores, a switch is seen where it is among the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from polyamp.contract.casting_report import OperationCount
from polyamp.parity.trace.sketch import Sketch, sample_indices
from polyamp.parity.trace.trace import Trace
from polyamp.parity.verdict.distances import EntryPair

Array = np.ndarray[Any, Any]
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
        self._columns: dict[str, set[int]] = {}

    def begin_step(self) -> None:
        """Forget what switched in the last step: its effect is in the parameters."""
        self.share = 0.0
        self._columns = {}

    def observe(self, pair: EntryPair, depth: int) -> None:
        """Record the entries of a step that are compared, in program order.

        Args:
            pair: the entries, of arrays.
            depth: approximate number of roundings before.
        """
        if not self.are_possible:
            return
        what, module = pair.one.what, pair.one.module
        if what.startswith("output"):
            self._record_output(pair, depth)
        elif what == "cotangent":
            self._columns.pop(module, None)  # it shows the units themselves
            self._record_zeros(pair, depth)
        elif what == "gradient":
            self._record_zeros(pair, depth)
            self._record_gradient(pair)

    def _record_output(self, pair: EntryPair, depth: int) -> None:
        """Record an output: which of the layer's units are off on one side alone, in some row."""
        one, two = pair.sketches
        if one.shape != two.shape or not one.shape:
            return
        a, b = pair.samples
        switched = (a == 0.0) != (b == 0.0)
        if 0 < int(np.count_nonzero(switched)) <= self._most(depth, switched.size):
            self._columns[pair.one.module] = {int(each) for each in _columns(one)[switched]}

    def _record_gradient(self, pair: EntryPair) -> None:
        """Record the gradient of a parameter of a layer whose gradient with respect to the output is not compared.

        `share` is from here on at least the norm of the difference in the columns of switched units, relative to the
        whole, less what the other columns explain: a factor that all columns have is no switch.
        """
        columns = self._columns.get(pair.module)
        one, two = pair.sketches
        if not columns or one.shape != two.shape or not one.shape:
            return
        a, b = pair.samples
        inside = np.isin(_columns(one), list(columns))
        whole, rest = float(max(map(np.linalg.norm, (a, b)))), float(np.linalg.norm(a[~inside]))
        if not rest:
            return  # no column is left that would tell a switch from a fault
        usual = float(np.linalg.norm((a - b)[~inside])) / rest * float(np.linalg.norm(a[inside]))
        self.share = max(self.share, (float(np.linalg.norm((a - b)[inside])) - usual) / whole)

    def _record_zeros(self, pair: EntryPair, depth: int) -> None:
        """Record the gradients with respect to an output or a parameter.

        `share` is from here on at least the norm of the elements that are 0 on one side alone, relative to the whole;
        unless they are more than rounding switches.
        """
        if pair.sketches[0].size != pair.sketches[1].size:
            return
        a, b = pair.samples
        switched = (a == 0.0) != (b == 0.0)
        count = int(np.count_nonzero(switched))
        whole = float(max(np.linalg.norm(a), np.linalg.norm(b)))
        if whole and count <= self._most(depth, switched.size):
            self.share = max(self.share, float(np.linalg.norm((a - b)[switched])) / whole)

    def _most(self, depth: int, size: int) -> float:
        """Return how many of an array's elements rounding may switch."""
        return max(_FEW, _MAX_SHARE * rounding_share(self._roundoff, depth) * size)


def _columns(one: Sketch) -> Array:
    """Return the index in the last axis of each stored element."""
    indices: Array = sample_indices(one.size) % one.shape[-1]
    return indices


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
