"""Export and import of a state's arrays by name, on one device or sharded over several (S22, S33).

The states are `TorchState`s, annotated as `Any` because `state` imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from polyamp.recipe.scaler import LossScaleState
from polyamp_torch.arrays import as_tensor, fill_tensor, to_numpy
from polyamp_torch.step.torch_only import optimizer_state
from polyamp_torch.step.torch_only.random_state import restore_generator_states


def state_parameters(state: Any) -> dict[str, torch.Tensor]:
    """Return path -> parameter, frozen ones included.

    Under `fully_shard` these are the sharded parameters, even while a module has gathered ones."""
    if state.replicas.engine.name is None or state.replicas.engine.name == "ddp":
        return dict(state.reader.parameters())
    divided: dict[str, torch.Tensor] = {**state.parameters, **dict(state.frozen)}
    return divided


def state_buffers(state: Any) -> dict[str, torch.Tensor]:
    """Return path -> buffer."""
    found: dict[str, torch.Tensor] = state.reader.buffers()
    return found


def optimizer_names(state: Any) -> list[str]:
    """Return the path of every parameter of the optimizer, in the order of its groups."""
    by_id = {id(p): name for name, p in state_parameters(state).items()}
    return [by_id[id(p)] for group in state.optimizer.param_groups for p in group["params"]]


def drop_gathered_parameters(state: Any) -> None:
    """Reshard the modules of `fully_shard`, so that the next pass gathers the restored parameters."""
    if state.replicas.engine.name is not None:
        for part in state.model.modules():
            reshard: Any = getattr(part, "reshard", None)  # for an FSDPModule
            if reshard is not None:
                reshard()


def state_arrays_by_name(state: Any, take: Callable[[torch.Tensor], Any] = to_numpy) -> dict[str, Any]:
    """Return every array by name, except the states of torch's generators.

    Args:
        state: a state whose lock the caller has acquired.
        take: conversion of each tensor; the default copies the unsharded tensor to the host.
    """
    arrays = {f"model/{name}": take(p) for name, p in state_parameters(state).items()}
    arrays |= {f"running/{name}": take(b) for name, b in state_buffers(state).items()}
    arrays |= {f"rng/{name}": take(stream) for name, stream in state.reader.random_streams().items()}
    if state.rates is not None:
        state.rates.multiples()
    exported = optimizer_state.export_optimizer(state.optimizer, optimizer_names(state), state.rates, take)
    arrays |= {f"optimizer/{name}": value for name, value in exported.items()}
    if state.averages is not None:
        arrays |= {f"average/{name}": take(value) for name, value in state.averages.named().items()}
    arrays |= {f"loss_scale/{name}": take(value) for name, value in state.scale_state._asdict().items()}
    return {**arrays, "step": take(state.step)}


def write_state_arrays(state: Any, arrays: Mapping[str, Any]) -> None:
    """Restore arrays in place.

    Args:
        state: a state whose lock the caller has acquired.
        arrays: unsharded NumPy arrays, or tensors sharded like those of the state.
    """
    drop_gathered_parameters(state)
    with torch.no_grad():
        for name, p in state_parameters(state).items():
            fill_tensor(p, as_tensor(arrays[f"model/{name}"]))
        for name, b in state_buffers(state).items():
            fill_tensor(b, as_tensor(arrays[f"running/{name}"]))
        for name, stream in state.reader.random_streams().items():
            fill_tensor(stream, as_tensor(arrays[f"rng/{name}"]))
        averages = {} if state.averages is None else state.averages.named()
        for name, average in averages.items():
            fill_tensor(average, as_tensor(arrays[f"average/{name}"]))
    prefix = "optimizer/"
    exported = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
    optimizer_state.load_optimizer(state.optimizer, optimizer_names(state), exported)
    if state.rates is not None:
        state.rates.write()
    fields = (as_tensor(arrays[f"loss_scale/{name}"]).to(state.device) for name in LossScaleState._fields)
    state.scale_state = LossScaleState(*fields)
    state.step = as_tensor(arrays["step"]).to(state.device)
    restore_generator_states(arrays, state.device)
