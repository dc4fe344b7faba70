"""Folder form of a checkpoint (S33): data written by several processes, and a manifest that makes it valid.

    path/polyamp.json             the manifest: metadata, and the size and SHA-256 of every data file
    path/data-0123456789abcdef/   data that the processes wrote through their framework's engine

The manifest is the commit: rank 0 replaces it atomically, after every rank reported that its part is on disk. A process
killed before the commit leaves the previous manifest with its data. One killed after it leaves the new ones and older
data, which the next save removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from polyamp.contract.sharded_state import ArrayForm, ShardedState
from polyamp.errors import ArgumentError, CheckpointError
from polyamp.files import exclusive_writer, sync_to_disk, unwritable_file_error, write_atomically
from polyamp.rules import resume_rng_seeds
from polyamp.train.checkpoint_extra import KEY as EXTRA
from polyamp.train.checkpoint_processes import (
    array_form,
    check_equal_on_ranks,
    run_on_all_ranks,
    run_on_each_rank,
    run_on_rank_0,
)
from polyamp.train.checkpoint_tensors import BLANK_DIGEST, PARSE_ERRORS, content_digest, seal_content

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

FORMAT: Final = "polyamp-checkpoint-folder-1"
MANIFEST: Final = "polyamp.json"
_DATA_NAME: Final = re.compile(r"data-[0-9a-f]{16}")
_TEXT_FIELDS: Final = ("format", "backend", "polyamp", "recipe", "settings", "data")


class Manifest(NamedTuple):
    """Content of `polyamp.json`.

    Attributes:
        meta: backend, version, recipe, settings and a user's own values, as in the single-file form.
        processes: number of processes that wrote it.
        data: name of the folder with the data.
        own: names of the arrays with a value per process; their first axis is the process.
        arrays: form of every array in the data.
        files: path in `data` -> size in bytes and SHA-256.
        digest: digest of the manifest itself.
    """

    meta: dict[str, str]
    processes: int
    data: str
    own: tuple[str, ...]
    arrays: dict[str, ArrayForm]
    files: dict[str, tuple[int, str]]
    digest: str


def write_folder(parts: ShardedState, path: Path, meta: Mapping[str, str], *, replace: bool) -> None:
    """Write a state's parts and then the manifest, on every process; with `replace=False` all but the manifest.

    Raises:
        OSError, CheckpointError: on every process; the previous checkpoint is intact.
    """
    processes = parts.processes
    check_equal_on_ranks(processes, "path", os.fspath(path))
    more = _gather_own_arrays(parts)
    with contextlib.ExitStack() as stack:
        name = run_on_rank_0(
            processes, f"could not begin to save {path}", lambda: stack.enter_context(_new_data_folder(path))
        )
        folder = path / name
        run_on_all_ranks(processes, "does not see the folder that rank 0 made", lambda: _check_visible(folder))
        parts.write(folder, more)
        names = run_on_rank_0(processes, "could not list what was written", lambda: _list_files(folder))
        own_names = names[processes.rank :: processes.count]
        digests = run_on_all_ranks(
            processes,
            "could not finish its part",
            lambda: {name: _sync_and_digest(folder / name) for name in own_names},
        )
        files = {name: each[name] for each in digests for name in each}

        def commit() -> None:
            forms = {name: array_form(array) for name, array in {**parts.arrays, **more}.items()}
            _commit(path, folder, _encode_manifest(meta, processes.count, folder.name, tuple(parts.own), forms, files))

        if replace:
            run_on_rank_0(processes, f"could not complete {path}", commit)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        IsADirectoryError: the folder has none.
        CheckpointError: it is damaged, or of another version.
    """
    try:
        content = (path / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        import errno

        said = f"{path.absolute()} is a folder without {MANIFEST}: no save into it came to its end, or it is another's"
        raise IsADirectoryError(
            errno.EISDIR, f"{said}. Name a file or folder that polyamp.save wrote", str(path)
        ) from error
    where = path / MANIFEST
    try:
        found = json.loads(content)
        digest = str(found.pop("digest"))
        intact = digest == content_digest(content, digest)
        known = found.get("format") == FORMAT
        manifest = _parse_manifest(found, digest) if intact and known else None
    except PARSE_ERRORS as error:
        raise CheckpointError(f"{where} is not a manifest of polyamp ({type(error).__name__}: {error}).") from error
    if not known:
        raise CheckpointError(f"{where} has format {found.get('format')!r}; this version of polyamp reads {FORMAT!r}.")
    if manifest is None:
        raise CheckpointError(f"{where} is damaged: its contents do not match its digest. Restore an older one.")
    return manifest


def read_verified_manifest(parts: ShardedState, path: Path) -> Manifest:
    """Read the manifest, the same on every process, after each process has verified its share of the data files.

    Raises:
        CheckpointError, OSError: on every process; names the file.
    """
    manifest = run_on_each_rank(parts.processes, f"could not read {path}", lambda: read_manifest(path))
    check_equal_on_ranks(
        parts.processes, f"checkpoint in {path}; was one saved meanwhile? Its manifest's digest", manifest.digest
    )
    rank, count = parts.processes.rank, parts.processes.count
    run_on_all_ranks(
        parts.processes, "found damage", lambda: _check_files(path / manifest.data, manifest.files, rank, count)
    )
    return manifest


def manifest_forms(manifest: Manifest) -> dict[str, ArrayForm]:
    """Return the forms of the arrays that a state takes from the data; for per-process arrays those of one process."""
    own = manifest.own
    return {name: ArrayForm(f.dtype, f.shape[1:]) if name in own else f for name, f in manifest.arrays.items()}


def read_folder(parts: ShardedState, path: Path, manifest: Manifest) -> dict[str, Any]:
    """Read all arrays, as `import_state` takes them, in new memory; on every process."""
    arrays = parts.read(path / manifest.data, manifest.arrays)
    saved = {name: arrays[name] for name in manifest.own if name in parts.own}
    return {**arrays, **streams_of_this_rank(parts, saved)}


def streams_of_this_rank(parts: ShardedState, saved: Mapping[str, Array]) -> dict[str, Array]:
    """Return the streams of this process: its own, or new ones if another number of processes saved them (S33).

    Args:
        parts: the sharded view of the state.
        saved: streams by name, with a first axis of processes.
    """
    result = {}
    for name, every in saved.items():
        if len(every) == parts.processes.count:
            result[name] = every[parts.processes.rank].copy()
        else:
            result[name] = parts.new_stream(
                name, resume_rng_seeds.stream_seed([each.tobytes() for each in every], *parts.replica)
            )
    return result


def _gather_own_arrays(parts: ShardedState) -> dict[str, Array]:
    """Return the per-process arrays of all processes, with a first axis of processes."""
    import numpy as np

    result = {}
    for name in sorted(parts.own):
        array = np.asarray(parts.own[name], order="C")
        every = parts.processes.gather(array.tobytes())
        result[name] = np.stack([np.frombuffer(each, array.dtype).reshape(array.shape) for each in every])
    return result


@contextlib.contextmanager
def _new_data_folder(path: Path) -> Iterator[str]:
    """Context of a new data folder. If no manifest names it in the end, it is removed."""
    new = _make_folder(path)
    try:
        with exclusive_writer(path) as is_locked:
            if is_locked:
                _remove_old_data(path, keep=_current_data_name(path))
            data = path / f"data-{os.urandom(8).hex()}"
            try:
                data.mkdir()
                if (old := _current_data_name(path)) is not None and (path / old).is_dir():
                    data.chmod((path / old).stat().st_mode & 0o7777)  # keep the folder's permissions private
                yield data.name
            finally:
                if _current_data_name(path) != data.name:
                    shutil.rmtree(data, ignore_errors=True)
    finally:
        if new:
            with contextlib.suppress(OSError):  # not empty: the checkpoint is in it
                path.rmdir()


def _make_folder(path: Path) -> bool:
    """Create the folder if necessary, and return whether it was; raise if the path has other content."""
    if path.is_dir():
        others = sorted(each.name for each in path.iterdir() if not _is_own_file(each.name))
        if others and not (path / MANIFEST).is_file():
            raise ArgumentError(
                f"path {path} is a folder with other things in it ({', '.join(others[:3])}). A checkpoint of several "
                "processes is a folder of its own: name one that does not exist yet."
            )
        return False
    if path.exists():
        raise ArgumentError(
            f"path {path} is a file, and this checkpoint is a folder. Name another, or save one file with "
            "sharded=False, which rank 0 writes."
        )
    try:
        path.mkdir()
    except OSError as error:
        clearer = unwritable_file_error(path, error)
        if clearer is error:
            raise
        raise clearer from error
    sync_to_disk(path.absolute().parent)
    return True


def _is_own_file(name: str) -> bool:
    return name == MANIFEST or _DATA_NAME.fullmatch(name) is not None or name.startswith(f".{MANIFEST}.")


def _current_data_name(path: Path) -> str | None:
    """Return the folder that the manifest names, also for a damaged but readable manifest."""
    try:
        name = json.loads((path / MANIFEST).read_bytes())["data"]
    except (OSError, *PARSE_ERRORS):
        return None
    return name if isinstance(name, str) and _DATA_NAME.fullmatch(name) else None


def _remove_old_data(path: Path, keep: str | None) -> None:
    """Remove data that the manifest does not name: that of killed saves, and of the previous checkpoint."""
    if keep is None and (path / MANIFEST).exists():
        return  # damaged: keep the data for inspection
    for each in path.iterdir():
        if _DATA_NAME.fullmatch(each.name) and each.name != keep:
            shutil.rmtree(each, ignore_errors=True)


def _check_visible(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder.absolute()} is not there. All ranks must see one path: on storage that they share."
        )


