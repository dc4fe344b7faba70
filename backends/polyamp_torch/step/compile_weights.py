"""What a selection counts in a compiled step (S8), where the compiler may not know how much is selected.

A module by itself because it loads torch's compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental import symbolic_shapes

from polyamp.rules import weights
from polyamp.rules.weights import Count, Loss
from polyamp.trees import leaves


def of_selection(loss: Loss, part: Any) -> Loss:
    """The loss, with the number of elements that its mean is over as its weight where that can be 0 or, beside other
    micro-batches, is not so many for each row.

    Args:
        loss: as `weights.read` gave it.
        part: the micro-batch; None if it is the only one.
    """
    if loss.weight is not None or loss.size is None:
        return loss
    known = _holds(loss.size != 0) and (part is None or not _selects(loss.size, part))
    return loss if known else loss._replace(weight=torch.scalar_tensor(loss.size, dtype=torch.float32))


def is_unclear(loss: Loss, found: Sequence[Count], part: Any) -> bool:
    """Whether a mean over ignored, weighted or selected elements went into a loss that does not say what it is over.

    Args:
        loss: as `of_selection` gave it.
        found: the means that were made.
        part: the micro-batch.
    """
    selects = any(item.count is None and item.size is not None and _selects(item.size, part) for item in found)
    return weights.is_unclear(loss, found) or (loss.own is None and not loss.terms and selects)


def _selects(size: int, part: Any) -> bool:
    """Whether so many elements are not, or may not be, the same number for each row. Lengths stay what they are, or the
    compiler would make a graph for each."""
    rows = [leaf.size(0) for _, leaf in leaves(part) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not rows or any(length != rows[0] for length in rows):
        return False  # a part of its window, whatever its arrays hold
    return not _holds(size % rows[0] == 0)


def _holds(condition: bool) -> bool:
    """Whether a condition on lengths holds: False of a length that the compiler does not know.

    Before torch 2.8 or so there is no such question: an unknown length is torch's own error.
    """
    ask = getattr(symbolic_shapes, "guard_or_false", bool)
    return bool(ask(condition))
