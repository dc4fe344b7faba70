"""The HDF5 files that Keras keeps weights in, by themselves (.weights.h5) or inside a .keras archive, read lazily.

Called by `files`. An array that lies in one piece is mapped from the file; nothing else of it is read. The archive's
checksum of its weights is compared once, when the first of them is read; an .h5 file has none.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import h5py
import ml_dtypes
import numpy as np

from polyamp.errors import PortError
from polyamp.files import missing
from polyamp.porting.layouts.lazy import Lazy

WEIGHTS: Final = "model.weights.h5"
CONFIG: Final = "config.json"
CHUNK: Final = 1 << 22
"""Bytes that are read at once."""
_HEADER: Final = 30
"""Bytes of a zip member's own header before its name; the lengths of its name and its extras stand at 26."""


class Stored(NamedTuple):
    """An array in a file.

    Attributes:
        array: its values.
        group: the group it lies in, "layers/dense/vars".
        start: where in the file its bytes begin; None where they do not lie in one piece.
    """

    array: Lazy
    group: str
    start: int | None


class Archive:
    """A file of Keras's.

    Args:
        path: a .keras or .weights.h5 file.

    Attributes:
        config: what a .keras file says of the model; None of an .h5 file.
        arrays: place in the HDF5 file -> array, without an optimizer's.
        names: group -> the name of the layer that it is, as far as Keras wrote them.
        start: where in the file the HDF5 file begins.
        length: how long that is.
        member: the name of the archive's member that it is; "" where the file is the HDF5 file.

    Raises:
        PortError: damaged, or no such file.
        FileNotFoundError: it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Any = None
        self.start, self.length = 0, 0
        self.member = ""
        self._checked = False
        self.names: dict[str, str] = {}
        try:
            self._open()
            with self.opened() as file:
                self.arrays: Mapping[str, Stored] = dict(self._arrays(file))
        except FileNotFoundError as error:
            raise missing(path) from error
        except IsADirectoryError as error:
            raise IsADirectoryError(error.errno, f"{path.absolute()} is a folder. Name a file", str(path)) from error
        except (OSError, KeyError, ValueError, zipfile.BadZipFile, json.JSONDecodeError) as error:
            if isinstance(error, PortError):
                raise
            raise self.damaged(str(error)) from error

    def _open(self) -> None:
        if not zipfile.is_zipfile(self.path):
            self.length = self.path.stat().st_size
            return
        with zipfile.ZipFile(self.path) as archive:
            names = set(archive.namelist())
            if CONFIG not in names or WEIGHTS not in names:
                raise PortError(
                    f"{self.path} is a zip archive without {CONFIG} and {WEIGHTS}, so it is no model that Keras saved "
                    f"in one file. It holds: {', '.join(sorted(names)[:5]) or 'nothing'}."
                )
            self.config = json.loads(archive.read(CONFIG))
            member = archive.getinfo(WEIGHTS)
        if member.compress_type != zipfile.ZIP_STORED:
            raise PortError(
                f"{self.path} holds {WEIGHTS} compressed, which Keras does not do; its arrays cannot be read one by "
                "one. Load it with keras.models.load_model and save it again."
            )
        with self.path.open("rb") as file:
            file.seek(member.header_offset)
            header = file.read(_HEADER)
        lengths = [int.from_bytes(header[place : place + 2], "little") for place in (26, 28)]
        self.start, self.length = member.header_offset + _HEADER + sum(lengths), member.file_size
        self.member = WEIGHTS

    @contextlib.contextmanager
    def opened(self) -> Iterator[Any]:
        """The HDF5 file, for reading."""
        with self.path.open("rb") as file, h5py.File(_Section(file, self.start, self.length), "r") as opened:
            yield opened

    def damaged(self, reason: str) -> PortError:
        """The error for a file that cannot be read."""
        return PortError(f"{self.path} is damaged, or no file of Keras's: {reason}. Nothing was changed.")

    def _arrays(self, file: Any) -> Iterator[tuple[str, Stored]]:
        for group in _groups(file, ""):
            inside = file[group] if group else file
            self.names[group.removesuffix("vars").rstrip("/")] = str(inside.attrs.get("name", ""))
            for name in sorted(inside, key=lambda name: (len(name), name)):
                dataset = own_member(inside, name)
                if not isinstance(dataset, h5py.Dataset):
                    continue
                if dataset.external is not None or dataset.is_virtual:
                    raise self.damaged(f"{dataset.name} lies in another file")
                yield f"{group}/{name}", self._stored(dataset, group)

    def _stored(self, dataset: Any, group: str) -> Stored:
        narrow = dataset.attrs.get("dtype") == "bfloat16"
        dtype = np.dtype(ml_dtypes.bfloat16) if narrow else dataset.dtype
        place, shape = dataset.name, dataset.shape
        start = dataset.id.get_offset()  # None where it is compressed or in pieces
        size = int(np.prod(shape)) * dtype.itemsize
        if start is not None and start + size > self.length:
            raise self.damaged(f"{place} ends behind the end of the file")
        whole = self.start + start if start is not None and size else None

        def read() -> np.ndarray[Any, Any]:
            self._check()
            if whole is None:
                with self.opened() as file:
                    return np.asarray(file[place][()]).view(dtype) if narrow else np.asarray(file[place][()])
            return np.memmap(self.path, dtype, "r", whole, shape).view(np.ndarray)

        return Stored(Lazy(shape, dtype, read), group, whole)

    def _check(self) -> None:
        """Compare the archive's checksum, once."""
        if self._checked or not self.member:
            return
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as member:
                while member.read(CHUNK):
                    pass
        except zipfile.BadZipFile as error:
            raise self.damaged(str(error)) from error
        self._checked = True


def _groups(file: Any, path: str) -> Iterator[str]:
    """The groups named "vars", in the order of their names, without an optimizer's."""
    here = file[path] if path else file
    for name in sorted(here, key=_counted):
        item = own_member(here, name)
        below = f"{path}/{name}" if path else name
        if not isinstance(item, h5py.Group) or below == "optimizer":
            continue
        if name == "vars":
            yield below
        else:
            yield from _groups(file, below)


def _counted(name: str) -> tuple[int, str, int]:
    """ "vars" first, and "dense_10" behind "dense_9"."""
    word, _, number = name.rpartition("_")
    return (name != "vars", word, int(number)) if number.isdigit() else (name != "vars", name, -1)


def own_member(group: Any, name: str) -> Any:
    """A member that lies in this file; a link elsewhere is not followed.

    Raises:
        ValueError: it is a link.
    """
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"{group.name}/{name} is a link elsewhere")  # the file's fault
    return group[name]


class _Section(io.RawIOBase):
    """A part of an open file as a file of its own."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length = file, start, length
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        self._place = place + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self._length - self._place, 0)]
        self._file.seek(self._start + self._place)
        count = int(self._file.readinto(view))
        self._place += count
        return count
