"""safetensors files, tensor by tensor: `read` maps a file into memory, `write` streams arrays to a file.

The format (https://huggingface.co/docs/safetensors) is eight bytes with the length of a JSON header, the header, and
the tensors one after the other. The public library reads and writes whole files and returns copies. This module reads
nothing before it is needed, and writes nothing twice.

A file that this module writes contains a CRC-32 of every tensor and a SHA-256 of its header. They detect accidental
damage:

- flipped bits (always, up to 32 in a row),
- a half-copied file,
- a tensor that another program changed without updating its checksum; one in 4e9 of such changes would pass.

They prove nothing about the file's author. Whoever changes a tensor on purpose can write the matching digest, as with
any digest that is stored in the file itself. CRC-32 costs a quarter of a second per GB on every processor. SHA-256
costs twice as much where the processor has instructions for it. Elsewhere it costs eight times as much, which is longer
than reading and writing the file.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.errors import PortError
from polyamp.files import missing_file_error, write_atomically
from polyamp.float_formats import FORMATS
from polyamp.porting.files.strided_copies import as_contiguous
from polyamp.porting.layouts.lazy_array import Array, Lazy
from polyamp.porting.progress import progress_bar
from polyamp.train.checkpoint_tensors import BLANK_DIGEST, PARSE_ERRORS, content_digest, seal_content

_DTYPES: Final = {
    **{each.aliases[0].upper(): each.name for each in FORMATS.values()},
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""dtype in the header -> NumPy dtype."""
_OTHER_SIGNATURES: Final = {
    b"PK\x03\x04": "it is a zip archive, as torch.save, .keras and .npz files are",
    b"\x89HDF": "it is an HDF5 file, as Keras weights are",
    b"\x80": "it is a pickle, as older torch files are",
    b"\x93NUMPY": "it is a NumPy array",
}
"""First bytes of a file -> description of its format."""
_MAX_HEADER_BYTES: Final = 100_000_000
"""Bytes of the longest header that the public library reads."""
_CHUNK_BYTES: Final = 1 << 24
"""Bytes that are digested and written at a time."""
_DIGEST_KEY: Final = "polyamp.digest"
_CHECKSUMS_KEY: Final = "polyamp.crc32"
"""Metadata keys of the header's digest, and of the arrays' checksums, a JSON object."""


class TensorFile(NamedTuple):
    """Result of `read`.

    Attributes:
        metadata: the header's string metadata.
        arrays: name -> values, in the order of the file; read-only views of it.
        digested: whether the file contains the digests that `write` adds.
    """

    metadata: Mapping[str, str]
    arrays: Mapping[str, Lazy]
    digested: bool


def read(path: Path, what: str = "safetensors file") -> TensorFile:
    """Read and check a file's header, and return its arrays, which are read on demand.

    An array with a digest is checked against it on its first read. The file must not be changed in place while its
    arrays are in use. If it is replaced, as by `write`, the arrays stay readable.

    Args:
        path: the file, or the index of several (`model.safetensors.index.json`) in the same folder.
        what: expected format, for messages.

    Raises:
        PortError: the file is of another format or damaged. Reading an array can raise it too.
        FileNotFoundError: there is no such file; the message lists files with similar names.
        IsADirectoryError: it is a folder.
    """
    if path.name.endswith(".index.json"):
        return _read_index(path)
    content = _map_file(path)
    try:
        length = _header_length(content)
        header = json.loads(content[8 : 8 + length].decode(), object_pairs_hook=_reject_duplicate_keys)
        metadata = header.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata is more than texts")
        places = _tensor_spans(header, len(content) - 8 - length)
    except PARSE_ERRORS as error:
        raise PortError(
            f"{path} is no {what} ({_describe_content(content, error)}). It is truncated, damaged or another "
            "program's; save it again, or restore an older one."
        ) from error
    said = metadata.pop(_DIGEST_KEY, None)
    if said is not None and said != content_digest(content[8 : 8 + length], said):
        raise damaged_file_error(path, "its header does not match its digest")
    held = metadata.pop(_CHECKSUMS_KEY, None)
    digests = _array_checksums(path, held, places)

    def reader(name: str, place: _TensorSpan) -> Callable[[], Array]:
        checked = name not in digests

        def values() -> Array:
            nonlocal checked
            start = 8 + length + place.start
            pages.move(start, start + place.nbytes)
            if not checked:
                found = zlib.crc32(memoryview(content)[start : start + place.nbytes])
                if found != int(digests[name], 16):
                    raise damaged_file_error(path, f"the values of {name!r} do not match their digest")
                checked = True
            return np.ndarray(place.shape, place.dtype, content, start)

        return values

    pages = _PageWindow(content)
    arrays = {name: Lazy(place.shape, place.dtype, reader(name, place)) for name, place in places.items()}
    return TensorFile(metadata, arrays, said is not None and held is not None)


