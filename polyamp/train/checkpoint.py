"""`save` and `restore`: one safetensors file holding every array of a state and a JSON header (S22).

The file is written by `polyamp.files`, so a save that dies half-way leaves the previous checkpoint as it was. A SHA-256
digest over every byte of the file, its own field blanked, lies in the header.
Loading parses JSON and copies bytes; it runs no code.

A backend whose native optimizer makes its arrays at the first step exports `optimizer/state/*`, an empty array: it says
that whatever lies under `optimizer/state/` on the other side is accepted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from polyamp._version import __version__
from polyamp.contract.backend import Backend, ChecksArrays, DescribesStates, ResumesOptimizers
from polyamp.errors import CheckpointError, RecipeError
from polyamp.files import as_path, missing, write_atomically
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.train import changes, contents
from polyamp.train.arguments import is_state, no_state

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Arrays = Mapping[str, Array]

OnChange = Literal["error", "warn", "accept"]
FORMAT: Final = "polyamp-checkpoint-1"
_BLANK: Final = "polyamp-digest".ljust(64, "-")
"""Stands in the header for the digest while the digest is computed; as long as one."""
_MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, RecursionError)
"""What parsing damaged bytes can raise, beside safetensors' own error."""
_OTHERS: Final = {
    b"PK\x03\x04": "it is a zip archive, as torch.save, .keras and .npz files are",
    b"\x89HDF": "it is an HDF5 file, as older Keras weights are",
    b"\x80": "it is a pickle, which polyamp does not load",
    b"\x93NUMPY": "it is a NumPy array",
}
"""First bytes of a file -> what it is."""
_State = TypeVar("_State")


def save(state: Any, path: str | os.PathLike[str], *, dry_run: bool = False) -> None:
    """Write a state to one file, atomically, with the recipe it is trained with.

    A run of hours should not find out at its end that it cannot be saved: call it once with `dry_run=True` before.

    Args:
        state: a training state.
        path: the file; its folder must exist. An older checkpoint there is replaced only once the new one is whole. Its
            permissions stay, and so does a symbolic link; partial files that killed saves of it left are removed.
        dry_run: do all but put the file in its place: the state is read, and a file of that size is written to the
            folder and removed. An older checkpoint stays.

    Raises:
        ArgumentError: no state, or no path.
        OSError: the folder is missing, full or read-only; the older checkpoint is intact.
    """
    file = _checked(state, path, "polyamp.save(state, path)")
    from safetensors.numpy import save as to_bytes

    backend: Backend = state.backend
    arrays = _contiguous(backend.export_state(state))
    meta = {
        "format": FORMAT,
        "backend": backend.name,
        "polyamp": __version__,
        "recipe": _recipe_text(state),
        "settings": json.dumps(changes.settings(state)),
    }
    if isinstance(backend, DescribesStates):
        meta["porting"] = backend.described(state, arrays)  # with which polyamp.port reads it in another framework
    content = to_bytes(arrays, metadata={**meta, "digest": _BLANK})
    whole = content.replace(_BLANK.encode(), _digest(content, _BLANK).encode(), 1)
    write_atomically(file, whole, replace=not dry_run)


