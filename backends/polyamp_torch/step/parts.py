"""`TorchParts`: a state as its processes hold it, for checkpoints of several processes (S33).

Called by the backend's `in_parts`. `torch.distributed.checkpoint` does the writing and reading, in one process as well;
what it is told is in `distributed.checkpoint`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polyamp.contract.parts import Form, Processes
from polyamp.errors import CheckpointError
from polyamp.train.parts import OneProcess
from polyamp_torch.arrays import DTYPES, as_tensor, dtype_name, is_divided, to_numpy
from polyamp_torch.step import exporting
from polyamp_torch.step.state import TorchState

Array = np.ndarray[Any, Any]
if TYPE_CHECKING:
    from polyamp_torch.distributed.checkpoint import Group


@contextlib.contextmanager
def in_parts(state: TorchState) -> Iterator[TorchParts]:
    """The state's parts while no step runs."""
    with state.turn:
        state.check_alive()
        yield TorchParts(state)


class TorchParts:
    """`Parts` of a torch state.

    Attributes:
        processes: all those that hold the model, whole or in parts.
        replica: this process's replica and their number; processes of one replica share their random streams.
        own: torch's random-number states.
    """

    def __init__(self, state: TorchState) -> None:
        self._state = state
        self._group = state.replicas.group if state.replicas.several else None
        self.processes: Processes = OneProcess() if self._group is None else _group(state.replicas)
        self.replica = (state.replicas.rank, state.replicas.count)
        self.own = exporting.streams_of(state)
        self._tensors: dict[str, Any] = exporting.arrays_of(state, take=torch.Tensor.detach)

    @property
    def arrays(self) -> Mapping[str, Array | Form]:
        """Options of the optimizer's groups as they are, which `restore` may prefer to the saved ones."""
        return {name: to_numpy(each) if _steers(name, each) else _form(each) for name, each in self._tensors.items()}

    def whole(self) -> dict[str, Array]:
        return self._state.export()

    def write(self, folder: Path, more: Mapping[str, Array]) -> None:
        from polyamp_torch.distributed import checkpoint  # brings torch.distributed.checkpoint, half a second

        tensors = {name: as_tensor(each) for name, each in {**self._tensors, **more}.items()}
        checkpoint.write(folder, tensors, self._group)

    def read(self, folder: Path, forms: Mapping[str, Form]) -> dict[str, Any]:
        from polyamp_torch.distributed import checkpoint

        targets = {name: self._memory(name, form) for name, form in forms.items()}
        checkpoint.read(folder, forms, targets, self._group)
        return {name: self._read(name, target) for name, target in targets.items()}

    def drawn(self, name: str, seed: int) -> Array:
        device = "cpu" if name == "rng/cpu" else self._state.device
        return to_numpy(torch.Generator(device).manual_seed(seed).get_state())

    def _memory(self, name: str, form: Form) -> torch.Tensor:
        """Where an array is read to: divided as the state's is, or as its parameter where the optimizer makes its
        arrays at its first step."""
        held: Any = self._tensors.get(name)
        if held is None and name.startswith("optimizer/state/") and form.shape:
            held = self._owner(name, form)
        dtype = getattr(torch, form.dtype) if form.dtype not in DTYPES else DTYPES[form.dtype]
        if is_divided(held):
            return torch.empty_like(held, dtype=dtype)
        return torch.empty(form.shape, dtype=dtype)

    def _owner(self, name: str, form: Form) -> Any:
        owner = name.removeprefix("optimizer/state/").rpartition("/")[0]
        parameter = exporting.parameters_of(self._state).get(owner)
        if parameter is None or not is_divided(parameter):
            return None
        if tuple(parameter.shape) != form.shape:
            raise CheckpointError(
                f"{name} has shape {list(form.shape)}, and its parameter {list(parameter.shape)}: how it is divided is "
                "not known before the optimizer made it. Run one step, and restore into the state that it gives."
            )
        return parameter

    def _read(self, name: str, target: torch.Tensor) -> Any:
        small = not target.shape or name in self.own or "#" in name.rpartition("/")[2]
        return to_numpy(target) if not is_divided(target) and (small or _steers(name, target)) else target


def _group(replicas: Any) -> Group:
    from polyamp_torch.distributed.checkpoint import Copies, Group

    return Copies(replicas) if replicas.engine == "ddp" else Group(replicas)


def _steers(name: str, each: Any) -> bool:
    return not isinstance(each, torch.Tensor) or name.startswith("optimizer/groups/")


def _form(tensor: torch.Tensor) -> Form:
    return Form(dtype_name(tensor.dtype), tuple(tensor.shape))
