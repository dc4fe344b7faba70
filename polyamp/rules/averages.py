"""S34: which parameters have a moving average, and how far one moves after an update. Knows no framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polyamp.array_namespace import ArrayNamespace
from polyamp.errors import RecipeError, StateError
from polyamp.recipe import overrides, path_aliases
from polyamp.recipe.ema import Ema
from polyamp.recipe.recipe import Recipe


def averaged_paths(recipe: Recipe, paths: Iterable[str], *, backend: str) -> list[str]:
    """Return the paths of the parameters that have an average, in order; none without `Recipe(ema=...)`.

    Raises:
        RecipeError: a glob of `exclude` matches no parameter.

    >>> from polyamp.recipe.recipe import Recipe
    >>> averaged_paths(Recipe(ema=Ema(exclude="head")), ["body/w", "head/w"], backend="torch")
    ['body/w']
    """
    ema = recipe.ema
    if ema is None:
        return []
    known = list(paths)
    if not ema.globs:
        return known
    aliases = recipe.policy.aliases  # that each names a module of the model is checked with the policy
    modules = [own[backend] for own in aliases.values() if backend in own]
    names = path_aliases.expand_aliases(aliases, backend, [(path,) for path in known], lambda: modules)
    overrides.check_all_match(
        ema.globs,
        (name for own in names for name in own),
        argument="ema: exclude",
        what="trainable parameter",
        error=RecipeError,
    )
    return [
        path
        for path, own in zip(known, names, strict=True)
        if not any(overrides.covers(glob, name) for glob in ema.globs for name in own)
    ]


def average_share(ema: Ema, count: Any, applied: Any, xp: ArrayNamespace) -> Any:
    """Return the share of a parameter's value in the next value of its average, scalar; 0 if the average stays.

    Args:
        ema: the recipe's.
        count: number of applied updates, the current one included, floating scalar.
        applied: whether the current update is applied, boolean scalar; None if it is.
        xp: the array namespace of `count`.

    >>> from polyamp.array_namespace import PYTHON
    >>> [average_share(Ema(0.75, every=2), float(count), None, PYTHON) for count in range(5)]
    [0.0, 0.0, 1.0, 0.0, 0.25]
    """
    zero, one = xp.asarray(0.0, count), xp.asarray(1.0, count)
    moves = xp.floor(count / ema.every)
    share = xp.asarray(1.0 - ema.decay, count)
    if ema.warmup:
        share = xp.maximum(share, 9.0 / (moves + 10.0))
    share = xp.where(moves > 1.0, share, one)
    due = (moves * ema.every == count) & (count > 0.0)
    return xp.where(due if applied is None else due & applied, share, zero)


def move_average(average: Any, value: Any, share: Any, xp: ArrayNamespace) -> Any:
    """Return the average after a move: `average + share * (value - average)`, exact for a share of 0 or 1.

    Args:
        average: array.
        value: array of the same shape and dtype.
        share: scalar of the same dtype.
        xp: their array namespace.
    """
    return xp.where(share == 1.0, value, xp.where(share > 0.0, average + share * (value - average), average))


def averages_in_place_error() -> StateError:
    """Return the error of a step, a save or a refresh inside of `polyamp.averaged(state)`."""
    return StateError(
        "inside `with polyamp.averaged(state)` the model has its averages in place of the trained parameters, so the "
        "state cannot be trained, saved or refreshed. Do it after the block, or take polyamp.averaged_model(state), "
        "which is a model of its own."
    )
