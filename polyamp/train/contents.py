"""What the arrays of a checkpoint must be like before a state takes them over: names, shapes, dtypes and values (S22).

Called by `restore`, which changes nothing if anything here is wrong: a file with a valid digest may still have been
made by another program, or by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyamp.contract.parts import Form
from polyamp.errors import LossScaleError
from polyamp.recipe.scaler import LossScaler

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def misfits(expected: Mapping[str, Array | Form], found: Mapping[str, Array | Form]) -> list[str]:
    """Names, shapes and dtypes that are not those of the state, of arrays or their forms.

    A name that ends in `/*`, on either side, accepts whatever lies under it.
    """
    late = tuple(name[:-1] for name in (*expected, *found) if name.endswith("/*"))
    problems = [f"missing: {name}" for name in expected if name not in found and not name.startswith(late)]
    problems += [f"not in this state: {name}" for name in found if name not in expected and not name.startswith(late)]
    return problems + [
        f"{name}: {_kind(found[name])} in the file, {_kind(expected[name])} in the state"
        for name in expected
        if name in found and _kind(found[name]) != _kind(expected[name])
    ]


def late_shapes(expected: Mapping[str, Array | Form], found: Mapping[str, Array | Form]) -> str:
    """What to do about running state that is in both with other shapes, as that which the first forward pass makes."""
    names = [name for name in expected if name.startswith("running/") and name in found]
    if all(tuple(expected[name].shape) == tuple(found[name].shape) for name in names):
        return ""
    return (
        " Running state that gets its shape in the first forward pass has it only then: call the model once on a batch "
        "before polyamp.init, or load its own saved weights into it."
    )


def impossible(arrays: Mapping[str, Array], scaler: LossScaler) -> list[str]:
    """Values that no run has: a scale outside of its bounds, negative counters.

    Args:
        scaler: the one that the file was saved with.
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
    counters = [(name, array) for name, array in arrays.items() if _counts(name, array)]
    return problems + [
        f"{name} is {array.item()}, and a count is never negative"
        for name, array in counters
        if not 0 <= array.item() < math.inf
    ]


def _counts(name: str, array: Array) -> bool:
    """Whether an array is a count: a whole number of polyamp's or an optimizer's, or what torch calls `step`."""
    owner, _, last = name.rpartition("/")
    if array.shape != () or name == "loss_scale/hysteresis":
        return False
    if array.dtype.kind == "i":
        return name == "step" or owner.startswith(("loss_scale", "optimizer"))
    return last == "step" and owner.startswith("optimizer")


def scaler_of(saved: Mapping[str, Any] | None, given: LossScaler) -> LossScaler:
    """The scaler that a file was saved with, as its settings say; the code's if they do not."""
    try:
        return LossScaler(**saved["scaler"]) if saved is not None else given
    except (LossScaleError, KeyError, TypeError):  # of another version of polyamp
        return given


def rescale(arrays: dict[str, Array], scaler: LossScaler, *, anew: bool) -> None:
    """Bring the loss scale of a file into the bounds of the code's scaler, or let it start `anew`.

    The count of skipped steps stays: random streams follow from it (S12).
    """
    import numpy as np

    fresh = {"scale": scaler.init_scale, "good_steps": 0, "hysteresis": scaler.hysteresis, "stuck": 0}
    held = {"scale": (scaler.min_scale, scaler.max_scale), "hysteresis": (-1, scaler.hysteresis)}
    for name, value in fresh.items():
        old = arrays.get(f"loss_scale/{name}")
        if old is not None and anew:
            arrays[f"loss_scale/{name}"] = np.asarray(value, old.dtype)
        elif old is not None and name in held:
            arrays[f"loss_scale/{name}"] = np.asarray(np.clip(old, *held[name]), old.dtype)


def listed(problems: list[str]) -> str:
    """The first five, and how many more."""
    return "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")


def _kind(array: Array | Form) -> str:
    return f"{array.dtype}{list(array.shape)}"
