"""`save` and `restore`: one safetensors file holding every array of a state and a JSON header (S22).

The folder form, for states that lie in several processes (S33), is `sharded`.

The file is written by `polyamp.files`, so a save that dies half-way leaves the previous checkpoint as it was. A SHA-256
digest over every byte of the file, its own field blanked, lies in the header.
Loading parses JSON and copies bytes; it runs no code.

A backend whose native optimizer makes its arrays at the first step exports `optimizer/state/*`, an empty array: it says
that whatever lies under `optimizer/state/` on the other side is accepted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from polyamp._version import __version__
from polyamp.contract.backend import ChecksArrays, DescribesStates, ResumesOptimizers
from polyamp.contract.parts import HasCopies, Parts, Processes
from polyamp.errors import ArgumentError, CheckpointError, RecipeError, described
from polyamp.files import as_path, missing, write_atomically
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.train import changes, contents
from polyamp.train import sharded as folder
from polyamp.train.arguments import is_state, no_state
from polyamp.train.parts import Alone, alike, call_of_all, in_parts, together
from polyamp.train.tensors import BLANK, MALFORMED, array, digest, with_complex128, without_complex128

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Arrays = Mapping[str, Array]

OnChange = Literal["error", "warn", "accept"]
FORMAT: Final = "polyamp-checkpoint-1"
_COMPLEX128: Final = "complex128"
"""In the metadata: the names of arrays that lie in the file as pairs of float64."""
_OTHERS: Final = {
    b"PK\x03\x04": "it is a zip archive, as torch.save, .keras and .npz files are",
    b"\x89HDF": "it is an HDF5 file, as older Keras weights are",
    b"\x80": "it is a pickle, which polyamp does not load",
    b"\x93NUMPY": "it is a NumPy array",
}
"""First bytes of a file -> what it is."""
_State = TypeVar("_State")


def save(state: Any, path: str | os.PathLike[str], *, sharded: bool | None = None, dry_run: bool = False) -> None:
    """Write a state, atomically, with the recipe it is trained with: to one file, or to a folder.

    A run of hours should not find out at its end that it cannot be saved: call it once with `dry_run=True` before.

    A state that every rank holds whole, as under `DistributedDataParallel`, is saved by whoever calls: one rank alone
    may, and waits for nobody; all may, and then rank 0 writes, and the file is whole on each when `save` returns. Where
    a state lies in several processes, every rank calls it with the same path, on storage that all of them see. Each
    writes what it holds through the framework's own engine, and the checkpoint is the folder `path`, which becomes
    valid in one moment, once every rank is through (S33).

    Args:
        state: a training state.
        path: the file, or the folder; what it lies in must exist. An older checkpoint there is replaced only once the
            new one is whole. Permissions stay, and so does a symbolic link; what killed saves of it left is removed.
        sharded: True writes a folder, which every rank calls for, and which holds the random streams of each. False
            writes one file, in several processes as well (where they hold parts, every rank gathers all of the state in
            its memory, and rank 0 writes). None, the default: a folder if the state lies in parts in several processes.
        dry_run: do all but put the checkpoint in its place: the state is read, and files of that size are written
            there and removed. An older checkpoint stays.

    Raises:
        ArgumentError: no state, no path, a file where a folder is to be, or a folder with other things in it.
        OSError: the folder is missing, full or read-only; the older checkpoint is intact.
        CheckpointError: another rank failed, which it names; the older checkpoint is intact.
        ReplicaError: another rank ended, or went another way where every rank is needed, and which; the older
            checkpoint is intact.

    Example:
        >>> import polyamp, tempfile
        >>> from polyamp.reference import MLP
        >>> state = polyamp.init(MLP.random([4, 1], seed=0), polyamp.Recipe(optimizer=polyamp.sgd(0.1)))
        >>> folder = tempfile.mkdtemp()
        >>> polyamp.save(state, f"{folder}/one_file")
        >>> polyamp.save(state, f"{folder}/a_folder", sharded=True)
        >>> polyamp.restore(state, f"{folder}/a_folder").step.item()
        0
    """
    if sharded not in (None, True, False):
        raise ArgumentError(f"sharded must be True, False or None. Received: sharded={described(sharded)}.")
    file = _checked(state, path, "polyamp.save(state, path)")
    with in_parts(state) as parts:
        processes = parts.processes
        if processes.count > 1 and not sharded and isinstance(processes, HasCopies):
            _write_by_one(state, parts, processes, file, replace=not dry_run)
            return
        if sharded or processes.count > 1:
            with call_of_all(processes, "polyamp.save"):
                if sharded is not False:
                    folder.write(parts, file, _meta(state), replace=not dry_run)
                    return
                content = _content_of(state, parts.whole())
                put = functools.partial(write_atomically, file, content, replace=not dry_run)
                together(processes, f"could not write {file}", lambda: put() if processes.rank == 0 else None)
            return
    content = _content_of(state, state.backend.export_state(state))
    write_atomically(file, content, replace=not dry_run)  # while another thread may step on


def _write_by_one(state: Any, parts: Parts, processes: HasCopies, file: Path, *, replace: bool) -> None:
    """Of a state that every process holds whole: by whoever calls `save`."""

    def put() -> None:
        write_atomically(file, _content_of(state, parts.whole()), replace=replace)

    def look() -> Any:
        try:
            found = file.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    processes.write_by_one(os.fspath(file), put, look if replace else str)


def _content_of(state: Any, exported: Arrays) -> bytes:
    """The bytes of the one file."""
    from safetensors.numpy import save as to_bytes

    arrays = _contiguous(exported)
    meta = {"format": FORMAT, **_meta(state)}
    if isinstance(state.backend, DescribesStates):
        meta["porting"] = state.backend.described(state, arrays)  # for polyamp.port into another framework
    arrays, complex128 = without_complex128(arrays)
    if complex128:
        meta[_COMPLEX128] = json.dumps(complex128)
    content = to_bytes(arrays, metadata={**meta, "digest": BLANK})
    return content.replace(BLANK.encode(), digest(content, BLANK).encode(), 1)


def _meta(state: Any) -> dict[str, str]:
    """What both forms say of a state beside its arrays."""
    return {
        "backend": state.backend.name,
        "polyamp": __version__,
        "recipe": _recipe_text(state),
        "settings": json.dumps(changes.settings(state)),
    }


def restore(state: _State, path: str | os.PathLike[str], *, on_change: OnChange = "error") -> _State:
    """The state with everything replaced by what a checkpoint holds; training continues bit-identically (S22).

    The recipe that the code gives trains: it is compared with the file's, and each difference is said. What did change
    is taken from the code, a changed learning rate too; hyperparameters that did not, but were moved since (by a
    scheduler of torch, or by hand), are taken from the file.

    Either form of checkpoint goes into any number of processes, each of which calls this and takes its part (S33).
    Random streams are each rank's own where as many ranks saved them, and otherwise drawn anew from the saved ones.

    Args:
        state: a state made by `init` from the same model and recipe. It says which arrays are expected.
        path: a file or folder written by `save`.
        on_change: what to do if the recipes differ: "error", "warn", or "accept" without a word. A scale outside of the
            new scaler's bounds is brought inside; if its `kind` is another one, it starts anew.

    Returns:
        The restored state. In torch and Keras the model and optimizer inside are updated in place.

    Raises:
        CheckpointError: the checkpoint is damaged, of another model or backend, of another recipe, or holds what no
            state of this kind can hold; or a part of it is missing, or only some ranks find it. The given state is then
            unchanged, on every rank.
        ArgumentError: no state, or no path.
        FileNotFoundError: there is no such file, on any rank; names files beside it with nearly that name.
        IsADirectoryError: it is a folder that no save completed.
        ReplicaError: another rank ended, or does not call this.

    Example:
        >>> import polyamp, tempfile
        >>> from polyamp.reference import MLP
        >>> def fresh(rate):
        ...     return polyamp.init(MLP.random([4, 1], seed=0), polyamp.Recipe(optimizer=polyamp.sgd(rate)))
        >>> path = tempfile.mkdtemp() + "/state"
        >>> polyamp.save(fresh(0.1), path)
        >>> polyamp.restore(fresh(0.2), path, on_change="accept").recipe.optimizer.learning_rate
        0.2
    """
    if on_change not in ("error", "warn", "accept"):
        raise CheckpointError(f"on_change must be 'error', 'warn' or 'accept'. Received: on_change={on_change!r}.")
    file = _checked(state, path, "polyamp.restore(state, path)")
    with in_parts(state) as parts, call_of_all(parts.processes, "polyamp.restore"):
        if _is_folder(parts.processes, file):
            manifest = folder.opened(parts, file)
            said = _Restored(state, os.fspath(path), manifest.meta, folder.forms(manifest), parts)
            return said.put(on_change, lambda: folder.read(parts, file, manifest))
        if parts.processes.count == 1:
            parts = Alone(state)
        meta, arrays = _read_by_all(parts, file)
        return _Restored(state, os.fspath(path), meta, arrays, parts).put(on_change, lambda: arrays)


def _is_folder(processes: Processes, file: Path) -> bool:
    """Whether the checkpoint is a folder; all processes have to find the same.

    Raises:
        FileNotFoundError: no process finds anything.
        CheckpointError: on every process, where one finds something else than another.
    """
    if processes.count == 1:
        return file.is_dir()
    kind = "a folder" if file.is_dir() else "a file" if file.exists() else "nothing"
    every = together(processes, "", lambda: [kind, os.fspath(file)])
    for rank, found in enumerate(every):
        if not (isinstance(found, list) and len(found) == 2):
            raise CheckpointError(f"rank {rank} is in another call than polyamp.restore({file}).")
        if found[0] != every[0][0]:
            raise CheckpointError(
                f"rank {rank} finds {found[0]} at {found[1]}, and rank 0 {every[0][0]} at {every[0][1]}. All ranks "
                "must see one checkpoint: give the same path, on storage that they share."
            )
    if kind == "nothing":
        raise missing(file)
    return kind == "a folder"


def _read_by_all(parts: Parts, file: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """A file, of which every process reads the whole; each with streams of its own, where there are several."""
    found: list[tuple[dict[str, str], dict[str, Any], str]] = []
    together(parts.processes, f"could not read {file}", lambda: found.append(_read(file)))
    meta, arrays, held = found[0]
    alike(parts.processes, f"file at {file}; is the storage shared? Its digest", held)
    if parts.processes.count > 1:
        saved = {name: arrays[name][None] for name in parts.own if name in arrays}
        arrays |= folder.of_this_process(parts, saved)
    return meta, arrays


class _Restored(Generic[_State]):
    """What a checkpoint says, on its way into a state: looked at whole before the first write.

    Attributes:
        state: the one that is to take it.
        name: the path, as the user wrote it.
        meta: what is said of backend and recipe.
        found: the arrays, or their forms.
        parts: the state's.
    """

    def __init__(self, state: _State, name: str, meta: dict[str, str], found: dict[str, Any], parts: Parts) -> None:
        self.state: Any = state
        self.name, self.meta, self.found, self.parts = name, meta, found, parts

    def put(self, on_change: OnChange, load: Callable[[], dict[str, Any]]) -> _State:
        """The state with what `load` gives. Of several processes all decide alike, or none writes."""
        processes = self.parts.processes
        changed: list[changes.Change] = []
        arrays: dict[str, Any] = {}
        together(processes, f"cannot take {self.name}", lambda: changed.extend(self._compared()))
        arrays.update(load())
        said: list[str | None] = []
        look = functools.partial(self._looked_at, arrays, changed, on_change)
        together(processes, f"cannot take {self.name}", lambda: said.append(look()))
        if said[0] is not None:
            warnings.warn(said[0], stacklevel=3)
        result: _State = self.state.backend.import_state(self.state, arrays)
        return result

    def _compared(self) -> list[changes.Change]:
        """What differs between the recipes, once names, shapes and dtypes were seen to fit."""
        backend = self.state.backend
        if self.meta.get("backend") != backend.name:
            raise CheckpointError(
                f"{self.name} was saved by the {self.meta.get('backend')} backend and cannot be restored into a "
                f"{backend.name} state: layouts of parameters differ between frameworks. To go on with it here:\n"
                "    state = polyamp.init(model, recipe)\n"
                f"    state, report = polyamp.port({self.name!r}, state)"
            )
        saved = saved_settings(self.meta)
        changed = [] if saved is None else changes.between(saved, changes.settings(self.state))
        expected = {**self.parts.arrays, **self.parts.own}
        found = dict(self.found)
        _keep_given(self.state, changed, expected, found)
        problems = contents.misfits(expected, found)
        if problems:
            raise CheckpointError(
                f"{self.name} belongs to another model, optimizer or scaler. {contents.listed(problems)}. Build the "
                f"state from the model and recipe that were saved.{contents.late_shapes(expected, found)}"
                f"{_said(changed)}"
            )
        return changed

    def _looked_at(self, arrays: dict[str, Any], changed: list[changes.Change], on_change: OnChange) -> str | None:
        """Refuse values that no state has, and bring the scale into the new scaler's bounds; what to warn of."""
        saved, scaler = saved_settings(self.meta), self.state.recipe.loss_scaler
        _keep_given(self.state, changed, {**self.parts.arrays, **self.parts.own}, arrays)
        values = {name: array for name, array in arrays.items() if hasattr(array, "tobytes")}  # NumPy's own
        problems = contents.impossible(values, contents.scaler_of(saved, scaler))
        if isinstance(self.state.backend, ChecksArrays):
            problems += self.state.backend.check_arrays(self.state, arrays)
        if problems:
            raise CheckpointError(
                f"{self.name} holds what no such state can hold. {contents.listed(problems)}.{_said(changed)}"
            )
        said = _report(self.name, saved is None, changed, on_change)
        if changes.touches(changed, "scaler"):
            contents.rescale(arrays, scaler, anew=changes.touches(changed, "scaler.kind"))
        return said


