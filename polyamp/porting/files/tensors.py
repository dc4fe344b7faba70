"""safetensors files, tensor by tensor: `read` maps one into memory, `write` streams one out. Called by `files` for
polyamp's own files, and by backends whose frameworks' models lie in such files.

The format (https://huggingface.co/docs/safetensors): eight bytes with the length of a JSON header, the header, the
tensors one after the other. The public library reads and writes whole files and hands out copies; here nothing is read
before it is needed, and nothing is written twice.

A file of this module holds a CRC-32 of every tensor and a SHA-256 of its header. They find what goes wrong by itself:
a flipped bit (always, up to 32 in a row), a half-copied file, a tensor that another program changed and did not say
so; one in 4e9 of such changes would pass. They prove nothing about who wrote the file: whoever changes a tensor on
purpose can write the matching digest beside it, as with any digest that a file holds of itself. CRC-32 costs a quarter
of a second per GB on every processor; SHA-256 costs twice as much where the processor has instructions for it and eight
times as much, longer than reading and writing the file, where it has none.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from polyamp.errors import PortError
from polyamp.files import missing, write_atomically
from polyamp.porting.files.copies import contiguous
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.progress import progress

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_DTYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""A tensor's dtype in the header -> NumPy's."""
_OTHERS: Final = {
    b"PK\x03\x04": "it is a zip archive, as torch.save, .keras and .npz files are",
    b"\x89HDF": "it is an HDF5 file, as Keras weights are",
    b"\x80": "it is a pickle, as older torch files are",
    b"\x93NUMPY": "it is a NumPy array",
}
"""First bytes of a file -> what it is."""
_LONGEST: Final = 100_000_000
"""Bytes of the longest header that the public library reads."""
_PART: Final = 1 << 24
"""Bytes that are digested and written at a time."""
_DIGEST: Final = "polyamp.digest"
_DIGESTS: Final = "polyamp.crc32"
"""Names in the metadata: of the header's digest, and of the arrays', a JSON object."""
_BLANK: Final = "polyamp-digest".ljust(64, "-")
"""Stands in the header for its digest while that is computed; as long as one."""
_MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What parsing damaged bytes can raise."""


class TensorFile(NamedTuple):
    """What `read` found.

    Attributes:
        metadata: the header's texts.
        arrays: name -> values, in the order in which they lie in the file; read-only views of it.
        digested: whether the file holds the digests that `write` gives it.
    """

    metadata: Mapping[str, str]
    arrays: Mapping[str, Lazy]
    digested: bool


def read(path: Path, what: str = "safetensors file") -> TensorFile:
    """A file's header, checked, and its arrays, which are read when they are needed.

    An array that the file has a digest of is checked against it when it is read for the first time. The file must not
    be changed in place while its arrays are in use; one that is replaced, as `write` does it, stays readable.

    Args:
        path: the file, or the index of several (`model.safetensors.index.json`) that lie beside it.
        what: what it ought to be, for messages.

    Raises:
        PortError: it is no such file, or a damaged one. Also by an array, when it is read.
        FileNotFoundError: there is no such file; names files beside it with nearly that name.
        IsADirectoryError: it is a folder.
    """
    if path.name.endswith(".index.json"):
        return _indexed(path)
    content = _mapped(path)
    try:
        length = _header_length(content)
        header = json.loads(content[8 : 8 + length].decode(), object_pairs_hook=_once)
        metadata = header.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata is more than texts")
        places = _places(header, len(content) - 8 - length)
    except _MALFORMED as error:
        raise PortError(
            f"{path} is no {what} ({_what(content, error)}). It is truncated, damaged or another program's; save it "
            "again, or restore an older one."
        ) from error
    said = metadata.pop(_DIGEST, None)
    if said is not None and said != _header_digest(content[8 : 8 + length], said):
        raise damaged(path, "its header does not match its digest")
    held = metadata.pop(_DIGESTS, None)
    digests = _digests(path, held, places)

    def reader(name: str, place: _Place) -> Callable[[], Array]:
        import numpy as np

        checked = name not in digests

        def values() -> Array:
            nonlocal checked
            start = 8 + length + place.start
            pages.move(start, start + place.nbytes)
            if not checked:
                found = zlib.crc32(memoryview(content)[start : start + place.nbytes])
                if found != int(digests[name], 16):
                    raise damaged(path, f"the values of {name!r} do not match their digest")
                checked = True
            return np.ndarray(place.shape, place.dtype, content, start)

        return values

    pages = _Pages(content)
    arrays = {name: Lazy(place.shape, place.dtype, reader(name, place)) for name, place in places.items()}
    return TensorFile(metadata, arrays, said is not None and held is not None)


def recognised(path: Path) -> bool:
    """Whether a file begins as safetensors do. To be asked first: the header's length, with which it begins, may look
    like another format's mark, as 0x80 does, of a pickle."""
    with path.open("rb") as file:
        start = file.read(9)
        return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= os.fstat(file.fileno()).st_size - 8


