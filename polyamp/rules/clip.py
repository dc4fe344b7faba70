"""S11: clipping of the unscaled gradients, by their norm or by value.

`clip_gradients` is the one function that a backend applies to gradients. torch's kernels take `clip_factor` in the
divisor that unscales, and clamp in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from polyamp.array_namespace import ArrayNamespace
from polyamp.recipe.clip_limits import ClipLimits


class ClipSet(NamedTuple):
    """Parameters whose gradients are clipped together.

    Attributes:
        limits: their limits.
        places: their indices in the parameters' order.
    """

    limits: ClipLimits
    places: tuple[int, ...]


def clip_factor(norm: Any, max_norm: float, xp: ArrayNamespace, eps: float = 0.0) -> Any:
    """Return the factor for clipping by global norm: `max_norm / max(norm + eps, max_norm)`, at most 1.

    >>> from polyamp.array_namespace import PYTHON
    >>> clip_factor(4.0, 1.0, PYTHON), clip_factor(0.5, 1.0, PYTHON)
    (0.25, 1.0)
    """
    limit = xp.asarray(max_norm, norm)
    return limit / xp.maximum(norm + eps if eps else norm, limit)


def clip_transformation(limits: ClipLimits, norm: Any, xp: ArrayNamespace) -> Callable[[Any], Any]:
    """Return the function that clips one gradient.

    Args:
        limits: the recipe's.
        norm: global norm of all gradients, scalar.
        xp: the framework's array namespace.

    >>> from polyamp.array_namespace import PYTHON
    >>> clip_transformation(ClipLimits(norm=1.0), 4.0, PYTHON)(2.0)
    0.5
    >>> clip_transformation(ClipLimits(value=1.5), 4.0, PYTHON)(-2.0)
    -1.5
    """
    if limits.norm is not None:
        factor = clip_factor(norm, limits.norm, xp, limits.eps)
        return lambda grad: grad * xp.asarray(factor, grad)
    if limits.value is not None:
        largest = limits.value
        return lambda grad: xp.minimum(xp.maximum(grad, xp.asarray(-largest, grad)), xp.asarray(largest, grad))
    return lambda grad: grad


def clip_gradients(
    sets: Sequence[ClipSet], grads: Sequence[Any], norm: Any, norm_of: Callable[[list[int]], Any], xp: ArrayNamespace
) -> list[Any]:
    """Return the clipped gradients.

    Args:
        sets: the result of `GroupMembers.clip_sets`.
        grads: one gradient per parameter, in order; None stays None.
        norm: norm of all gradients, scalar.
        norm_of: indices of gradients -> their norm, a scalar like `norm`. Called if there are several sets.
        xp: the framework's array namespace.

    >>> from polyamp.array_namespace import PYTHON
    >>> sets = [ClipSet(ClipLimits(norm=1.0), (0, 1)), ClipSet(ClipLimits(), (2,))]
    >>> clip_gradients(sets, [3.0, None, 4.0], 5.0, lambda places: 3.0, PYTHON)
    [1.0, None, 4.0]
    """
    clipped = list(grads)
    for limits, places in sets:
        own = [place for place in places if grads[place] is not None]
        if own:
            of_set = norm if len(sets) == 1 or limits.norm is None else norm_of(own)
            transform = clip_transformation(limits, of_set, xp)
            for place in own:
                clipped[place] = transform(grads[place])
    return clipped
