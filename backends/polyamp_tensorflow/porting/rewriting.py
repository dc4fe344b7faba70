"""A file of Keras's written as another one, with other values in it. Called by `files`.

Where the new values are as long as the old ones, as a rule, the file's bytes are copied with theirs in between: HDF5's
own structure stays as it is, and of an archive the checksum changes. Otherwise HDF5 writes the file anew.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import h5py
import ml_dtypes
import numpy as np

from polyamp.files import write_atomically
from polyamp.porting.files.copies import contiguous
from polyamp.porting.layouts.lazy import Lazy
from polyamp_tensorflow.porting.archive import CHUNK, WEIGHTS, Archive, own_member

_CHECKSUM: Final = 14
"""Where the checksum stands in a zip member's own header; in the archive's list it is two bytes farther."""
_ENTRY: Final = 46
"""Bytes of an entry in that list before its name; the lengths of name, extras and comment stand at 28."""
_STREAMED: Final = 8
"""The flag of a zip member whose checksum stands behind it."""


def write(path: Path, archive: Archive, values: Mapping[str, Lazy]) -> None:
    """Write a file, atomically, with other values at some places of its HDF5 file; one array at a time.

    Raises:
        OSError: it cannot be written; an older file is intact.
    """
    like = [(archive.arrays[place], given) for place, given in values.items()]
    fits = all(old.start is not None and old.array.dtype == given.dtype for old, given in like)
    if not fits or (archive.member and _streamed(archive)):
        write_atomically(path, _anew(archive, values))
        return
    pieces = sorted(((old.start or 0, given) for old, given in like), key=lambda piece: piece[0])
    splice = _Splice(archive, pieces)
    write_atomically(path, splice.parts(), head=splice.head if archive.member else None)


class _Splice:
    """A file's bytes with other arrays in it.

    Args:
        archive: the file.
        pieces: (where an array begins, its new values), in order.
    """

    def __init__(self, archive: Archive, pieces: list[tuple[int, Lazy]]) -> None:
        self._archive = archive
        self._pieces = pieces
        self._sum = 0

    def parts(self) -> Iterator[bytes | memoryview]:
        start, end = self._archive.start, self._archive.start + self._archive.length
        with self._archive.path.open("rb") as file:
            yield from _between(file, 0, start)
            for part in self._weights(file, start, end):
                self._sum = zlib.crc32(part, self._sum) if self._archive.member else 0
                yield part
            yield from self._listed(file) if self._archive.member else _between(file, end, None)

    def _weights(self, file: Any, start: int, end: int) -> Iterator[bytes | memoryview]:
        for place, given in self._pieces:
            yield from _between(file, start, place)
            yield contiguous(given.read()).reshape(-1).view(np.uint8).data
            start = place + given.nbytes
        yield from _between(file, start, end)

    def head(self) -> bytes:
        """The beginning of an archive, with the new checksum in its member's header."""
        place = _member(self._archive).header_offset + _CHECKSUM
        with self._archive.path.open("rb") as file:
            return file.read(place) + struct.pack("<L", self._sum)

    def _listed(self, file: Any) -> Iterator[bytes]:
        """What lies behind the weights of an archive, with the new checksum in its list of members."""
        with zipfile.ZipFile(self._archive.path) as archive:
            place = archive.start_dir
        yield from _between(file, self._archive.start + self._archive.length, place)
        file.seek(place)
        entries = bytearray(file.read())
        at = 0
        while entries[at : at + 4] == b"PK\x01\x02":
            lengths = struct.unpack_from("<3H", entries, at + 28)
            if entries[at + _ENTRY : at + _ENTRY + lengths[0]] == WEIGHTS.encode():
                struct.pack_into("<L", entries, at + _CHECKSUM + 2, self._sum)
            at += _ENTRY + sum(lengths)
        yield bytes(entries)


def _member(archive: Archive) -> zipfile.ZipInfo:
    with zipfile.ZipFile(archive.path) as opened:
        return opened.getinfo(WEIGHTS)


def _streamed(archive: Archive) -> bool:
    return bool(_member(archive).flag_bits & _STREAMED)


def _between(file: Any, start: int, end: int | None) -> Iterator[bytes]:
    file.seek(start)
    while chunk := file.read(CHUNK if end is None else min(CHUNK, end - file.tell())):
        yield chunk


def _anew(archive: Archive, values: Mapping[str, Lazy]) -> Iterator[bytes]:
    """The bytes of a file that HDF5 writes anew, first to a temporary file without a name: it writes here and there."""
    with tempfile.TemporaryFile() as made:
        with archive.opened() as old, h5py.File(made, "w") as new:
            _copy(old, new, values)
        if archive.config is None:
            yield from _chunks(made)
            return
        with tempfile.TemporaryFile() as whole:
            with zipfile.ZipFile(archive.path) as like, zipfile.ZipFile(whole, "w") as zipped:
                for member in like.infolist():
                    if member.filename != WEIGHTS:
                        zipped.writestr(member, like.read(member))
                        continue
                    size = made.seek(0, os.SEEK_END)
                    entry = zipfile.ZipInfo(WEIGHTS, member.date_time)
                    entry.file_size = size
                    with zipped.open(entry, "w", force_zip64=size >= 1 << 31) as inside:
                        for chunk in _chunks(made):
                            inside.write(chunk)
            yield from _chunks(whole)


def _chunks(file: Any) -> Iterator[bytes]:
    file.seek(0)
    while chunk := file.read(CHUNK):
        yield chunk


def _copy(old: Any, new: Any, values: Mapping[str, Lazy]) -> None:
    """A group and all below it, with other values at some places."""
    new.attrs.update(old.attrs)
    for name in old:
        item = own_member(old, name)
        if isinstance(item, h5py.Group):
            _copy(item, new.create_group(name), values)
        elif (given := values.get(item.name.lstrip("/"))) is None:
            old.copy(item, new, name)
        else:
            array = given.read()
            narrow = array.dtype == ml_dtypes.bfloat16
            made = new.create_dataset(name, data=np.ascontiguousarray(array).view("V2") if narrow else array)
            made.attrs.update({key: value for key, value in item.attrs.items() if key != "dtype"})
            if narrow:
                made.attrs["dtype"] = "bfloat16"