def write(path: Path, arrays: Mapping[str, Lazy], metadata: Mapping[str, str]) -> None:
    """Write arrays to a file, one at a time, atomically; any program that reads safetensors can read it.

    Args:
        path: the file; its folder must exist. As `polyamp.save` treats an older file, so does this.
        arrays: name -> values. Each is read once, and let go before the next one.
        metadata: texts for the header, beside the digests.

    Raises:
        PortError: an array's dtype has no place in such a file.
        OSError: the folder is missing, full or read-only; the older file is intact.
    """
    names = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)  # so that each lies at a multiple of its size
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        array = arrays[name]
        entries[name] = {"dtype": _letters(name, array), "shape": list(array.shape), "data_offsets": [end, 0]}
        end += array.nbytes
        entries[name]["data_offsets"][1] = end
    digests: dict[str, str] = {}

    def head() -> bytes:
        held = json.dumps({name: digests.get(name, "0" * 8) for name in names})
        blank = _header(entries, {_DIGEST: _BLANK, _DIGESTS: held, **metadata})
        return blank.replace(_BLANK.encode(), _header_digest(blank[8:], _BLANK).encode(), 1)

    def parts() -> Iterator[bytes | memoryview]:
        yield head()
        for name in names:
            digest = 0
            for part in _bytes_of(arrays[name]):
                digest = zlib.crc32(part, digest)
                yield part
                advance(len(part))
            digests[name] = f"{digest:08x}"

    if len(head()) - 8 > _LONGEST:
        raise PortError(f"the names and attributes of the model take more than the {_LONGEST:,} bytes of a header.")
    with progress(f"writing {path.name}", end) as advance:
        write_atomically(path, parts(), head=head)


def _indexed(path: Path) -> TensorFile:
    """The arrays of all files that an index names, as one."""
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(Path(name).name == name and name.endswith(".safetensors") for name in places.values()):
            raise ValueError("it names what is no safetensors file beside it")
    except FileNotFoundError as error:
        raise missing(path) from error
    except _MALFORMED as error:
        raise PortError(
            f"{path} is no index of safetensors files ({type(error).__name__}: {error}). Restore an older one."
        ) from error
    found = {name: read(path.with_name(name)) for name in dict.fromkeys(places.values())}
    if lacking := [name for name, place in places.items() if name not in found[place].arrays]:
        raise damaged(path, f"{lacking[0]!r} should be in {places[lacking[0]]}, and is not")
    metadata = next((file.metadata for file in found.values()), {})
    return TensorFile(metadata, {name: found[place].arrays[name] for name, place in places.items()}, False)


class _Pages:
    """Which part of a mapped file is in this process's memory: that of the array which was read last. Those before it
    are let go, or a process that reads a whole model would seem to hold it twice; they come back when they are looked
    at, from the file or from the system's copy of it.

    Args:
        content: the mapped file.
    """

    def __init__(self, content: mmap.mmap | bytes) -> None:
        self._content = content
        self._last = (0, 0)

    def move(self, start: int, stop: int) -> None:
        """Another array is about to be read, from here to there."""
        first, last = self._last
        self._last = start, stop
        if (first, last) == (start, stop) or not hasattr(mmap, "MADV_DONTNEED") or isinstance(self._content, bytes):
            return
        first -= first % mmap.PAGESIZE
        if last > first:
            self._content.madvise(mmap.MADV_DONTNEED, first, last - first)


