"""A state's arrays by name, out of it and back into it, on one device or divided over several (S22, S33).

Called by the state (a `TorchState`, which is no type here since it imports this), and by `parts`, which takes the
tensors themselves and not copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from polyamp.rules.scale import LossScaleState
from polyamp_torch.arrays import as_tensor, fill, from_numpy, to_numpy
from polyamp_torch.precision.parameter_listing import tree_parameters
from polyamp_torch.precision.paths import path_of
from polyamp_torch.step import optimizer_state

Array = np.ndarray[Any, Any]
STREAMS: Final = ("rng/cpu", "rng/cuda")
"""Of these each process has its own."""


def parameters_of(state: Any) -> dict[str, torch.Tensor]:
    """Path -> parameter, frozen ones included. Those that `fully_shard` divides are the divided ones also while a
    module holds them whole for its next pass."""
    if state.replicas.engine is None or state.replicas.engine == "ddp":
        path = path_of(state.model)
        return {path(name): p for name, p in tree_parameters(state.model)}
    divided: dict[str, torch.Tensor] = {**state.parameters, **dict(state.frozen)}
    return divided


def buffers_of(state: Any) -> dict[str, torch.Tensor]:
    """Path -> buffer."""
    path = path_of(state.model)
    return {path(name): b for name, b in torch.nn.Module.named_buffers(state.model)}


def optimizer_names(state: Any) -> list[str]:
    """The path of every parameter that the optimizer holds, in the order of its groups."""
    by_id = {id(p): name for name, p in parameters_of(state).items()}
    return [by_id[id(p)] for group in state.optimizer.param_groups for p in group["params"]]


def _let_go(state: Any) -> None:
    """Have `fully_shard` forget what it gathered: a pass after this gathers what was put back."""
    if state.replicas.engine is not None:
        for part in state.model.modules():
            reshard: Any = getattr(part, "reshard", None)  # of an FSDPModule
            if reshard is not None:
                reshard()


def arrays_of(state: Any, take: Callable[[torch.Tensor], Any] = to_numpy) -> dict[str, Any]:
    """Every array by name, but for the random streams.

    Args:
        state: whose turn the caller has.
        take: what becomes of a tensor; the default copies all of it to the host.
    """
    arrays = {f"model/{name}": take(p) for name, p in parameters_of(state).items()}
    arrays |= {f"running/{name}": take(b) for name, b in buffers_of(state).items()}
    if state.rates is not None:
        state.rates.multiples()
    exported = optimizer_state.export(state.optimizer, optimizer_names(state), state.rates, take)
    arrays |= {f"optimizer/{name}": value for name, value in exported.items()}
    arrays |= {f"loss_scale/{name}": take(value) for name, value in state.scale_state._asdict().items()}
    return {**arrays, "step": take(state.step)}


def streams_of(state: Any) -> dict[str, Array]:
    """torch's random-number states, so that dropout resumes where it was."""
    arrays = {"rng/cpu": to_numpy(torch.get_rng_state())}
    if state.device.type == "cuda":
        arrays["rng/cuda"] = to_numpy(torch.cuda.get_rng_state(state.device))
    return arrays


def put(state: Any, arrays: Mapping[str, Any]) -> None:
    """Put arrays back, in place.

    Args:
        state: whose turn the caller has.
        arrays: NumPy arrays, whole, or tensors, divided as those of the state are.
    """
    _let_go(state)
    with torch.no_grad():
        for name, p in parameters_of(state).items():
            fill(p, as_tensor(arrays[f"model/{name}"]))
        for name, b in buffers_of(state).items():
            fill(b, as_tensor(arrays[f"running/{name}"]))
    prefix = "optimizer/"
    exported = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
    optimizer_state.load(state.optimizer, optimizer_names(state), exported)
    if state.rates is not None:
        state.rates.write()
    fields = (as_tensor(arrays[f"loss_scale/{name}"]).to(state.device) for name in LossScaleState._fields)
    state.scale_state = LossScaleState(*fields)
    state.step = as_tensor(arrays["step"]).to(state.device)
    torch.set_rng_state(from_numpy(arrays["rng/cpu"]))
    if "rng/cuda" in arrays:
        torch.cuda.set_rng_state(from_numpy(arrays["rng/cuda"]), state.device)
