"""What a step collects for a monitor, in NumPy (S35)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polyamp.monitor.exponents import exponent_counts
from polyamp.monitor.slots import (
    MonitorSelection,
    MonitorSlots,
    OutputFigures,
    OutputLimits,
    check_selected_outputs,
    collect_slots,
    output_limits,
)
from polyamp.reference.models import MLP
from polyamp.reference.tensor import Tensor


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


class ReferenceWatch:
    """Records the outputs of an MLP's layers, and its products in 8 bits, in a step (S35).

    Args:
        model: the network.
        selection: what is recorded.

    Attributes:
        activations, products: as in the slots.

    Raises:
        ArgumentError: the selection matches no layer.
    """

    def __init__(self, model: MLP, selection: MonitorSelection) -> None:
        if selection.activations:
            check_selected_outputs(selection, ["", *model.module_paths()])
        self._model, self._selection = model, selection
        self.activations: dict[str, OutputFigures] | None = {} if selection.activations else None
        self.products: dict[str, Any] | None = {} if selection.products else None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager in which passes are recorded."""
        self._model.shown = None if self.activations is None else self._see
        self._model.products = None if self.products is None else self._add_product
        try:
            yield
        finally:
            self._model.shown = self._model.products = None

    def _add_product(self, path: str, sums: Any) -> None:
        assert self.products is not None
        self.products[path] = self.products.get(path, 0.0) + sums

    def _see(self, path: str, output: Tensor, given: Tensor | None) -> Tensor:
        if self.activations is not None and self._selection.measures_output_of(path):
            figures = _array_figures(output.data, output_limits(self._selection.compute))
            if (known := self.activations.get(path)) is not None:
                figures = OutputFigures(known.sums + figures.sums, np.maximum(known.largest, figures.largest))
            self.activations[path] = figures
        return output


def _array_figures(array: Any, limits: OutputLimits) -> OutputFigures:
    values = np.abs(array.astype(np.float64))
    lost, below = np.sum(values <= limits.zero), np.sum(values < limits.normal)
    zeros, over = np.sum(values == 0.0), values.size - np.sum(values < limits.overflow)
    sums = [values.size, zeros, lost - zeros, below - lost, over, np.sum(np.square(values))]
    return OutputFigures(np.array(sums, np.float64), np.nan_to_num(values.max(), nan=np.inf, posinf=np.inf))
