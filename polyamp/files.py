"""`write_atomically`: how polyamp writes every file that it will read again. Called by `save`, `Recipe.dump` and
`porting.save`.

The content goes into a partial file beside the target, is flushed to disk and renamed over it, so that whoever dies
half-way leaves the older file as it was. A writer holds a lock on its partial file for as long as it lives; partial
files of the same target that nobody holds were left by killed writers, and are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final

from polyamp.errors import ArgumentError, described, nearest

_PLAIN: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags with which opening a link fails and opening a pipe does not wait."""


def as_path(path: Any, *, instead: str = "") -> Path:
    """What a user gave as a path.

    Args:
        path: a string or path object.
        instead: what to do with anything else, a sentence.

    Raises:
        ArgumentError: anything else.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f"path must be a file's path, a string or a pathlib.Path. Received: {described(path)}. {instead}".rstrip()
        )
    return Path(path)


def missing(path: Path) -> FileNotFoundError:
    """The error for a file that is not there; it names those beside it with nearly that name."""
    import errno

    if not path.parent.is_dir():
        return FileNotFoundError(errno.ENOENT, f"the folder {path.parent.absolute()} does not exist", str(path))
    close = nearest(path.name, sorted(each.name for each in path.parent.iterdir()))
    said = f". Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return FileNotFoundError(errno.ENOENT, f"there is no such file in {path.parent.absolute()}{said}", str(path))


def unwritable(path: Path, error: OSError) -> OSError:
    """The error for a file that could not be written: what is wrong, and what to do. As it is if that is not known."""
    folder, whole = path.parent, path.absolute()
    if error.errno is None:
        return error
    if _is(path, "is_dir"):
        said = f"{whole} is a folder; path must be a file's path, such as {whole / 'state.safetensors'}"
    elif above := next((each for each in folder.absolute().parents if _is(each, "is_file")), None):
        said = f"{above} is a file, not a folder"
    elif _is(folder, "is_file"):
        said = f"{folder.absolute()} is a file, not a folder"
    elif not _is(folder, "is_dir"):
        made = f"pathlib.Path({str(folder)!r}).mkdir(parents=True)"
        said = f"the folder {folder.absolute()} does not exist. Make it: {made}"
    else:
        said = f"no file in the folder {folder.absolute()} can be written: {error.strerror}. Choose another folder"
    return OSError(error.errno, said, str(path))  # of the class that belongs to the number


def _is(path: Path, kind: str) -> bool:
    """`path.is_dir()` or `path.is_file()`, False where one may not look."""
    try:
        return bool(getattr(path, kind)())
    except OSError:
        return False


def write_atomically(
    path: str | os.PathLike[str],
    content: bytes | Iterable[bytes | memoryview],
    *,
    replace: bool = True,
    head: Callable[[], bytes] | None = None,
) -> None:
    """Replace a file's content in one moment; it is always the old content or the new one.

    A symbolic link stays, and what it points to is replaced. The file keeps its permissions and, where that is allowed,
    its owner; a new one gets those that the process's umask says. What is no regular file (a terminal, a pipe) is
    simply written to.

    Args:
        path: the file; its folder must exist.
        content: all of it, or its parts, which are written as they come, so that it need not fit into memory.
        replace: False only tries: all but the last step is done, and nothing is left behind.
        head: called once all parts are written; what it returns takes the place of as many first bytes. For digests of
            what was written.

    Raises:
        OSError: the folder is missing, full or read-only; the older file is intact, and no partial one is left. So it
            is with whatever the parts or `head` raise.
    """
    target = Path(os.path.realpath(path))
    try:
        _write(target, [content] if isinstance(content, bytes) else content, replace, head)
    except OSError as error:
        clearer = unwritable(Path(path), error)
        if clearer is error:
            raise
        raise clearer from error


def _write(target: Path, parts: Iterable[bytes | memoryview], replace: bool, head: Callable[[], bytes] | None) -> None:
    old = _status(target)
    if old is not None and not stat.S_ISREG(old.st_mode):
        if replace or stat.S_ISDIR(old.st_mode):
            with target.open("wb") as file:
                _stream(file, parts, head)
        return
    _remove_abandoned(target)
    partial, descriptor = _partial_file(target, private=old is not None)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if old is not None:
                with contextlib.suppress(OSError):  # only a privileged process may give a file away
                    os.chown(partial, old.st_uid, old.st_gid)
                partial.chmod(stat.S_IMODE(old.st_mode))
            _stream(file, parts, head)
            file.flush()
            os.fsync(file.fileno())
            if replace:
                partial.replace(target)  # while the lock is held: nobody takes it for abandoned
            else:
                partial.unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _stream(file: IO[bytes], parts: Iterable[bytes | memoryview], head: Callable[[], bytes] | None) -> None:
    if head is not None and not file.seekable():  # a pipe: nothing leaves before its beginning is known
        whole = b"".join(parts)
        start = head()
        file.write(start + whole[len(start) :])
        return
    for part in parts:
        file.write(part)
    if head is not None:
        file.seek(0)
        file.write(head())


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _partial_file(target: Path, *, private: bool) -> tuple[Path, int]:
    """A new partial file and its descriptor, locked; `private` until its permissions are set."""
    while True:
        partial = target.with_name(f".{target.name}.{os.urandom(8).hex()}.partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        descriptor = os.open(partial, flags, 0o600 if private else 0o666)
        if not _lock(descriptor, wait=True) or _is_at(partial, descriptor):
            return partial, descriptor
        os.close(descriptor)  # another writer took it for abandoned, between the two calls


def _remove_abandoned(target: Path) -> None:
    """Remove partial files of this target whose writers are dead; where locks do not work, none."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.partial")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for found in [Path(entry.path) for entry in entries if name.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                descriptor = os.open(found, os.O_WRONLY | _PLAIN)
                try:
                    if _lock(descriptor, wait=False):
                        found.unlink()
                finally:
                    os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Take the lock of an open file, which ends with the process that holds it; False if it cannot be had."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows: abandoned files stay there
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another writer, or a file system without locks
        return False
    return True


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[bool]:
    """The lock of a folder, held in a `with` block; False where there are no locks.

    Raises:
        BlockingIOError: another writer holds it.
    """
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ModuleNotFoundError, PermissionError):  # Windows
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks
            held = False
        yield held
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Have a file's, or a folder's, content on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():  # Windows opens no folders
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    here, there = os.fstat(descriptor), _status(path)
    return there is not None and (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
