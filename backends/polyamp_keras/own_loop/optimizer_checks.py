"""Checks of an optimizer before training (S20): it must not itself scale or accumulate, or be built for another model.

The checks for a strategy are in `replicas`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import keras

from polyamp.errors import LossScaleError, RecipeError, UnsupportedError
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.scaler import LossScaler
from polyamp_keras.arrays import dtype_name, native_variable, variable_name
from polyamp_keras.compat import own_trainable_variables

_UNSUPPORTED_SETTINGS: Final = {
    "gradient_accumulation_steps": "Recipe(accumulate_steps=...)",
    "loss_scale_factor": "Recipe(scaler=polyamp.LossScaler.static(...))",
}
"""Settings of Keras's optimizers that would duplicate the step's own work -> their replacements."""
_WARNED_ATTRIBUTE: Final = "_polyamp_said_how_the_average_moves"  # attribute of an optimizer


def optimizer_members(optimizer: Any) -> list[Any]:
    """Return the optimizer and, for a `keras.optimizers.MultiOptimizer`, its members, which update independently.

    If the `MultiOptimizer` has a function instead of a map, its members are known after `build`.
    """
    return [optimizer, *getattr(optimizer, "optimizers", ())]


def check_recipe_optimizer(optimizer: Any, clip_norm: float | None = None) -> None:
    """Raise for an optimizer of a recipe that is not Keras's, or that would itself scale or accumulate.

    Its `clipnorm`, `clipvalue` or `global_clipnorm` have Keras's meaning. They apply after the recipe's `clip_norm`, to
    gradients that are unscaled, finite, fully accumulated and reduced over replicas.

    Args:
        optimizer: the recipe's optimizer.
        clip_norm: the recipe's `clip_norm`.

    Raises:
        LossScaleError: a `LossScaleOptimizer`, which would scale a second time.
        RecipeError: another framework's optimizer, a setting that the recipe has its own field for, or two clips by
            the global norm.
    """
    if is_spec(optimizer):
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise LossScaleError(
            "optimizer: a keras LossScaleOptimizer in a recipe is a scaler wrapped twice, because polyamp scales the "
            "loss itself. Pass its inner_optimizer, and choose the scale with Recipe(scaler=polyamp.LossScaler(...))."
        )
    _check_optimizer_class(optimizer)
    for member in optimizer_members(optimizer):
        for knob, instead in _UNSUPPORTED_SETTINGS.items():
            value = getattr(member, knob, None)
            if value is not None:
                raise RecipeError(
                    f"optimizer: {type(member).__qualname__}({knob}={value!r}) would act before polyamp's finite check "
                    f"or on scaled gradients. Leave it unset and use {instead} instead."
                )
        _check_one_clip(member, clip_norm)


def warn_about_average(optimizer: Any, accumulate_steps: int) -> None:
    """Warn once that a moving average (`use_ema`) moves at each update; in Keras it moves at each micro-batch."""
    if accumulate_steps == 1 or vars(optimizer).get(_WARNED_ATTRIBUTE):
        return
    for member in optimizer_members(optimizer):
        if member.use_ema:
            object.__setattr__(optimizer, _WARNED_ATTRIBUTE, True)
            momentum = member.ema_momentum
            warnings.warn(
                f"use_ema with accumulate_steps: the moving average of {type(member).__qualname__}(use_ema=True, "
                f"ema_momentum={momentum!r}) moves once an update, of accumulate_steps={accumulate_steps} micro-batches"
                ", where Keras's own gradient_accumulation_steps moves it at each micro-batch. An average over as many "
                f"micro-batches as Keras's has ema_momentum={momentum**accumulate_steps:.6g}, which is {momentum!r}**"
                f"{accumulate_steps}. If it is meant so: warnings.filterwarnings('ignore', message='use_ema with').",
                stacklevel=2,
            )
            return


def check_inner_optimizer(optimizer: Any, clip_norm: float | None) -> None:
    """Raise for an optimizer that cannot be inside a `LossScaleOptimizer`. Its own clipping is allowed.

    Raises:
        LossScaleError: a scaler wrapped twice, or a `loss_scale_factor`.
        RecipeError: not a Keras optimizer, or a setting that would act a second time.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise LossScaleError(
            "optimizer: a LossScaleOptimizer inside another is a scaler wrapped twice. Pass its inner_optimizer."
        )
    _check_optimizer_class(optimizer)
    for member in optimizer_members(optimizer):
        name = type(member).__qualname__
        if member.loss_scale_factor is not None:
            raise LossScaleError(
                f"optimizer: {name}(loss_scale_factor={member.loss_scale_factor!r}) inside a LossScaleOptimizer is a "
                "scaler wrapped twice. Leave it unset; LossScaler.static(...) gives a constant scale."
            )
        if member.gradient_accumulation_steps is not None:
            raise RecipeError(
                f"optimizer: {name}(gradient_accumulation_steps={member.gradient_accumulation_steps!r}) would count "
                "micro-batches as updates. Leave it unset and use LossScaleOptimizer(accumulate_steps=...) instead."
            )
        _check_one_clip(member, clip_norm)


def _check_one_clip(member: Any, clip_norm: float | None) -> None:
    if clip_norm is not None and member.global_clipnorm is not None:
        raise RecipeError(
            f"optimizer: {type(member).__qualname__}(global_clipnorm={member.global_clipnorm!r}) and clip_norm="
            f"{clip_norm!r} both clip by the global norm. Leave one of them unset."
        )


def _check_optimizer_class(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise RecipeError(
            "optimizer must be one of polyamp's specs or a keras.optimizers.Optimizer. Received: "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}."
        )


def check_built_for(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise if an optimizer or one of its members is built for other variables than these.

    Raises:
        RecipeError: names the optimizer.
    """
    wanted = {id(native_variable(variable)) for variable in variables}
    parts = optimizer_members(optimizer)[1:] or [optimizer]
    known = [{id(native_variable(variable)) for variable in own_trainable_variables(part)} for part in parts]
    strange = [part for part, own in zip(parts, known, strict=True) if not own <= wanted]
    if optimizer.built and set().union(*known) != wanted:
        strange.append(optimizer)
    if strange:
        raise RecipeError(
            f"optimizer: this {type(strange[0]).__qualname__} is already built for other variables: another model's, "
            "or this one's when other layers were trainable. Make a new optimizer for each model, or use one of "
            "polyamp's specs, which can be shared."
        )


def check_scaled_variables(variables: Sequence[Any], scaler: LossScaler) -> None:
    """Raise for variables whose gradients cannot be scaled and checked.

    Raises:
        LossScaleError: float16 parameters with a scaler that scales.
        UnsupportedError: variables that are overwritten by their gradients (float8).
    """
    for variable in variables:
        if scaler.scales and dtype_name(variable) == "float16":
            raise LossScaleError(
                "a loss scaler needs float32 master weights: unscaled gradients underflow in float16 parameters. "
                f"Received: {variable_name(variable)} in float16. Use mixed_float16, or LossScaler.off()."
            )
        if getattr(variable, "overwrite_with_gradient", False):
            raise UnsupportedError(
                f"{variable_name(variable)} is overwritten by its gradient, as float8 layers do. polyamp scales, "
                "checks and sums gradients, which such values are not. Use keras.optimizers.LossScaleOptimizer."
            )
