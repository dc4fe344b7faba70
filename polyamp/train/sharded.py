"""The folder form of a checkpoint (S33): data that several processes wrote, and a manifest that makes them valid.

    path/polyamp.json             the manifest: what was saved, and the size and SHA-256 of every file of the data
    path/data-0123456789abcdef/   what the processes wrote through their framework's engine

The manifest is the commit: it is replaced in one moment, by rank 0, after every rank said that its part is on the disk.
Whoever is killed before that leaves the previous manifest with its data; whoever is killed after it leaves the new ones
and older data, which the next save removes. Called by `checkpoint`.
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

from polyamp.contract.parts import Form, Parts
from polyamp.errors import ArgumentError, CheckpointError
from polyamp.files import only_writer, sync, unwritable, write_atomically
from polyamp.rules import streams
from polyamp.train.parts import alike, form_of, together
from polyamp.train.tensors import BLANK, MALFORMED, digest

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

FORMAT: Final = "polyamp-checkpoint-folder-1"
MANIFEST: Final = "polyamp.json"
_DATA: Final = re.compile(r"data-[0-9a-f]{16}")
_TEXTS: Final = ("format", "backend", "polyamp", "recipe", "settings", "data")
_CHUNK: Final = 1 << 22


class Manifest(NamedTuple):
    """What `polyamp.json` says.

    Attributes:
        meta: backend, version, recipe and settings, as in the one file.
        processes: how many wrote it.
        data: name of the folder with the data.
        own: names of arrays of which each process has its own; their first axis is the process.
        arrays: form of every array in the data.
        files: path in `data` -> size in bytes and SHA-256.
        digest: of the manifest itself.
    """

    meta: dict[str, str]
    processes: int
    data: str
    own: tuple[str, ...]
    arrays: dict[str, Form]
    files: dict[str, tuple[int, str]]
    digest: str


def write(parts: Parts, path: Path, meta: Mapping[str, str], *, replace: bool) -> None:
    """Write a state's parts and then the manifest, on every process; with `replace=False` all but the manifest.

    Raises:
        OSError, CheckpointError: on every process; the previous checkpoint is intact.
    """
    processes = parts.processes
    first = processes.rank == 0
    alike(processes, "path", os.fspath(path))
    more = _stacked(parts)
    with contextlib.ExitStack() as stack:
        begun = together(processes, f"could not begin to save {path}", lambda: stack.enter_context(_begun(path, first)))
        folder = path / begun[0]
        together(processes, "does not see the folder that rank 0 made", lambda: _seen(folder))
        parts.write(folder, more)
        names = together(processes, "could not list what was written", lambda: _files(folder) if first else None)[0]
        mine = (names or [])[processes.rank :: processes.count]
        found = together(
            processes, "could not finish its part", lambda: {name: _settled(folder / name) for name in mine}
        )
        files = {name: each[name] for each in found for name in each}

        def commit() -> None:
            if first and replace:
                forms = {name: form_of(array) for name, array in {**parts.arrays, **more}.items()}
                _commit(path, folder, _text(meta, processes.count, folder.name, tuple(parts.own), forms, files))

        together(processes, f"could not complete {path}", commit)


def look(path: Path) -> Manifest:
    """The manifest of a folder.

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
        held = str(found.pop("digest"))
        intact = held == digest(content, held)
        known = found.get("format") == FORMAT
        manifest = _parsed(found, held) if intact and known else None
    except MALFORMED as error:
        raise CheckpointError(f"{where} is not a manifest of polyamp ({type(error).__name__}: {error}).") from error
    if not known:
        raise CheckpointError(f"{where} has format {found.get('format')!r}; this version of polyamp reads {FORMAT!r}.")
    if manifest is None:
        raise CheckpointError(f"{where} is damaged: its contents do not match its digest. Restore an older one.")
    return manifest


