"""Loss weights of selections in a compiled step (S8), where the compiler may not know the number of elements.

A separate module, because it imports torch's compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental import symbolic_shapes

from polyamp.rules import loss_weights
from polyamp.rules.loss_weights import LossCount, LossOutput
from polyamp.trees import leaves


def weigh_selection(loss: LossOutput, part: Any) -> LossOutput:
    """Return the loss, with its mean's number of elements as weight if that may be 0 or may vary per row.

    The second condition applies only if there are other micro-batches.

    Args:
        loss: the result of `loss_weights.parse_loss_output`.
        part: the micro-batch; None if it is the only one.
    """
    if loss.weight is not None or loss.size is None:
        return loss
    known = _is_known_true(loss.size != 0) and (part is None or not _is_selection(loss.size, part))
    return loss if known else loss._replace(weight=torch.scalar_tensor(loss.size, dtype=torch.float32))


def has_unclear_selection(loss: LossOutput, found: Sequence[LossCount], part: Any) -> bool:
    """Return whether a loss without an explicit count uses a mean over ignored, weighted or selected elements.

    Args:
        loss: the result of `weigh_selection`.
        found: the means that were computed.
        part: the micro-batch.
    """
    selects = any(item.count is None and item.size is not None and _is_selection(item.size, part) for item in found)
    return loss_weights.has_unclear_count(loss, found) or (loss.own is None and not loss.terms and selects)


def _is_selection(size: int, part: Any) -> bool:
    """Return whether a number of elements may be unequal per row.

    Lengths remain symbolic; otherwise the compiler would make a graph for each."""
    rows = [leaf.size(0) for _, leaf in leaves(part) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not rows or any(length != rows[0] for length in rows):
        return False  # weighted by its part of the batch, whatever its arrays are
    return not _is_known_true(size % rows[0] == 0)


def _is_known_true(condition: bool) -> bool:
    """Return whether a condition on lengths is true; False if the compiler does not know a length.

    Before about torch 2.8 there is no such query: an unknown length raises torch's own error.
    """
    ask = getattr(symbolic_shapes, "guard_or_false", bool)
    return bool(ask(condition))
