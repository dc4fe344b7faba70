"""A state as its processes hold it, for `save` and `restore`: one process that holds all, and one answer of many.

Called by `checkpoint` and `sharded`. What a backend has to offer for several processes is `polyamp.contract.parts`.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from polyamp.contract.parts import Form, LiesInParts, Meets, Parts, Processes
from polyamp.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

FILE: Final = "state.safetensors"
"""The one file that `Alone` writes."""
_Value = TypeVar("_Value")


def in_parts(state: Any) -> contextlib.AbstractContextManager[Parts]:
    """The state's parts, of a backend that knows of several processes or of one that does not."""
    backend = state.backend
    if isinstance(backend, LiesInParts):
        return backend.in_parts(state)
    return contextlib.nullcontext(Alone(state))


def call_of_all(processes: Processes, what: str) -> contextlib.AbstractContextManager[None]:
    """The block of a call that every process has to make; see `Meets`."""
    if processes.count > 1 and isinstance(processes, Meets):
        return processes.call_of_all(what)
    return contextlib.nullcontext()


class OneProcess:
    """`Processes` of a state that lies in this one."""

    rank = 0
    count = 1

    def gather(self, said: bytes) -> list[bytes]:
        return [said]


class Alone:
    """`Parts` of a state that lies in this process, whole: one safetensors file of NumPy arrays."""

    processes: Processes = OneProcess()
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
        save_file({name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}, folder / FILE)

    def read(self, folder: Path, forms: Mapping[str, Form]) -> dict[str, Array]:
        return read_file(folder / FILE, forms)

    def drawn(self, name: str, seed: int) -> Array:
        raise NotImplementedError("one process has no stream of its own beside the others'")


class Alike(Alone):
    """`Parts` of a state of which every process holds all, as under data parallelism: the first process writes."""

    def __init__(self, state: Any, processes: Processes) -> None:
        super().__init__(state)
        self.processes = processes
        self.replica = (processes.rank, processes.count)

    def write(self, folder: Path, more: Mapping[str, Array]) -> None:
        first = self.processes.rank == 0
        put = functools.partial(super().write, folder, more)
        together(self.processes, "could not write", lambda: put() if first else None)

    def read(self, folder: Path, forms: Mapping[str, Form]) -> dict[str, Array]:
        found: list[dict[str, Array]] = []
        get = functools.partial(super().read, folder, forms)
        together(self.processes, "could not read", lambda: found.append(get()))
        return found[0]


def read_file(file: Path, forms: Mapping[str, Form]) -> dict[str, Array]:
    """The arrays of one safetensors file.

    Raises:
        CheckpointError: it holds something else than `forms` says.
    """
    from safetensors import SafetensorError, deserialize

    from polyamp.train.tensors import MALFORMED, array

    try:
        arrays = {name: array(info) for name, info in deserialize(file.read_bytes())}  # type: ignore[no-untyped-call]
    except (*MALFORMED, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({type(error).__name__}: {error}).") from error
    check_forms(file, {name: form_of(each) for name, each in arrays.items()}, forms)
    return arrays


def form_of(array: Array | Form) -> Form:
    """The form of an array."""
    return array if isinstance(array, Form) else Form(str(array.dtype), tuple(array.shape))


def check_forms(where: Path, found: Mapping[str, Form], said: Mapping[str, Form]) -> None:
    """Refuse files that hold something else than their manifest says.

    Raises:
        CheckpointError: names the first array.
    """
    for name in sorted({*found, *said}):
        if found.get(name) != said.get(name):
            raise CheckpointError(
                f"{where} does not hold what its manifest says: {name} is {_shown(found.get(name))} in the data and "
                f"{_shown(said.get(name))} in the manifest."
            )


def _shown(form: Form | None) -> str:
    return "missing" if form is None else f"{form.dtype}{list(form.shape)}"


def together(processes: Processes, what: str, action: Callable[[], _Value]) -> list[_Value]:
    """What `action` gave on each process; an error on one is an error on all.

    Args:
        processes: who calls this, each of them.
        what: what the action does, for the others' error: "could not write its part".
        action: of this process alone, no collective; what it returns can be written as JSON.

    Raises:
        CheckpointError: another process's action raised; names it. A process's own error is raised as it is.
    """
    if processes.count == 1:
        return [action()]
    own: Exception | None = None
    said: dict[str, Any] = {}
    try:
        said["value"] = action()
    except Exception as error:  # noqa: BLE001  # whatever it is, the others have to hear of it
        own = error
        said["error"] = f"{type(error).__name__}: {error}"
    heard = processes.gather(json.dumps(said).encode())
    if own is not None:
        raise own
    try:
        every = [dict(json.loads(each)) for each in heard]
    except (ValueError, TypeError) as error:  # a file here and a folder there: other things are said of each
        raise CheckpointError("the ranks name different checkpoints. All of them must give the same path.") from error
    failed = [(rank, each["error"]) for rank, each in enumerate(every) if "error" in each]
    if failed:
        rank, error_text = failed[0]
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise CheckpointError(f"rank {rank}{others} {what}: {error_text}")
    return [each["value"] for each in every]


def alike(processes: Processes, what: str, said: str) -> None:
    """Refuse to go on where processes say different things of what must be the same.

    Raises:
        CheckpointError: on every process; shows the first two that differ.
    """
    if processes.count == 1:
        return
    every = [each.decode() for each in processes.gather(said.encode())]
    for rank, each in enumerate(every):
        if each != every[0]:
            raise CheckpointError(f"all ranks must have the same {what}. Rank 0 has {every[0]}, rank {rank} {each}.")
