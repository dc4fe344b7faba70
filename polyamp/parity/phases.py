"""The runs that a comparison makes of each side: float32 first, the policy then, and float64 as judge of float32.

Called by `compare` and `run`, which give the phases to each `Party`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from polyamp.errors import PolicyError, PolyampError, RecipeError, described
from polyamp.parity.own_loop import OwnLoop
from polyamp.recipe.optimizers import is_spec, sgd
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler

FLOAT32: Final = "float32"
FLOAT64: Final = "float64"
POLICY: Final = "policy"
WIDE_LIMIT: Final = 25_000_000
"""Trained values up to which a model is trained in float64 as well: 32 bytes for each, with Adam."""
LOOK_LIMIT: Final = 200_000_000
"""Trained values up to which one forward and backward pass is made in float64: 16 bytes for each."""

EPSILON: Final = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
"""Dtype -> the largest relative error of one rounding (the unit roundoff)."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a side.

    Attributes:
        name: `FLOAT32`, `FLOAT64` or `POLICY`.
        wide: whether the model is run in float64.
        shown: what reports call it: the policy, as a person spells it.
        looks: whether it is one forward and backward pass, and no training.
    """

    name: str
    wide: bool = False
    shown: str = ""
    looks: bool = False


def settled_recipe(recipe: Any, model: Any) -> Recipe | None:
    """The recipe that a side trains with, from a recipe or from a function that makes one for a model.

    Raises:
        RecipeError: neither.
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


def check_own_optimizer(recipe: Any, *, in_place: bool) -> None:
    """Refuse a framework's own optimizer that belongs to one model: each run trains a model of its own.

    Raises:
        RecipeError: says how to give it.
    """
    if isinstance(recipe, Recipe) and in_place and not is_spec(recipe.optimizer):
        raise RecipeError(
            f"recipe holds {type(recipe.optimizer).__name__}, which belongs to one model, and a comparison trains "
            "several copies of it. Give a function instead: recipe=lambda model: polyamp.Recipe(optimizer="
            "torch.optim.AdamW(model.parameters()), ...)."
        )


def recipe_of(recipe: Recipe | None, phase: Phase) -> Recipe:
    """The recipe of one phase: the user's, in float32, or in float64.

    Everything but dtypes and scaler is the user's. Without a recipe the state is only there to be looked at.

    >>> from polyamp import adam
    >>> recipe_of(Recipe(policy="mixed_float16", optimizer=adam(0.1)), Phase(name=FLOAT32)).policy.compute
    'float32'
    """
    if recipe is None:
        recipe = Recipe(optimizer=sgd(0.0))
    if phase.name == POLICY:
        return recipe
    dtype = FLOAT64 if phase.wide else FLOAT32
    # TF32 is a precision of its own: judged as the policy, never as float32
    policy = Policy(param=dtype, compute=dtype, output=dtype)
    return recipe.replace(policy=policy, scaler=LossScaler.off())


def phases_of(recipes: tuple[Recipe | None, ...], parameters: int) -> list[Phase]:
    """The phases of a comparison.

    Args:
        recipes: of both sides.
        parameters: how many trained values the larger side has: float64 has to be cheap.
    """
    found = []
    if all(recipe is None or recipe.policy.param == FLOAT32 for recipe in recipes):
        found.append(Phase(name=FLOAT32, shown=FLOAT32))
        if parameters <= LOOK_LIMIT:
            found.append(Phase(name=FLOAT64, wide=True, shown=FLOAT64, looks=parameters > WIDE_LIMIT))
    if any(recipe is not None and (recipe.policy.is_mixed or recipe.policy.param != FLOAT32) for recipe in recipes):
        policies = dict.fromkeys(_spelled(recipe.policy) for recipe in recipes if recipe is not None)
        found.append(Phase(name=POLICY, shown=" / ".join(policies)))
    return found


def _spelled(policy: Policy) -> str:
    """A policy in Keras's word for it, or in jmp's."""
    for dialect in ("keras", "jmp"):
        try:
            return policy.replace(overrides={}).spelled(dialect)
        except PolicyError:
            continue
    return str(policy)


def dtypes_of(recipe: Recipe | None, phase: Phase) -> set[str]:
    """The floating dtypes that a phase computes in."""
    policy = recipe_of(recipe, phase).policy
    return {policy.compute, policy.param}


def epsilon(recipes: tuple[Recipe | None, ...], phase: Phase) -> float:
    """The unit roundoff of the coarsest dtype that either side computes in."""
    return max(EPSILON[dtype] for recipe in recipes for dtype in dtypes_of(recipe, phase))


def as_data(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain data, for a report."""
    text, optimizer = plain(recipe)
    data: dict[str, Any] = msgspec.json.decode(text or "{}")
    return {**data, "optimizer": {"type": optimizer}} if optimizer else data


def plain(recipe: Recipe | None) -> tuple[str | None, str]:
    """A recipe as JSON, and what its optimizer is called where JSON cannot hold it."""
    if recipe is None:
        return None, ""
    try:
        return recipe.to_json(), ""
    except PolyampError:
        return recipe.replace(optimizer=sgd(0.0)).to_json(), described(recipe.optimizer)