def read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, np.ndarray[Any, Any]]]:
    """A checkpoint's metadata and arrays, after checking its digest. For inspection; `restore` uses it.

    Raises:
        CheckpointError: the file is truncated, damaged, or not a polyamp checkpoint.
    """
    meta, arrays, _ = _read(as_path(path))
    return meta, arrays


def _read(path: Path) -> tuple[dict[str, str], dict[str, Any], str]:
    """See `read`; and the digest."""
    from safetensors import SafetensorError, deserialize

    content = _content(path)
    try:
        length = int.from_bytes(content[:8], "little")
        meta: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
        arrays = {name: array(info) for name, info in deserialize(content)}  # type: ignore[no-untyped-call]  # untyped
        arrays = with_complex128(arrays, json.loads(meta.pop(_COMPLEX128, "[]")))
        stored = meta.pop("digest")
        intact = stored == digest(content, stored)
    except (*MALFORMED, SafetensorError) as error:
        raise CheckpointError(
            f"{os.fspath(path)} is not a whole polyamp checkpoint ({_what(content, error)}). It is truncated, "
            "damaged or "
            "another program's; restore an older one."
        ) from error
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{os.fspath(path)} has format {meta.get('format')!r}; this version of polyamp reads {FORMAT!r}."
        )
    if not intact:
        raise CheckpointError(
            f"{os.fspath(path)} is damaged: its contents do not match its digest. Restore an older one."
        )
    return meta, arrays, stored


