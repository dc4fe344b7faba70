"""`save` and `restore`: a checkpoint as one safetensors file with every array of a state and a JSON header (S22).

`polyamp.train.sharded_checkpoint` has the folder form, for states in several processes (S33). `polyamp.files` writes
the file, so a save that dies half-way leaves the previous checkpoint intact. The header stores a SHA-256 digest over
every byte of the file, its own field blanked. Loading parses JSON and copies bytes; it runs no code.

A backend whose native optimizer creates its arrays at the first step exports `optimizer/state/*`, an empty array. Any
arrays under `optimizer/state/` on the other side are then accepted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from polyamp._version import __version__
from polyamp.contract.backend import ChecksArrays, DescribesStates, ResumesOptimizers
from polyamp.contract.sharded_state import HasReplicas, ShardedState, StateProcesses
from polyamp.errors import ArgumentError, CheckpointError, RecipeError, describe_value
from polyamp.files import as_path, missing_file_error, write_atomically
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.train import checkpoint_checks, recipe_changes
from polyamp.train import sharded_checkpoint as folder
from polyamp.train.argument_checks import is_state, not_a_state_error
from polyamp.train.checkpoint_extra import decode_extra, encode_extra
from polyamp.train.checkpoint_file import COMPLEX128, FORMAT, read_with_digest
from polyamp.train.checkpoint_processes import (
    UnshardedState,
    check_equal_on_ranks,
    collective_call,
    run_on_all_ranks,
    run_on_each_rank,
    run_on_rank_0,
    sharded_state,
)
from polyamp.train.checkpoint_tensors import BLANK_DIGEST, encode_complex128, seal_content

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Arrays = Mapping[str, Array]

OnChange = Literal["error", "warn", "accept"]
_State = TypeVar("_State")


def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    sharded: bool | None = None,
    dry_run: bool = False,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write a state and its recipe atomically, to one file or to a folder.

    - Whole state on every rank (`DistributedDataParallel`): one rank may save alone and waits for no other. If all
      ranks save, rank 0 writes, and the file is complete on each when `save` returns.
    - State in several processes: every rank calls it with one path on shared storage, and writes its part through the
      framework's own engine. The folder `path` becomes valid at one moment, once every rank is done (S33).

    Args:
        state: a training state.
        path: the file or folder; its parent must exist. An older checkpoint is replaced only once the new one is
            complete. Permissions and symbolic links stay. Leftovers of killed saves are removed.
        sharded: True writes a folder with the random streams of each rank; every rank calls it. False writes one file,
            also from several processes (if each has a part, every rank gathers the whole state in memory, and rank 0
            writes). None, the default, writes a folder if the state is divided over several processes.
        dry_run: check before a long run that it can be saved: read the state, write files of that size there, and
            remove them. An older checkpoint stays.
        extra: your own values, which `load_extra` returns: None, bool, int, float, str, and lists and dicts of these.
            Scalars of NumPy or a framework become Python numbers. The values of the rank that writes are stored; in a
            folder those of rank 0.

    Raises:
        ArgumentError: no state, no path, a file in place of a folder, a folder with other content, or a value in
            `extra` of another kind, which it names.
        OSError: the folder is missing, full or read-only; the older checkpoint is intact.
        CheckpointError: another rank failed, which it names; the older checkpoint is intact.
        ReplicaError: names a rank that ended or took another path; the older checkpoint is intact.

    Example:
        >>> import polyamp, tempfile
        >>> from polyamp.reference import MLP
        >>> state = polyamp.init(MLP.random([4, 1], seed=0), polyamp.Recipe(optimizer=polyamp.sgd(0.1)))
        >>> folder = tempfile.mkdtemp()
        >>> polyamp.save(state, f"{folder}/one_file", extra={"best_val_loss": 1.5})
        >>> polyamp.save(state, f"{folder}/a_folder", sharded=True)
        >>> polyamp.restore(state, f"{folder}/a_folder").step.item(), polyamp.load_extra(f"{folder}/one_file")
        (0, {'best_val_loss': 1.5})
    """
    if sharded not in (None, True, False):
        raise ArgumentError(f"sharded must be True, False or None. Received: sharded={describe_value(sharded)}.")
    file = _checkpoint_path(state, path, "polyamp.save(state, path)")
    own = encode_extra(extra)
    with sharded_state(state) as parts:
        processes = parts.processes
        if processes.count > 1 and not sharded and isinstance(processes, HasReplicas):
            _write_single_file(state, parts, processes, file, own, replace=not dry_run)
            return
        if sharded or processes.count > 1:
            with collective_call(processes, "polyamp.save"):
                if sharded is not False:
                    folder.write_folder(parts, file, _metadata(state) | own, replace=not dry_run)
                    return
                content = _encode_file(state, parts.whole(), own)
                write = functools.partial(write_atomically, file, content, replace=not dry_run)
                run_on_rank_0(processes, f"could not write {file}", write)
            return
    content = _encode_file(state, state.backend.export_state(state), own)
    write_atomically(file, content, replace=not dry_run)  # while another thread may step on


