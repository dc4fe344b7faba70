"""`write_atomically`: atomic replacement of every file that polyamp reads again.

The content goes into a partial file next to the target, is flushed to disk and renamed over it. So a writer that dies
half-way leaves the older file intact. A writer locks its partial file until it ends. Unlocked partial files of the same
target were left by killed writers, and are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final

from polyamp.errors import ArgumentError, CheckpointError, closest_words, describe_value

_OPEN_FLAGS: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags for `open`: a link is an error, and opening a pipe does not wait."""
_CHUNK_BYTES: Final = 1 << 24
"""Bytes that `read_chunks` reads at a time."""


def as_path(path: Any, *, instead: str = "") -> Path:
    """Convert a user's argument to a path.

    Args:
        path: a string or path object.
        instead: a sentence with the fix for other values.

    Raises:
        ArgumentError: the value is neither.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f"path must be a file's path, a string or a pathlib.Path. Received: {describe_value(path)}. "
            f"{instead}".rstrip()
        )
    return Path(path)


def missing_file_error(path: Path) -> FileNotFoundError:
    """Return the error for a missing file; it lists similar names in the folder."""
    import errno

    if not path.parent.is_dir():
        return FileNotFoundError(errno.ENOENT, f"the folder {path.parent.absolute()} does not exist", str(path))
    close = closest_words(path.name, sorted(each.name for each in path.parent.iterdir()))
    said = f". Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return FileNotFoundError(errno.ENOENT, f"there is no such file in {path.parent.absolute()}{said}", str(path))


def unwritable_file_error(path: Path, error: OSError) -> OSError:
    """Return an error with cause and fix for a file that could not be written; the given one if they are unknown."""
    folder, whole = path.parent, path.absolute()
    if error.errno is None:
        return error
    if _is_kind(path, "is_dir"):
        said = f"{whole} is a folder; path must be a file's path, such as {whole / 'state.safetensors'}"
    elif above := next((each for each in folder.absolute().parents if _is_kind(each, "is_file")), None):
        said = f"{above} is a file, not a folder"
    elif _is_kind(folder, "is_file"):
        said = f"{folder.absolute()} is a file, not a folder"
    elif not _is_kind(folder, "is_dir"):
        made = f"pathlib.Path({str(folder)!r}).mkdir(parents=True)"
        said = f"the folder {folder.absolute()} does not exist. Make it: {made}"
    else:
        said = f"no file in the folder {folder.absolute()} can be written: {error.strerror}. Choose another folder"
    return OSError(error.errno, said, str(path))  # the subclass that matches the error number


def _is_kind(path: Path, kind: str) -> bool:
    """Return `path.is_dir()` or `path.is_file()`; False without permission to check."""
    try:
        return bool(getattr(path, kind)())
    except OSError:
        return False


def read_chunks(file: IO[bytes], end: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of an open file from its position to the offset `end`, by default to its end."""
    while chunk := file.read(_CHUNK_BYTES if end is None else min(_CHUNK_BYTES, end - file.tell())):
        yield chunk


def write_atomically(
    path: str | os.PathLike[str],
    content: bytes | Iterable[bytes | memoryview],
    *,
    replace: bool = True,
    head: Callable[[], bytes] | None = None,
) -> None:
    """Replace a file's content atomically: it is always the old content or the new one.

    A symbolic link stays, and its target is replaced. The file keeps its permissions and, if allowed, its owner; a new
    file follows the process's umask. A path that is not a regular file (a terminal, a pipe) is simply written to.

    Args:
        path: the file; its folder must exist.
        content: all of it, or an iterable of parts that are written one by one, so it need not fit into memory.
        replace: False only tests: it does all but the last step, and leaves no files.
        head: called once all parts are written; its result overwrites as many first bytes. For digests of the
            written content.

    Raises:
        OSError: the folder is missing, full or read-only. After any error, also one of the parts or `head`, the older
            file is intact and no partial file is left.
    """
    target = Path(os.path.realpath(path))
    try:
        _write_target(target, [content] if isinstance(content, bytes) else content, replace, head)
    except OSError as error:
        clearer = unwritable_file_error(Path(path), error)
        if clearer is error:
            raise
        raise clearer from error


def _write_target(
    target: Path, parts: Iterable[bytes | memoryview], replace: bool, head: Callable[[], bytes] | None
) -> None:
    old = _file_status(target)
    if old is not None and not stat.S_ISREG(old.st_mode):
        if replace or stat.S_ISDIR(old.st_mode):
            with target.open("wb") as file:
                _write_parts(file, parts, head)
        return
    _remove_abandoned(target)
    partial, descriptor = _create_partial_file(target, private=old is not None)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if old is not None:
                with contextlib.suppress(OSError):  # only a privileged process may change the owner
                    os.chown(partial, old.st_uid, old.st_gid)
                partial.chmod(stat.S_IMODE(old.st_mode))
            _write_parts(file, parts, head)
            file.flush()
            os.fsync(file.fileno())
            if replace:
                partial.replace(target)  # under the lock, so nobody removes it as abandoned
            else:
                partial.unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_to_disk(target.parent)


def _write_parts(file: IO[bytes], parts: Iterable[bytes | memoryview], head: Callable[[], bytes] | None) -> None:
    if head is not None and not file.seekable():  # a pipe: its first bytes must be known before anything is written
        whole = b"".join(parts)
        start = head()
        file.write(start + whole[len(start) :])
        return
    for part in parts:
        file.write(part)
    if head is not None:
        file.seek(0)
        file.write(head())


def _file_status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _create_partial_file(target: Path, *, private: bool) -> tuple[Path, int]:
    """Create and lock a partial file, and return it with its descriptor; `private` until its permissions are set."""
    while True:
        partial = target.with_name(f".{target.name}.{os.urandom(8).hex()}.partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        descriptor = os.open(partial, flags, 0o600 if private else 0o666)
        if not _acquire_lock(descriptor, wait=True) or _is_at(partial, descriptor):
            return partial, descriptor
        os.close(descriptor)  # another writer removed it as abandoned, between the two calls


def _remove_abandoned(target: Path) -> None:
    """Remove partial files of this target whose writers are dead; none if locks do not work."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.partial")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for found in [Path(entry.path) for entry in entries if name.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                descriptor = os.open(found, os.O_WRONLY | _OPEN_FLAGS)
                try:
                    if _acquire_lock(descriptor, wait=False):
                        found.unlink()
                finally:
                    os.close(descriptor)


def _acquire_lock(descriptor: int, *, wait: bool) -> bool:
    """Acquire the lock of an open file or folder, which ends with its process; return False if there are no locks.

    Raises:
        BlockingIOError: another writer has the lock, and `wait` is False.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows: abandoned files stay
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return False
    return True


@contextlib.contextmanager
def exclusive_writer(folder: Path) -> Iterator[bool]:
    """Context that locks a folder for a save; it yields False if locks are not supported.

    Raises:
        CheckpointError: another writer has the lock.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows
        yield False
        return
    try:
        try:
            is_locked = _acquire_lock(descriptor, wait=False)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another save into {folder} is under way. Wait for it, or name another folder."
            ) from error
        yield is_locked
    finally:
        os.close(descriptor)


def sync_to_disk(path: Path) -> None:
    """Sync the content of a file or a folder to disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():  # Windows cannot open folders
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    here, there = os.fstat(descriptor), _file_status(path)
    return there is not None and (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
