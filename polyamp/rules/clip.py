"""S11: clipping of the unscaled gradients, by their norm or by value.

`gradient_clip` has the ways to clip. `clip_gradients` is the one function that a backend applies to gradients; a
backend that writes in place, or unscales and clips with one divisor, takes a `GradientClip` apart itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from polyamp.array_namespace import ArrayNamespace
from polyamp.recipe.clip_limits import ClipLimits


class GradientClip(NamedTuple):
    """How gradients are clipped that are clipped together: by a factor, by a function of each one, or not at all.

    Attributes:
        factor: `factor(norm, xp=...)`, norm of these gradients -> the factor of all of them, scalars; or None.
        transformation: gradient, namespace -> the clipped gradient; or None. It may overwrite its argument.
        apart: whether no factor or function is common to all gradients, because they are clipped in several sets.
    """

    factor: Callable[..., Any] | None = None
    transformation: Callable[[Any, ArrayNamespace], Any] | None = None
    apart: bool = False


class ClipSet(NamedTuple):
    """Parameters whose gradients are clipped together.

    Attributes:
        limits: their limits.
        places: their indices in the parameters' order.
    """

    limits: ClipLimits
    places: tuple[int, ...]


class SetClip(NamedTuple):
    """How the gradients of one set are clipped, with the set's factor computed.

    Attributes:
        places: the indices of those that are not None.
        factor: their factor, a scalar, or None.
        transformation: see `GradientClip`.
    """

    places: list[int]
    factor: Any
    transformation: Callable[[Any, ArrayNamespace], Any] | None


def gradient_clip(limits: ClipLimits) -> GradientClip:
    """Return how gradients are clipped by limits.

    >>> from polyamp.array_namespace import PYTHON
    >>> gradient_clip(ClipLimits(norm=1.0)).factor(4.0, xp=PYTHON)
    0.25
    >>> gradient_clip(ClipLimits(value=1.5)).transformation(-2.0, PYTHON)
    -1.5
    """
    if limits.norm is not None:
        return GradientClip(factor=functools.partial(clip_factor, max_norm=limits.norm, eps=limits.eps))
    if limits.value is not None:
        return GradientClip(transformation=functools.partial(_limit_elements, limits.value))
    return GradientClip()


def _limit_elements(largest: float, grad: Any, xp: ArrayNamespace) -> Any:
    return xp.clip(grad, -largest, largest)


def clip_factor(norm: Any, max_norm: float, xp: ArrayNamespace, eps: float = 0.0) -> Any:
    """Return the factor for clipping by global norm: `max_norm / max(norm + eps, max_norm)`, at most 1.

    >>> from polyamp.array_namespace import PYTHON
    >>> clip_factor(4.0, 1.0, PYTHON), clip_factor(0.5, 1.0, PYTHON)
    (0.25, 1.0)
    """
    limit = xp.asarray(max_norm, norm)
    return limit / xp.maximum(norm + eps if eps else norm, limit)


def clip_sets(limits: Sequence[tuple[Hashable, ClipLimits]]) -> list[ClipSet]:
    """Return which gradients are clipped together; every one lies in one set.

    Args:
        limits: for each parameter, in order, a name for those that are clipped together, and their limits.

    >>> sets = clip_sets([("a", ClipLimits(1.0)), ("b", ClipLimits(1.0)), ("a", ClipLimits(1.0))])
    >>> [places for _, places in sets]
    [(0, 2), (1,)]
    """
    found: dict[tuple[Hashable, ClipLimits], list[int]] = {}
    for place, key in enumerate(limits):
        found.setdefault(key, []).append(place)
    return [ClipSet(own, tuple(places)) for (_, own), places in found.items()]


def plan_clips(
    sets: Sequence[ClipSet],
    present: Sequence[bool],
    norm: Any,
    norms_of: Callable[[list[list[int]]], Sequence[Any]],
    xp: ArrayNamespace,
) -> list[SetClip]:
    """Return how each set with a gradient is clipped.

    Args:
        sets: the result of `clip_sets`.
        present: for each parameter whether it has a gradient.
        norm: norm of all gradients, scalar, for a single set; None to have it from `norms_of`.
        norms_of: several lists of indices of gradients -> the norm of each list, scalars. Called at most once, only if
            norms are needed.
        xp: the framework's array namespace of scalars.
    """
    own = [(gradient_clip(limits), [place for place in places if present[place]]) for limits, places in sets]
    own = [(how, places) for how, places in own if places]
    by_norm = [places for how, places in own if how.factor is not None]
    known = not by_norm or (norm is not None and len(sets) == 1)
    norms = iter([norm] * len(by_norm) if known else norms_of(by_norm))
    return [
        SetClip(places, None if how.factor is None else how.factor(next(norms), xp=xp), how.transformation)
        for how, places in own
    ]


def clip_gradients(
    sets: Sequence[ClipSet], grads: Sequence[Any], norm: Any, norm_of: Callable[[list[int]], Any], xp: ArrayNamespace
) -> list[Any]:
    """Return the clipped gradients.

    Args:
        sets: the result of `clip_sets`.
        grads: one gradient per parameter, in order; None stays None.
        norm: norm of all gradients, scalar, for a single set; None to have it from `norm_of`.
        norm_of: indices of gradients -> their norm, a scalar like `norm`.
        xp: the framework's array namespace.

    >>> from polyamp.array_namespace import PYTHON
    >>> sets = [ClipSet(ClipLimits(norm=1.0), (0, 1)), ClipSet(ClipLimits(), (2,))]
    >>> clip_gradients(sets, [3.0, None, 4.0], 5.0, lambda places: 3.0, PYTHON)
    [1.0, None, 4.0]
    """
    clipped = list(grads)
    present = [grad is not None for grad in grads]
    for places, factor, transformation in plan_clips(sets, present, norm, lambda many: list(map(norm_of, many)), xp):
        for place in places:
            grad = grads[place] if factor is None else grads[place] * xp.asarray(factor, grads[place])
            clipped[place] = grad if transformation is None else transformation(grad, xp)
    return clipped