def _checked(state: Any, path: Any, call: str) -> Path:
    """The path, of a call with a state and a path."""
    if not is_state(state):
        raise no_state(state, path, call)
    return as_path(path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise missing(path) from error
    except IsADirectoryError as error:
        said = "polyamp.save wrote a file. Name the file"
        if (path / folder.MANIFEST).exists():
            said = "its own framework reads it: restore it in one process, and save one file (sharded=False)"
        raise IsADirectoryError(error.errno, f"{path.absolute()} is a folder; {said}", str(path)) from error


def _what(content: bytes, error: Exception) -> str:
    """What a file is that is no checkpoint, if its first bytes tell; otherwise where reading it failed."""
    if not content:
        return "it is empty"
    for start, kind in _OTHERS.items():
        if content.startswith(start):
            return kind
    return f"{type(error).__name__}: {error}"


def saved_settings(meta: Mapping[str, str]) -> changes.Settings | None:
    """The settings in a file's metadata; None in one of an older polyamp that was saved with a native optimizer."""
    if meta.get("recipe"):
        with contextlib.suppress(RecipeError):  # of a later version: then its plain settings are compared
            return changes.of_recipe(Recipe.from_json(meta["recipe"]))
    if not meta.get("settings"):
        return None
    found: changes.Settings = json.loads(meta["settings"])
    return found


def _keep_given(state: Any, changed: list[changes.Change], expected: Mapping[str, Any], arrays: dict[str, Any]) -> None:
    """Put the code's own value in the place of every array that holds a hyperparameter that was changed."""
    backend = state.backend
    if not changed or not isinstance(backend, ResumesOptimizers):
        return
    # of polyamp's own optimizers; in torch's own settings `groups` are the optimizer's, each with its options
    regrouped = is_spec(state.recipe.optimizer) and changes.touches(changed, "optimizer.groups")
    for name in {*expected, *arrays}:
        setting = backend.setting_of(state, name)
        if setting is not None and (regrouped or changes.touches(changed, setting)):
            arrays.pop(name, None)
            if name in expected:
                arrays[name] = expected[name]


def _report(name: str, unknown: bool, changed: list[changes.Change], on_change: OnChange) -> str | None:
    """What to warn of, as `on_change` asks for; raises for "error"."""
    if on_change == "accept":
        return None
    if unknown:
        return (
            f"{name} says nothing of its recipe (an older polyamp saved it, with a native optimizer), so that nothing "
            "could be compared with the recipe in the code."
        )
    if not changed:
        return None
    message = (
        f"{name} was saved with another recipe; the code's is the one that trains.{_said(changed)}\n"
        "restore(..., on_change='accept') goes on with it, 'warn' says so; or give the recipe that was saved."
    )
    if on_change == "error":
        raise CheckpointError(message)
    return message


def _said(changed: list[changes.Change]) -> str:
    if not changed:
        return ""
    return "\nThe file's value -> the code's:\n" + "\n".join(f"  {change}" for change in changed)


def _contiguous(arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    import numpy as np

    return {name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}


def _recipe_text(state: Any) -> str:
    try:
        return str(state.recipe.to_json())
    except RecipeError:
        return ""  # a native optimizer has no file form; the arrays still describe it wholly
