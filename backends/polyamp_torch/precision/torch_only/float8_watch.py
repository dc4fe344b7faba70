"""Figures of products in 8 bits for a monitor (S35, S36): what the rounding of an operand lost, and where figures go.

A product gives its figures away in its backward pass, so that one which a checkpoint runs again counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import torch

from polyamp_torch.compat import has_active_transforms

FigureSink = Callable[[torch.Tensor], None]
"""Receives the figures of one product, float64, shape (3, 4): see `MonitorSlots.products`."""


class ProductWatch(Protocol):
    """What takes the figures of a model's products."""

    def sink(self, parameter: torch.Tensor) -> FigureSink | None:
        """Return where the figures of products with a parameter go; None if it is not the model's."""

    def add(self, path: str, figures: torch.Tensor) -> None:
        """Add the figures of a product of a module."""


OPEN_WATCHES: Final[list[ProductWatch]] = []
"""The watches of the passes that run now. Backward passes may run in threads of torch's own."""


def find_watch(parameter: torch.Tensor | None) -> FigureSink | None:
    """Return where the figures of a product with this parameter go, or None. Products inside of `torch.func`'s
    transformations are left out."""
    if parameter is None or not OPEN_WATCHES or has_active_transforms():
        return None
    return next((found for watch in OPEN_WATCHES if (found := watch.sink(parameter)) is not None), None)


def rounding_sums(x: torch.Tensor, numbers: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return the figures of an operand, float64, shape (4,): elements, those that became zero, and the sums of the
    squares and of the squared errors.

    Args:
        x: the operand, floats of any shape.
        numbers: its 8-bit numbers.
        exponent: these are x times 2 to this power, int32: a scalar, or of a shape that broadcasts to that of x.
    """
    rounded = numbers.to(torch.float32)
    exact = torch.ldexp(x.detach().to(torch.float32), exponent)
    lost = ((exact != 0.0) & (rounded == 0.0)).sum()
    errors = (torch.ldexp(each.double(), -exponent) for each in (exact, exact - rounded))
    squares = torch.stack([torch.linalg.vector_norm(each).square() for each in errors])
    return torch.cat([torch.full_like(squares[:1], x.numel()), lost.double()[None], squares])
