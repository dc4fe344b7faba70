"""Sharded view of a state for checkpoints of several processes (S33), written and read with orbax.

A state's arrays are global: several processes store parts of each. Its random keys are the same for all processes, so
that a checkpoint has the same meaning on any mesh. orbax's own folder is part of the data that the manifest lists. It
contains JSON and array bytes, and reading it runs no code. Without sharded arrays one process writes, and the others
wait in a key-value store over JAX's coordination service.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from polyamp.contract.sharded_state import ArrayForm, StateProcesses
from polyamp.errors import BackendNotInstalledError, CheckpointError, ReplicaError, UnsupportedError
from polyamp.rules.rank_group import RankGroup
from polyamp.rules.single_file_save import SingleWriter
from polyamp.train.checkpoint_processes import SingleProcess, check_array_forms
from polyamp_jax import compat
from polyamp_jax.arrays import is_key, shape_struct
from polyamp_jax.step.error_hints import other_process_error
from polyamp_jax.step.state import JaxState, check_not_donated, export_arrays, named_state_arrays

Array = np.ndarray[Any, Any]
_ORBAX_FOLDER: Final = "orbax"
_PREFIX: Final = "polyamp/"
_LONGEST_WAIT: Final = 1800.0
"""Seconds that a process waits for the writing process. JAX itself ends it earlier if the writer has ended."""
_Value = TypeVar("_Value")


_writer_cache: Final[list[Any]] = []
"""The service's client and the writer that uses it."""


class CoordinationStore:
    """`RankStore` over JAX's coordination service, which ends with process 0. Process 0 waits for the others.

    Args:
        client: the service's client, whose calls have their own time limits.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def reach(self) -> None:
        """See `RankStore`."""

    def set(self, key: str, value: bytes) -> None:
        """See `RankStore`."""
        _call_service(lambda: self._client.key_value_set_bytes(_PREFIX + key, value, allow_overwrite=True))

    def get(self, key: str, seconds: float) -> bytes | None:
        """See `RankStore`."""
        try:
            found: bytes = self._client.blocking_key_value_get_bytes(_PREFIX + key, max(1, int(1000 * seconds)))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise ConnectionError(str(error)) from error
        return found

    def add(self, key: str, number: int) -> int:
        """See `RankStore`. An older JAX has no counters: `number` is then returned, as for the first process."""
        count = getattr(self._client, "key_value_increment", None)
        return number if count is None else _call_service(lambda: int(count(_PREFIX + key, number)))


def _coordination_writer() -> SingleWriter | None:
    """Return this process's single writer, or None if there is no coordination service."""
    client = compat.coordination_client()
    if client is None:
        return None
    if not _writer_cache or _writer_cache[0] is not client:
        group = RankGroup(CoordinationStore(client), jax.process_index(), range(jax.process_count()), _LONGEST_WAIT)
        _writer_cache[:] = [client, SingleWriter(group)]
    found: SingleWriter = _writer_cache[1]
    return found


def _call_service(call: Callable[[], _Value]) -> _Value:
    try:
        return call()
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error


class JaxProcesses:
    """`StateProcesses` of `jax.distributed`."""

    def __init__(self) -> None:
        self.rank = jax.process_index()
        self.count = jax.process_count()

    def gather(self, message: bytes) -> list[bytes]:
        """Return the message of each process, by rank.

        Raises:
            ReplicaError: a process ended, or did not respond in time.
        """
        try:
            lengths = np.asarray(multihost_utils.process_allgather(np.asarray([len(message)], np.int32))).ravel()
            padded = np.zeros(max(1, int(lengths.max())), np.uint8)
            padded[: len(message)] = np.frombuffer(message, np.uint8)
            every = np.asarray(multihost_utils.process_allgather(padded)).reshape(self.count, -1)
        except (RuntimeError, ValueError) as error:
            if other_process_error(error) is not None:  # `collective_call` reports which process
                raise
            raise ReplicaError(
                f"process {self.rank} heard nothing of another one while a checkpoint was saved or restored: that one "
                f"ended, or hangs ({error}). The last complete checkpoint is whole; start all anew from it."
            ) from error
        return [row[:length].tobytes() for row, length in zip(every, lengths, strict=True)]

    @contextlib.contextmanager
    def collective_call(self, what: str) -> Iterator[None]:
        """Run a call that needs every process, and name a process that has ended (`HasCollectiveCalls`)."""
        try:
            yield
        except Exception as error:
            parted = other_process_error(error)
            if parted is None:
                raise
            raise ReplicaError(f"{parted} (In {what}; the last complete checkpoint is whole.)") from error


class JaxReplicatedProcesses(JaxProcesses):
    """Processes of a state that is fully replicated on every process."""

    def __init__(self, state: JaxState, writer: SingleWriter) -> None:
        super().__init__()
        self._state, self._writer = state, writer

    def write_by_one(self, path: str, write_file: Callable[[], None], file_version: Callable[[], Any]) -> None:
        """See `polyamp.contract.sharded_state.HasReplicas`."""
        self._writer.write(path, str(int(np.asarray(self._state.step))), write_file, file_version)


