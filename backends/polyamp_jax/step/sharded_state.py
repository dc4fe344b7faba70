"""Sharded view of a state for checkpoints of several processes (S33), written and read with orbax.

A state's arrays are global: several processes store parts of each. Its random keys are the same for all processes, so
that a checkpoint has the same meaning on any mesh. orbax's own folder is part of the data that the manifest lists. It
contains JSON and array bytes, and reading it runs no code. Without sharded arrays one process writes, and the others
wait in a key-value store over JAX's coordination service.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from polyamp.contract.sharded_state import ArrayForm, StateProcesses
from polyamp.errors import BackendNotInstalledError, CheckpointError, UnsupportedError
from polyamp.train.checkpoint_processes import SingleProcess, check_array_forms
from polyamp_jax.arrays import is_key, shape_struct
from polyamp_jax.distributed.jax_only.coordination_store import coordination_writer
from polyamp_jax.distributed.processes import JaxProcesses, JaxReplicatedProcesses
from polyamp_jax.step.state import JaxState, check_not_donated, export_arrays, named_state_arrays

Array = np.ndarray[Any, Any]
_ORBAX_FOLDER: Final = "orbax"


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
    writer = coordination_writer() if all(leaf.is_fully_replicated for leaf in shared) else None
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
