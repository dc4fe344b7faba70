"""What the guard of `fit` does on every Keras backend: the functions that run `fit`, with the host's checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from polyamp.rules.stuck_scale import StuckScaleMonitor
from polyamp_keras.engine import ENGINE
from polyamp_keras.models.keras_serialization import add_setting, model_settings, remove_setting
from polyamp_keras.models.layers import own_class
from polyamp_keras.own_loop.saved_guard import SavedGuard
from polyamp_keras.own_loop.scaled_optimizer import ScaledOptimizer
from polyamp_keras.precision.policy_application import CACHED_FUNCTIONS

StuckCheck = Callable[[Any, Any], None]
"""Raises for a stuck scale, given the model and what a train function returned."""


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
