"""What a checkpoint says and asks of a torch optimizer beyond its arrays.

That is its hyperparameters by name, and values that torch would refuse. Called by the backend and the state;
`optimizer_state` writes and reads the arrays themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from polyamp.recipe.optimizers import is_spec
from polyamp_torch.arrays import from_numpy
from polyamp_torch.step.exporting import optimizer_names
from polyamp_torch.step.optimizer_state import NUMBERS

Arrays = Mapping[str, np.ndarray[Any, Any]]


def described(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The options of every parameter group as plain values."""
    groups = {
        str(index): {name: _plain(value) for name, value in group.items() if name != "params"}
        for index, group in enumerate(optimizer.param_groups)
    }
    return {"groups": groups}


def setting_of(spec: Any, name: str) -> str | None:
    """The setting whose present value an exported array holds: an option of a group."""
    prefix, _, rest = name.partition("groups/")
    if prefix != "optimizer/" or not rest:
        return None
    index, _, option = rest.partition("#")[0].partition("/")
    if not is_spec(spec):
        return f"optimizer.groups.{index}.{option}"
    field = "learning_rate" if option in ("lr", "lr_scale") else option
    return f"optimizer.{field}" if hasattr(spec, field) else "optimizer.type"


def problems(state: Any, arrays: Arrays) -> list[str]:
    """What `TorchState.load` could not put back."""
    found = []
    if "optimizer/state/*" in arrays and is_spec(state.recipe.optimizer):
        found.append("optimizer/state/* is of an optimizer that makes its arrays by itself, which a spec's does not")
    owners = {f"optimizer/state/{name}" for name in optimizer_names(state)}
    for name, array in arrays.items():
        owner, _, slot = name.rpartition("/")
        if owner.startswith("optimizer/state/") and owner not in owners:
            found.append(f"{name} is of no parameter that is trained")
        if name.startswith("optimizer/") and ("#" in slot) and not _is_number(array):
            found.append(f"{name} is not a number with its type, float64[2]")
    devices = [("rng/cpu", "cpu"), ("rng/cuda", state.device)]
    for name, device in devices:
        if name in arrays:
            try:
                torch.Generator(device).set_state(from_numpy(arrays[name]))
            except (RuntimeError, TypeError) as error:
                found.append(f"{name} is no state of torch's random numbers ({error})")
    return found


def _is_number(array: np.ndarray[Any, Any]) -> bool:
    if array.dtype != np.float64 or array.shape != (2,):
        return False
    kind, value = array.tolist()
    return kind in range(len(NUMBERS)) and (kind == 0 or value == value // 1)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else f"{str(value.dtype)[6:]}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"{type(value).__module__}.{type(value).__qualname__}"
