"""Tolerances: the largest distance of two correct computations that rounding explains.

Two programs of one formula differ by rounding alone. The effect of rounding in *this* model at *this* array is
measured: each side also runs in a wider dtype (float64 for float32, float32 for a 16-bit policy). The distance between
a side's two runs, its own distance, is the effect of its rounding, whatever amplified it: depth, cancellation, a ReLU
that switched, earlier steps. Two sides a and b with own distances da and db agree if

    |a - b| <= FACTOR * max(own(da, db), u * sqrt(depth) * |a|)

with u the unit roundoff of the dtype: n roundings of random sign add up to sqrt(n) of them (Higham, "Accuracy and
Stability of Numerical Algorithms", 2.8). In float32 `own` is the sum of da and db: a wrong formula is wrong in float64
too, so it does not add to an own distance. Under a policy `own` is the smaller of the two. There a fault may exist only
in the 16-bit program (a softmax in 16 bits, a forgotten cast), and then adds only to that side's own distance.

A model may compute in a narrower dtype by itself, whatever its parameters' dtype is: LLaMA's and T5's norms cast to
float32, and so do explicit softmaxes and tables of positions. From there on its float64 run is rounded as that dtype
is, and two right models are as far apart (`JudgePrecision`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from polyamp.contract.casting_report import OperationCount
from polyamp.float_formats import FORMATS
from polyamp.parity.trace.trace import Trace
from polyamp.parity.verdict.alignment import Alignment, nearest_module

FACTOR: Final = 6.0
"""Largest accepted distance, in multiples of the effect of rounding."""
RANDOMNESS_LIMIT: Final = 1e-2
"""Relative distance of a module's output from its own float64 run above which rounding is not the cause."""
NO_WIDE_RUN_FACTOR: Final = 8.0
"""Multiple of the floor that is used if neither side has a wider run. A sum of n products of random sign rounds like
sqrt(n / 2) roundings of its result, over the 32 lanes in which processors add; 8 is the value for 4096 products."""
DRIFT_FACTOR: Final = 3.0
"""Largest accepted relative distance of a computed quantity, in multiples of that of the parameters."""
SWITCH_FACTOR: Final = 3.0
"""Largest accepted relative distance of a gradient, in multiples of the share of switched units in the gradients with
respect to outputs behind it: sums over rows may cancel, and what switched in one row does not."""
_OWN_DISTANCE_CAP: Final = 16.0
"""Largest own distance that counts between two different policies, in multiples of the arithmetic's share."""


class PhaseTolerance(NamedTuple):
    """Tolerance of one phase.

    Attributes:
        roundoff: the unit roundoff of the coarsest dtype of both sides.
        wide: whether own distances are measured from a float64 run of the same formula.
        same_policy: whether both sides have the same policy.
    """

    roundoff: float
    wide: bool
    same_policy: bool

    def arithmetic(self, depth: float, scale: float, roundoff: float | None = None) -> float:
        """Return the error of `depth` successive roundings, by default in the phase's dtype."""
        return (self.roundoff if roundoff is None else roundoff) * math.sqrt(max(depth, 1.0)) * scale

    def allowed(
        self,
        own: tuple[float | None, float | None],
        depth: float,
        scale: float,
        *,
        same_inputs: bool = True,
        switched: float | None = None,
        drift: float = 0.0,
    ) -> float:
        """Return the largest distance that rounding explains.

        Args:
            own: distance of each side from its own wider run; None if there is none.
            depth: approximate number of successive roundings.
            scale: norm of the values, to which roundings are relative.
            same_inputs: whether both sides compute from the same numbers, as in the first step. A fault of one side's
                16-bit program then affects only that side's own distance.
            switched: share of the gradient before it that units have which switched on one side alone
                (`unit_switches`); None if none can have switched.
            drift: relative distance of the parameters from which it is computed, where that is legitimate.

        >>> PhaseTolerance(2.0**-24, True, True).allowed((1e-6, 2e-6), 4, 1.0) == FACTOR * 3e-6
        True
        """
        floor = self.arithmetic(depth, scale)
        most = math.sqrt(self.roundoff * math.sqrt(max(depth, 1.0))) * scale
        known = [each for each in own if each is not None]
        if not known:
            distance = FACTOR * NO_WIDE_RUN_FACTOR * floor
        elif not self.same_policy:
            return FACTOR * max(floor, min(max(known), _OWN_DISTANCE_CAP * floor))
        elif self.wide:
            distance = FACTOR * max(floor, sum(known) * len(own) / len(known))  # a missing one counts as the other
        else:
            distance = FACTOR * max(floor, min(known) if same_inputs else max(known))
        if switched is not None and not self.wide:  # in float32 the own distances have it: a switch is no fault of it
            distance = max(distance, SWITCH_FACTOR * switched * scale)
        if switched is not None and len(known) < len(own):
            distance = max(distance, 2.0 * most)  # which units switched against the wider run is not known
        return max(distance, DRIFT_FACTOR * drift * scale)