def _write_single_file(
    state: Any, parts: ShardedState, processes: HasReplicas, file: Path, own: Mapping[str, str], *, replace: bool
) -> None:
    """Write a state that every process holds whole, from the processes that call `save`."""

    def write_file() -> None:
        write_atomically(file, _encode_file(state, parts.whole(), own), replace=replace)

    def file_version() -> Any:
        try:
            status = file.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    processes.write_by_one(os.fspath(file), write_file, file_version if replace else str)


def _encode_file(state: Any, exported: Arrays, own: Mapping[str, str]) -> bytes:
    """Return the bytes of the one file; `own` is the metadata of `extra`."""
    from safetensors.numpy import save as to_bytes

    arrays = _contiguous_arrays(exported)
    meta = {"format": FORMAT, **_metadata(state), **own}
    if isinstance(state.backend, DescribesStates):
        meta["porting"] = state.backend.describe_state(state, arrays)  # for polyamp.port into another framework
    arrays, complex128 = encode_complex128(arrays)
    if complex128:
        meta[COMPLEX128] = json.dumps(complex128)
    return seal_content(to_bytes(arrays, metadata={**meta, "digest": BLANK_DIGEST}))


def _metadata(state: Any) -> dict[str, str]:
    """Return the metadata of a state that both forms store."""
    return {
        "backend": state.backend.name,
        "polyamp": __version__,
        "recipe": _recipe_text(state),
        "settings": json.dumps(recipe_changes.state_settings(state)),
    }


def restore(state: _State, path: str | os.PathLike[str], *, on_change: OnChange = "error") -> _State:
    """Return the state with everything replaced from a checkpoint; training continues bit-identically (S22).

    The code's recipe is used, and each difference from the saved one is reported. Changed settings, learning rates too,
    come from the code. Unchanged hyperparameters that were modified (by torch schedulers, by hand) come from the file.
    Either form loads into any number of processes; each calls this and takes its part (S33). If as many ranks saved
    random streams, each rank gets its own back; otherwise they are derived anew from the saved ones.

    Args:
        state: a state made by `init` from the same model and recipe. It defines the expected arrays.
        path: a file or folder written by `save`.
        on_change: what to do if the recipes differ: "error", "warn", or "accept" silently. A scale outside of the new
            scaler's bounds is clamped; if the scaler's `kind` differs, the scale starts anew.

    Returns:
        The restored state. In torch and Keras its model and optimizer are updated in place.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete, of another model, backend or recipe, has impossible
            values, or only some ranks find it. The given state is then unchanged on every rank.
        ArgumentError: no state, or no path.
        FileNotFoundError: there is no such file, on any rank; lists similar names in the folder.
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
    file = _checkpoint_path(state, path, "polyamp.restore(state, path)")
    with sharded_state(state) as parts, collective_call(parts.processes, "polyamp.restore"):
        if _is_folder(parts.processes, file):
            manifest = folder.read_verified_manifest(parts, file)
            pending = _PendingRestore(state, os.fspath(path), manifest.meta, folder.manifest_forms(manifest), parts)
            return pending.finish(on_change, lambda: folder.read_folder(parts, file, manifest))
        if parts.processes.count == 1:
            parts = UnshardedState(state)
        meta, arrays = _read_on_all_ranks(parts, file)
        return _PendingRestore(state, os.fspath(path), meta, arrays, parts).finish(on_change, lambda: arrays)


def load_extra(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the values that `save(extra=...)` stored in a checkpoint; an empty dict if it stored none (S22).

    It needs no state, so a program can read there what it builds its model from.

    Args:
        path: a file or folder written by `save`. Each process may call it alone.

    Raises:
        CheckpointError: the file, or the manifest of the folder, is damaged or not polyamp's.
        FileNotFoundError: there is no such file; lists similar names in the folder.
        IsADirectoryError: it is a folder that no save completed.

    Example:
        >>> import polyamp, tempfile
        >>> from polyamp.reference import MLP
        >>> state = polyamp.init(MLP.random([4, 1], seed=0), polyamp.Recipe(optimizer=polyamp.sgd(0.1)))
        >>> path = tempfile.mkdtemp() + "/state"
        >>> polyamp.save(state, path, extra={"model": {"width": 4}, "best_val_loss": 1.5})
        >>> polyamp.load_extra(path)["model"]
        {'width': 4}
    """
    file = as_path(path)
    return decode_extra(folder.read_manifest(file).meta if file.is_dir() else read(file)[0])


