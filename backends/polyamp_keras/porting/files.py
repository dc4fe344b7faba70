"""Keras files as sources and targets: `.keras` archives and `.weights.h5` files.

A .keras file contains the model's config. Keras builds the model from it without its weights, and its layers are read
as any model's. A .weights.h5 file has only names and shapes (`weights_file_layers`).

Usually a file's new values are as long as the old ones. Its bytes are then copied with the new arrays spliced in: the
HDF5 structure is unchanged, and an archive gets a new checksum. Otherwise HDF5 writes the file anew.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import h5py
import keras
import ml_dtypes
import numpy as np

from polyamp.errors import PortError, describe_value, did_you_mean
from polyamp.files import read_chunks, write_atomically
from polyamp.porting.files.strided_copies import as_contiguous
from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf, NativeLayer
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_keras.compat import saved_variable_paths
from polyamp_keras.porting import weights_file_layers
from polyamp_keras.porting.h5_archive import (
    WEIGHTS_MEMBER,
    KerasArchive,
    StoredArray,
    local_member,
)
from polyamp_keras.porting.inventory import KerasInventory, read_keras_model
from polyamp_keras.precision.bound_model import native_model

_ZEROS: Final[Mapping[str, Any]] = keras.saving.serialize_keras_object(keras.initializers.Zeros())

_CHECKSUM_OFFSET: Final = 14
"""Offset of the checksum in a zip member's local header; in the central directory it is two bytes larger."""

_ENTRY_BYTES: Final = 46
"""Bytes of a central directory entry before its name; the lengths of name, extras and comment are at 28."""

_STREAMED_FLAG: Final = 8
"""Flag of a zip member whose checksum follows its data."""


def open_file(path: Path) -> Inventory:
    """Return the layers of a file (see `FileConverter`)."""
    return _read_archive_layers(KerasArchive(path))[0]


def write_file(path: Path, leaves: Mapping[str, Lazy], like: Path) -> None:
    """Write a copy of the file `like` with other values (see `FileConverter`)."""
    archive = KerasArchive(like)
    inventory, places = _read_archive_layers(archive)
    there = {leaf.name: leaf.array for layer in inventory.layers for leaf in layer.leaves.values()}
    for name, given in leaves.items():
        if name not in there:
            raise PortError(f"{like} has no array {name!r}.{did_you_mean(name, there)}")
        if given.shape != there[name].shape:
            raise PortError(f"{name!r} of {like} has shape {list(there[name].shape)}. Received: {list(given.shape)}.")
    _rewrite_file(path, archive, {place: given for name, given in leaves.items() for place in places[name]})


def write_model(path: Path, model: Any) -> None:
    """Save a model with Keras (see `FileConverter`): a .keras file stores the model, a .weights.h5 file its weights."""
    model = native_model(model)
    whole = path.name.endswith(".keras")
    if not (whole or path.name.endswith(".weights.h5")) or not isinstance(model, keras.Model):
        raise PortError(
            "a keras.Model is written to a .keras or .weights.h5 file. Received: "
            f"{describe_value(model)}, for the file {path.name}."
        )
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "model.keras" if whole else "model.weights.h5")
        (model.save if whole else model.save_weights)(made)
        with made.open("rb") as file:
            write_atomically(path, read_chunks(file))


def _read_archive_layers(archive: KerasArchive) -> tuple[Inventory, dict[str, list[str]]]:
    """Return the layers, and the places of each leaf in the HDF5 file."""
    if archive.config is None:
        return weights_file_layers.read_file_layers(archive.arrays, archive.names)
    model = _build_model(archive)
    there = read_keras_model(model)
    places = dict(_dataset_places(archive, model, there))
    layers = [_with_stored_arrays(layer, archive.arrays, places) for layer in there.inventory.layers]
    inventory = dataclasses.replace(there.inventory, layers=layers)
    del model, there
    gc.collect()  # the model has reference cycles, and is as large as the file
    return inventory, places