class _Place(NamedTuple):
    """Where an array lies behind the header."""

    dtype: Any
    shape: tuple[int, ...]
    start: int
    nbytes: int


def _mapped(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0
            return b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise missing(path) from error
    except IsADirectoryError as error:
        raise IsADirectoryError(error.errno, f"{path.absolute()} is a folder. Name a file", str(path)) from error


def _header_length(content: mmap.mmap | bytes) -> int:
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise ValueError(f"its header claims {length:,} bytes, and {max(len(content) - 8, 0):,} are there")
    if length > _LONGEST:
        raise ValueError(f"its header claims {length:,} bytes")
    return length


def _places(header: Mapping[str, Any], total: int) -> dict[str, _Place]:
    """Where each array lies; together they fill what is behind the header, without a gap or an overlap.

    Raises:
        ValueError, KeyError, TypeError: they do not.
    """
    found: dict[str, _Place] = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), _dtype(entry["dtype"])
        sizes = all(type(number) is int and number >= 0 for number in (start, stop, *shape))
        if not sizes or len(shape) > 32 or math.prod(max(length, 1) for length in shape) >= 1 << 60:
            raise ValueError(f"{name!r} has a shape or offsets that are no sizes")
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r}, {entry['dtype']}{list(shape)}, lies from byte {start} to {stop}")
        found[name] = _Place(dtype, shape, start, stop - start)
    at = 0
    ordered = sorted(found.items(), key=lambda item: (item[1].start, item[1].nbytes))
    for name, place in ordered:
        if place.start != at:
            raise ValueError(f"{name!r} begins at byte {place.start}, and what lies before it ends at {at}")
        at += place.nbytes
    if at != total:
        raise ValueError(f"its arrays take {at:,} bytes, and {total:,} are there")
    return dict(ordered)


def _dtype(letters: Any) -> Any:
    import ml_dtypes
    import numpy as np

    if letters not in _DTYPES:
        raise ValueError(f"dtype {letters!r} is unknown")
    name = _DTYPES[letters]
    dtype = np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)
    return dtype.newbyteorder("<") if dtype.isbuiltin == 1 else dtype


def _letters(name: str, array: Lazy) -> str:
    for letters, dtype in _DTYPES.items():
        if dtype == array.dtype.name:
            return letters
    raise PortError(
        f"{name!r} is {array.dtype}, which a safetensors file has no place for. It holds {', '.join(_DTYPES.values())}."
    )


def _bytes_of(array: Lazy) -> Iterator[memoryview]:
    """An array's bytes, little-endian and in C order, in parts."""
    import numpy as np

    values = contiguous(array.read())
    if values.dtype.byteorder == ">":
        values = values.astype(values.dtype.newbyteorder("<"))
    view = values.reshape(-1).view(np.uint8).data
    for start in range(0, len(view), _PART):
        yield view[start : start + _PART]


def _header(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _header_digest(header: bytes, held: str) -> str:
    """SHA-256 of a header with its digest field, which now holds `held`, blanked."""
    return hashlib.sha256(header.replace(held.encode(), _BLANK.encode(), 1)).hexdigest()


def _digests(path: Path, text: str | None, places: Mapping[str, _Place]) -> Mapping[str, str]:
    """Name -> digest, of a file that has them."""
    if text is None:
        return {}
    try:
        found: dict[str, str] = json.loads(text)
        if found.keys() != places.keys() or not all(0 <= int(digest, 16) < 1 << 32 for digest in found.values()):
            raise ValueError("they are not those of its arrays")
    except _MALFORMED as error:
        raise damaged(path, f"its digests cannot be read: {error}") from error
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in its header twice")
    return found


def _what(content: mmap.mmap | bytes, error: Exception) -> str:
    """What a file is, if its first bytes tell; otherwise where reading it failed."""
    if not content:
        return "it is empty"
    for start, kind in _OTHERS.items():
        if content[: len(start)] == start and content[8:9] != b"{":
            return kind
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def damaged(path: Path, what: str) -> PortError:
    """The error for a file that is not as it was written."""
    return PortError(f"{path} is damaged: {what}. Save it again, or restore an older one.")
