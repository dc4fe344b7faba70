"""Optimizer of a recipe as a Keras optimizer: a spec of polyamp (`polyamp_keras.SpecOptimizer`), or the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.rules.group_members import GroupMembers
from polyamp_keras.own_loop import spec_optimizer
from polyamp_keras.own_loop.optimizer_checks import check_recipe_optimizer
from polyamp_keras.own_loop.spec_optimizer import SpecOptimizer
from polyamp_tensorflow.step.replicas import check_replicated


def make_optimizer(recipe: Recipe, parameters: Mapping[str, Any], groups: GroupMembers) -> Any:
    """Return the recipe's optimizer, built for these parameters.

    Args:
        recipe: the recipe.
        parameters: path -> variable.
        groups: the result of `resolve_groups`.

    Raises:
        RecipeError: a native optimizer of another model, or one whose members scale or accumulate.
        LossScaleError, UnsupportedError: the optimizer does not work on the current strategy's replicas.
    """
    optimizer = SpecOptimizer(recipe.optimizer, groups=groups) if is_spec(recipe.optimizer) else recipe.optimizer
    check = functools.partial(check_recipe_optimizer, clip_norm=recipe.clip_norm)
    build_optimizer(optimizer, list(parameters.values()), check)
    return optimizer


def build_optimizer(optimizer: Any, variables: list[Any], check: Callable[[Any], None]) -> None:
    """Build a Keras optimizer as `spec_optimizer.build_optimizer`, and check it for the current strategy.

    Raises:
        LossScaleError, UnsupportedError: it does not work on the current strategy's replicas.
    """

    def check_both(optimizer: Any) -> None:
        check(optimizer)
        check_replicated(optimizer)

    spec_optimizer.build_optimizer(optimizer, variables, check_both)
