"""What Keras's optimizers call what polyamp's specs keep, and their options in its words. Called by `states` and
`training`.

Keras's momentum holds the learning rate: `m = momentum * m - rate * gradient`. polyamp's, and torch's, does not, so it
is divided by the rate of the next update, with which that update is the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import keras

from polyamp.porting.states.layout import Count, OptimizerLayout
from polyamp.porting.states.recipe import of_members
from polyamp_tensorflow.arrays import raw
from polyamp_tensorflow.compat import rate_variable, slot_lists
from polyamp_tensorflow.step.optimizers import SpecOptimizer, optimizer_variables


class _Kind(NamedTuple):
    """One class of `keras.optimizers`.

    Attributes:
        type: what polyamp calls it.
        slots: Keras's word for a slot -> polyamp's.
        words: Keras's word for an option -> polyamp's.
        note: how its formula differs from polyamp's; "" if it does not.
    """

    type: str
    slots: Mapping[str, str]
    words: Mapping[str, str]
    note: str = ""


_ADAM: Final = _Kind(
    "adam",
    {"momentums": "exp_avg", "velocities": "exp_avg_sq"},
    {"epsilon": "eps"},
    "Keras's Adam adds epsilon to the root before its bias correction, polyamp's and torch's behind it: at first as a "
    "larger epsilon would",
)
_KINDS: Final[Mapping[str, _Kind]] = {
    "SGD": _Kind("sgd", {"momentums": "momentum"}, {"momentum": "momentum", "nesterov": "nesterov"}),
    "AdamW": _ADAM,
    "Adam": _ADAM,
    "RMSprop": _Kind(
        "rmsprop",
        {"velocities": "square_avg", "momentums": "momentum", "average_gradients": "grad_avg"},
        {"rho": "alpha", "momentum": "momentum", "centered": "centered", "epsilon": "eps"},
        "Keras's RMSprop adds epsilon inside the root, polyamp's and torch's outside of it",
    ),
    "Adagrad": _Kind(
        "adagrad",
        {"accumulators": "sum"},
        {"epsilon": "eps", "initial_accumulator_value": "initial_accumulator_value"},
        "Keras's Adagrad adds epsilon inside the root, polyamp's and torch's outside of it",
    ),
    "Lion": _Kind("lion", {"momentums": "exp_avg"}, {}),
}


def layout_of(optimizer: Any, parameters: Sequence[str]) -> OptimizerLayout:
    """Which variables of a built optimizer are what.

    Args:
        optimizer: Keras's own, or a `SpecOptimizer`.
        parameters: paths of the variables that it was built for, in their order.
    """
    names = {id(raw(variable)): name for name, variable in optimizer_variables(optimizer, list(parameters)).items()}
    if isinstance(optimizer, SpecOptimizer):
        return _of_spec(optimizer, parameters)
    kind = next(
        (found for name, found in _KINDS.items() if isinstance(optimizer, getattr(keras.optimizers, name))), None
    )
    called = f"keras.optimizers.{type(optimizer).__name__}"
    numbers = dict.fromkeys(parameters, 0)
    if kind is None:
        refused = [f"it is trained by {called}, of which polyamp knows no formula"]
        return OptimizerLayout({}, {}, [{"type": called}], numbers, refused=refused)
    refused = _other(optimizer, called)
    if refused:
        return OptimizerLayout({}, {}, [{"type": kind.type}], numbers, refused=refused)
    slots = {
        kind.slots[word]: {
            path: f"optimizer/{names[id(raw(variable))]}" for path, variable in zip(parameters, variables, strict=True)
        }
        for word, variables in slot_lists(optimizer).items()
        if word in kind.slots and variables
    }
    iterations = f"optimizer/{names[id(raw(optimizer.iterations))]}"
    counts = {path: Count(iterations) for path in parameters} if kind.type == "adam" else {}
    factors, refused = _factors(optimizer, kind, slots, called)
    return OptimizerLayout(
        slots,
        counts,
        [_settings(optimizer, kind)],
        numbers,
        [iterations],
        factors,
        [kind.note] if kind.note else [],
        refused,
    )


def _of_spec(optimizer: SpecOptimizer, parameters: Sequence[str]) -> OptimizerLayout:
    slots = {slot: {path: f"optimizer/{path}/{slot}" for path in parameters} for slot in optimizer.spec.slots}
    counts = {
        path: Count("optimizer/iteration", "optimizer/missed_updates", number) for number, path in enumerate(parameters)
    }
    distinct, _ = of_members(optimizer.groups)
    order = optimizer.groups.order or (0,) * len(parameters)
    numbers = dict(zip(parameters, order, strict=True))
    return OptimizerLayout(slots, counts, distinct, numbers, ["optimizer/iteration"])


def _factors(optimizer: Any, kind: _Kind, slots: Mapping[str, Any], called: str) -> tuple[dict[str, float], list[str]]:
    """What Keras's momentum is multiplied with to be polyamp's; and why it cannot be."""
    if "momentum" not in slots:
        return {}, []
    rate = float(optimizer.learning_rate)
    if isinstance(rate_variable(optimizer), keras.optimizers.schedules.LearningRateSchedule) or rate == 0.0:
        why = "which is 0" if rate == 0.0 else "which follows a schedule"
        return {}, [f"the momentum of {called} holds the learning rate, {why}"]
    return {"momentum": (-1.0 if kind.type == "sgd" else 1.0) / rate}, []


def _settings(optimizer: Any, kind: _Kind) -> dict[str, Any]:
    found: dict[str, Any] = {"type": kind.type}
    if not isinstance(rate_variable(optimizer), keras.optimizers.schedules.LearningRateSchedule):
        found["learning_rate"] = float(optimizer.learning_rate)
    found |= {word: getattr(optimizer, own) for own, word in kind.words.items() if hasattr(optimizer, own)}
    if hasattr(optimizer, "beta_1"):
        found["betas"] = [float(optimizer.beta_1), float(optimizer.beta_2)]
    decay = optimizer.weight_decay
    if kind.type in ("adam", "lion"):  # decoupled in all of Keras, as in AdamW and Lion
        found["weight_decay"] = float(decay or 0.0)
        found["type"] = "adamw" if decay and kind.type == "adam" else kind.type
    return found


def _other(optimizer: Any, called: str) -> list[str]:
    """Settings that no other framework's optimizer has."""
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