def opened(parts: Parts, path: Path) -> Manifest:
    """The manifest, the same on every process, once all the data were looked at: each process looks at some files.

    Raises:
        CheckpointError, OSError: on every process; names the file.
    """
    found: list[Manifest] = []
    together(parts.processes, f"could not read {path}", lambda: found.append(look(path)))
    manifest = found[0]
    alike(parts.processes, f"checkpoint in {path}; was one saved meanwhile? Its manifest's digest", manifest.digest)
    rank, count = parts.processes.rank, parts.processes.count
    together(parts.processes, "found damage", lambda: _check(path / manifest.data, manifest.files, rank, count))
    return manifest


def forms(manifest: Manifest) -> dict[str, Form]:
    """The forms of the arrays that a state takes from the data: of what each process has its own, one process's."""
    own = manifest.own
    return {name: Form(f.dtype, f.shape[1:]) if name in own else f for name, f in manifest.arrays.items()}


def read(parts: Parts, path: Path, manifest: Manifest) -> dict[str, Any]:
    """All arrays, as `import_state` takes them, in new memory; on every process."""
    arrays = parts.read(path / manifest.data, manifest.arrays)
    saved = {name: arrays[name] for name in manifest.own}
    return {**arrays, **of_this_process(parts, saved)}


def of_this_process(parts: Parts, saved: Mapping[str, Array]) -> dict[str, Array]:
    """The streams of this process: its own, or new ones where another number of processes saved them (S33).

    Args:
        parts: the state's.
        saved: streams by name, with a first axis of processes.
    """
    result = {}
    for name, every in saved.items():
        if len(every) == parts.processes.count:
            result[name] = every[parts.processes.rank].copy()
        else:
            result[name] = parts.drawn(name, streams.seed([each.tobytes() for each in every], *parts.replica))
    return result


def _stacked(parts: Parts) -> dict[str, Array]:
    """Every process's own arrays, with a first axis of processes."""
    import numpy as np

    result = {}
    for name in sorted(parts.own):
        array = np.asarray(parts.own[name], order="C")
        every = parts.processes.gather(array.tobytes())
        result[name] = np.stack([np.frombuffer(each, array.dtype).reshape(array.shape) for each in every])
    return result


@contextlib.contextmanager
def _begun(path: Path, first: bool) -> Iterator[str]:
    """A fresh folder for the data, which the first process makes and, if no manifest names it, takes away again."""
    if not first:
        yield ""
        return
    new = _made(path)
    try:
        with _alone(path) as locked:
            if locked:
                _clear(path, kept=_current(path))
            data = path / f"data-{os.urandom(8).hex()}"
            try:
                data.mkdir()
                if (old := _current(path)) is not None and (path / old).is_dir():
                    data.chmod((path / old).stat().st_mode & 0o7777)  # what was private stays so
                yield data.name
            finally:
                if _current(path) != data.name:
                    shutil.rmtree(data, ignore_errors=True)
    finally:
        if new:
            with contextlib.suppress(OSError):  # it is not empty: the checkpoint is in it
                path.rmdir()


def _made(path: Path) -> bool:
    """Whether the folder had to be made; refuses one that is somebody else's."""
    if path.is_dir():
        others = sorted(each.name for each in path.iterdir() if not _ours(each.name))
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
        clearer = unwritable(path, error)
        if clearer is error:
            raise
        raise clearer from error
    sync(path.absolute().parent)
    return True


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(only_writer(path))
        except BlockingIOError as error:
            raise CheckpointError(
                f"another save into {path} is under way. Wait for it, or name another folder."
            ) from error
        yield held


def _ours(name: str) -> bool:
    return name == MANIFEST or _DATA.fullmatch(name) is not None or name.startswith(f".{MANIFEST}.")


def _current(path: Path) -> str | None:
    """The folder that the manifest names; also where the manifest is damaged, if it can be read at all."""
    try:
        name = json.loads((path / MANIFEST).read_bytes())["data"]
    except (OSError, *MALFORMED):
        return None
    return name if isinstance(name, str) and _DATA.fullmatch(name) else None


