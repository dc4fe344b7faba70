"""File of arrays for workers: batches (`data`) and weights are written once and memory-mapped by each worker."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import msgspec
import numpy as np

from polyamp.errors import ArgumentError, describe_value
from polyamp.porting.check import Batch

Array = np.ndarray[Any, Any]
_ALIGNMENT: Final = 64
_PLAIN_TYPES: Final = (bool, int, float, str, type(None))


class ArrayLocation(msgspec.Struct, frozen=True, array_like=True):
    """Location of an array in a file: its first byte, the name of its dtype, its shape."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class BatchTree(msgspec.Struct, frozen=True, tag="tree"):
    """Structure of a batch, with the locations of its arrays.

    Attributes:
        kind: "array", "plain", "dict", "list", "tuple", or "sides" for a `porting.Batch`.
        place: location of an array.
        value: a plain value.
        keys: of a dict.
        children: the values of a container.
    """

    kind: str
    place: ArrayLocation | None = None
    value: Any = None
    keys: list[str | int] = []
    children: list[BatchTree] = []


class ArrayStore:
    """Writer of a file of arrays; a context manager.

    Args:
        path: a new file.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")

    def put(self, array: Any) -> ArrayLocation:
        """Write one array."""
        array = np.asarray(array)
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
        offset = self._file.tell()
        packed = np.ascontiguousarray(array)
        self._file.write(packed.reshape(-1).view(np.uint8).data)
        name = array.dtype.name if array.dtype.kind in "biufcV" else array.dtype.str
        return ArrayLocation(offset, name, tuple(int(length) for length in array.shape))

    def put_tree(self, tree: Any, argument: str) -> BatchTree:
        """Write the arrays of a batch.

        Raises:
            ArgumentError: the batch has a value that is neither an array nor plain.
        """
        if isinstance(tree, Batch):
            return BatchTree("sides", children=[self.put_tree(each, argument) for each in (tree.source, tree.target)])
        if isinstance(tree, Mapping) and all(isinstance(key, str | int) for key in tree):
            return BatchTree(
                "dict", keys=list(tree), children=[self.put_tree(each, argument) for each in tree.values()]
            )
        if type(tree) in (list, tuple):
            return BatchTree(type(tree).__name__, children=[self.put_tree(each, argument) for each in tree])
        if type(tree) in _PLAIN_TYPES:
            return BatchTree("plain", value=tree)
        array = _host_array(tree)
        if array is None:
            raise ArgumentError(
                f"{argument} must be made of NumPy arrays, numbers, strings, dicts, lists and tuples: it is handed to "
                f"other processes. Received: {describe_value(tree)}. Or give a function that returns it, which each "
                "process calls."
            )
        return BatchTree("array", place=self.put(array))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._file.close()


def memory_map(path: Path, place: ArrayLocation) -> Array:
    """Return an array of a file, memory-mapped copy-on-write."""
    import ml_dtypes  # noqa: F401  # registers bfloat16 with NumPy

    dtype = np.dtype(place.dtype)
    if 0 in place.shape:
        return np.zeros(place.shape, dtype)
    return np.asarray(np.memmap(path, dtype, "c", place.offset, place.shape))


def load_batch(path: Path, tree: BatchTree) -> Any:
    """Return the batch whose arrays are in a file."""
    children = [load_batch(path, each) for each in tree.children]
    if tree.kind == "array":
        assert tree.place is not None
        return memory_map(path, tree.place)
    if tree.kind == "dict":
        return dict(zip(tree.keys, children, strict=True))
    if tree.kind == "sides":
        return Batch(*children)
    return tree.value if tree.kind == "plain" else (tuple(children) if tree.kind == "tuple" else children)


def batch_digest(tree: Any, *, any_width: bool = False) -> str:
    """Return a digest of a batch's structure and arrays; equal only for equal batches.

    Args:
        tree: the batch.
        any_width: whether float64 counts as float32, and int32 as int64: in a float64 run a framework makes wider
            numbers where no dtype is named.

    >>> batch_digest({"x": 1}) == batch_digest({"x": 1}), batch_digest([1]) == batch_digest((1,))
    (True, False)
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(item: Any) -> None:
        if isinstance(item, Batch):
            item = ("sides", item.source, item.target)
        if isinstance(item, Mapping):
            digest.update(f"dict {len(item)}".encode())
            for key, value in item.items():
                digest.update(repr(key).encode())
                add(value)
        elif isinstance(item, list | tuple):
            digest.update(f"{type(item).__name__} {len(item)}".encode())
            for value in item:
                add(value)
        elif (array := None if type(item) in _PLAIN_TYPES else _host_array(item)) is not None:
            if any_width and array.dtype.kind in "fi" and array.dtype.itemsize >= 4:
                array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64, copy=False)
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        else:
            digest.update(repr(item).encode())

    add(tree)
    return digest.hexdigest()


def _host_array(value: Any) -> Array | None:
    """Return an array or array-like value as a NumPy array; None for anything else."""
    if not hasattr(value, "__array__"):
        return None
    array = np.asarray(value)
    return None if array.dtype.kind == "O" else array
