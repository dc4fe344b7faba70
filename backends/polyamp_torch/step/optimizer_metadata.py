"""Checkpoint metadata of a torch optimizer: its hyperparameters by name, and checks for values that torch rejects.

`optimizer_state` writes and reads the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from polyamp.recipe.optimizers import is_spec
from polyamp_torch.step.torch_only.optimizer_state import NUMBER_TYPES
from polyamp_torch.step.torch_only.random_state import list_random_state_problems
from polyamp_torch.step.torch_only.state_arrays import optimizer_names

Arrays = Mapping[str, np.ndarray[Any, Any]]


def optimizer_metadata(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options of every parameter group as plain values."""
    groups = {
        str(index): {name: _plain_value(value) for name, value in group.items() if name != "params"}
        for index, group in enumerate(optimizer.param_groups)
    }
    return {"groups": groups}


def optimizer_setting(spec: Any, name: str) -> str | None:
    """Return the setting, an option of a group, whose current value an exported array contains."""
    prefix, _, rest = name.partition("groups/")
    if prefix != "optimizer/" or not rest:
        return None
    index, _, option = rest.partition("#")[0].partition("/")
    if not is_spec(spec):
        return f"optimizer.groups.{index}.{option}"
    field = "learning_rate" if option in ("lr", "lr_scale") else option
    return f"optimizer.{field}" if hasattr(spec, field) else "optimizer.type"


def list_load_problems(state: Any, arrays: Arrays) -> list[str]:
    """Return messages about the arrays that `TorchState.load` cannot restore."""
    found = []
    if "optimizer/state/*" in arrays and is_spec(state.recipe.optimizer):
        found.append("optimizer/state/* is of an optimizer that makes its arrays by itself, which a spec's does not")
    owners = {f"optimizer/state/{name}" for name in optimizer_names(state)}
    for name, array in arrays.items():
        owner, _, slot = name.rpartition("/")
        if owner.startswith("optimizer/state/") and owner not in owners:
            found.append(f"{name} is of no parameter that is trained")
        if name.startswith("optimizer/") and ("#" in slot) and not _is_encoded_number(array):
            found.append(f"{name} is not a number with its type, float64[2]")
    return found + list_random_state_problems(arrays, state.device)


def _is_encoded_number(array: np.ndarray[Any, Any]) -> bool:
    if array.dtype != np.float64 or array.shape != (2,):
        return False
    kind, value = array.tolist()
    return kind in range(len(NUMBER_TYPES)) and (kind == 0 or value == value // 1)


def _plain_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else f"{str(value.dtype)[6:]}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return [_plain_value(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"{type(value).__module__}.{type(value).__qualname__}"
