"""Mapping of Keras optimizers to polyamp's specs: their slots and options under polyamp's names.

Keras's momentum includes the learning rate: `m = momentum * m - rate * gradient`. polyamp's and torch's does not. So
it is divided by the rate of the next update, which makes that update the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import keras

from polyamp.porting.states.optimizer_layout import OptimizerLayout, UpdateCount
from polyamp.porting.states.recipe_comparison import member_settings
from polyamp.recipe.optimizer_spec import NativeOptimizer
from polyamp.recipe.optimizers import SPECS
from polyamp_keras.arrays import variable_key
from polyamp_keras.compat import rate_variable, slot_lists
from polyamp_keras.own_loop.spec_optimizer import SpecOptimizer, optimizer_variables

_NATIVES: Final[Mapping[str, tuple[str, NativeOptimizer]]] = {
    native.name.rpartition(".")[2]: (spec.tag, native) for spec in SPECS for native in spec.native.get("keras", ())
}
"""Class of `keras.optimizers` -> the spec's tag, and its description. Keras's AdamW is a subclass of its Adam."""


def read_optimizer_layout(optimizer: Any, parameters: Sequence[str]) -> OptimizerLayout:
    """Return the layout of a built optimizer: the meaning of each variable, and its options.

    Args:
        optimizer: Keras's own, or a `SpecOptimizer`.
        parameters: paths of the variables that it was built for, in order.
    """
    names = {
        variable_key(variable): name for name, variable in optimizer_variables(optimizer, list(parameters)).items()
    }
    if isinstance(optimizer, SpecOptimizer):
        return _spec_layout(optimizer, parameters)
    tag, native = next(
        (found for name, found in _NATIVES.items() if isinstance(optimizer, getattr(keras.optimizers, name))),
        ("", None),
    )
    called = f"keras.optimizers.{type(optimizer).__name__}"
    numbers = dict.fromkeys(parameters, 0)
    unknown = [f"it is trained by {called}, of which polyamp knows no formula"]
    refused = unknown if native is None else _unsupported_settings(optimizer, called)
    if native is None or refused:
        return OptimizerLayout({}, {}, [{"type": tag or called}], numbers, refused=refused)
    slots = {
        native.slots[word]: {
            path: f"optimizer/{names[variable_key(variable)]}"
            for path, variable in zip(parameters, variables, strict=True)
        }
        for word, variables in slot_lists(optimizer, native.slots).items()
        if variables
    }
    iterations = f"optimizer/{names[variable_key(optimizer.iterations)]}"
    counts = {path: UpdateCount(iterations) for path in parameters} if native.counts else {}
    factors, refused = _slot_factors(optimizer, tag, slots, called)
    return OptimizerLayout(
        slots,
        counts,
        [_hyperparameters(optimizer, tag, native)],
        numbers,
        [iterations],
        factors,
        [native.note] if native.note else [],
        refused,
    )


def _spec_layout(optimizer: SpecOptimizer, parameters: Sequence[str]) -> OptimizerLayout:
    slots = {slot: {path: f"optimizer/{path}/{slot}" for path in parameters} for slot in optimizer.spec.slots}
    counts = {
        path: UpdateCount("optimizer/iteration", "optimizer/missed_updates", number)
        for number, path in enumerate(parameters)
    }
    distinct, _ = member_settings(optimizer.groups)
    order = optimizer.groups.order or (0,) * len(parameters)
    numbers = dict(zip(parameters, order, strict=True))
    return OptimizerLayout(slots, counts, distinct, numbers, ["optimizer/iteration"])


def _slot_factors(
    optimizer: Any, tag: str, slots: Mapping[str, Any], called: str
) -> tuple[dict[str, float], list[str]]:
    """Return the factors from Keras's momentum to polyamp's, and the reasons why there is none."""
    if "momentum" not in slots:
        return {}, []
    rate = float(optimizer.learning_rate)
    if isinstance(rate_variable(optimizer), keras.optimizers.schedules.LearningRateSchedule) or rate == 0.0:
        why = "which is 0" if rate == 0.0 else "which follows a schedule"
        return {}, [f"the momentum of {called} holds the learning rate, {why}"]
    return {"momentum": (-1.0 if tag == "sgd" else 1.0) / rate}, []


def _hyperparameters(optimizer: Any, tag: str, native: NativeOptimizer) -> dict[str, Any]:
    found: dict[str, Any] = {"type": tag}
    if not isinstance(rate_variable(optimizer), keras.optimizers.schedules.LearningRateSchedule):
        found["learning_rate"] = float(optimizer.learning_rate)
    found |= {word: getattr(optimizer, own) for own, word in native.options.items() if hasattr(optimizer, own)}
    if hasattr(optimizer, "beta_1"):
        found["betas"] = [float(optimizer.beta_1), float(optimizer.beta_2)]
        decay = optimizer.weight_decay
        found["weight_decay"] = float(decay or 0.0)  # decoupled in all of Keras, as in AdamW and Lion
        if decay and tag == "adam":
            found["type"] = "adamw"
    return found


def _unsupported_settings(optimizer: Any, called: str) -> list[str]:
    """Return the settings that no other framework's optimizer has."""
    found = []
    if getattr(optimizer, "amsgrad", False):
        found.append(f"amsgrad=True of {called}")
    if optimizer.use_ema:
        found.append(f"use_ema=True of {called}, a moving average of the parameters")
    if optimizer.gradient_accumulation_steps:
        found.append(f"gradient_accumulation_steps of {called}, which holds a sum of gradients")
    if optimizer.weight_decay and not hasattr(optimizer, "beta_1"):
        found.append(f"weight_decay of {called}, which is decoupled in Keras and added to the gradient elsewhere")
    return found
