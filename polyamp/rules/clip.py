"""S11: clipping of the unscaled gradients by their global norm.

`clip_transformation` is the one function that a backend applies to gradients. torch's kernels take `clip_factor` in the
divisor that unscales.
"""

from __future__ import annotations

from collections.abc import Callable
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


def clip_transformation(max_norm: float | None, norm: Any, xp: ArrayNamespace) -> Callable[[Any], Any]:
    """Return the function that clips one gradient.

    Args:
        max_norm: maximum of the global norm, or None.
        norm: global norm of all gradients, scalar.
        xp: the framework's array namespace.

    >>> from polyamp.array_namespace import PYTHON
    >>> clip_transformation(1.0, 4.0, PYTHON)(2.0), clip_transformation(None, 4.0, PYTHON)(2.0)
    (0.5, 2.0)
    """
    if max_norm is None:
        return lambda grad: grad
    factor = clip_factor(norm, max_norm, xp)
    return lambda grad: grad * xp.asarray(factor, grad)
