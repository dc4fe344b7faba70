"""`compile`, which configures `model.fit` by a recipe, and `guard`, for Keras on torch and JAX.

`fit`, `evaluate` and `predict` are Keras's own. A wrapper of the model's `train_step` restores running statistics after
a skipped update. The host checks for a stuck scale every `patience` batches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.policy import Policy
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
from polyamp_keras.own_loop.fit_checks import (
    check_average,
    check_losses,
    check_model,
    replace_keras_wrapper,
    scaling_optimizer,
)
from polyamp_keras.own_loop.fit_loss_divisor import install_loss_counting, report_loss_divisors
from polyamp_keras.own_loop.native_scaler import KerasLossScaleOptimizer
from polyamp_keras.own_loop.optimizer_checks import check_recipe_optimizer
from polyamp_keras.own_loop.saved_guard import SavedGuard
from polyamp_keras.own_loop.spec_optimizer import SpecOptimizer, build_optimizer, resolve_groups
from polyamp_keras.precision.apply_policy import APPLIED_BY_COMPILE, AppliedPolicy, resolve_policy
from polyamp_keras.precision.policy_application import CACHED_FUNCTIONS


def compile(  # noqa: A001  # Keras's word for it
    model: Any,
    recipe: Recipe,
    loss: Any = None,
    *,
    metrics: Any = None,
    loss_weights: Any = None,
    weighted_metrics: Any = None,
    run_eagerly: bool = False,
    steps_per_execution: int = 1,
    jit_compile: bool | str | None = None,
    **more: Any,
) -> None:
    """Compile a model by a recipe: `fit`, `evaluate` and `predict` follow its policy, scaler, optimizer and clip.

    The policy is applied permanently, and variables stay float32. Each batch of `fit` is a micro-batch, as with Keras's
    own accumulation: `accumulate_steps` of them form one update. Each is weighted by its rows, or by the divisor of its
    loss: the mask of its output, or sample weights with `reduction="mean_with_sample_weight"` (S8). An accumulation
    that is incomplete at the end of an epoch continues in the next epoch.

    Args:
        model: a built `keras.Model`.
        recipe: a recipe as for `polyamp.train_step`.
        loss, metrics, loss_weights, weighted_metrics, run_eagerly, steps_per_execution: as in `model.compile`. Losses
            are computed in float32.
        jit_compile: True, False or "auto" as in Keras. None is "auto": on JAX True, on torch False.
        **more: further arguments of the model's own `compile`, such as the `student_loss_fn` of keras.io's Distiller.
            Of Keras's arguments it gets those that it accepts.

    Raises:
        ModelError: not a `keras.Model`, not built, or without float32 parameters.
        LossError: a loss in 16 bits.
        PolicyError, RecipeError, LossScaleError, UnsupportedError: as from `polyamp.init`; jit_compile=True on torch,
            `keras.distribution`, nnx-enabled Keras; an argument that the model's `compile` does not accept, or a
            missing one.

    Example:
        >>> import keras, polyamp
        >>> import polyamp_keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(1e-3), clip_norm=1.0)
        >>> polyamp_keras.compile(model, recipe, loss="mse", metrics=["mae"])
        >>> history = model.fit(keras.ops.ones((8, 4)), keras.ops.zeros((8, 2)), verbose=0)
        >>> int(model.optimizer.iterations), sorted(history.history)
        (1, ['loss', 'mae'])
    """
    check_model(model)
    jit = "auto" if jit_compile is None else jit_compile
    ENGINE.check_fit(jit)
    given = {"loss": loss, "metrics": metrics, "loss_weights": loss_weights, "weighted_metrics": weighted_metrics}
    check_compile_arguments(model, {name: value for name, value in given.items() if value is not None}, more)
    check_losses([loss, *more.values()])
    plan = resolve_policy(model, recipe.policy)
    check_recipe_optimizer(recipe.optimizer, recipe.clip_norm)
    check_average(recipe)
    parameters = model_variables(model).parameters
    step_checks.check_parameters([(name, dtype_name(variable)) for name, variable in parameters.items()], recipe)
    optimizer = KerasLossScaleOptimizer(
        _make_optimizer(model, recipe, parameters),
        recipe.loss_scaler,
        clip_norm=recipe.clip_norm,
        clip_value=recipe.clip_value,
        clip_eps=recipe.clip_eps,
        accumulate_steps=recipe.accumulate_steps,
    )
    optimizer.build(model.trainable_variables)
    _install_policy(model, plan)
    settings = {
        "optimizer": optimizer,
        **given,
        "run_eagerly": run_eagerly,
        "steps_per_execution": steps_per_execution,
        "jit_compile": jit,
        "auto_scale_loss": False,
    }
    compile_model(model, settings, more)
    guard(model, recipe.policy)


def _make_optimizer(model: Any, recipe: Recipe, parameters: dict[str, Any]) -> Any:
    groups = resolve_groups(model, recipe, parameters)
    optimizer = SpecOptimizer(recipe.optimizer, groups=groups) if is_spec(recipe.optimizer) else recipe.optimizer
    check = functools.partial(check_recipe_optimizer, clip_norm=recipe.clip_norm)
    build_optimizer(optimizer, list(parameters.values()), check)
    return optimizer


def _install_policy(model: Any, plan: ResolvedPolicy) -> None:
    """Apply the policy permanently, in place of that of an earlier `compile`."""
    before = vars(model).get(APPLIED_BY_COMPILE)
    AppliedPolicy(model, plan, by_compile=True)  # first, since it may raise
    if before is not None:
        before.restore()


def guard(model: Any, policy: Policy | str | None = None) -> None:
    """Guard `model.fit` with a `LossScaleOptimizer`: restore running statistics, and detect a stuck scale.

    `compile` calls it. Call it for a model from `keras.models.load_model`, or for one that got its `LossScaleOptimizer`
    in `model.compile`. It replaces Keras's own `LossScaleOptimizer`, for example from a file, by
    `LossScaleOptimizer.from_keras`, and recompiles the model with its previous arguments.

    Args:
        model: a compiled, built model.
        policy: a policy or its spelling, whose `float32_matmul` applies to `fit`, `evaluate` and `predict`.

    Raises:
        LossScaleError: the model's optimizer is not a `LossScaleOptimizer`.
        ModelError: the model is not built.
    """
    _install_guard(model, None if policy is None else Policy.of(policy).float32_matmul)


def _install_guard(model: Any, precision: str | None) -> None:
    replace_keras_wrapper(model, KerasLossScaleOptimizer)
    optimizer = scaling_optimizer(model)
    ENGINE.check_fit(getattr(model, "jit_compile", False))
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    optimizer.prepare_statistics(model)
    step = own_class(model).train_step
    model.train_step = ENGINE.guarded_train_step(model, step, KerasLossScaleOptimizer, _count_micro_batch)
    if ENGINE.COUNTS_LOSS_DIVISORS:
        install_loss_counting(model)
    for name in CACHED_FUNCTIONS:
        setattr(model, f"make_{name}", _guard_function_maker(model, name, precision))
        setattr(model, name, None)
    for setting in model_settings(model):
        if isinstance(setting, SavedGuard):
            remove_setting(model, setting)
    add_setting(model, SavedGuard(model, precision))


SavedGuard.guard_model = staticmethod(_install_guard)


@contextlib.contextmanager
def _count_micro_batch(optimizer: KerasLossScaleOptimizer, data: Any) -> Iterator[None]:
    """Context manager that weights a micro-batch by its rows, or by the divisor of its loss."""
    arrays = [leaf for leaf in keras.tree.flatten(data) if len(getattr(leaf, "shape", ()))]
    if optimizer.accumulate_steps == 1 or not arrays:
        yield
        return
    with optimizer.micro_batch(float(arrays[0].shape[0])), report_loss_divisors(optimizer.count_micro_batch):
        yield


def _guard_function_maker(model: Any, name: str, precision: str | None) -> Callable[..., Any]:
    """Return a replacement of `make_train_function` and similar methods that adds the host's part of the guard."""
    own = getattr(own_class(model), f"make_{name}")
    watch = StuckScaleMonitor() if name == "train_function" else None

    def make(force: bool = False) -> Any:
        if getattr(model, name) is None or force:
            own(model, force)
            setattr(model, name, functools.partial(_run_guarded, model, getattr(model, name), precision, watch))
        return getattr(model, name)

    return make


def _run_guarded(
    model: Any, function: Callable[..., Any], precision: str | None, watch: StuckScaleMonitor | None, *args: Any
) -> Any:
    """Run a function that Keras made; check for a stuck scale when `watch`, that of a training function, is due."""
    with ENGINE.matmul_precision(precision):
        result = function(*args)
    optimizer = model.optimizer
    if watch is None or not ENGINE.KEEPS_FIT_STATE or not isinstance(optimizer, KerasLossScaleOptimizer):
        return result
    if watch.is_due(optimizer.scaler, model.steps_per_execution, optimizer.accumulate_steps):
        ENGINE.store_fit_state(model, result)
        optimizer.raise_if_stuck()
    return result
