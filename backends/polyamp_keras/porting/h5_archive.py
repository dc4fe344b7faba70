"""Lazy reader of Keras's HDF5 weight files: a `.weights.h5` file, or the weights inside a `.keras` archive.

A contiguous array is memory-mapped, and nothing else of the file is read. The archive's checksum of its weights is
compared once, when the first array is read; an .h5 file has no checksum.
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
from polyamp.files import missing_file_error, read_chunks
from polyamp.porting.layouts.lazy_array import Lazy

WEIGHTS_MEMBER: Final = "model.weights.h5"
CONFIG_MEMBER: Final = "config.json"
_HEADER_BYTES: Final = 30
"""Bytes of a zip member's local header before its name; the lengths of its name and its extras are at 26."""


class StoredArray(NamedTuple):
    """An array in a file.

    Attributes:
        array: its values.
        group: the group that contains it, such as "layers/dense/vars".
        start: offset of its bytes in the file; None if they are not contiguous.
    """

    array: Lazy
    group: str
    start: int | None


class KerasArchive:
    """Opened Keras weight file.

    Args:
        path: a .keras or .weights.h5 file.

    Attributes:
        config: the model's config in a .keras file; None for an .h5 file.
        arrays: place in the HDF5 file -> array, without an optimizer's.
        names: group -> the name of its layer, if Keras stored it.
        start: offset of the HDF5 file in the file.
        length: length of the HDF5 file in bytes.
        member: the archive member that contains it; "" if the file itself is the HDF5 file.

    Raises:
        PortError: the file is damaged, or no Keras file.
        FileNotFoundError: the file does not exist.
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
            with self.open_hdf5() as file:
                self.arrays: Mapping[str, StoredArray] = dict(self._arrays(file))
        except FileNotFoundError as error:
            raise missing_file_error(path) from error
        except IsADirectoryError as error:
            raise IsADirectoryError(error.errno, f"{path.absolute()} is a folder. Name a file", str(path)) from error
        except (OSError, KeyError, ValueError, zipfile.BadZipFile, json.JSONDecodeError) as error:
            if isinstance(error, PortError):
                raise
            raise self.damaged_error(str(error)) from error

    def _open(self) -> None:
        if not zipfile.is_zipfile(self.path):
            self.length = self.path.stat().st_size
            return
        with zipfile.ZipFile(self.path) as archive:
            names = set(archive.namelist())
            if CONFIG_MEMBER not in names or WEIGHTS_MEMBER not in names:
                raise PortError(
                    f"{self.path} is a zip archive without {CONFIG_MEMBER} and {WEIGHTS_MEMBER}, so it is no model "
                    f"that Keras saved in one file. It holds: {', '.join(sorted(names)[:5]) or 'nothing'}."
                )
            self.config = json.loads(archive.read(CONFIG_MEMBER))
            member = archive.getinfo(WEIGHTS_MEMBER)
        if member.compress_type != zipfile.ZIP_STORED:
            raise PortError(
                f"{self.path} holds {WEIGHTS_MEMBER} compressed, which Keras does not do; its arrays cannot be read "
                "one by one. Load it with keras.models.load_model and save it again."
            )
        with self.path.open("rb") as file:
            file.seek(member.header_offset)
            header = file.read(_HEADER_BYTES)
        lengths = [int.from_bytes(header[place : place + 2], "little") for place in (26, 28)]
        self.start, self.length = member.header_offset + _HEADER_BYTES + sum(lengths), member.file_size
        self.member = WEIGHTS_MEMBER

    @contextlib.contextmanager
    def open_hdf5(self) -> Iterator[Any]:
        """Open the HDF5 file for reading."""
        with self.path.open("rb") as file, h5py.File(_FileSection(file, self.start, self.length), "r") as opened:
            yield opened

    def damaged_error(self, reason: str) -> PortError:
        """Return the error for a file that cannot be read."""
        return PortError(f"{self.path} is damaged, or no file of Keras's: {reason}. Nothing was changed.")

    def _arrays(self, file: Any) -> Iterator[tuple[str, StoredArray]]:
        for group in _variable_groups(file, ""):
            inside = file[group] if group else file
            self.names[group.removesuffix("vars").rstrip("/")] = str(inside.attrs.get("name", ""))
            for name in sorted(inside, key=lambda name: (len(name), name)):
                dataset = local_member(inside, name)
                if not isinstance(dataset, h5py.Dataset):
                    continue
                if dataset.external is not None or dataset.is_virtual:
                    raise self.damaged_error(f"{dataset.name} lies in another file")
                yield f"{group}/{name}", self._stored(dataset, group)

    def _stored(self, dataset: Any, group: str) -> StoredArray:
        narrow = dataset.attrs.get("dtype") == "bfloat16"
        dtype = np.dtype(ml_dtypes.bfloat16) if narrow else dataset.dtype
        place, shape = dataset.name, dataset.shape
        start = dataset.id.get_offset()  # None if the dataset is compressed or chunked
        size = int(np.prod(shape)) * dtype.itemsize
        if start is not None and start + size > self.length:
            raise self.damaged_error(f"{place} ends behind the end of the file")
        whole = self.start + start if start is not None and size else None

        def read() -> np.ndarray[Any, Any]:
            self._check()
            if whole is None:
                with self.open_hdf5() as file:
                    return np.asarray(file[place][()]).view(dtype) if narrow else np.asarray(file[place][()])
            return np.memmap(self.path, dtype, "r", whole, shape).view(np.ndarray)

        return StoredArray(Lazy(shape, dtype, read), group, whole)

    def _check(self) -> None:
        """Check the archive's checksum, once."""
        if self._checked or not self.member:
            return
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as member:
                for _ in read_chunks(member):
                    pass
        except zipfile.BadZipFile as error:
            raise self.damaged_error(str(error)) from error
        self._checked = True


def _variable_groups(file: Any, path: str) -> Iterator[str]:
    """Yield the groups named "vars", in name order, without an optimizer's."""
    here = file[path] if path else file
    for name in sorted(here, key=_natural_key):
        item = local_member(here, name)
        below = f"{path}/{name}" if path else name
        if not isinstance(item, h5py.Group) or below == "optimizer":
            continue
        if name == "vars":
            yield below
        else:
            yield from _variable_groups(file, below)


def _natural_key(name: str) -> tuple[int, str, int]:
    """Return a sort key that puts "vars" first, and "dense_10" after "dense_9"."""
    word, _, number = name.rpartition("_")
    return (name != "vars", word, int(number)) if number.isdigit() else (name != "vars", name, -1)


def local_member(group: Any, name: str) -> Any:
    """Return a member stored in this file; links are not followed.

    Raises:
        ValueError: the member is a link.
    """
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"{group.name}/{name} is a link elsewhere")  # invalid file
    return group[name]


class _FileSection(io.RawIOBase):
    """File object for a byte range of another open file."""

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
