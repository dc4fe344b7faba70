"""`recipe_differences`: the settings in which two recipes differ, apart from their policies."""

from __future__ import annotations

from typing import Any, Final

from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe

_FIELDS: Final = ("clip_norm", "clip_value", "accumulate_steps", "loss_scaler")


def recipe_differences(labels: tuple[str, str], recipes: tuple[Recipe | None, Recipe | None]) -> list[str]:
    """Return the differences as one sentence; empty if there are none, or if a side has no recipe.

    Args:
        labels: of both sides.
        recipes: of both sides.

    Example:
        >>> from polyamp import sgd
        >>> recipe_differences(("a", "b"), (Recipe(optimizer=sgd(0.1)), Recipe(optimizer=sgd(0.2))))
        ['The recipes differ: learning_rate is 0.1 in a and 0.2 in b.']
    """
    one, two = recipes
    if one is None or two is None:
        return []
    settings = [_settings(recipe) for recipe in (one, two)]
    texts = [
        f"{name} is {settings[0].get(name)} in {labels[0]} and {settings[1].get(name)} in {labels[1]}"
        for name in dict.fromkeys([*settings[0], *settings[1]])
        if settings[0].get(name) != settings[1].get(name)
    ]
    return [f"The recipes differ: {'; '.join(texts)}."] if texts else []


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe's step by name."""
    found = {name: getattr(recipe, name) for name in _FIELDS}
    spec = recipe.optimizer
    if not is_spec(spec):
        return found
    return {"optimizer": spec.tag, **{name: getattr(spec, name) for name in spec.field_names}, **found}
