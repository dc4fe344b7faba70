"""Process views of a state for `save` and `restore`: unsharded and replicated states, and checks over all processes.

`polyamp.contract.sharded_state` has the protocols for backends with several processes.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from polyamp.contract.sharded_state import ArrayForm, HasCollectiveCalls, HasShardedState, ShardedState, StateProcesses
from polyamp.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

STATE_FILE: Final = "state.safetensors"
"""Name of the file that `UnshardedState` writes."""
_Value = TypeVar("_Value")


def sharded_state(state: Any) -> contextlib.AbstractContextManager[ShardedState]:
    """Return the sharded view of a state, whether or not its backend supports several processes."""
    backend = state.backend
    if isinstance(backend, HasShardedState):
        return backend.sharded_state(state)
    return contextlib.nullcontext(UnshardedState(state))


def collective_call(processes: StateProcesses, what: str) -> contextlib.AbstractContextManager[None]:
    """Return the context of a call that every process has to make; see `HasCollectiveCalls`."""
    if processes.count > 1 and isinstance(processes, HasCollectiveCalls):
        return processes.collective_call(what)
    return contextlib.nullcontext()


class SingleProcess:
    """`StateProcesses` of a state in this process only."""

    rank = 0
    count = 1

    def gather(self, message: bytes) -> list[bytes]:
        return [message]


class UnshardedState:
    """`ShardedState` of a whole state in this process: one safetensors file of NumPy arrays."""

    processes: StateProcesses = SingleProcess()
    replica = (0, 1)
    own: Mapping[str, Array] = {}

    def __init__(self, state: Any) -> None:
        self._state = state
        self._arrays: dict[str, Array] | None = None

    @property
    def arrays(self) -> Mapping[str, Array]:
        if self._arrays is None:
            self._arrays = self.whole()
        return self._arrays

    def whole(self) -> dict[str, Array]:
        exported: dict[str, Array] = self._state.backend.export_state(self._state)
        return exported

    def write(self, folder: Path, more: Mapping[str, Array]) -> None:
        import numpy as np
        from safetensors.numpy import save_file

        arrays = {**self.arrays, **more}
        save_file({name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}, folder / STATE_FILE)

    def read(self, folder: Path, forms: Mapping[str, ArrayForm]) -> dict[str, Array]:
        return read_safetensors(folder / STATE_FILE, forms)

    def new_stream(self, name: str, seed: int) -> Array:
        raise NotImplementedError("one process has no stream of its own beside the others'")


class ReplicatedState(UnshardedState):
    """`ShardedState` of a state that every process holds whole, as in data parallelism: the first process writes."""

    def __init__(self, state: Any, processes: StateProcesses) -> None:
        super().__init__(state)
        self.processes = processes
        self.replica = (processes.rank, processes.count)

    def write(self, folder: Path, more: Mapping[str, Array]) -> None:
        run_on_rank_0(self.processes, "could not write", functools.partial(super().write, folder, more))

    def read(self, folder: Path, forms: Mapping[str, ArrayForm]) -> dict[str, Array]:
        return run_on_each_rank(self.processes, "could not read", functools.partial(super().read, folder, forms))


def read_safetensors(file: Path, forms: Mapping[str, ArrayForm]) -> dict[str, Array]:
    """Read the arrays of one safetensors file.

    Raises:
        CheckpointError: the file does not match `forms`.
    """
    from safetensors import SafetensorError

    from polyamp.train.checkpoint_tensors import PARSE_ERRORS, deserialize_arrays

    try:
        arrays = deserialize_arrays(file.read_bytes())
    except (*PARSE_ERRORS, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({type(error).__name__}: {error}).") from error
    check_array_forms(file, {name: array_form(each) for name, each in arrays.items()}, forms)
    return arrays


def array_form(array: Array | ArrayForm) -> ArrayForm:
    """Return the form of an array."""
    return array if isinstance(array, ArrayForm) else ArrayForm(str(array.dtype), tuple(array.shape))


def check_array_forms(where: Path, stored: Mapping[str, ArrayForm], expected: Mapping[str, ArrayForm]) -> None:
    """Raise if files do not match their manifest.

    Raises:
        CheckpointError: names the first differing array.
    """
    for name in sorted({*stored, *expected}):
        if stored.get(name) != expected.get(name):
            here, there = (
                format_array_form(forms[name]) if name in forms else "missing" for forms in (stored, expected)
            )
            raise CheckpointError(
                f"{where} does not hold what its manifest says: {name} is {here} in the data and {there} in the "
                "manifest."
            )


def format_array_form(array: Array | ArrayForm) -> str:
    """Return an array's dtype and shape as text: "float32[4, 3]"."""
    return f"{array.dtype}{list(array.shape)}"


def run_on_all_ranks(processes: StateProcesses, what: str, action: Callable[[], _Value]) -> list[_Value]:
    """Return the result of `action` on each process. An error on one is raised on all.

    Args:
        processes: the processes; each of them calls this.
        what: description of the action's failure for the others: "could not write its part".
        action: runs on this process, no collective; its result must be JSON-serialisable.

    Raises:
        CheckpointError: the action of another process raised; names it. A process raises its own error unchanged.
    """
    if processes.count == 1:
        return [action()]
    own_error: Exception | None = None
    outcome: dict[str, Any] = {}
    try:
        outcome["value"] = action()
    except Exception as error:  # noqa: BLE001  # whatever it is, the other processes must learn of it
        own_error = error
        outcome["error"] = f"{type(error).__name__}: {error}"
    messages = processes.gather(json.dumps(outcome).encode())
    if own_error is not None:
        raise own_error
    try:
        every = [dict(json.loads(message)) for message in messages]
    except (ValueError, TypeError) as error:  # a file here and a folder there: their results differ in kind
        raise CheckpointError("the ranks name different checkpoints. All of them must give the same path.") from error
    failed = [(rank, each["error"]) for rank, each in enumerate(every) if "error" in each]
    if failed:
        rank, error_text = failed[0]
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise CheckpointError(f"rank {rank}{others} {what}: {error_text}")
    return [each["value"] for each in every]


def run_on_each_rank(processes: StateProcesses, what: str, action: Callable[[], _Value]) -> _Value:
    """Return the result of `action` on this process, of any type. An error on one is raised on all.

    Arguments and errors are those of `run_on_all_ranks`.
    """
    results: list[_Value] = []
    run_on_all_ranks(processes, what, lambda: results.append(action()))
    return results[0]


def run_on_rank_0(processes: StateProcesses, what: str, action: Callable[[], _Value]) -> _Value:
    """Return the result of `action` on the first process, which alone runs it. An error is raised on all.

    Arguments and errors are those of `run_on_all_ranks`.
    """
    results: list[Any] = run_on_all_ranks(processes, what, lambda: action() if processes.rank == 0 else None)
    result: _Value = results[0]
    return result


def check_equal_on_ranks(processes: StateProcesses, what: str, value: str) -> None:
    """Raise if processes differ in a value that must be equal.

    Raises:
        CheckpointError: on every process; shows the first two differing values.
    """
    if processes.count == 1:
        return
    every = [each.decode() for each in processes.gather(value.encode())]
    for rank, each in enumerate(every):
        if each != every[0]:
            raise CheckpointError(f"all ranks must have the same {what}. Rank 0 has {every[0]}, rank {rank} {each}.")