def restore(state: _State, path: str | os.PathLike[str], *, on_change: OnChange = "error") -> _State:
    """The state with everything replaced by what a checkpoint holds; training continues bit-identically (S22).

    The recipe that the code gives trains: it is compared with the file's, and each difference is said. What did change
    is taken from the code, a changed learning rate too; hyperparameters that did not, but were moved since (by a
    scheduler of torch, or by hand), are taken from the file.

    Args:
        state: a state made by `init` from the same model and recipe. It says which arrays are expected.
        path: a file written by `save`.
        on_change: what to do if the recipes differ: "error", "warn", or "accept" without a word. A scale outside of the
            new scaler's bounds is brought inside; if its `kind` is another one, it starts anew.

    Returns:
        The restored state. In torch and Keras the model and optimizer inside are updated in place.

    Raises:
        CheckpointError: the file is damaged, of another model or backend, of another recipe, or holds what no state of
            this kind can hold. The given state is then unchanged.
        ArgumentError: no state, or no path.
        FileNotFoundError: there is no such file; names files beside it with nearly that name.
        IsADirectoryError: it is a folder.

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
    _checked(state, path, "polyamp.restore(state, path)")
    backend: Backend = state.backend  # type: ignore[attr-defined]  # a State; the type variable keeps the caller's type
    name = os.fspath(path)
    meta, arrays = read(path)
    if meta.get("backend") != backend.name:
        raise CheckpointError(
            f"{name} was saved by the {meta.get('backend')} backend and cannot be restored into a "
            f"{backend.name} state: layouts of parameters differ between frameworks. To go on with it here:\n"
            "    state = polyamp.init(model, recipe)\n"
            f"    state, report = polyamp.port({name!r}, state)"
        )
    saved = saved_settings(meta)
    changed = [] if saved is None else changes.between(saved, changes.settings(state))
    expected = backend.export_state(state)
    _keep_given(state, changed, expected, arrays)
    problems = contents.misfits(expected, arrays)
    if problems:
        raise CheckpointError(
            f"{name} belongs to another model, optimizer or scaler. {contents.listed(problems)}. Build the state from "
            f"the model and recipe that were saved.{_said(changed)}"
        )
    scaler: LossScaler = state.recipe.loss_scaler  # type: ignore[attr-defined]  # a State, as above
    problems = contents.impossible(arrays, contents.scaler_of(saved, scaler))
    if isinstance(backend, ChecksArrays):
        problems += backend.check_arrays(state, arrays)
    if problems:
        raise CheckpointError(f"{name} holds what no such state can hold. {contents.listed(problems)}.{_said(changed)}")
    _report(name, saved is None, changed, on_change)
    if changes.touches(changed, "scaler"):
        contents.rescale(arrays, scaler, anew=changes.touches(changed, "scaler.kind"))
    result: _State = backend.import_state(state, arrays)  # type: ignore[assignment]  # the same State type comes back
    return result


def read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, np.ndarray[Any, Any]]]:
    """A checkpoint's metadata and arrays, after checking its digest. For inspection; `restore` uses it.

    Raises:
        CheckpointError: the file is truncated, damaged, or not a polyamp checkpoint.
    """
    from safetensors import SafetensorError, deserialize

    content = _content(as_path(path))
    try:
        length = int.from_bytes(content[:8], "little")
        meta: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
        arrays = {name: _array(info) for name, info in deserialize(content)}  # type: ignore[no-untyped-call]  # untyped
        stored = meta.pop("digest")
        intact = stored == _digest(content, stored)
    except (*_MALFORMED, SafetensorError) as error:
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
    return meta, arrays


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
        raise IsADirectoryError(
            error.errno, f"{path.absolute()} is a folder; polyamp.save wrote a file. Name the file", str(path)
        ) from error


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


def _keep_given(state: Any, changed: list[changes.Change], expected: Arrays, arrays: dict[str, Array]) -> None:
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


def _report(name: str, unknown: bool, changed: list[changes.Change], on_change: OnChange) -> None:
    """Say what differs, as `on_change` asks for."""
    if on_change == "accept":
        return
    if unknown:
        warnings.warn(
            f"{name} says nothing of its recipe (an older polyamp saved it, with a native optimizer), so that nothing "
            "could be compared with the recipe in the code.",
            stacklevel=3,
        )
    if not changed:
        return
    message = (
        f"{name} was saved with another recipe; the code's is the one that trains.{_said(changed)}\n"
        "restore(..., on_change='accept') goes on with it, 'warn' says so; or give the recipe that was saved."
    )
    if on_change == "error":
        raise CheckpointError(message)
    warnings.warn(message, stacklevel=3)


def _said(changed: list[changes.Change]) -> str:
    if not changed:
        return ""
    return "\nThe file's value -> the code's:\n" + "\n".join(f"  {change}" for change in changed)


def _contiguous(arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    import numpy as np

    return {name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}


def _digest(content: bytes, held: str) -> str:
    """SHA-256 over a file's bytes with the digest field, which now holds `held`, blanked."""
    start = content.find(held.encode())
    view = memoryview(content)
    digest = hashlib.sha256(view[:start])
    digest.update(_BLANK.encode())
    digest.update(view[start + len(held) :])
    return digest.hexdigest()


def _array(info: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    import ml_dtypes
    import numpy as np

    names = {"BF16": ml_dtypes.bfloat16, "BOOL": np.bool_, "F16": np.float16, "F32": np.float32, "F64": np.float64}
    letter = info["dtype"]
    dtype = np.dtype(names[letter] if letter in names else f"{letter[0].lower()}{int(letter[1:]) // 8}")
    if letter == "BOOL" and max(info["data"], default=0) > 1:
        raise ValueError("a boolean that is neither 0 nor 1")
    return np.frombuffer(info["data"], dtype).reshape(info["shape"]).copy()


def _recipe_text(state: Any) -> str:
    try:
        return str(state.recipe.to_json())
    except RecipeError:
        return ""  # a native optimizer has no file form; the arrays still describe it wholly