def is_safetensors(path: Path) -> bool:
    """Return whether a file begins as safetensors do. Check this first: the header's length at the start may look like
    another format's signature, such as a pickle's 0x80."""
    with path.open("rb") as file:
        start = file.read(9)
        return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= os.fstat(file.fileno()).st_size - 8


def write(path: Path, arrays: Mapping[str, Lazy], metadata: Mapping[str, str]) -> None:
    """Write arrays to a file one at a time, atomically. Any program that reads safetensors can read it.

    Args:
        path: the file; its folder must exist. An older file is treated as in `polyamp.save`.
        arrays: name -> values. Each is read once, and released before the next one.
        metadata: strings for the header, in addition to the digests.

    Raises:
        PortError: the file format lacks an array's dtype.
        OSError: the folder is missing, full or read-only; the older file is intact.
    """
    names = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)  # aligns each at a multiple of its size
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        array = arrays[name]
        entries[name] = {"dtype": _dtype_code(name, array), "shape": list(array.shape), "data_offsets": [end, 0]}
        end += array.nbytes
        entries[name]["data_offsets"][1] = end
    digests: dict[str, str] = {}

    def head() -> bytes:
        held = json.dumps({name: digests.get(name, "0" * 8) for name in names})
        blank = _header(entries, {_DIGEST_KEY: BLANK_DIGEST, _CHECKSUMS_KEY: held, **metadata})
        return blank[:8] + seal_content(blank[8:])

    def parts() -> Iterator[bytes | memoryview]:
        yield head()
        for name in names:
            digest = 0
            for part in _array_bytes(arrays[name]):
                digest = zlib.crc32(part, digest)
                yield part
                advance(len(part))
            digests[name] = f"{digest:08x}"

    if len(head()) - 8 > _MAX_HEADER_BYTES:
        raise PortError(
            f"the names and attributes of the model take more than the {_MAX_HEADER_BYTES:,} bytes of a header."
        )
    with progress_bar(f"writing {path.name}", end) as advance:
        write_atomically(path, parts(), head=head)


def _read_index(path: Path) -> TensorFile:
    """Return the arrays of all files in an index, as one file."""
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(Path(name).name == name and name.endswith(".safetensors") for name in places.values()):
            raise ValueError("it names what is no safetensors file beside it")
    except FileNotFoundError as error:
        raise missing_file_error(path) from error
    except PARSE_ERRORS as error:
        raise PortError(
            f"{path} is no index of safetensors files ({type(error).__name__}: {error}). Restore an older one."
        ) from error
    found = {name: read(path.with_name(name)) for name in dict.fromkeys(places.values())}
    if lacking := [name for name, place in places.items() if name not in found[place].arrays]:
        raise damaged_file_error(path, f"{lacking[0]!r} should be in {places[lacking[0]]}, and is not")
    metadata = next((file.metadata for file in found.values()), {})
    return TensorFile(metadata, {name: found[place].arrays[name] for name, place in places.items()}, False)


class _PageWindow:
    """Resident part of a mapped file: the array that was read last. Pages of earlier arrays are released; otherwise a
    process that reads a whole model would appear to use twice its memory. They are reloaded on access, from the file or
    from the system's page cache.

    Args:
        content: the mapped file.
    """

    def __init__(self, content: mmap.mmap | bytes) -> None:
        self._content = content
        self._last = (0, 0)

    def move(self, start: int, stop: int) -> None:
        """Release the earlier pages, because the array from `start` to `stop` is read next."""
        first, last = self._last
        self._last = start, stop
        if (first, last) == (start, stop) or not hasattr(mmap, "MADV_DONTNEED") or isinstance(self._content, bytes):
            return
        first -= first % mmap.PAGESIZE
        if last > first:
            self._content.madvise(mmap.MADV_DONTNEED, first, last - first)