@contextlib.contextmanager
def sharded_state(state: JaxState) -> Iterator[JaxShardedState]:
    """Yield the sharded view of the state. Its arrays are immutable; no step changes them.

    Raises:
        CheckpointError: a step consumed the arrays.
    """
    check_not_donated(state)
    yield JaxShardedState(state)


class JaxShardedState:
    """`ShardedState` of a JAX state.

    Attributes:
        processes: the processes of `jax.distributed`, if some array is on devices of several processes.
        replica: constant, because every process draws from the same keys.
        own: empty, because no value differs between processes.
    """

    replica = (0, 1)
    own: Mapping[str, Array] = {}

    def __init__(self, state: JaxState) -> None:
        self._state = state
        self._leaves = named_state_arrays(state)
        shared = [leaf for leaf in self._leaves.values() if _is_shared(leaf)]
        self.processes: StateProcesses = _state_processes(state, shared)
        ranks = {device.process_index for leaf in shared for device in leaf.sharding.device_set}
        if shared and len(ranks) != jax.process_count():
            raise UnsupportedError(
                f"this state lies in {len(ranks)} of {jax.process_count()} processes. A mesh over all of them can be "
                "saved by all; or save one file with sharded=False on a state that lies in one."
            )

    @property
    def arrays(self) -> Mapping[str, Array | ArrayForm]:
        return {
            name: _array_form(leaf) if leaf.ndim or is_key(leaf) else np.array(leaf)
            for name, leaf in self._leaves.items()
        }

    def whole(self) -> dict[str, Array]:
        return export_arrays(self._state)

    def write(self, folder: Path, more: Mapping[str, Array]) -> None:
        orbax = _import_orbax()
        tree = {name: self._storable(leaf) for name, leaf in self._leaves.items() if _element_count(_array_form(leaf))}
        with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save((folder / _ORBAX_FOLDER).absolute(), args=orbax.args.PyTreeSave(tree))

    def read(self, folder: Path, forms: Mapping[str, ArrayForm]) -> dict[str, Any]:
        orbax = _import_orbax()
        stored = {name: form for name, form in forms.items() if _element_count(form)}
        empty = {
            name: np.zeros(form.shape, _array_dtype(form)) for name, form in forms.items() if not _element_count(form)
        }
        arguments = {name: self._restore_arguments(orbax, name, form) for name, form in stored.items()}
        item = {name: shape_struct(form.shape, _array_dtype(form)) for name, form in stored.items()}
        path = (folder / _ORBAX_FOLDER).absolute()
        try:
            with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
                tree = checkpointer.metadata(path).item_metadata.tree
                found = {name: ArrayForm(str(array.dtype), tuple(array.shape)) for name, array in tree.items()}
                check_array_forms(folder, found, stored)
                args = orbax.args.PyTreeRestore(item=item, restore_args=arguments)
                read: dict[str, Any] = checkpointer.restore(path, args=args)
        except CheckpointError:
            raise
        except Exception as error:  # orbax and tensorstore raise many exception types for damaged files
            raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error
        return {**read, **empty}

    def new_stream(self, name: str, seed: int) -> Array:
        raise NotImplementedError("JAX's keys are the same for all processes")

    def _storable(self, leaf: Any) -> Any:
        data = jax.random.key_data(leaf) if is_key(leaf) else leaf
        return data if self.processes.count == 1 or _is_shared(data) else np.array(data)  # host-local: of process 0

    def _restore_arguments(self, orbax: Any, name: str, form: ArrayForm) -> Any:
        """Return the restore arguments of an array: to the sharding of the state's own array, or whole to the host."""
        leaf = self._leaves.get(name)
        if leaf is None or not leaf.ndim or is_key(leaf) or not leaf.committed:
            return orbax.RestoreArgs(restore_type=np.ndarray)
        return orbax.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=form.shape)


def _state_processes(state: JaxState, shared: Sequence[Any]) -> StateProcesses:
    if not shared:
        return SingleProcess()
    writer = _coordination_writer() if all(leaf.is_fully_replicated for leaf in shared) else None
    return JaxProcesses() if writer is None else JaxReplicatedProcesses(state, writer)


def _is_shared(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _array_form(leaf: Any) -> ArrayForm:
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return ArrayForm(str(data.dtype), tuple(data.shape))
    return ArrayForm(str(leaf.dtype), tuple(leaf.shape))


def _element_count(form: ArrayForm) -> int:
    """Return the number of elements. orbax does not write empty arrays; their form is enough to restore them."""
    return math.prod(form.shape)


def _array_dtype(form: ArrayForm) -> Any:
    return jax.numpy.dtype(form.dtype)


def _import_orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise BackendNotInstalledError(
            'a checkpoint that is a folder needs orbax: pip install "polyamp[sharded]". Without it, save one file: '
            "polyamp.save(state, path, sharded=False)."
        ) from error
    return orbax
