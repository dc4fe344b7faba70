"""`compile`, which configures `model.fit` by a recipe, and `guard`, on every Keras backend.

`fit`, `evaluate` and `predict` are Keras's own. `train_step_guard` has the part of torch and JAX, and
`polyamp_tensorflow` that of TensorFlow, where strategies are.
"""

from __future__ import annotations

from typing import Any

from polyamp.recipe.clip_limits import clip_arguments
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.rules import step_checks
from polyamp_keras.arrays import dtype_name
from polyamp_keras.models.variables import model_variables
from polyamp_keras.own_loop.compile_arguments import check_compile_arguments, compile_model
from polyamp_keras.own_loop.fit_checks import check_average, check_losses, check_model
from polyamp_keras.own_loop.optimizer_checks import check_recipe_optimizer
from polyamp_keras.own_loop.saved_guard import SavedGuard
from polyamp_keras.own_loop.spec_optimizer import make_optimizer, resolve_groups
from polyamp_keras.precision.apply_policy import APPLIED_BY_COMPILE, AppliedPolicy, resolve_policy


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
        model: a built `keras.Model`; with a strategy of TensorFlow's, created in its scope.
        recipe: a recipe as for `polyamp.train_step`.
        loss, metrics, loss_weights, weighted_metrics, run_eagerly, steps_per_execution: as in `model.compile`. Losses
            are computed in float32.
        jit_compile: True, False or "auto" as in Keras. None is "auto": on JAX True, on torch False; but
            on TensorFlow float16 on one CPU is compiled with XLA, with one warning per process.
        **more: further arguments of the model's own `compile`, such as the `student_loss_fn` of keras.io's Distiller.
            Of Keras's arguments it gets those that it accepts.

    Raises:
        ModelError: not a `keras.Model`, not built, or without float32 parameters.
        LossError: a loss in 16 bits.
        PolicyError, RecipeError, LossScaleError, UnsupportedError: as from `polyamp.init`; jit_compile=True on torch,
            XLA on several replicas, `keras.distribution`, nnx-enabled Keras; an argument that the model's `compile`
            does not accept, or a missing one.

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
    backend = SavedGuard.backend
    given = {"loss": loss, "metrics": metrics, "loss_weights": loss_weights, "weighted_metrics": weighted_metrics}
    check_model(model)
    check_compile_arguments(model, {name: value for name, value in given.items() if value is not None}, more)
    check_losses([loss, *more.values()])
    plan = resolve_policy(model, recipe.policy)
    check_recipe_optimizer(recipe.optimizer, recipe.clip_norm)
    check_average(recipe)
    parameters = model_variables(model).parameters
    step_checks.check_parameters([(name, dtype_name(variable)) for name, variable in parameters.items()], recipe)
    with backend.scope(model):
        jit = backend.choose_jit(model, plan, jit_compile, run_eagerly)
        groups = resolve_groups(model, recipe, parameters)
        optimizer = backend.optimizer(
            make_optimizer(recipe, parameters, groups, backend.check_optimizer),
            recipe.loss_scaler,
            accumulate_steps=recipe.accumulate_steps,
            **clip_arguments(recipe.clip),
        )
        optimizer.build(model.trainable_variables)
        execution = {"run_eagerly": run_eagerly, "steps_per_execution": steps_per_execution, "jit_compile": jit}
        before = vars(model).get(APPLIED_BY_COMPILE)
        AppliedPolicy(model, plan, by_compile=True)  # first, since it may raise
        if before is not None:
            before.restore()
        compile_model(model, {"optimizer": optimizer, **given, **execution, "auto_scale_loss": False}, more)
        guard(model, recipe.policy)


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
    SavedGuard.backend.install_guard(model, None if policy is None else Policy.of(policy).float32_matmul)
