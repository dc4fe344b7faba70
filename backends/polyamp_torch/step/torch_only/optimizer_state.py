"""Conversion of an optimizer's state arrays and group options to named NumPy arrays for a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from polyamp.errors import UnsupportedError
from polyamp_torch.arrays import as_tensor, fill_tensor, is_sharded, to_numpy
from polyamp_torch.step.optimizers import is_stateless
from polyamp_torch.step.torch_only.learning_rates import GroupLearningRates

NUMBER_TYPES: Final[tuple[type[float], ...]] = (float, int, bool)
"""Types of the Python numbers in a group or a state; a checkpoint stores the index of a number's type."""


def export_optimizer(
    optimizer: torch.optim.Optimizer,
    names: list[str],
    rates: GroupLearningRates | None,
    take: Callable[[torch.Tensor], Any] = to_numpy,
) -> dict[str, Any]:
    """Return state arrays by `state/<parameter>/<slot>`, and group options by `groups/<index>/<option>`.

    Python numbers are marked by `#number`, those inside a tuple by their position. The learning rate of a schedule is
    omitted: it follows from the applied-update count. Tensors are converted by `take`.

    Raises:
        UnsupportedError: the optimizer's state has values other than tensors and numbers.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    arrays: dict[str, Any] = {}
    for name, p in zip(names, parameters, strict=True):
        for slot, value in optimizer.state.get(p, {}).items():
            if not isinstance(value, torch.Tensor | int | float | None):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} in its state ({slot!r}), which a "
                    "checkpoint cannot hold: it holds tensors and numbers."
                )
            arrays.update(_encode_value(f"state/{name}/{slot}", value, take))
    if not any(optimizer.state.get(p) for p in parameters) and not is_stateless(optimizer):
        arrays["state/*"] = np.zeros(0, np.uint8)  # created by the optimizer in its first step; see train.checkpoint
    for index, group in enumerate(optimizer.param_groups):
        scheduled = rates is not None and rates.schedule_of(index) is not None
        for option, value in group.items():
            if option != "params" and not (scheduled and option == "lr"):
                arrays.update(_encode_value(f"groups/{index}/{option}", value, take))
    return arrays


def _encode_value(name: str, value: Any, take: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {name: take(value)}
    if isinstance(value, int | float):
        return {f"{name}#number": _encode_number(value)}
    if isinstance(value, tuple | list) and all(isinstance(item, int | float) for item in value):
        return {f"{name}#{position}": _encode_number(item) for position, item in enumerate(value)}
    return {}


def _encode_number(value: float) -> np.ndarray[Any, Any]:
    """Encode a Python number and its type as a float64[2] array."""
    return np.array([NUMBER_TYPES.index(type(value)), value], np.float64)


def _decode_number(array: np.ndarray[Any, Any]) -> float:
    kind, value = array.tolist()
    return NUMBER_TYPES[int(kind)](value)


def load_optimizer(optimizer: torch.optim.Optimizer, names: list[str], arrays: Mapping[str, Any]) -> None:
    """Restore exported arrays, each tensor on the device and in the memory layout that the kernels expect.

    Args:
        optimizer: the state's optimizer.
        names: the paths of its parameters, in the order of its groups.
        arrays: NumPy arrays, or tensors sharded like their parameters.
    """
    if "state/*" in arrays:
        optimizer.state.clear()
    by_owner: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        owner, _, slot = key.rpartition("/")
        by_owner.setdefault(owner, {})[slot] = array
    remaining = iter(names)
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            for slot, array in by_owner.get(f"state/{next(remaining)}", {}).items():
                if slot.endswith("#number"):
                    optimizer.state[p][slot.removesuffix("#number")] = _decode_number(array)
                else:
                    optimizer.state[p][slot] = _slot_tensor(slot, array, p, group, optimizer.state[p].get(slot))
        for option, array in by_owner.get(f"groups/{index}", {}).items():
            _set_option(group, option, array)


def _slot_tensor(slot: str, array: Any, p: torch.Tensor, group: dict[str, Any], old: Any) -> torch.Tensor:
    """Return a slot's tensor, with the strides of its parameter if the shapes are equal.

    A step count keeps its place. A new one is on the device for kernels that read it there, otherwise on the CPU."""
    value = as_tensor(array)
    if slot == "step":
        if isinstance(old, torch.Tensor):
            same = old.shape == value.shape and old.dtype == value.dtype
            return old.copy_(value) if same else value.to(old.device)  # in place: see make_step_counts
        return value.to(p.device) if group.get("fused") or group.get("capturable") else value
    if value.shape == p.shape:
        new = torch.empty_like(p, dtype=value.dtype)
        fill_tensor(new, value)
        return new
    if is_sharded(old) and old.shape == value.shape:  # sharded unlike its parameter
        fill_tensor(old, value)
        placed: torch.Tensor = old
        return placed
    return value.to(p.device)


def _set_option(group: dict[str, Any], option: str, array: Any) -> None:
    name, _, mark = option.partition("#")
    if mark == "number":
        group[name] = _decode_number(array)
    elif mark:
        items = list(group[name])
        items[int(mark)] = _decode_number(array)
        group[name] = tuple(items) if isinstance(group[name], tuple) else items
    else:
        old = group.get(name)
        group[name] = as_tensor(array).to(old.device if isinstance(old, torch.Tensor) else "cpu")
