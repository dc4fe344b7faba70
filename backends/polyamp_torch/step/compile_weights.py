"""What a selection counts in a compiled step (S8), where the compiler may not know how much is selected.

A module by itself because it loads torch's compiler.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx.experimental import symbolic_shapes

from polyamp.rules import weights
from polyamp.rules.weights import Count, Loss


def of_selection(loss: Loss, rows: int, *, several: bool) -> Loss:
    """The loss, with the number of elements that its mean is over as its weight where that can be 0 or, beside other
    micro-batches, is not so many for each row.

    Args:
        loss: as `weights.read` gave it.
        rows: of the micro-batch.
        several: whether there are others.
    """
    if loss.weight is not None or loss.size is None:
        return loss
    known = _holds(loss.size != 0) and not (several and _selects(loss.size, rows))
    return loss if known else loss._replace(weight=torch.scalar_tensor(loss.size, dtype=torch.float32))


def is_unclear(loss: Loss, found: Sequence[Count], rows: int) -> bool:
    """Whether a mean over ignored, weighted or selected elements went into a loss that does not say what it is over.

    Args:
        loss: as `of_selection` gave it.
        found: the means that were made.
        rows: of the micro-batch.
    """
    selects = any(item.count is None and item.size is not None and _selects(item.size, rows) for item in found)
    return weights.is_unclear(loss, found) or (loss.own is None and not loss.terms and selects)


def _selects(size: int, rows: int) -> bool:
    """Whether so many elements are not, or may not be, the same number for each row."""
    return not _holds(size % rows == 0)


def _holds(condition: bool) -> bool:
    """Whether a condition on lengths holds: False of a length that the compiler does not know.

    Before torch 2.8 or so there is no such question: an unknown length is torch's own error.
    """
    ask = getattr(symbolic_shapes, "guard_or_false", bool)
    return bool(ask(condition))