def _is_folder(processes: StateProcesses, file: Path) -> bool:
    """Whether the checkpoint is a folder. All processes must find the same.

    Raises:
        FileNotFoundError: no process finds anything.
        CheckpointError: on every process, if their findings differ.
    """
    if processes.count == 1:
        return file.is_dir()
    kind = "a folder" if file.is_dir() else "a file" if file.exists() else "nothing"
    every = run_on_all_ranks(processes, "", lambda: [kind, os.fspath(file)])
    for rank, found in enumerate(every):
        if not (isinstance(found, list) and len(found) == 2):
            raise CheckpointError(f"rank {rank} is in another call than polyamp.restore({file}).")
        if found[0] != every[0][0]:
            raise CheckpointError(
                f"rank {rank} finds {found[0]} at {found[1]}, and rank 0 {every[0][0]} at {every[0][1]}. All ranks "
                "must see one checkpoint: give the same path, on storage that they share."
            )
    if kind == "nothing":
        raise missing_file_error(file)
    return kind == "a folder"


def _read_on_all_ranks(parts: ShardedState, file: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Read a file that every process reads whole; with several processes each gets its own random streams."""
    meta, arrays, digest = run_on_each_rank(parts.processes, f"could not read {file}", lambda: read_with_digest(file))
    check_equal_on_ranks(parts.processes, f"file at {file}; is the storage shared? Its digest", digest)
    if parts.processes.count > 1:
        saved = {name: arrays[name][None] for name in parts.own if name in arrays}
        arrays |= folder.streams_of_this_rank(parts, saved)
    return meta, arrays


class _PendingRestore(Generic[_State]):
    """Checkpoint content, checked completely before the first write into `state`. `name` is the user's path, `meta` the
    metadata, `found` the arrays or their forms, `parts` the state's sharded view."""

    def __init__(
        self, state: _State, name: str, meta: dict[str, str], found: dict[str, Any], parts: ShardedState
    ) -> None:
        self.state: Any = state
        self.name, self.meta, self.found, self.parts = name, meta, found, parts

    def finish(self, on_change: OnChange, load: Callable[[], dict[str, Any]]) -> _State:
        """Return the state with the arrays from `load`. All processes decide alike, or none writes."""
        processes, failure = self.parts.processes, f"cannot take {self.name}"
        changed = run_on_each_rank(processes, failure, self._compare_recipes)
        arrays = load()
        warning = run_on_each_rank(processes, failure, lambda: self._check_values(arrays, changed, on_change))
        if warning is not None:
            warnings.warn(warning, stacklevel=3)
        result: _State = self.state.backend.import_state(self.state, arrays)
        return result

    def _compare_recipes(self) -> list[recipe_changes.SettingChange]:
        """Return the differences between the recipes, after names, shapes and dtypes were checked."""
        backend = self.state.backend
        if self.meta.get("backend") != backend.name:
            raise CheckpointError(
                f"{self.name} was saved by the {self.meta.get('backend')} backend and cannot be restored into a "
                f"{backend.name} state: layouts of parameters differ between frameworks. To go on with it here:\n"
                "    state = polyamp.init(model, recipe)\n"
                f"    state, report = polyamp.port({self.name!r}, state)"
            )
        saved = saved_settings(self.meta)
        changed = [] if saved is None else recipe_changes.list_changes(saved, recipe_changes.state_settings(self.state))
        expected = {**self.parts.arrays, **self.parts.own}
        found = dict(self.found)
        _keep_changed_settings(self.state, changed, expected, found)
        checkpoint_checks.keep_device_streams(expected, found)
        problems = checkpoint_checks.list_mismatches(expected, found)
        if problems:
            raise CheckpointError(
                f"{self.name} belongs to another model, optimizer or scaler. "
                f"{checkpoint_checks.join_problems(problems)}. Build the state from the model and recipe that were "
                f"saved.{checkpoint_checks.late_shape_hint(expected, found)}{_format_changes(changed)}"
            )
        return changed

    def _check_values(
        self, arrays: dict[str, Any], changed: list[recipe_changes.SettingChange], on_change: OnChange
    ) -> str | None:
        """Raise for impossible values, and clamp the scale to the new scaler's bounds; return a warning, if any."""
        saved, scaler = saved_settings(self.meta), self.state.recipe.loss_scaler
        expected = {**self.parts.arrays, **self.parts.own}
        _keep_changed_settings(self.state, changed, expected, arrays)
        checkpoint_checks.keep_device_streams(expected, arrays)
        values = {name: array for name, array in arrays.items() if hasattr(array, "tobytes")}  # NumPy arrays
        problems = checkpoint_checks.list_impossible_values(values, checkpoint_checks.saved_scaler(saved, scaler))
        if isinstance(self.state.backend, ChecksArrays):
            problems += self.state.backend.check_arrays(self.state, arrays)
        if problems:
            raise CheckpointError(
                f"{self.name} holds what no such state can hold. {checkpoint_checks.join_problems(problems)}."
                f"{_format_changes(changed)}"
            )
        warning = _changes_warning(self.name, saved is None, changed, on_change)
        if recipe_changes.has_change_in(changed, "scaler"):
            checkpoint_checks.fit_loss_scale(arrays, scaler, reset=recipe_changes.has_change_in(changed, "scaler.kind"))
        return warning


def read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, np.ndarray[Any, Any]]]:
    """Read a checkpoint's metadata and arrays, and check its digest. For inspection.

    Raises:
        CheckpointError: the file is truncated, damaged, or not a polyamp checkpoint.
    """
    meta, arrays, _ = read_with_digest(as_path(path))
    return meta, arrays


