"""`dialect_report`: what becomes of every key of another library's options (docs/reference/dialect_keys.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from polyamp.errors import RecipeError, describe_value, did_you_mean
from polyamp.recipe.dialects import deepspeed, timm, torchtitan, transformers
from polyamp.recipe.dialects.block import DialectReport, DialectTable
from polyamp.schedules.schedule_base import check_steps

__all__ = ["DIALECTS", "DialectReport", "DialectTable", "dialect_report"]

DIALECTS: Final[dict[str, tuple[DialectTable, Callable[..., DialectReport]]]] = {
    "transformers": (transformers.TABLE, transformers.read_block),
    "timm": (timm.TABLE, timm.read_block),
    "deepspeed": (deepspeed.TABLE, deepspeed.read_block),
    "torchtitan": (torchtitan.TABLE, torchtitan.read_block),
}
"""Name -> its table and its reader."""


def dialect_report(
    name: str, block: Any, *, total_steps: int | None = None, updates_per_epoch: int | None = None
) -> DialectReport:
    """Return what becomes of every key of another library's options; `Recipe.from_dialect` makes the recipe.

    Args:
        name: "transformers", "timm", "deepspeed" or "torchtitan".
        block: the options, as a dictionary or as the library's object.
        total_steps: number of updates of the training, in place of the block's.
        updates_per_epoch: number of updates of an epoch, if the block counts epochs.

    Raises:
        RecipeError: an unknown name, an impossible value, or a schedule whose number of updates is not known.
        ArgumentError: the block is no dictionary and no object with attributes.

    >>> report = dialect_report("deepspeed", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}})
    >>> report.mapped["optimizer.params.lr"], report.fields["clip_norm"]
    ('learning_rate: 0.0001', 1.0)
    """
    if not isinstance(name, str) or name not in DIALECTS:
        close = did_you_mean(name, DIALECTS) if isinstance(name, str) else ""
        raise RecipeError(f"dialect must be one of {', '.join(DIALECTS)}. Received: {describe_value(name)}.{close}")
    for argument, steps in (("total_steps", total_steps), ("updates_per_epoch", updates_per_epoch)):
        if steps is not None:
            check_steps(argument, steps)
    return DIALECTS[name][1](block, total_steps=total_steps, updates_per_epoch=updates_per_epoch)
