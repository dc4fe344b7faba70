"""An optimizer's state arrays and group options as named NumPy arrays, and back: what a checkpoint holds of it.

Called by the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from polyamp.errors import UnsupportedError
from polyamp_torch.arrays import as_tensor, fill, is_divided, to_numpy
from polyamp_torch.step.optimizers import stateless
from polyamp_torch.step.rates import Rates

NUMBERS: Final[tuple[type[float], ...]] = (float, int, bool)
"""The types of Python numbers that a group or a state may hold; a checkpoint holds the index of each one's."""


def export(
    optimizer: torch.optim.Optimizer,
    names: list[str],
    rates: Rates | None,
    take: Callable[[torch.Tensor], Any] = to_numpy,
) -> dict[str, Any]:
    """State arrays by `state/<parameter>/<slot>`, and the numbers in each group by `groups/<index>/<option>`.

    Python numbers are marked by `#number`, those inside a tuple by their position. The learning rate of a schedule is
    left out: it follows from the applied-update count. Tensors go through `take`.

    Raises:
        UnsupportedError: the optimizer keeps something else than tensors and numbers.
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
            arrays.update(_encoded(f"state/{name}/{slot}", value, take))
    if not any(optimizer.state.get(p) for p in parameters) and not stateless(optimizer):
        arrays["state/*"] = np.zeros(0, np.uint8)  # made by the optimizer at its first step; see train.checkpoint
    for index, group in enumerate(optimizer.param_groups):
        scheduled = rates is not None and rates.schedule_of(index) is not None
        for option, value in group.items():
            if option != "params" and not (scheduled and option == "lr"):
                arrays.update(_encoded(f"groups/{index}/{option}", value, take))
    return arrays


def _encoded(name: str, value: Any, take: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {name: take(value)}
    if isinstance(value, int | float):
        return {f"{name}#number": _boxed(value)}
    if isinstance(value, tuple | list) and all(isinstance(item, int | float) for item in value):
        return {f"{name}#{position}": _boxed(item) for position, item in enumerate(value)}
    return {}


def _boxed(value: float) -> np.ndarray[Any, Any]:
    """A Python number with its type, in one shape and dtype whatever the type is."""
    return np.array([NUMBERS.index(type(value)), value], np.float64)


def _unboxed(array: np.ndarray[Any, Any]) -> float:
    kind, value = array.tolist()
    return NUMBERS[int(kind)](value)


def load(optimizer: torch.optim.Optimizer, names: list[str], arrays: Mapping[str, Any]) -> None:
    """Put exported arrays back, each tensor on the device and in the memory layout that the kernels expect.

    Args:
        optimizer: the state's.
        names: of its parameters, in the order of its groups.
        arrays: NumPy arrays, or tensors divided over processes as their parameters are.
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
                    optimizer.state[p][slot.removesuffix("#number")] = _unboxed(array)
                else:
                    optimizer.state[p][slot] = _placed(slot, array, p, group, optimizer.state[p].get(slot))
        for option, array in by_owner.get(f"groups/{index}", {}).items():
            _set_option(group, option, array)


def _placed(slot: str, array: Any, p: torch.Tensor, group: dict[str, Any], old: Any) -> torch.Tensor:
    """A slot's tensor: laid out like its parameter if it has its shape; a step count where it was, or else on the
    device for kernels that read it there, on the CPU for the others."""
    value = as_tensor(array)
    if slot == "step":
        if isinstance(old, torch.Tensor):
            same = old.shape == value.shape and old.dtype == value.dtype
            return old.copy_(value) if same else value.to(old.device)  # where it lies: see kernels.counts_for
        return value.to(p.device) if group.get("fused") or group.get("capturable") else value
    if value.shape == p.shape:
        new = torch.empty_like(p, dtype=value.dtype)
        fill(new, value)
        return new
    if is_divided(old) and old.shape == value.shape:  # laid out in a way of its own
        fill(old, value)
        placed: torch.Tensor = old
        return placed
    return value.to(p.device)


def _set_option(group: dict[str, Any], option: str, array: Any) -> None:
    name, _, mark = option.partition("#")
    if mark == "number":
        group[name] = _unboxed(array)
    elif mark:
        items = list(group[name])
        items[int(mark)] = _unboxed(array)
        group[name] = tuple(items) if isinstance(group[name], tuple) else items
    else:
        old = group.get(name)
        group[name] = as_tensor(array).to(old.device if isinstance(old, torch.Tensor) else "cpu")
