"""`ClipLimits`: how far gradients are clipped (S11)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from polyamp.errors import RecipeError, plain_number_hint


class ClipLimits(NamedTuple):
    """Limits of the unscaled gradients; at most one of them is set.

    Attributes:
        norm: largest global L2 norm, or None.
        value: largest magnitude of an element, or None.
    """

    norm: float | None = None
    value: float | None = None


def check_clip_limits(limits: ClipLimits) -> None:
    """Raise unless both limits are None or a finite number above 0, and one of them is None."""
    _check_limit("clip_norm", limits.norm)
    _check_limit("clip_value", limits.value)
    if limits.norm is not None and limits.value is not None:
        raise RecipeError(
            "clip_norm and clip_value are two ways to clip, of which a recipe has one. Received: "
            f"clip_norm={limits.norm!r}, clip_value={limits.value!r}."
        )


def _check_limit(name: str, limit: Any) -> None:
    if limit is not None and (
        isinstance(limit, bool) or not isinstance(limit, int | float) or not 0.0 < limit < math.inf
    ):
        off = f" For no clipping: {name}=None." if limit == 0 and not isinstance(limit, bool) else ""
        raise RecipeError(
            f"{name} must be None or a finite number above 0. Received: {name}={limit!r}.{off}"
            f"{plain_number_hint(limit)}"
        )
