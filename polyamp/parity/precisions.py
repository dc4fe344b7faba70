"""Phases of a comparison: float32, the recipe's policy, and float64 as reference for float32."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from polyamp.errors import PolicyError, PolyampError, RecipeError, describe_value
from polyamp.float_formats import FORMATS
from polyamp.parity.trainers import OwnLoop
from polyamp.recipe.optimizers import is_spec, sgd
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler

FLOAT32: Final = "float32"
FLOAT64: Final = "float64"
POLICY: Final = "policy"
FLOAT64_TRAINING_LIMIT: Final = 25_000_000
"""Largest number of trained values with which a model is also trained in float64: 32 bytes for each, with Adam."""
FLOAT64_PASS_LIMIT: Final = 200_000_000
"""Largest number of trained values with which one float64 forward and backward pass runs: 16 bytes for each."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One run of each side, in one precision.

    Attributes:
        name: `FLOAT32`, `FLOAT64` or `POLICY`.
        wide: whether the model runs in float64.
        title: name in reports: the policy in its usual spelling.
        pass_only: whether it is a single forward and backward pass without training.
    """

    name: str
    wide: bool = False
    title: str = ""
    pass_only: bool = False


def resolve_recipe(recipe: Any, model: Any) -> Recipe | None:
    """Return a side's recipe, from a recipe or from a function that makes one for a model.

    Raises:
        RecipeError: `recipe` is neither.
    """
    if isinstance(recipe, OwnLoop):
        return recipe.recipe
    made = recipe(model) if callable(recipe) and not isinstance(recipe, Recipe) else recipe
    if made is not None and not isinstance(made, Recipe):
        raise RecipeError(
            "recipe must be a polyamp.Recipe, a function of the model that returns one, a polyamp.parity.OwnLoop, or "
            f"None for a forward and backward pass in float32. Received: {type(made).__name__}."
        )
    return made


def check_native_optimizer(recipe: Any, *, in_place: bool) -> None:
    """Raise if a framework's own optimizer is bound to one model: each run trains a separate copy.

    Raises:
        RecipeError: the message shows how to pass it instead.
    """
    if isinstance(recipe, Recipe) and in_place and not is_spec(recipe.optimizer):
        raise RecipeError(
            f"recipe holds {type(recipe.optimizer).__name__}, which belongs to one model, and a comparison trains "
            "several copies of it. Give a function instead: recipe=lambda model: polyamp.Recipe(optimizer="
            "torch.optim.AdamW(model.parameters()), ...)."
        )


def phase_recipe(recipe: Recipe | None, phase: Phase) -> Recipe:
    """Return the recipe of one phase: the user's, or the user's in float32 or float64.

    Only dtypes and the scaler differ from the user's. Without a recipe the state is only observed, not trained.

    >>> from polyamp import adam
    >>> phase_recipe(Recipe(policy="mixed_float16", optimizer=adam(0.1)), Phase(name=FLOAT32)).policy.compute
    'float32'
    """
    if recipe is None:
        recipe = Recipe(optimizer=sgd(0.0))
    if phase.name == POLICY:
        return recipe
    dtype = FLOAT64 if phase.wide else FLOAT32
    # TF32 is a separate precision: it is judged under the policy, never as float32
    policy = Policy(param=dtype, compute=dtype, output=dtype)
    return recipe.replace(policy=policy, scaler=LossScaler.off())


def comparison_phases(recipes: tuple[Recipe | None, ...], parameters: int) -> list[Phase]:
    """Return the phases of a comparison.

    Args:
        recipes: of both sides.
        parameters: number of trained values of the larger side; limits the use of float64.
    """
    found = []
    if all(recipe is None or recipe.policy.param == FLOAT32 for recipe in recipes):
        found.append(Phase(name=FLOAT32, title=FLOAT32))
        if parameters <= FLOAT64_PASS_LIMIT:
            found.append(Phase(name=FLOAT64, wide=True, title=FLOAT64, pass_only=parameters > FLOAT64_TRAINING_LIMIT))
    if any(recipe is not None and (recipe.policy.is_mixed or recipe.policy.param != FLOAT32) for recipe in recipes):
        policies = dict.fromkeys(_policy_name(recipe.policy) for recipe in recipes if recipe is not None)
        found.append(Phase(name=POLICY, title=" / ".join(policies)))
    return found


def _policy_name(policy: Policy) -> str:
    """Return a policy in Keras's spelling, or else in jmp's."""
    for dialect in ("keras", "jmp"):
        try:
            return policy.replace(overrides={}).spelled(dialect)
        except PolicyError:
            continue
    return str(policy)


def trains(recipe: Recipe) -> bool:
    """Return whether a recipe is the user's, and not the one with which a loop's passes are recorded."""
    return not (is_spec(recipe.optimizer) and recipe.optimizer.learning_rate == 0.0)


def phase_dtypes(recipe: Recipe | None, phase: Phase) -> set[str]:
    """Return the floating dtypes in which a phase computes."""
    if phase.name == POLICY and recipe is not None:
        return {recipe.policy.compute, recipe.policy.param}
    return {FLOAT64 if phase.wide else FLOAT32}


def unit_roundoff(recipes: tuple[Recipe | None, ...], phase: Phase) -> float:
    """Return the unit roundoff of the coarsest dtype in which either side computes."""
    return max(FORMATS[dtype].unit_roundoff for recipe in recipes for dtype in phase_dtypes(recipe, phase))


def recipe_data(recipe: Recipe, optimizer: str = "") -> dict[str, Any]:
    """Return a recipe as plain data, for a report.

    Args:
        recipe: the recipe.
        optimizer: description of a framework's own optimizer that the recipe stands for; "" for the recipe's own.
    """
    text, own = recipe_json(recipe)
    data: dict[str, Any] = msgspec.json.decode(text or "{}")
    return {**data, "optimizer": {"type": optimizer or own}} if optimizer or own else data


def recipe_json(recipe: Recipe | None) -> tuple[str | None, str]:
    """Return a recipe as JSON, and a description of its optimizer if that cannot be serialised."""
    if recipe is None:
        return None, ""
    try:
        return recipe.to_json(), ""
    except PolyampError:
        return recipe.replace(optimizer=sgd(0.0)).to_json(), describe_value(recipe.optimizer)


def without_judge(label: str, error: Exception) -> str:
    """Return the note for a side without float64: its framework lacks it, or the model requests a dtype itself."""
    message = str(error).strip().partition("\n")[0]
    return f"{label} has no float64 run to judge its float32 by: {message or type(error).__name__}"