class JudgePrecision:
    """Unit roundoff of the narrowest operations that the wider runs have made, module by module.

    Args:
        alignment: alignment of the sides.
        traces: the wider runs of both sides; empty without one.
        roundoff: unit roundoff of the runs that are judged.
    """

    def __init__(self, alignment: Alignment, traces: Sequence[Trace], roundoff: float) -> None:
        known = set(alignment.modules.values())
        self._sides = [_roundoffs(trace.operations, known) for trace in traces]
        self._counts = [_narrow_counts(trace.operations, known) for trace in traces]
        self._roundoff = roundoff
        self._is_exact = not any(each[""] > roundoff for each in self._sides)

    def common(self, module: str, *, forward: bool = True) -> float:
        """Return the unit roundoff of a 16-bit dtype that both sides have passed through; 0 if one has not.

        Args:
            module: module in whose output, or in the gradients with respect to it, the question is.
            forward: whether it is the output; gradients have passed through every operation.
        """
        if self._is_exact:
            return 0.0
        found = self._at(module, forward)
        return min(found, default=0.0) if min(found, default=0.0) > self._roundoff else 0.0

    def limit(self, module: str) -> float:
        """Return the unit roundoff to which both wider runs are exact in the output of a module; 0 if they are."""
        found = self._at(module, forward=True)
        either = min(max(found, default=0.0), self._roundoff)
        return max(either, self.common(module))

    def is_exact_since(self, earlier: str, module: str) -> bool:
        """Return whether neither side has begun a kind of narrower operation between the outputs of two modules.

        Args:
            earlier: a module before `module`; "" for the beginning.
            module: the module in whose output the question is.
        """
        return all(module in each and each.get(earlier, 0) == each[module] for each in self._counts)

    def _at(self, module: str, forward: bool) -> list[float]:
        return [each.get(module, each[""]) if forward else each[""] for each in self._sides]


def _roundoffs(operations: Iterable[OperationCount], known: set[str]) -> dict[str, float]:
    """Return module -> the largest unit roundoff, other than float64's, of the operations up to its last one; "": of
    all operations."""
    found: dict[str, float] = {}
    largest = 0.0
    for row in operations:
        dtypes = [FORMATS[dtype] for dtype in row.dtype.split(", ") if dtype in FORMATS and dtype != "float64"]
        largest = max(largest, *(dtype.unit_roundoff for dtype in dtypes), 0.0)
        found[nearest_module(row.module, known)] = largest
    found[""] = largest
    return found


def _narrow_counts(operations: Iterable[OperationCount], known: set[str]) -> dict[str, int]:
    """Return module -> number of kinds of narrower operations up to its last one; of a submodule, not of the model."""
    found: dict[str, int] = {}
    count = 0
    for row in operations:
        count += any(dtype in FORMATS and dtype != "float64" for dtype in row.dtype.split(", "))
        module = nearest_module(row.module, known)
        if module:
            found[module] = count
    return found
