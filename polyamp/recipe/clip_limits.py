"""`ClipLimits`: how far gradients are clipped (S11)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from polyamp.errors import RecipeError, plain_number_hint


class ClipLimits(NamedTuple):
    """Limits of the unscaled gradients; at most one of `norm` and `value` is set.

    Attributes:
        norm: largest global L2 norm, or None.
        value: largest magnitude of an element, or None.
        eps: what is added to the norm before it is compared with the limit.
    """

    norm: float | None = None
    value: float | None = None
    eps: float = 0.0


def clip_arguments(limits: ClipLimits) -> dict[str, Any]:
    """Return the limits under the names that recipes and optimizers give them.

    >>> clip_arguments(ClipLimits(norm=1.0))
    {'clip_norm': 1.0, 'clip_value': None, 'clip_eps': 0.0}
    """
    return {f"clip_{name}": limit for name, limit in limits._asdict().items()}


def check_clip_limits(limits: ClipLimits) -> None:
    """Raise unless both limits are None or a finite number above 0, one of them is None, and `eps` fits."""
    _check_limit("clip_norm", limits.norm)
    _check_limit("clip_value", limits.value)
    if limits.norm is not None and limits.value is not None:
        raise RecipeError(
            "clip_norm and clip_value are two ways to clip, of which a recipe has one. Received: "
            f"clip_norm={limits.norm!r}, clip_value={limits.value!r}."
        )
    eps: Any = limits.eps
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0.0 <= eps < math.inf:
        raise RecipeError(
            f"clip_eps must be a finite number of at least 0; torch's is 1e-6. Received: clip_eps={eps!r}."
            f"{plain_number_hint(eps)}"
        )
    if eps and limits.norm is None:
        raise RecipeError(f"clip_eps is added to the norm and needs clip_norm. Received: clip_eps={eps!r} without it.")


def _check_limit(name: str, limit: Any) -> None:
    if limit is not None and (
        isinstance(limit, bool) or not isinstance(limit, int | float) or not 0.0 < limit < math.inf
    ):
        off = f" For no clipping: {name}=None." if limit == 0 and not isinstance(limit, bool) else ""
        raise RecipeError(
            f"{name} must be None or a finite number above 0. Received: {name}={limit!r}.{off}"
            f"{plain_number_hint(limit)}"
        )
