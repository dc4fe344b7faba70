"""`JudgePrecision`: how exact the float64 runs are that judge the float32 ones.

A model may compute in a narrower dtype by itself, whatever its parameters' dtype is: LLaMA's and T5's norms cast to
float32, and so do explicit softmaxes and tables of positions. From there on its float64 run is rounded as that dtype
is, and two right models are as far apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polyamp.contract.casting_report import OperationCount
from polyamp.float_formats import FORMATS
from polyamp.parity.trace.trace import Trace
from polyamp.parity.verdict.alignment import Alignment, nearest_module


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

    def common(self, module: str, *, forward: bool = True) -> float:
        """Return the unit roundoff of a 16-bit dtype that both sides have passed through; 0 if one has not.

        Args:
            module: module in whose output, or in the gradients with respect to it, the question is.
            forward: whether it is the output; gradients have passed through every operation.
        """
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
