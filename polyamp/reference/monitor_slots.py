"""What a step collects for a monitor, in NumPy (S35)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyamp.monitor.exponents import exponent_counts
from polyamp.monitor.slots import MonitorSelection, MonitorSlots, collect_slots


class ReferenceSlots:
    """`SlotFunctions` for NumPy."""

    def exponent_counts(self, name: str, array: Any) -> Any:
        """Return how many elements have each exponent field."""
        return exponent_counts(array).astype(np.int32)

    def squares(self, name: str, array: Any) -> Any:
        """Return the sum of squares, float64."""
        return np.sum(np.square(array, dtype=np.float64))

    def stack(self, values: Sequence[Any]) -> Any:
        """Stack arrays."""
        return np.stack(values)

    def square_root(self, values: Any) -> Any:
        """Return the square root, float32."""
        return np.sqrt(values).astype(np.float32)


def update_slots(
    selection: MonitorSelection,
    gradients: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    scale: Any,
) -> MonitorSlots:
    """Return the figures of an update with unscaled gradients."""
    found = {name: grad for name, grad in gradients.items() if grad is not None}
    one = np.ones((), np.float32)
    return collect_slots(
        selection, ReferenceSlots(), found, before, after, read=np.ones((), bool), scale=scale, carried=one
    )