def _checkpoint_path(state: Any, path: Any, call: str) -> Path:
    """Check the two arguments of a call and return the path."""
    if not is_state(state):
        raise not_a_state_error(state, path, call)
    return as_path(path)


def saved_settings(meta: Mapping[str, str]) -> recipe_changes.RecipeSettings | None:
    """Return the settings in a file's metadata; None if an older polyamp saved it with a native optimizer."""
    if meta.get("recipe"):
        with contextlib.suppress(RecipeError):  # of a later version: compare its plain settings then
            return recipe_changes.recipe_settings(Recipe.from_json(meta["recipe"]))
    if not meta.get("settings"):
        return None
    found: recipe_changes.RecipeSettings = json.loads(meta["settings"])
    return found


def _keep_changed_settings(
    state: Any, changed: list[recipe_changes.SettingChange], expected: Mapping[str, Any], arrays: dict[str, Any]
) -> None:
    """Replace every array that stores a changed hyperparameter by the code's own value."""
    backend = state.backend
    if not changed or not isinstance(backend, ResumesOptimizers):
        return
    # for polyamp's own optimizers; in torch's settings `groups` are the optimizer's, each with its options
    regrouped = is_spec(state.recipe.optimizer) and recipe_changes.has_change_in(changed, "optimizer.groups")
    for name in {*expected, *arrays}:
        setting = backend.setting_of(state, name)
        if setting is not None and (regrouped or recipe_changes.has_change_in(changed, setting)):
            arrays.pop(name, None)
            if name in expected:
                arrays[name] = expected[name]


def _changes_warning(
    name: str, unknown: bool, changed: list[recipe_changes.SettingChange], on_change: OnChange
) -> str | None:
    """Return the warning that `on_change` requires, or raise for "error"."""
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
        f"{name} was saved with another recipe; the code's is the one that trains.{_format_changes(changed)}\n"
        "restore(..., on_change='accept') goes on with it, 'warn' says so; or give the recipe that was saved."
    )
    if on_change == "error":
        raise CheckpointError(message)
    return message


def _format_changes(changed: list[recipe_changes.SettingChange]) -> str:
    if not changed:
        return ""
    return "\nThe file's value -> the code's:\n" + "\n".join(f"  {change}" for change in changed)


def _contiguous_arrays(arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    import numpy as np

    return {name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}


def _recipe_text(state: Any) -> str:
    try:
        return str(state.recipe.to_json())
    except RecipeError:
        return ""  # a native optimizer has no file format; the arrays still describe it completely
