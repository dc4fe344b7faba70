"""Keras's own `LossScaleOptimizer`: its arguments, its messages and its state in files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from polyamp.errors import LossScaleError, RecipeError, did_you_mean
from polyamp.recipe.clip_limits import ClipLimits, clip_arguments
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler, LossScaleState

_BASE_DEFAULTS: Final[dict[str, Any]] = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
"""Arguments that Keras's wrapper accepts only for older files, with their defaults."""
_POLYAMP_ARGUMENTS: Final[dict[str, str]] = {
    "clipnorm": "clip_norm",
    "global_clipnorm": "clip_norm",
    "clipvalue": "clip_value",
    "gradient_accumulation_steps": "accumulate_steps",
}
"""Those with an equivalent in polyamp's wrapper -> its name."""
_NAMES: Final = (
    *("inner_optimizer", "initial_scale", "dynamic_growth_steps", "name", "scaler", "accumulate_steps"),
    *clip_arguments(ClipLimits()),
)
_WRAPPER_VARIABLES: Final = 4
"""Keras's variables before the inner optimizer's: an unused count and learning rate, good steps, scale."""


def pop_inner_optimizer(optimizer: Any, options: dict[str, Any]) -> Any:
    """Return the optimizer to wrap, which may be in `options` by its older name; remove it there.

    Raises:
        RecipeError: no optimizer, or two.
    """
    by_name = options.pop("optimizer", None)
    if optimizer is not None and by_name is not None:
        raise RecipeError("LossScaleOptimizer wraps one optimizer. Received: inner_optimizer and optimizer=.")
    if optimizer is None and by_name is None:
        raise RecipeError(
            "LossScaleOptimizer needs an inner_optimizer: a Keras optimizer or one of polyamp's specs. Received: none. "
            "Write LossScaleOptimizer(keras.optimizers.Adam(1e-3))."
        )
    return by_name if optimizer is None else optimizer


def check_scaler_options(options: dict[str, Any]) -> None:
    """Raise, with Keras's messages, for arguments that Keras's wrapper does not accept.

    Raises:
        RecipeError: names the argument and where it belongs.
    """
    if not options.pop("dynamic", True):
        raise RecipeError(
            "LossScaleOptimizer no longer supports `dynamic=False`. Instead, set a constant scale with "
            "scaler=polyamp.LossScaler.static(...)."
        )
    for name, default in _BASE_DEFAULTS.items():
        value = options.pop(name, default)
        if value != default:
            own = f", or use LossScaleOptimizer({_POLYAMP_ARGUMENTS[name]}=...)" if name in _POLYAMP_ARGUMENTS else ""
            raise RecipeError(
                f"LossScaleOptimizer does not support `{name}`. Instead, set `{name}` on the `inner_optimizer`{own}. "
                f"Received: {name}={value!r}."
            )
    if options:
        unknown = next(iter(options))
        raise RecipeError(
            f"LossScaleOptimizer does not support arguments: `{'`, `'.join(options)}`. It takes {', '.join(_NAMES)}."
            f"{did_you_mean(unknown, _NAMES)}"
        )


def scaler_from_arguments(initial_scale: Any, dynamic_growth_steps: Any, scaler: LossScaler | str | None) -> LossScaler:
    """Return the scaler for Keras's or polyamp's arguments. `initial_scale` may also be polyamp's scaler.

    With Keras's arguments, defaults are Keras's, and the minimum scale is polyamp's.

    Raises:
        LossScaleError: an impossible number, or arguments of both kinds.
        RecipeError: not a scaler.
    """
    if isinstance(initial_scale, LossScaler | str):
        if scaler is not None:
            raise LossScaleError(f"the scaler is given twice. Received: {initial_scale!r} and scaler={scaler!r}.")
        initial_scale, scaler = None, initial_scale
    numbers = {"initial_scale": initial_scale, "dynamic_growth_steps": dynamic_growth_steps}
    given = {name: value for name, value in numbers.items() if value is not None}
    if scaler is not None and given:
        raise LossScaleError(
            f"{', '.join(given)} must be set in the scaler that is given as well: LossScaler(init_scale=..., "
            "growth_interval=...)."
        )
    if not given:
        return Recipe(policy="mixed_float16", scaler=scaler).loss_scaler
    if initial_scale is not None and not (_is_number(initial_scale) and 0 < float(initial_scale) < math.inf):
        raise LossScaleError(
            f"initial_scale must be a positive number, or a polyamp.LossScaler. Received: {initial_scale!r}."
        )
    steps = dynamic_growth_steps
    if steps is not None and not (_is_number(steps) and float(steps).is_integer() and steps >= 1):
        raise LossScaleError(f"dynamic_growth_steps must be a whole number of at least 1. Received: {steps!r}.")
    changes: dict[str, Any] = {} if initial_scale is None else {"init_scale": float(initial_scale)}
    return LossScaler.like("keras", **changes, **({} if steps is None else {"growth_interval": int(steps)}))


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool | str) and hasattr(value, "__float__")


def keras_numbers(optimizer: Any) -> dict[str, Any]:
    """Return the arguments of Keras's own wrapper that set its scaler."""
    return {"initial_scale": optimizer.initial_scale, "dynamic_growth_steps": optimizer.dynamic_growth_steps}


def is_keras_wrapper_file(store: Mapping[str, Any], inner: Any) -> bool:
    """Return whether a file contains the variables of Keras's own wrapper around such an inner optimizer."""
    return len(store.keys()) == _WRAPPER_VARIABLES + len(inner.variables)


def load_from_keras(store: Mapping[str, Any], inner: Any, scaler: LossScaler, state: LossScaleState) -> None:
    """Load the inner optimizer's variables and the loss-scale state from a file of Keras's own wrapper.

    Raises:
        LossScaleError: the file's scale is outside the scaler's bounds.
    """
    adopt_keras_scale(float(store["3"][()]), int(store["2"][()]), scaler, state)
    for index, variable in enumerate(inner.variables, start=_WRAPPER_VARIABLES):
        variable.assign(store[str(index)])


def adopt_keras_scale(scale: float, good_steps: int, scaler: LossScaler, state: LossScaleState) -> None:
    """Set the loss-scale state from the scale and the count of good steps of Keras's own wrapper.

    Raises:
        LossScaleError: the scale is outside the scaler's bounds.
    """
    if not scaler.min_scale <= scale <= scaler.max_scale:
        raise LossScaleError(
            f"the scale of Keras's LossScaleOptimizer must lie between min_scale={scaler.min_scale:g} and max_scale="
            f"{scaler.max_scale:g}. Received: {scale:g}. A scaler with other bounds takes it; a scale of 0, inf or NaN "
            "comes from a run that had collapsed, and has to be replaced by hand."
        )
    for variable, value in zip(state, (scale, good_steps, scaler.hysteresis, 0, 0), strict=True):
        variable.assign(value)
