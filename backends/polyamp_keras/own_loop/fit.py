"""`compile`, which configures `model.fit` by a recipe, and `guard`, for Keras on torch and JAX.

`fit`, `evaluate` and `predict` are Keras's own. A wrapper of the model's `train_step` restores running statistics after
a skipped update. The host checks for a stuck scale every `patience` batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp_keras.engine import ENGINE
from polyamp_keras.models.layers import own_class
from polyamp_keras.own_loop.fit_checks import check_trained_variables, replace_keras_wrapper, scaling_optimizer
from polyamp_keras.own_loop.fit_guard import check_compile, compile_with, install_functions, wrap_optimizer
from polyamp_keras.own_loop.fit_loss_divisor import install_loss_counting, report_loss_divisors
from polyamp_keras.own_loop.native_scaler import KerasLossScaleOptimizer
from polyamp_keras.own_loop.saved_guard import SavedGuard
from polyamp_keras.own_loop.spec_optimizer import make_optimizer, resolve_groups


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
    jit = "auto" if jit_compile is None else jit_compile
    ENGINE.check_fit(jit)
    given = {"loss": loss, "metrics": metrics, "loss_weights": loss_weights, "weighted_metrics": weighted_metrics}
    plan, parameters = check_compile(model, recipe, given, more)
    inner = make_optimizer(recipe, parameters, resolve_groups(model, recipe, parameters))
    optimizer = wrap_optimizer(KerasLossScaleOptimizer, inner, recipe)
    optimizer.build(model.trainable_variables)
    execution = {"run_eagerly": run_eagerly, "steps_per_execution": steps_per_execution, "jit_compile": jit}
    compile_with(model, plan, {"optimizer": optimizer, **given, **execution}, more)
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
    if ENGINE.LOSS_REACHES_APPLY:
        install_loss_counting(model)
    keeps = ENGINE.KEEPS_FIT_STATE
    install_functions(model, precision, _check_stuck if keeps else None, check_trained_variables if keeps else None)


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


def _check_stuck(model: Any, result: Any) -> None:
    ENGINE.store_fit_state(model, result)
    model.optimizer.raise_if_stuck()
