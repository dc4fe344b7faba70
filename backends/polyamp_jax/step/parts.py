"""`JaxParts`: a state as its processes hold it, for checkpoints of several processes (S33). orbax writes and reads.

Called by the backend's `in_parts`. A state's arrays are global: several processes hold parts of each, and its random
keys are the same for all, so that a checkpoint means the same on any mesh. orbax's own folder lies in the data that the
manifest names; it is JSON and array bytes, and reading it runs no code.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.experimental import multihost_utils

from polyamp.contract.parts import Form, Processes
from polyamp.errors import BackendNotInstalledError, CheckpointError, ReplicaError, UnsupportedError
from polyamp.rules.single_writer import SingleWriter
from polyamp.train.parts import OneProcess, check_forms
from polyamp_jax.arrays import is_key
from polyamp_jax.step import coordination
from polyamp_jax.step.failures import of_other_process
from polyamp_jax.step.state import JaxState, check_held, export, named_arrays

Array = np.ndarray[Any, Any]
_FOLDER: Final = "orbax"


class AllProcesses:
    """`Processes` of `jax.distributed`."""

    def __init__(self) -> None:
        self.rank = jax.process_index()
        self.count = jax.process_count()

    def gather(self, said: bytes) -> list[bytes]:
        """What each says, by rank.

        Raises:
            ReplicaError: one of them ended, or was not heard in time.
        """
        try:
            lengths = np.asarray(multihost_utils.process_allgather(np.asarray([len(said)], np.int32))).ravel()
            padded = np.zeros(max(1, int(lengths.max())), np.uint8)
            padded[: len(said)] = np.frombuffer(said, np.uint8)
            every = np.asarray(multihost_utils.process_allgather(padded)).reshape(self.count, -1)
        except (RuntimeError, ValueError) as error:
            if of_other_process(error) is not None:  # `call_of_all` says which
                raise
            raise ReplicaError(
                f"process {self.rank} heard nothing of another one while a checkpoint was saved or restored: that one "
                f"ended, or hangs ({error}). The last complete checkpoint is whole; start all anew from it."
            ) from error
        return [row[:length].tobytes() for row, length in zip(every, lengths, strict=True)]

    @contextlib.contextmanager
    def call_of_all(self, what: str) -> Iterator[None]:
        """See `polyamp.contract.parts.Meets`: here all have to come by themselves, and one that ends is named."""
        try:
            yield
        except Exception as error:
            parted = of_other_process(error)
            if parted is None:
                raise
            raise ReplicaError(f"{parted} (In {what}; the last complete checkpoint is whole.)") from error


class Copies(AllProcesses):
    """Those of a state whose arrays every process holds whole."""

    def __init__(self, state: JaxState, writer: SingleWriter) -> None:
        super().__init__()
        self._state, self._writer = state, writer

    def write_by_one(self, path: str, put: Callable[[], None], look: Callable[[], Any]) -> None:
        """See `polyamp.contract.parts.HasCopies`."""
        self._writer.write(path, str(int(np.asarray(self._state.step))), put, look)


@contextlib.contextmanager
def in_parts(state: JaxState) -> Iterator[JaxParts]:
    """The state's parts; its arrays are values, which no step changes.

    Raises:
        CheckpointError: a step consumed them.
    """
    check_held(state)
    yield JaxParts(state)


class JaxParts:
    """`Parts` of a JAX state.

    Attributes:
        processes: those of `jax.distributed`, if some array lies on devices of several.
        replica: every process draws from the same keys.
        own: nothing; see above.
    """

    replica = (0, 1)
    own: Mapping[str, Array] = {}

    def __init__(self, state: JaxState) -> None:
        self._state = state
        self._leaves = named_arrays(state)
        shared = [leaf for leaf in self._leaves.values() if _is_shared(leaf)]
        self.processes: Processes = _processes(state, shared)
        held = {device.process_index for leaf in shared for device in leaf.sharding.device_set}
        if shared and len(held) != jax.process_count():
            raise UnsupportedError(
                f"this state lies in {len(held)} of {jax.process_count()} processes. A mesh over all of them can be "
                "saved by all; or save one file with sharded=False on a state that lies in one."
            )

    @property
    def arrays(self) -> Mapping[str, Array | Form]:
        return {
            name: _form(leaf) if leaf.ndim or is_key(leaf) else np.array(leaf) for name, leaf in self._leaves.items()
        }

    def whole(self) -> dict[str, Array]:
        return export(self._state)

    def write(self, folder: Path, more: Mapping[str, Array]) -> None:
        orbax = _orbax()
        tree = {name: self._written(leaf) for name, leaf in self._leaves.items() if _size(_form(leaf))}
        with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save((folder / _FOLDER).absolute(), args=orbax.args.PyTreeSave(tree))

    def read(self, folder: Path, forms: Mapping[str, Form]) -> dict[str, Any]:
        orbax = _orbax()
        stored = {name: form for name, form in forms.items() if _size(form)}
        empty = {name: np.zeros(form.shape, _dtype(form)) for name, form in forms.items() if not _size(form)}
        how = {name: self._how(orbax, name, form) for name, form in stored.items()}
        described: Any = jax.ShapeDtypeStruct  # JAX does not annotate it
        item = {name: described(form.shape, _dtype(form)) for name, form in stored.items()}
        path = (folder / _FOLDER).absolute()
        try:
            with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
                tree = checkpointer.metadata(path).item_metadata.tree
                found = {name: Form(str(held.dtype), tuple(held.shape)) for name, held in tree.items()}
                check_forms(folder, found, stored)
                args = orbax.args.PyTreeRestore(item=item, restore_args=how)
                read: dict[str, Any] = checkpointer.restore(path, args=args)
        except CheckpointError:
            raise
        except Exception as error:  # orbax and tensorstore raise what they like of damaged files
            raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error
        return {**read, **empty}

    def drawn(self, name: str, seed: int) -> Array:
        raise NotImplementedError("JAX's keys are the same for all processes")

    def _written(self, leaf: Any) -> Any:
        data = jax.random.key_data(leaf) if is_key(leaf) else leaf
        return data if self.processes.count == 1 or _is_shared(data) else np.array(data)  # host-local: of process 0

    def _how(self, orbax: Any, name: str, form: Form) -> Any:
        """Where an array goes: to the devices of the state's own, in its sharding, or whole to the host."""
        leaf = self._leaves.get(name)
        if leaf is None or not leaf.ndim or is_key(leaf) or not leaf.committed:
            return orbax.RestoreArgs(restore_type=np.ndarray)
        return orbax.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=form.shape)


def _processes(state: JaxState, shared: Sequence[Any]) -> Processes:
    if not shared:
        return OneProcess()
    writer = coordination.writer() if all(leaf.is_fully_replicated for leaf in shared) else None
    return AllProcesses() if writer is None else Copies(state, writer)


def _is_shared(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _form(leaf: Any) -> Form:
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return Form(str(data.dtype), tuple(data.shape))
    return Form(str(leaf.dtype), tuple(leaf.shape))


def _size(form: Form) -> int:
    """orbax writes no array without elements; its form says all of it."""
    return math.prod(form.shape)


def _dtype(form: Form) -> Any:
    return jax.numpy.dtype(form.dtype)


def _orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise BackendNotInstalledError(
            'a checkpoint that is a folder needs orbax: pip install "polyamp[sharded]". Without it, save one file: '
            "polyamp.save(state, path, sharded=False)."
        ) from error
    return orbax
