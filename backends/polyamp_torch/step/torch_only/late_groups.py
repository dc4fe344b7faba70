"""Parameter groups that are trained after a number of applied updates (S27).

Until then their gradients are zeros in the norm and the finite flag. On the CPU they then have no gradient in the
optimizer; elsewhere, where the host does not read the number of updates, the optimizer gets a flag for each group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyamp.errors import UnsupportedError
from polyamp_torch.arrays import can_read_without_sync
from polyamp_torch.step.state import TorchState

Tensors = list[torch.Tensor]


def zero_waiting_gradients(
    state: TorchState, parameters: Sequence[torch.Tensor], values: Tensors, *, own: bool
) -> Tensors:
    """Return the gradients of `parameters`, zeros for those that do not train in this step.

    Args:
        state: the state.
        parameters: the parameters that have gradients.
        values: their gradients.
        own: whether they may be overwritten; otherwise those that may change are copied.
    """
    trains = _trains_by_id(state)
    pairs = list(zip(parameters, values, strict=True))
    values = [value if own or id(p) not in trains else value.clone() for p, value in pairs]
    for p, plain in zip(parameters, state.plain(values), strict=True):
        if id(p) in trains:
            plain.masked_fill_(~trains[id(p)].to(plain.device), 0.0)
    return values


def waiting_parameters(state: TorchState) -> set[int]:
    """Return the ids of the parameters that do not train in this step, where reading is free; empty elsewhere."""
    if not can_read_without_sync(state.device):
        return set()
    return {key for key, trains in _trains_by_id(state).items() if not bool(trains)}


def group_flags(state: TorchState) -> list[torch.Tensor | None] | None:
    """Return, for each group of the optimizer, whether it trains in this step: on the device, None for always.

    None alone: `waiting_parameters` tells it.

    Raises:
        UnsupportedError: a group that was divided by hand has parameters that start at different updates.
    """
    if can_read_without_sync(state.device):
        return None
    paths = {id(p): path for path, p in state.parameters.items()}
    found: list[torch.Tensor | None] = []
    for number, group in enumerate(state.optimizer.param_groups):
        starts = {state.groups.starts.get(paths[id(p)], 0) for p in group["params"]}
        if len(starts) > 1:
            raise UnsupportedError(
                f"param_groups[{number}] has parameters whose groups in the recipe have different trainable_after: "
                f"{sorted(starts)}. Divide it by them."
            )
        start = max(starts, default=0)
        found.append(state.step >= start if start else None)
    return found


def _trains_by_id(state: TorchState) -> dict[int, torch.Tensor]:
    """Return, by id of each parameter of a late group, whether it takes the next update."""
    flags = {start: state.step >= start for start in set(state.groups.starts.values())}
    return {id(state.parameters[path]): flags[start] for path, start in state.groups.starts.items()}