def _list_files(folder: Path) -> list[str]:
    """Return every file below, by its relative path."""
    return sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*") if not each.is_dir())


def _sync_and_digest(file: Path) -> tuple[int, str]:
    """Return size and SHA-256 of a file, after it and its folder are synced to disk."""
    sync_to_disk(file)
    sync_to_disk(file.parent)
    return _size_and_digest(file)


def _size_and_digest(file: Path) -> tuple[int, str]:
    with file.open("rb", buffering=0) as opened_file:
        found = hashlib.file_digest(opened_file, "sha256")
        return opened_file.tell(), found.hexdigest()


def _check_files(data: Path, files: Mapping[str, tuple[int, str]], rank: int, count: int) -> None:
    """Verify this process's share of the files. The first process also checks that none is missing."""
    if rank == 0:
        there = _list_files(data) if data.is_dir() else []
        if sorted(files) != there:
            lost = sorted({*files} - {*there})
            said = f"{lost[0]} is missing" if lost else f"{min({*there} - {*files})} is none of its files"
            raise CheckpointError(f"{data} is not whole: {said}. Restore an older one.")
    for name in sorted(files)[rank::count]:
        try:
            size, found = _size_and_digest(data / name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{data} is not whole: {name} is missing. Restore an older one.") from error
        if (size, found) != files[name]:
            why = f"it has {size} bytes of {files[name][0]}" if size != files[name][0] else "its digest is another"
            raise CheckpointError(f"{data / name} is damaged: {why}. Restore an older one.")


def _commit(path: Path, data: Path, text: bytes) -> None:
    sync_to_disk(data)
    sync_to_disk(path)
    write_atomically(path / MANIFEST, text)
    _remove_old_data(path, keep=data.name)


def _encode_manifest(
    meta: Mapping[str, str],
    processes: int,
    data: str,
    own: tuple[str, ...],
    arrays: Mapping[str, ArrayForm],
    files: Mapping[str, tuple[int, str]],
) -> bytes:
    manifest = {
        **meta,
        "format": FORMAT,
        "processes": processes,
        "data": data,
        "own": sorted(own),
        "arrays": {name: [arrays[name].dtype, list(arrays[name].shape)] for name in sorted(arrays)},
        "files": {name: list(files[name]) for name in sorted(files)},
        "digest": BLANK_DIGEST,
    }
    return seal_content(json.dumps(manifest, indent=1).encode())


def _parse_manifest(found: Mapping[str, Any], digest: str) -> Manifest:
    texts = {name: found[name] for name in (*_TEXT_FIELDS, *({EXTRA} & {*found}))}
    if not all(isinstance(text, str) for text in texts.values()) or not _DATA_NAME.fullmatch(texts["data"]):
        raise ValueError("a field is no text, or names no folder of data")
    arrays = {
        str(name): ArrayForm(str(dtype), tuple(map(int, shape))) for name, (dtype, shape) in found["arrays"].items()
    }
    files = {str(name): (int(size), str(sha)) for name, (size, sha) in found["files"].items()}
    own = tuple(map(str, found["own"]))
    inside = (PurePosixPath(name) for name in files)
    if any(name.is_absolute() or ".." in name.parts for name in inside):
        raise ValueError("a file lies outside of the data")
    processes = int(found["processes"])
    if processes < 1 or any(name not in arrays or arrays[name].shape[:1] != (processes,) for name in own):
        raise ValueError("not every process has its own arrays")
    return Manifest(texts, processes, texts["data"], own, arrays, files, digest)
