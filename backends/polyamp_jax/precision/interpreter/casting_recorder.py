"""`Recorder`: collects what the interpreter does into a `CastingReport`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from polyamp.contract.casting_report import CastCount, CastingReport, OperationCount
from polyamp.recipe.policy import Policy
from polyamp_jax.precision.interpreter.float8_products import Product, sizes
from polyamp_jax.precision.interpreter.program_value import CASTABLE_DTYPES
from polyamp_jax.precision.op_list import operation_family


class Recorder:
    """Record of every operation and cast of one evaluation.

    Attributes:
        products: products in 8 bits, by module and sizes: rows, inputs, outputs.
    """

    def __init__(self) -> None:
        self._operations: Counter[tuple[str, str, str, str, str]] = Counter()
        self._casts: Counter[tuple[str, str]] = Counter()
        self.products: Counter[tuple[str, tuple[int, int, int]]] = Counter()

    def operation(
        self,
        module: str,
        name: str,
        operands: Sequence[Any],
        results: Sequence[Any],
        rule: str,
        direction: str = "forward",
        product: Product | None = None,
    ) -> None:
        """Record an operation. One without floating operands or results is omitted. `product` is it in 8 bits."""
        if product is not None:
            self.products[module, sizes(product, operands)] += 1
        dtypes = _floats(operands) or _floats(results)
        if dtypes:
            self._operations[module, name, ", ".join(sorted(set(dtypes))), rule, direction] += 1

    @property
    def rules(self) -> dict[tuple[str, str], str]:
        """Rule of each operation of the forward pass, by module and name."""
        return {key[:2]: key[3] for key in self._operations if key[4] == "forward"}

    def cast(self, source: Any, target: Any) -> None:
        """Record a cast that autocast inserts."""
        self._casts[str(source), str(target)] += 1

    def report(self, policy: Policy) -> CastingReport:
        """Return the casting report."""
        operations = [OperationCount(*key[:4], count, key[4]) for key, count in self._operations.items()]
        casts = [CastCount(*key, count) for key, count in sorted(self._casts.items())]
        return CastingReport(policy, operations, casts, {row.name: operation_family(*row[1:4:2]) for row in operations})


def _floats(arrays: Sequence[Any]) -> list[str]:
    dtypes = (getattr(array, "dtype", None) for array in arrays)
    return [str(dtype) for dtype in dtypes if dtype in CASTABLE_DTYPES or getattr(dtype, "kind", None) in ("f", "c")]
