"""What `compile` and `guard` do on every Keras backend: the checks, the arguments, and the functions that run `fit`.

`own_loop.fit` has both for torch and JAX, and `polyamp_tensorflow` for TensorFlow, where strategies are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from polyamp.recipe.recipe import Recipe
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.rules import step_checks
from polyamp.rules.stuck_scale import StuckScaleMonitor
from polyamp_keras.arrays import dtype_name
from polyamp_keras.engine import ENGINE
from polyamp_keras.models.keras_serialization import add_setting, model_settings, remove_setting
from polyamp_keras.models.layers import own_class
from polyamp_keras.models.variables import model_variables
from polyamp_keras.own_loop.compile_arguments import check_compile_arguments, compile_model
from polyamp_keras.own_loop.fit_checks import check_average, check_losses, check_model
from polyamp_keras.own_loop.optimizer_checks import check_recipe_optimizer
from polyamp_keras.own_loop.saved_guard import SavedGuard
from polyamp_keras.own_loop.scaled_optimizer import ScaledOptimizer
from polyamp_keras.precision.apply_policy import APPLIED_BY_COMPILE, AppliedPolicy, resolve_policy
from polyamp_keras.precision.policy_application import CACHED_FUNCTIONS

StuckCheck = Callable[[Any, Any], None]
"""Raises for a stuck scale, given the model and what a train function returned."""


def check_compile(
    model: Any, recipe: Recipe, given: Mapping[str, Any], more: Mapping[str, Any]
) -> tuple[ResolvedPolicy, dict[str, Any]]:
    """Raise for what `compile` does not accept, before the model is changed.

    Args:
        model: the model.
        recipe: the recipe.
        given: Keras's arguments about losses and metrics.
        more: arguments of the model's own `compile`.

    Returns:
        The policy, resolved for the model, and path -> parameter.

    Raises:
        ModelError, LossError, PolicyError, RecipeError, UnsupportedError: as `compile`.
    """
    check_model(model)
    check_compile_arguments(model, {name: value for name, value in given.items() if value is not None}, more)
    check_losses([given["loss"], *more.values()])
    plan = resolve_policy(model, recipe.policy)
    check_recipe_optimizer(recipe.optimizer, recipe.clip_norm)
    check_average(recipe)
    parameters = model_variables(model).parameters
    step_checks.check_parameters([(name, dtype_name(variable)) for name, variable in parameters.items()], recipe)
    return plan, parameters


def wrap_optimizer(kind: type[Any], optimizer: Any, recipe: Recipe) -> Any:
    """Return the `LossScaleOptimizer` of this class around the recipe's optimizer."""
    return kind(
        optimizer,
        recipe.loss_scaler,
        clip_norm=recipe.clip_norm,
        clip_value=recipe.clip_value,
        clip_eps=recipe.clip_eps,
        accumulate_steps=recipe.accumulate_steps,
    )


def compile_with(model: Any, plan: ResolvedPolicy, settings: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Apply the policy permanently, in place of that of an earlier `compile`, and call the model's own `compile`."""
    before = vars(model).get(APPLIED_BY_COMPILE)
    AppliedPolicy(model, plan, by_compile=True)  # first, since it may raise
    if before is not None:
        before.restore()
    compile_model(model, {**settings, "auto_scale_loss": False}, more)


def install_functions(
    model: Any,
    precision: str | None,
    check_stuck: StuckCheck | None,
    check_variables: Callable[[Any], None] | None = None,
) -> None:
    """Replace `make_train_function` and its like by ones that add the host's part of the guard, and note it for files.

    Args:
        model: the model.
        precision: `float32_matmul` of the policy.
        check_stuck: called after a train function, where a check of the scale is due; None if `apply` checks it.
        check_variables: called with the model before each `fit`; None for nothing.
    """
    for name in CACHED_FUNCTIONS:
        setattr(model, f"make_{name}", _function_maker(model, name, precision, check_stuck, check_variables))
        setattr(model, name, None)
    for setting in model_settings(model):
        if isinstance(setting, SavedGuard):
            remove_setting(model, setting)
    add_setting(model, SavedGuard(model, precision))


def _function_maker(
    model: Any,
    name: str,
    precision: str | None,
    check_stuck: StuckCheck | None,
    check_variables: Callable[[Any], None] | None,
) -> Callable[..., Any]:
    own = getattr(own_class(model), f"make_{name}")
    watch = StuckScaleMonitor() if name == "train_function" else None

    def make(force: bool = False) -> Any:
        if watch is not None and check_variables is not None:
            check_variables(model)
        if getattr(model, name) is None or force:
            own(model, force)
            run = functools.partial(_run_guarded, model, getattr(model, name), precision, watch, check_stuck)
            setattr(model, name, run)
        return getattr(model, name)

    return make


def _run_guarded(
    model: Any,
    function: Callable[..., Any],
    precision: str | None,
    watch: StuckScaleMonitor | None,
    check_stuck: StuckCheck | None,
    *args: Any,
) -> Any:
    """Run a function that Keras made; check for a stuck scale when `watch`, that of a training function, is due."""
    with ENGINE.matmul_precision(precision):
        result = function(*args)
    optimizer = model.optimizer
    if watch is None or check_stuck is None or not isinstance(optimizer, ScaledOptimizer):
        return result
    if watch.is_due(optimizer.scaler, model.steps_per_execution, optimizer.accumulate_steps):
        check_stuck(model, result)
    return result
