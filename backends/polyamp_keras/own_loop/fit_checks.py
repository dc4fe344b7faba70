"""Checks of a model, its loss and its optimizer for `fit`, on every Keras backend."""

from __future__ import annotations

from typing import Any

import keras

from polyamp.errors import LossError, LossScaleError, ModelError, UnsupportedError
from polyamp.float_formats import HALF_DTYPES
from polyamp.recipe.recipe import Recipe
from polyamp_keras.compat import is_keras_code, own_trainable_variables
from polyamp_keras.models.layers import is_built, own_class
from polyamp_keras.own_loop.scaled_optimizer import ScaledOptimizer


def check_model(model: Any) -> None:
    """Raise unless an object is a built `keras.Model`.

    Raises:
        ModelError: it is not.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"compile takes a keras.Model. Received: {type(model).__module__}.{type(model).__qualname__}. For other "
            "models keep the loop: polyamp.train_step, or LossScaleOptimizer."
        )
    if not is_built(model):
        raise ModelError(
            f"compile needs a built model, to put the policy on its layers. Received: {model.name!r}, which is not "
            "built. Call it once on a batch, or give its first layer an Input."
        )


def check_average(recipe: Recipe) -> None:
    """Raise for a recipe with averages of the parameters.

    Raises:
        UnsupportedError: names Keras's way.
    """
    if recipe.ema is not None:
        raise UnsupportedError(
            f"in fit Keras keeps averages of the parameters. Received: recipe.ema={recipe.ema}. Give it ema=None "
            f"and an optimizer of Keras's with use_ema=True, ema_momentum={recipe.ema.decay:g}; or train with "
            "polyamp.train_step."
        )


def check_losses(loss: Any) -> None:
    """Raise for losses that would be computed in 16 bits (S6)."""
    if keras.config.floatx() in HALF_DTYPES:
        raise UnsupportedError(
            "losses are computed in keras.config.floatx(), which must be float32 (S6). Received: "
            f"{keras.config.floatx()}. Call keras.config.set_floatx('float32') and set the compute dtype by a policy."
        )
    for part in keras.tree.flatten(loss):
        if getattr(part, "dtype", None) in HALF_DTYPES:
            raise LossError(
                f"loss must be computed in float32. Received: {type(part).__qualname__}(dtype={part.dtype!r}). Drop "
                "its dtype."
            )


def scaling_optimizer(model: Any) -> Any:
    """Return a model's optimizer.

    Raises:
        LossScaleError: it is not a `LossScaleOptimizer`.
    """
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, ScaledOptimizer):
        raise LossScaleError(
            "the model must be compiled with polyamp's LossScaleOptimizer, by polyamp's compile or by "
            f"model.compile. Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}."
        )
    return optimizer


def check_trained_variables(model: Any) -> None:
    """Raise if the step of `fit` would give the optimizer another number of values than it was built for, where Keras
    keeps the values in a state of its own: it refuses them after it took them out of the model's variables.

    Raises:
        ModelError: says what to do.
    """
    optimizer = model.optimizer
    if not isinstance(optimizer, ScaledOptimizer) or not is_keras_code(own_class(model).train_step):
        return
    built, now = len(own_trainable_variables(optimizer)), len(model.trainable_variables)
    if built != now:
        raise ModelError(
            f"the model was compiled with {built} trainable variables, for which its optimizer was built. Received: "
            f"{now} in fit. After model.quantize(), layer.enable_lora() or a change of `trainable`, compile the model "
            "again: polyamp_keras.compile(model, recipe, loss=...)."
        )


def replace_keras_wrapper(model: Any, made: type[ScaledOptimizer]) -> None:
    """Replace Keras's own wrapper by polyamp's, of the class `made`."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not isinstance(optimizer, ScaledOptimizer):
        settings = keras.saving.deserialize_keras_object(model.get_compile_config())
        model.compile(**{**settings, "optimizer": made.from_keras(optimizer)})
