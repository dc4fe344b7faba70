"""Tensors of several processes to and from a folder, by `torch.distributed.checkpoint` in its safetensors layout (S33).

Each process writes what it holds, into a file of its own; what all hold alike is written by the first of them. Offsets
lie in the files' headers: unlike in DCP's other layout nothing is pickled, and loading runs no code. Called by
`step.parts`.

What DCP leaves open is looked at here: it converts dtypes as it loads, takes sizes from the pieces that it finds, and
leaves memory as it was where no piece lies.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from polyamp.contract.parts import Form
from polyamp.errors import CheckpointError, UnsupportedError
from polyamp.train.parts import check_forms
from polyamp_torch.arrays import dtype_name
from polyamp_torch.distributed.failure import of_a_collective


class Group:
    """The processes of a process group, for `polyamp.save` and `polyamp.restore`.

    Args:
        replicas: the state's.
    """

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas
        self._group = replicas.group
        self.rank = dist.get_rank(self._group)
        self.count = dist.get_world_size(self._group)

    def gather(self, said: bytes) -> list[bytes]:
        """What each says, by rank; torch's error where one of them ended, or was not heard in time, which
        `call_of_all` makes a ReplicaError of."""
        every: list[Any] = [None] * self.count
        dist.all_gather_object(every, said, group=self._group)
        return every

    def call_of_all(self, what: str) -> contextlib.AbstractContextManager[None]:
        """See `polyamp.contract.parts.Meets`."""
        guard = self._replicas.guard
        block: contextlib.AbstractContextManager[None]
        block = contextlib.nullcontext() if guard is None else guard.call_of_all(what)
        return block


class Copies(Group):
    """Those of `DistributedDataParallel`, which hold everything alike."""

    def write_by_one(self, path: str, put: Callable[[], None], look: Callable[[], Any]) -> None:
        """See `polyamp.contract.parts.HasCopies`."""
        guard = self._replicas.guard
        if guard is None:
            put()
            return
        board = guard.board
        guard.writer.write(path, f"{self._replicas.number} {board.begun} {board.meetings}", put, look)


def write(folder: Path, tensors: Mapping[str, torch.Tensor], group: Any) -> None:
    """Write tensors into an empty folder, each process what it holds; an error in one is an error in all.

    Args:
        folder: seen by all.
        tensors: by name; a `DTensor`, or a tensor that all have alike, of which the first process's counts.
        group: all of them; None for a process alone.
    """
    writer, _ = _storage(str(folder))
    plan = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    given = {name: _storable(tensor.detach()).contiguous() for name, tensor in tensors.items()}
    _run(lambda: save(given, storage_writer=writer, planner=plan, process_group=group, no_dist=group is None))


def read(folder: Path, forms: Mapping[str, Form], targets: Mapping[str, torch.Tensor], group: Any) -> None:
    """Fill tensors from what `write` wrote, however many processes wrote it.

    Args:
        folder: seen by all.
        forms: what the folder has to hold, whole.
        targets: new memory by name, of the same forms.
        group: as in `write`.

    Raises:
        CheckpointError: it holds something else.
    """
    _, reader = _storage(str(folder))
    _check(folder, reader, {name: _storable_form(form) for name, form in forms.items()})
    given = {name: _storable(target) for name, target in targets.items()}
    _run(lambda: load(given, storage_reader=reader, process_group=group, no_dist=group is None))


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as safetensors hold it, which have no complex128: as pairs of float64, in the same memory."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.dtype == torch.complex128 else tensor


def _storable_form(form: Form) -> Form:
    """The form of `_storable`."""
    return Form("float64", (*form.shape, 2)) if form.dtype == "complex128" else form


def _storage(folder: str) -> tuple[Any, Any]:
    """DCP's writer and reader of its safetensors layout, every process with files of its own.

    Raises:
        UnsupportedError: this torch has none; 2.7 has not.
    """
    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

        return HuggingFaceStorageWriter(folder, save_distributed=True), HuggingFaceStorageReader(folder)
    except (ImportError, TypeError) as error:
        raise UnsupportedError(
            "a checkpoint that is a folder needs torch.distributed.checkpoint's safetensors layout, which torch "
            f"{torch.__version__} does not have. pip install 'torch>=2.8', or save one file: "
            "polyamp.save(state, path, sharded=False)."
        ) from error


def _check(folder: Path, reader: Any, forms: Mapping[str, Form]) -> None:
    """Look at the headers: names, dtypes, shapes, and that the pieces are the whole of each tensor."""
    try:
        found = reader.read_metadata().state_dict_metadata
    except Exception as error:  # whatever safetensors and DCP raise of a file that is none
        raise CheckpointError(f"{folder} cannot be read ({type(error).__name__}: {error}).") from error
    check_forms(folder, {name: Form(dtype_name(m.properties.dtype), tuple(m.size)) for name, m in found.items()}, forms)
    for name, metadata in found.items():
        held = sum(math.prod(chunk.sizes) for chunk in metadata.chunks)
        if held != math.prod(metadata.size):
            raise CheckpointError(
                f"{folder} does not hold the whole of {name}: pieces of {held} elements, and it has "
                f"{math.prod(metadata.size)}."
            )


def _run(action: Callable[[], None]) -> None:
    """Run one of DCP's calls; its own error, which is no `Exception`, as one of polyamp's."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a process alone: as meant
            action()
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        if (isinstance(first, OSError) and not dist.is_initialized()) or of_a_collective(first):
            raise first from error
        raise CheckpointError(
            f"rank {rank} could not write or read its part: {type(first).__name__}: {first}"
        ) from error
