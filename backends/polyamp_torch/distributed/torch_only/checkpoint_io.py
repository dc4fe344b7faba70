"""Distributed tensor checkpoints in a folder: `torch.distributed.checkpoint` in its safetensors layout (S33).

Each process writes its shards into its own file; the first process writes replicated tensors. Offsets are in the
files' headers: unlike DCP's other layout, nothing is pickled, and loading runs no code.

This module checks what DCP does not: DCP converts dtypes as it loads, takes sizes from the chunks that it finds, and
leaves memory unchanged where no chunk exists.
"""

from __future__ import annotations

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

from polyamp.contract.sharded_state import ArrayForm
from polyamp.errors import CheckpointError, UnsupportedError
from polyamp.train.checkpoint_processes import check_array_forms
from polyamp_torch.arrays import dtype_name
from polyamp_torch.distributed.torch_only.failure_guard import is_collective_error


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], group: Any) -> None:
    """Write tensors into an empty folder, each process its own shards; an error in one is raised in all.

    Args:
        folder: visible to all processes.
        tensors: by name; a `DTensor`, or a replicated tensor, of which the first process's is written.
        group: all the processes; None for a single process.
    """
    writer, _ = _storage(str(folder))
    plan = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    given = {name: _storable_tensor(tensor.detach()).contiguous() for name, tensor in tensors.items()}
    _run_dcp(lambda: save(given, storage_writer=writer, planner=plan, process_group=group, no_dist=group is None))


def read_tensors(folder: Path, forms: Mapping[str, ArrayForm], targets: Mapping[str, torch.Tensor], group: Any) -> None:
    """Fill tensors from a folder of `write_tensors`, however many processes wrote it.

    Args:
        folder: visible to all processes.
        forms: the unsharded arrays that the folder must contain.
        targets: new memory by name, of the same forms.
        group: as in `write_tensors`.

    Raises:
        CheckpointError: the folder contains something else.
    """
    _, reader = _storage(str(folder))
    _check_headers(folder, reader, {name: _storable_form(form) for name, form in forms.items()})
    given = {name: _storable_tensor(target) for name, target in targets.items()}
    _run_dcp(lambda: load(given, storage_reader=reader, process_group=group, no_dist=group is None))


def _storable_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """View complex128, which safetensors lacks, as pairs of float64 in the same memory."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.dtype == torch.complex128 else tensor


def _storable_form(form: ArrayForm) -> ArrayForm:
    """Return the form of `_storable_tensor`."""
    return ArrayForm("float64", (*form.shape, 2)) if form.dtype == "complex128" else form


def _storage(folder: str) -> tuple[Any, Any]:
    """Return DCP's writer and reader of its safetensors layout, with one file per process.

    Raises:
        UnsupportedError: this torch has no such layout, for example 2.7.
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


def _check_headers(folder: Path, reader: Any, forms: Mapping[str, ArrayForm]) -> None:
    """Check the headers: names, dtypes, shapes, and that the chunks cover each tensor."""
    try:
        found = reader.read_metadata().state_dict_metadata
    except Exception as error:  # any error of safetensors and DCP for a malformed file
        raise CheckpointError(f"{folder} cannot be read ({type(error).__name__}: {error}).") from error
    check_array_forms(
        folder, {name: ArrayForm(dtype_name(m.properties.dtype), tuple(m.size)) for name, m in found.items()}, forms
    )
    for name, metadata in found.items():
        held = sum(math.prod(chunk.sizes) for chunk in metadata.chunks)
        if held != math.prod(metadata.size):
            raise CheckpointError(
                f"{folder} does not hold the whole of {name}: pieces of {held} elements, and it has "
                f"{math.prod(metadata.size)}."
            )


def _run_dcp(action: Callable[[], None]) -> None:
    """Run a DCP call, and convert its error, which is no `Exception`, into one of polyamp's."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended for a single process
            action()
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        if (isinstance(first, OSError) and not dist.is_initialized()) or is_collective_error(first):
            raise first from error
        raise CheckpointError(
            f"rank {rank} could not write or read its part: {type(first).__name__}: {first}"
        ) from error
