"""`explain_step`: which rule of the training step makes two updates differ, with the number that shows it.

What recipes and loops know (clip, loss scale, micro-batches, momentum, schedule, betas) is tried against the formulas
that `update_rule` recovers from both sides' arrays. `recipe_differences`: the settings in which two recipes differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from polyamp.parity.verdict.causes import clip_causes, moment_causes
from polyamp.parity.verdict.causes.cause import Cause
from polyamp.parity.verdict.causes.step_facts import StepFacts
from polyamp.parity.verdict.causes.step_history import SideUpdate
from polyamp.parity.verdict.causes.update_causes import other_update
from polyamp.parity.verdict.causes.update_rule import moment_rule
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe

_GRADIENT_CHECKS: Final[tuple[Callable[[StepFacts], Cause | None], ...]] = (
    clip_causes.clip_by_value,
    clip_causes.clip_per_parameter,
    moment_causes.other_gradient,
    moment_causes.stale_gradient,
    moment_causes.dampening,
    moment_causes.coupled_decay,
    clip_causes.gradient_factor,
    moment_causes.momentum,
)
"""Checks of what the moments are made of, the most certain first."""
_PLAIN_CHECKS: Final = (clip_causes.clip_by_value, clip_causes.clip_per_parameter, clip_causes.gradient_factor)
"""Those for optimizers without moments."""
_SETTINGS: Final = ("clip_norm", "clip_value", "accumulate_steps", "loss_scaler")


def explain_step(
    labels: tuple[str, str],
    step: int,
    recipes: tuple[Recipe | None, Recipe | None],
    sides: tuple[SideUpdate, SideUpdate],
    roundoff: float = 0.0,
) -> Cause | None:
    """Return the rule of the step by which two updates differ; None if no rule is recognised.

    Args:
        labels: of both sides.
        step: number of the step, from 1.
        recipes: of both sides; None of a side without one.
        sides: updates of both, whose gradients agree.
        roundoff: unit roundoff of the passes.
    """
    limits = [limit for recipe in recipes if recipe is not None for limit in recipe.clip if limit is not None]
    one, two = (moment_rule(side, limits, roundoff) for side in sides)
    if one is None or two is None:
        return None
    facts = StepFacts(labels, step, recipes, sides, (one, two))
    checks: list[Callable[[StepFacts], Cause | None]] = [moment_causes.frozen_parameters]
    if one.slot and one.slot == two.slot:
        checks += _GRADIENT_CHECKS
    elif facts.is_plain:
        checks += _PLAIN_CHECKS
    checks += [moment_causes.second_moment, other_update]
    return next((found for check in checks if (found := check(facts)) is not None), None)


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
    found = {name: getattr(recipe, name) for name in _SETTINGS}
    spec = recipe.optimizer
    if not is_spec(spec):
        return found
    return {"optimizer": spec.tag, **{name: getattr(spec, name) for name in spec.field_names}, **found}
