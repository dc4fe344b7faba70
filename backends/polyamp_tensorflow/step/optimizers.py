"""Optimizer of a recipe as a Keras optimizer: a spec of polyamp (`polyamp_keras.SpecOptimizer`), or the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyamp.recipe.recipe import Recipe
from polyamp.rules.group_members import GroupMembers
from polyamp_keras.own_loop import spec_optimizer
from polyamp_tensorflow.distributed.replicas import check_replicated


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
    return spec_optimizer.make_optimizer(recipe, parameters, groups, check_replicated)
