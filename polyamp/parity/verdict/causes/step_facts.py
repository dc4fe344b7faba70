"""`StepFacts`: everything that is known about a step whose updates differ, for the functions that name the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from polyamp.array_namespace import PYTHON
from polyamp.errors import join_first
from polyamp.parity.verdict.causes.step_history import ParameterKey, SideUpdate
from polyamp.parity.verdict.causes.update_rule import SECOND_MOMENTS, MomentRule
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe

TOLERANCE: Final = 3e-3
"""Largest relative distance of two factors that count as equal."""
MIN_CLIP: Final = 1e-2
"""Least part by which a clip makes a gradient smaller that is seen as one."""
_DEFAULT_BETAS: Final = (0.9, 0.999)
_MAX_NAMED: Final = 3


class StepFacts(NamedTuple):
    """Everything that is known about a step that differs.

    Attributes:
        labels: of both sides.
        step: its number, from 1.
        recipes: of both sides; None of a side that a loop of the user's trains.
        sides: updates of both.
        moments: formulas of both first moments.
    """

    labels: tuple[str, str]
    step: int
    recipes: tuple[Recipe | None, Recipe | None]
    sides: tuple[SideUpdate, SideUpdate]
    moments: tuple[MomentRule, MomentRule]

    def hyperparameter(self, name: str) -> object:
        """Return a hyperparameter of the first side's optimizer, or else of the other's; None if no recipe has it."""
        found = [getattr(recipe.optimizer, name, None) for recipe in self.recipes if recipe is not None]
        return next((each for each in found if each is not None), None)

    @property
    def betas(self) -> tuple[float, float]:
        """Betas of the recipes, or else the usual ones."""
        found = self.hyperparameter("betas")
        return found if isinstance(found, tuple) else _DEFAULT_BETAS

    @property
    def rate(self) -> float | None:
        """Learning rate of this step by the first recipe that says it."""
        specs = [recipe.optimizer for recipe in self.recipes if recipe is not None and is_spec(recipe.optimizer)]
        return float(specs[0].rate(self.step - 1, PYTHON)) if specs else None

    @property
    def moment_tolerance(self) -> float:
        """Largest relative distance of two factors of the moments that count as equal."""
        return max(rule.tolerance for rule in self.moments)

    @property
    def is_plain(self) -> bool:
        """Whether the optimizers keep no moments, so that an update is a multiple of its gradient."""
        return not any(rule.slot for rule in self.moments) and not any(
            slot in side.slots for side in self.sides for slot in SECOND_MOMENTS
        )

    @property
    def global_norm(self) -> float:
        """Norm of all gradients of the pass."""
        return self.sides[0].global_norm

    def share(self, side: int) -> float:
        """Return how much of its gradient a side uses: less than 1 where it is clipped."""
        rule = self.moments[side]
        if rule.slot == "exp_avg":
            return rule.gradient / (1.0 - self.betas[0])
        if rule.slot:
            return rule.gradient
        largest = max(abs(each.gradient) for each in self.moments)
        return -rule.gradient / (self.rate or largest or 1.0)

    def clipped_norm(self, side: int) -> float | None:
        """Return the global norm to which a side clips its gradients; None if it does not."""
        recipe, norm = self.recipes[side], self.sides[side].global_norm
        if recipe is not None and (recipe.clip_norm is None or norm <= recipe.clip_norm):
            return None
        return self.share(side) * norm if self.share(side) < 1.0 - MIN_CLIP else None

    def pair(self, values: Sequence[float]) -> str:
        """Return a number of each side as text: `0.1 in torch, 0.2 in jax`."""
        return ", ".join(f"{value:.4g} in {label}" for value, label in zip(values, self.labels, strict=True))


def is_near(one: float, other: float, tolerance: float = TOLERANCE) -> bool:
    """Return whether two numbers are equal up to a relative tolerance."""
    return math.isclose(one, other, rel_tol=tolerance)


def parameter_names(keys: Sequence[ParameterKey]) -> str:
    """Return the first of some parameters' names as text."""
    return join_first([f"{module}.{name}" for module, name in keys], _MAX_NAMED)
