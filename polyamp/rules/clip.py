"""S11: clipping by the global norm of the unscaled gradients."""

from __future__ import annotations

from typing import Any

from polyamp.array_namespace import ArrayNamespace


def clip_factor(norm: Any, max_norm: float, xp: ArrayNamespace) -> Any:
    """Return the factor for clipping by global norm: `max_norm / max(norm, max_norm)`, at most 1.

    >>> from polyamp.array_namespace import PYTHON
    >>> clip_factor(4.0, 1.0, PYTHON), clip_factor(0.5, 1.0, PYTHON)
    (0.25, 1.0)
    """
    limit = xp.asarray(max_norm, norm)
    return limit / xp.maximum(norm, limit)
