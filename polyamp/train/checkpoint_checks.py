"""Checks of a checkpoint's arrays before a state takes them: names, shapes, dtypes and values (S22).

A file with a valid digest may still have been written by another program, or by hand. If a check fails, `restore`
changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from polyamp.contract.sharded_state import ArrayForm
from polyamp.errors import LossScaleError, join_first
from polyamp.recipe.scaler import LossScaler
from polyamp.train.checkpoint_processes import format_array_form

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


DEVICE_STREAMS: Final = ("rng/cuda",)
"""Random streams that a state has only on some devices."""


def keep_device_streams(expected: Mapping[str, Any], arrays: dict[str, Any]) -> None:
    """Let a training go on on another device: a stream that only one of the two has is left as the state has it."""
    for name in DEVICE_STREAMS:
        if name in expected and name not in arrays:
            arrays[name] = expected[name]
        elif name not in expected:
            arrays.pop(name, None)


def list_mismatches(expected: Mapping[str, Array | ArrayForm], saved: Mapping[str, Array | ArrayForm]) -> list[str]:
    """Return names, shapes and dtypes that differ from those of the state, for arrays or their forms.

    A name that ends in `/*`, on either side, accepts all arrays under it.
    """
    late = tuple(name[:-1] for name in (*expected, *saved) if name.endswith("/*"))
    problems = [f"missing: {name}" for name in expected if name not in saved and not name.startswith(late)]
    problems += [f"not in this state: {name}" for name in saved if name not in expected and not name.startswith(late)]
    return problems + [
        f"{name}: {format_array_form(saved[name])} in the file, {format_array_form(expected[name])} in the state"
        for name in expected
        if name in saved and format_array_form(saved[name]) != format_array_form(expected[name])
    ]


def late_shape_hint(expected: Mapping[str, Array | ArrayForm], saved: Mapping[str, Array | ArrayForm]) -> str:
    """Return a hint for running state whose shapes differ; such state may be created by the first forward pass."""
    names = [name for name in expected if name.startswith("running/") and name in saved]
    if all(tuple(expected[name].shape) == tuple(saved[name].shape) for name in names):
        return ""
    return (
        " Running state that gets its shape in the first forward pass has it only then: call the model once on a batch "
        "before polyamp.init, or load its own saved weights into it."
    )


def list_impossible_values(arrays: Mapping[str, Array], scaler: LossScaler) -> list[str]:
    """Return impossible values: a scale outside of its bounds, negative counters.

    Args:
        scaler: the scaler that the file was saved with.
    """
    problems = []
    scale = arrays.get("loss_scale/scale")
    if scale is not None and not scaler.min_scale <= float(scale) <= scaler.max_scale:
        problems.append(
            f"loss_scale/scale is {float(scale):g}, which its scaler (kind={scaler.kind!r}, {scaler.min_scale:g} to "
            f"{scaler.max_scale:g}) never has"
        )
    left = arrays.get("loss_scale/hysteresis")
    if left is not None and not -1 <= int(left) <= scaler.hysteresis:
        problems.append(f"loss_scale/hysteresis is {int(left)}, which must lie between -1 and {scaler.hysteresis}")
    counters = [(name, array) for name, array in arrays.items() if _is_count(name, array)]
    return problems + [
        f"{name} is {array.item()}, and a count is never negative"
        for name, array in counters
        if not 0 <= array.item() < math.inf
    ]


def _is_count(name: str, array: Array) -> bool:
    """Whether an array is a count: an integer of polyamp or an optimizer, or torch's `step`."""
    owner, _, last = name.rpartition("/")
    if array.shape != () or name == "loss_scale/hysteresis":
        return False
    if array.dtype.kind == "i":
        return name == "step" or owner.startswith(("loss_scale", "optimizer"))
    return last == "step" and owner.startswith("optimizer")


def saved_scaler(saved: Mapping[str, Any] | None, given: LossScaler) -> LossScaler:
    """Return the scaler that a file was saved with, from its settings; else the code's scaler."""
    try:
        return LossScaler(**saved["scaler"]) if saved is not None else given
    except (LossScaleError, KeyError, TypeError):  # saved by another version of polyamp
        return given


def fit_loss_scale(arrays: dict[str, Array], scaler: LossScaler, *, reset: bool) -> None:
    """Clamp the loss scale of a file to the bounds of the code's scaler, or start anew with `reset`.

    The count of skipped steps stays, because random streams depend on it (S12).
    """
    import numpy as np

    fresh = {"scale": scaler.init_scale, "good_steps": 0, "hysteresis": scaler.hysteresis, "stuck": 0}
    bounds = {"scale": (scaler.min_scale, scaler.max_scale), "hysteresis": (-1, scaler.hysteresis)}
    for name, value in fresh.items():
        old = arrays.get(f"loss_scale/{name}")
        if old is not None and reset:
            arrays[f"loss_scale/{name}"] = np.asarray(value, old.dtype)
        elif old is not None and name in bounds:
            arrays[f"loss_scale/{name}"] = np.asarray(np.clip(old, *bounds[name]), old.dtype)


def join_problems(problems: list[str]) -> str:
    """Join the first five problems, and the number of the others."""
    return join_first(problems, 5, "; ")
