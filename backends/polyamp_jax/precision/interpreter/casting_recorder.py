"""`Recorder`: collects what the interpreter does into a `CastingReport`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from polyamp.contract.casting_report import CastCount, CastingReport, OperationCount
from polyamp.recipe.policy import Policy
from polyamp_jax.precision.interpreter.program_value import CASTABLE_DTYPES


class Recorder:
    """Record of every operation and cast of one evaluation."""

    def __init__(self) -> None:
        self._operations: Counter[tuple[str, str, str, str]] = Counter()
        self._casts: Counter[tuple[str, str]] = Counter()

    def operation(self, module: str, name: str, operands: Sequence[Any], results: Sequence[Any], rule: str) -> None:
        """Record an operation. One without floating operands or results is omitted."""
        dtypes = _floats(operands) or _floats(results)
        if dtypes:
            self._operations[module, name, ", ".join(sorted(set(dtypes))), rule] += 1

    def cast(self, source: Any, target: Any) -> None:
        """Record a cast that autocast inserts."""
        self._casts[str(source), str(target)] += 1

    def report(self, policy: Policy) -> CastingReport:
        """Return the casting report."""
        operations = [OperationCount(*key, count) for key, count in self._operations.items()]
        return CastingReport(policy, operations, [CastCount(*key, count) for key, count in sorted(self._casts.items())])


def _floats(arrays: Sequence[Any]) -> list[str]:
    dtypes = (getattr(array, "dtype", None) for array in arrays)
    return [str(dtype) for dtype in dtypes if dtype in CASTABLE_DTYPES or getattr(dtype, "kind", None) in ("f", "c")]
