"""Arrays on their way to workers: written once to a file, memory-mapped by each. Batches (`data`), and weights.

`run` stores the batches that it was given, `exchange` a model's weights; `worker` reads both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, Self

import msgspec

from polyamp.errors import ArgumentError, described
from polyamp.porting.check import Batch

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_ALIGNED: Final = 64
_PLAIN: Final = (bool, int, float, str, type(None))


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where an array is in a file: its first byte, its dtype by name, its shape."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class Tree(msgspec.Struct, frozen=True, tag="tree"):
    """A batch with places for its arrays.

    Attributes:
        kind: "array", "plain", "dict", "list", "tuple", or "sides" for a `porting.Batch`.
        place: of an array.
        value: what is plain.
        keys: of a dict.
        inside: the values of a container.
    """

    kind: str
    place: Place | None = None
    value: Any = None
    keys: list[str | int] = []
    inside: list[Tree] = []


class Store:
    """A file of arrays that is written; a context manager.

    Args:
        path: a new file.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")

    def put(self, array: Any) -> Place:
        """Write one array."""
        import numpy as np

        array = np.asarray(array)
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNED))
        offset = self._file.tell()
        packed = np.ascontiguousarray(array)
        self._file.write(packed.reshape(-1).view(np.uint8).data)
        name = array.dtype.name if array.dtype.kind in "biufcV" else array.dtype.str
        return Place(offset, name, tuple(int(length) for length in array.shape))

    def put_tree(self, tree: Any, argument: str) -> Tree:
        """Write the arrays of a batch.

        Raises:
            ArgumentError: there is something in it that is neither an array nor plain.
        """
        if isinstance(tree, Batch):
            return Tree("sides", inside=[self.put_tree(each, argument) for each in (tree.source, tree.target)])
        if isinstance(tree, Mapping) and all(isinstance(key, str | int) for key in tree):
            return Tree("dict", keys=list(tree), inside=[self.put_tree(each, argument) for each in tree.values()])
        if type(tree) in (list, tuple):
            return Tree(type(tree).__name__, inside=[self.put_tree(each, argument) for each in tree])
        if type(tree) in _PLAIN:
            return Tree("plain", value=tree)
        array = _array(tree)
        if array is None:
            raise ArgumentError(
                f"{argument} must be made of NumPy arrays, numbers, strings, dicts, lists and tuples: it is handed to "
                f"other processes. Received: {described(tree)}. Or give a function that returns it, which each process "
                "calls."
            )
        return Tree("array", place=self.put(array))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._file.close()


def mapped(path: Path, place: Place) -> Array:
    """An array of a file, memory-mapped; what is written to it stays in this process."""
    import ml_dtypes  # noqa: F401  # so that NumPy knows bfloat16 by its name
    import numpy as np

    dtype = np.dtype(place.dtype)
    if 0 in place.shape:
        return np.zeros(place.shape, dtype)
    return np.asarray(np.memmap(path, dtype, "c", place.offset, place.shape))


def tree_of(path: Path, tree: Tree) -> Any:
    """The batch whose arrays are in a file."""
    inside = [tree_of(path, each) for each in tree.inside]
    if tree.kind == "array":
        assert tree.place is not None
        return mapped(path, tree.place)
    if tree.kind == "dict":
        return dict(zip(tree.keys, inside, strict=True))
    if tree.kind == "sides":
        return Batch(*inside)
    return tree.value if tree.kind == "plain" else (tuple(inside) if tree.kind == "tuple" else inside)


def digest(tree: Any) -> str:
    """What two batches have in common only if they are the same, array by array.

    >>> digest({"x": 1}) == digest({"x": 1}), digest([1]) == digest((1,))
    (True, False)
    """
    import numpy as np

    made = hashlib.blake2b(digest_size=16)

    def add(item: Any) -> None:
        if isinstance(item, Batch):
            item = ("sides", item.source, item.target)
        if isinstance(item, Mapping):
            made.update(f"dict {len(item)}".encode())
            for key, value in item.items():
                made.update(repr(key).encode())
                add(value)
        elif isinstance(item, list | tuple):
            made.update(f"{type(item).__name__} {len(item)}".encode())
            for value in item:
                add(value)
        elif (array := None if type(item) in _PLAIN else _array(item)) is not None:
            made.update(f"{array.dtype} {array.shape}".encode())
            made.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        else:
            made.update(repr(item).encode())

    add(tree)
    return made.hexdigest()


def _array(value: Any) -> Array | None:
    """What is an array, or can be read as one, on the host; None of anything else."""
    import numpy as np

    if not hasattr(value, "__array__"):
        return None
    array = np.asarray(value)
    return None if array.dtype.kind == "O" else array
