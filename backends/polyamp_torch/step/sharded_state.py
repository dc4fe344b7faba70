"""Sharded view of a state, for checkpoints of several processes (S33).

`torch.distributed.checkpoint` writes and reads it, in a single process too (`distributed.torch_only.checkpoint_io`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyamp.contract.sharded_state import ArrayForm, StateProcesses
from polyamp.errors import CheckpointError
from polyamp.train.checkpoint_processes import SingleProcess
from polyamp_torch.arrays import DTYPES, as_tensor, dtype_name, is_sharded, to_numpy
from polyamp_torch.distributed.processes import TorchProcesses, TorchReplicaProcesses
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only import state_arrays
from polyamp_torch.step.torch_only.random_state import new_random_state_array, random_state_arrays

Array = np.ndarray[Any, Any]


@contextlib.contextmanager
def sharded_state(state: TorchState) -> Iterator[TorchShardedState]:
    """Context manager that yields the state's shards while no step runs."""
    with state.lock:
        state.check_alive()
        yield TorchShardedState(state)


class TorchShardedState:
    """`ShardedState` of a torch state.

    Attributes:
        processes: all the processes of the model, whether replicated or sharded.
        replica: this process's replica index and the number of replicas. Processes of one replica share their random
            streams.
        own: torch's random-number states.
    """

    def __init__(self, state: TorchState) -> None:
        self._state = state
        self._group = state.replicas.group if state.replicas.several else None
        self.processes: StateProcesses = (
            SingleProcess() if self._group is None else _checkpoint_processes(state.replicas)
        )
        self.replica = (state.replicas.rank, state.replicas.count)
        self.own = random_state_arrays(state.device)
        self._tensors: dict[str, Any] = state_arrays.state_arrays_by_name(state, take=torch.Tensor.detach)

    @property
    def arrays(self) -> Mapping[str, Array | ArrayForm]:
        """Array forms by name; the current options of the optimizer's groups as values, which `restore` may prefer to
        the saved ones."""
        return {
            name: to_numpy(each) if _is_group_option(name, each) else _array_form(each)
            for name, each in self._tensors.items()
        }

    def whole(self) -> dict[str, Array]:
        return self._state.export()

    def write(self, folder: Path, more: Mapping[str, Array]) -> None:
        from polyamp_torch.distributed.torch_only import (
            checkpoint_io,  # imports torch.distributed.checkpoint, half a second
        )

        tensors = {name: as_tensor(each) for name, each in {**self._tensors, **more}.items()}
        checkpoint_io.write_tensors(folder, tensors, self._group)

    def read(self, folder: Path, forms: Mapping[str, ArrayForm]) -> dict[str, Any]:
        from polyamp_torch.distributed.torch_only import checkpoint_io

        targets = {name: self._empty_tensor(name, form) for name, form in forms.items()}
        checkpoint_io.read_tensors(folder, forms, targets, self._group)
        return {name: self._restored_value(name, target) for name, target in targets.items()}

    def new_stream(self, name: str, seed: int) -> Array:
        return new_random_state_array(name, seed, self._state.device)

    def _empty_tensor(self, name: str, form: ArrayForm) -> torch.Tensor:
        """Return memory for an array to be read, sharded as in the state.

        If the optimizer creates its arrays only in its first step, the array is sharded as its parameter."""
        tensor: Any = self._tensors.get(name)
        if tensor is None and name.startswith("optimizer/state/") and form.shape:
            tensor = self._sharded_parameter(name, form)
        dtype = getattr(torch, form.dtype) if form.dtype not in DTYPES else DTYPES[form.dtype]
        if is_sharded(tensor):
            return torch.empty_like(tensor, dtype=dtype)
        return torch.empty(form.shape, dtype=dtype)

    def _sharded_parameter(self, name: str, form: ArrayForm) -> Any:
        """Return the parameter that an array of the optimizer belongs to, if it is sharded."""
        owner = name.removeprefix("optimizer/state/").rpartition("/")[0]
        parameter = state_arrays.state_parameters(self._state).get(owner)
        if parameter is None or not is_sharded(parameter):
            return None
        if tuple(parameter.shape) != form.shape:
            raise CheckpointError(
                f"{name} has shape {list(form.shape)}, and its parameter {list(parameter.shape)}: how it is divided is "
                "not known before the optimizer made it. Run one step, and restore into the state that it gives."
            )
        return parameter

    def _restored_value(self, name: str, target: torch.Tensor) -> Any:
        """Return an array as `import_state` takes it: small ones as NumPy arrays."""
        small = not target.shape or name in self.own or "#" in name.rpartition("/")[2]
        return to_numpy(target) if not is_sharded(target) and (small or _is_group_option(name, target)) else target


def _checkpoint_processes(replicas: Any) -> TorchProcesses:
    return TorchReplicaProcesses(replicas) if replicas.engine.name == "ddp" else TorchProcesses(replicas)


def _is_group_option(name: str, each: Any) -> bool:
    return not isinstance(each, torch.Tensor) or name.startswith("optimizer/groups/")


def _array_form(tensor: torch.Tensor) -> ArrayForm:
    return ArrayForm(dtype_name(tensor.dtype), tuple(tensor.shape))