def _clear(path: Path, kept: str | None) -> None:
    """Remove data that the manifest does not name: of killed saves, and of the checkpoint before."""
    if kept is None and (path / MANIFEST).exists():
        return  # damaged: somebody may want to look at the data
    for each in path.iterdir():
        if _DATA.fullmatch(each.name) and each.name != kept:
            shutil.rmtree(each, ignore_errors=True)


def _seen(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder.absolute()} is not there. All ranks must see one path: on storage that they share."
        )


def _files(folder: Path) -> list[str]:
    """Every file below, by its path from there."""
    return sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*") if not each.is_dir())


def _settled(file: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file, once it is on the disk with its folder."""
    sync(file)
    sync(file.parent)
    return _measured(file)


def _measured(file: Path) -> tuple[int, str]:
    found, size = hashlib.sha256(), 0
    with file.open("rb", buffering=0) as opened_file:
        while part := opened_file.read(_CHUNK):
            found.update(part)
            size += len(part)
    return size, found.hexdigest()


def _check(data: Path, files: Mapping[str, tuple[int, str]], rank: int, count: int) -> None:
    """Look at this process's share of the files; the first process looks whether all are there as well."""
    if rank == 0:
        there = _files(data) if data.is_dir() else []
        if sorted(files) != there:
            lost = sorted({*files} - {*there})
            said = f"{lost[0]} is missing" if lost else f"{min({*there} - {*files})} is none of its files"
            raise CheckpointError(f"{data} is not whole: {said}. Restore an older one.")
    for name in sorted(files)[rank::count]:
        try:
            size, found = _measured(data / name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{data} is not whole: {name} is missing. Restore an older one.") from error
        if (size, found) != files[name]:
            why = f"it has {size} bytes of {files[name][0]}" if size != files[name][0] else "its digest is another"
            raise CheckpointError(f"{data / name} is damaged: {why}. Restore an older one.")


def _commit(path: Path, data: Path, text: bytes) -> None:
    sync(data)
    sync(path)
    write_atomically(path / MANIFEST, text)
    _clear(path, kept=data.name)


def _text(
    meta: Mapping[str, str],
    processes: int,
    data: str,
    own: tuple[str, ...],
    arrays: Mapping[str, Form],
    files: Mapping[str, tuple[int, str]],
) -> bytes:
    said = {
        **meta,
        "format": FORMAT,
        "processes": processes,
        "data": data,
        "own": sorted(own),
        "arrays": {name: [arrays[name].dtype, list(arrays[name].shape)] for name in sorted(arrays)},
        "files": {name: list(files[name]) for name in sorted(files)},
        "digest": BLANK,
    }
    content = json.dumps(said, indent=1).encode()
    return content.replace(BLANK.encode(), digest(content, BLANK).encode(), 1)


def _parsed(found: Mapping[str, Any], held: str) -> Manifest:
    texts = {name: found[name] for name in _TEXTS}
    if not all(isinstance(text, str) for text in texts.values()) or not _DATA.fullmatch(texts["data"]):
        raise ValueError("a field is no text, or names no folder of data")
    arrays = {str(name): Form(str(dtype), tuple(map(int, shape))) for name, (dtype, shape) in found["arrays"].items()}
    files = {str(name): (int(size), str(sha)) for name, (size, sha) in found["files"].items()}
    own = tuple(map(str, found["own"]))
    inside = (PurePosixPath(name) for name in files)
    if any(name.is_absolute() or ".." in name.parts for name in inside):
        raise ValueError("a file lies outside of the data")
    processes = int(found["processes"])
    if processes < 1 or any(name not in arrays or arrays[name].shape[:1] != (processes,) for name in own):
        raise ValueError("not every process has its own arrays")
    return Manifest(texts, processes, texts["data"], own, arrays, files, held)