def _build_model(archive: KerasArchive) -> Any:
    """Build the uncompiled model of a config, with zero weights. Keras refuses code in the file.

    Raises:
        PortError: Keras cannot build it.
    """
    config = _without_initializers({**archive.config, "compile_config": None})
    try:
        return keras.saving.deserialize_keras_object(config, safe_mode=True)
    except Exception as error:
        raise PortError(
            f"Keras cannot build the model of {archive.path} from its config: {type(error).__name__}: "
            f"{str(error).strip().splitlines()[0]} Import the module that defines and registers its classes "
            "(keras.saving.register_keras_serializable), or load the model with keras.models.load_model and give it "
            "instead of the file."
        ) from error


def _without_initializers(config: Any) -> Any:
    """Return the config with zeros in place of all initializers. Random values are not needed and take longer."""
    if isinstance(config, list):
        return [_without_initializers(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {
        key: dict(_ZEROS) if key.endswith("initializer") and value is not None else _without_initializers(value)
        for key, value in config.items()
    }


def _dataset_places(archive: KerasArchive, model: Any, there: KerasInventory) -> Iterator[tuple[str, list[str]]]:
    """Yield (leaf, places of its array in the HDF5 file)."""
    saved = saved_variable_paths(model)
    for name, variable in there.variables.items():
        places = saved.get(id(variable), [])
        for place in places or [""]:
            stored = archive.arrays.get(place)
            if stored is None:
                raise archive.damaged_error(f"its weights lack {name!r}, which its config has")
            if stored.array.shape != tuple(variable.shape):
                raise archive.damaged_error(
                    f"{name!r} is {list(variable.shape)} in its config and {list(stored.array.shape)} in its weights"
                )
        yield name, places


def _with_stored_arrays(
    layer: NativeLayer, arrays: Mapping[str, StoredArray], places: Mapping[str, list[str]]
) -> NativeLayer:
    """Return a layer with the file's arrays in place of the model's."""

    def one(leaf: InventoryLeaf) -> InventoryLeaf:
        return dataclasses.replace(leaf, array=arrays[places[leaf.name][0]].array)

    return dataclasses.replace(layer, leaves={name: one(leaf) for name, leaf in layer.leaves.items()})


def _rewrite_file(path: Path, archive: KerasArchive, values: Mapping[str, Lazy]) -> None:
    """Write a copy of an archive atomically, one array at a time, with other values at some places of its HDF5 file.

    Raises:
        OSError: the file cannot be written; an existing file is intact.
    """
    like = [(archive.arrays[place], given) for place, given in values.items()]
    fits = all(old.start is not None and old.array.dtype == given.dtype for old, given in like)
    if not fits or (archive.member and _has_streamed_size(archive)):
        write_atomically(path, _rebuild_file(archive, values))
        return
    pieces = sorted(((old.start or 0, given) for old, given in like), key=lambda piece: piece[0])
    splice = _Splice(archive, pieces)
    write_atomically(path, splice.parts(), head=splice.head if archive.member else None)


class _Splice:
    """Byte stream of a file with some arrays replaced.

    Args:
        archive: the file.
        pieces: (start of an array, its new values), in order.
    """

    def __init__(self, archive: KerasArchive, pieces: list[tuple[int, Lazy]]) -> None:
        self._archive = archive
        self._pieces = pieces
        self._sum = 0

    def parts(self) -> Iterator[bytes | memoryview]:
        start, end = self._archive.start, self._archive.start + self._archive.length
        with self._archive.path.open("rb") as file:
            yield from _read_range(file, 0, start)
            for part in self._weights(file, start, end):
                self._sum = zlib.crc32(part, self._sum) if self._archive.member else 0
                yield part
            yield from self._central_directory(file) if self._archive.member else _read_range(file, end, None)

    def _weights(self, file: Any, start: int, end: int) -> Iterator[bytes | memoryview]:
        for place, given in self._pieces:
            yield from _read_range(file, start, place)
            yield as_contiguous(given.read()).reshape(-1).view(np.uint8).data
            start = place + given.nbytes
        yield from _read_range(file, start, end)

    def head(self) -> bytes:
        """Return the start of an archive, with the new checksum in its member's header."""
        place = _weights_member(self._archive).header_offset + _CHECKSUM_OFFSET
        with self._archive.path.open("rb") as file:
            return file.read(place) + struct.pack("<L", self._sum)

    def _central_directory(self, file: Any) -> Iterator[bytes]:
        """Yield the bytes after the weights of an archive, with the new checksum in the central directory."""
        with zipfile.ZipFile(self._archive.path) as archive:
            place = archive.start_dir
        yield from _read_range(file, self._archive.start + self._archive.length, place)
        file.seek(place)
        entries = bytearray(file.read())
        at = 0
        while entries[at : at + 4] == b"PK\x01\x02":
            lengths = struct.unpack_from("<3H", entries, at + 28)
            if entries[at + _ENTRY_BYTES : at + _ENTRY_BYTES + lengths[0]] == WEIGHTS_MEMBER.encode():
                struct.pack_into("<L", entries, at + _CHECKSUM_OFFSET + 2, self._sum)
            at += _ENTRY_BYTES + sum(lengths)
        yield bytes(entries)


def _weights_member(archive: KerasArchive) -> zipfile.ZipInfo:
    with zipfile.ZipFile(archive.path) as opened:
        return opened.getinfo(WEIGHTS_MEMBER)


def _has_streamed_size(archive: KerasArchive) -> bool:
    return bool(_weights_member(archive).flag_bits & _STREAMED_FLAG)


def _read_range(file: Any, start: int, end: int | None) -> Iterator[bytes]:
    file.seek(start)
    yield from read_chunks(file, end)


def _rebuild_file(archive: KerasArchive, values: Mapping[str, Lazy]) -> Iterator[bytes]:
    """Yield the bytes of a file that HDF5 writes anew, first to an unnamed temporary file: its writes are not in
    order."""
    with tempfile.TemporaryFile() as made:
        with archive.open_hdf5() as old, h5py.File(made, "w") as new:
            _copy_group(old, new, values)
        if archive.config is None:
            yield from _read_range(made, 0, None)
            return
        with tempfile.TemporaryFile() as whole:
            with zipfile.ZipFile(archive.path) as like, zipfile.ZipFile(whole, "w") as zipped:
                for member in like.infolist():
                    if member.filename != WEIGHTS_MEMBER:
                        zipped.writestr(member, like.read(member))
                        continue
                    size = made.seek(0, os.SEEK_END)
                    entry = zipfile.ZipInfo(WEIGHTS_MEMBER, member.date_time)
                    entry.file_size = size
                    with zipped.open(entry, "w", force_zip64=size >= 1 << 31) as inside:
                        for chunk in _read_range(made, 0, None):
                            inside.write(chunk)
            yield from _read_range(whole, 0, None)


def _copy_group(old: Any, new: Any, values: Mapping[str, Lazy]) -> None:
    """Copy a group and everything below it, with other values at some places."""
    new.attrs.update(old.attrs)
    for name in old:
        item = local_member(old, name)
        if isinstance(item, h5py.Group):
            _copy_group(item, new.create_group(name), values)
        elif (given := values.get(item.name.lstrip("/"))) is None:
            old.copy(item, new, name)
        else:
            array = given.read()
            narrow = array.dtype == ml_dtypes.bfloat16
            made = new.create_dataset(name, data=np.ascontiguousarray(array).view("V2") if narrow else array)
            made.attrs.update({key: value for key, value in item.attrs.items() if key != "dtype"})
            if narrow:
                made.attrs["dtype"] = "bfloat16"