class _TensorSpan(NamedTuple):
    """Position of an array after the header."""

    dtype: Any
    shape: tuple[int, ...]
    start: int
    nbytes: int


def _map_file(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0
            return b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise missing_file_error(path) from error
    except IsADirectoryError as error:
        raise IsADirectoryError(error.errno, f"{path.absolute()} is a folder. Name a file", str(path)) from error


def _header_length(content: mmap.mmap | bytes) -> int:
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise ValueError(f"its header claims {length:,} bytes, and {max(len(content) - 8, 0):,} are there")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"its header claims {length:,} bytes")
    return length


def _tensor_spans(header: Mapping[str, Any], total: int) -> dict[str, _TensorSpan]:
    """Return the position of each array. Together they fill the data after the header, without a gap or an overlap.

    Raises:
        ValueError, KeyError, TypeError: the header is invalid.
    """
    found: dict[str, _TensorSpan] = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), _dtype_from_code(entry["dtype"])
        sizes = all(type(number) is int and number >= 0 for number in (start, stop, *shape))
        if not sizes or len(shape) > 32 or math.prod(max(length, 1) for length in shape) >= 1 << 60:
            raise ValueError(f"{name!r} has a shape or offsets that are no sizes")
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r}, {entry['dtype']}{list(shape)}, lies from byte {start} to {stop}")
        found[name] = _TensorSpan(dtype, shape, start, stop - start)
    at = 0
    ordered = sorted(found.items(), key=lambda item: (item[1].start, item[1].nbytes))
    for name, place in ordered:
        if place.start != at:
            raise ValueError(f"{name!r} begins at byte {place.start}, and what lies before it ends at {at}")
        at += place.nbytes
    if at != total:
        raise ValueError(f"its arrays take {at:,} bytes, and {total:,} are there")
    return dict(ordered)


def _dtype_from_code(letters: Any) -> Any:
    import ml_dtypes

    if letters not in _DTYPES:
        raise ValueError(f"dtype {letters!r} is unknown")
    name = _DTYPES[letters]
    dtype = np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)
    return dtype.newbyteorder("<") if dtype.isbuiltin == 1 else dtype


def _dtype_code(name: str, array: Lazy) -> str:
    for letters, dtype in _DTYPES.items():
        if dtype == array.dtype.name:
            return letters
    raise PortError(
        f"{name!r} is {array.dtype}, which a safetensors file has no place for. It holds {', '.join(_DTYPES.values())}."
    )


def _array_bytes(array: Lazy) -> Iterator[memoryview]:
    """Yield an array's bytes, little-endian and in C order, in parts."""
    values = as_contiguous(array.read())
    if values.dtype.byteorder == ">":
        values = values.astype(values.dtype.newbyteorder("<"))
    view = values.reshape(-1).view(np.uint8).data
    for start in range(0, len(view), _CHUNK_BYTES):
        yield view[start : start + _CHUNK_BYTES]


def _header(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _array_checksums(path: Path, text: str | None, places: Mapping[str, _TensorSpan]) -> Mapping[str, str]:
    """Return name -> checksum, if the file contains checksums."""
    if text is None:
        return {}
    try:
        found: dict[str, str] = json.loads(text)
        if found.keys() != places.keys() or not all(0 <= int(digest, 16) < 1 << 32 for digest in found.values()):
            raise ValueError("they are not those of its arrays")
    except PARSE_ERRORS as error:
        raise damaged_file_error(path, f"its digests cannot be read: {error}") from error
    return found


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in its header twice")
    return found


def _describe_content(content: mmap.mmap | bytes, error: Exception) -> str:
    """Return a description of a file by its first bytes, otherwise of the position where reading failed."""
    if not content:
        return "it is empty"
    for start, kind in _OTHER_SIGNATURES.items():
        if content[: len(start)] == start and content[8:9] != b"{":
            return kind
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def damaged_file_error(path: Path, what: str) -> PortError:
    """Return the error for a file whose content has changed since it was written."""
    return PortError(f"{path} is damaged: {what}. Save it again, or restore an older one.")
