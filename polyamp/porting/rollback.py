"""`read_ahead` and `write_all`, with which a `fill` writes all arrays or none, and `Rollback`, the replaced values.

It is used for models that are filled in place. Small models are kept in memory. Values of large models that do not fit
are written to an unnamed temporary file, so that filling needs little more memory than the model.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import IO, Any, Final, NamedTuple

import numpy as np

from polyamp.porting.layouts.lazy_array import Array, Lazy

MEMORY_LIMIT: Final = 128 * 2**20
"""Maximum bytes kept in memory."""


_MIN_BUDGET: Final = 1 << 24
_BUDGET_SHARE: Final = 0.05
"""Share of all arrays that may be kept of arrays that every read creates again; at least `_MIN_BUDGET` bytes."""


class PendingWrite(NamedTuple):
    """An array that was read once and is to be written.

    Attributes:
        name: its name in the model.
        array: the array.
        values: its values; None if they must be read again.
        is_view: whether the values are a view of permanent memory (a tensor, a mapped file).
    """

    name: str
    array: Lazy
    values: Array | None
    is_view: bool


def read_ahead(arrays: Mapping[str, Lazy]) -> list[PendingWrite]:
    """Read every array once before the first write, so that unreadable arrays are found in time.

    A view of permanent memory costs nothing and is kept. A few small arrays that every read creates again are kept too;
    the others are released. Memory use is therefore little more than the two models.

    Returns:
        The writes; those that must be read again come first, because they can fail.
    """
    budget = max(_MIN_BUDGET, int(_BUDGET_SHARE * sum(array.nbytes for array in arrays.values())))
    found: list[PendingWrite] = []
    for name, array in arrays.items():
        values = array.read()
        is_view = _is_stable_view(values, array)
        size = 0 if is_view else array.nbytes
        is_kept = size <= budget
        budget -= size if is_kept else 0
        found.append(PendingWrite(name, array, values if is_kept else None, is_view))
    return sorted(found, key=lambda each: each.values is not None)


def write_all(
    writes: list[PendingWrite], old_values: Callable[[str], Array], write: Callable[[str, Array], None]
) -> None:
    """Write every array, or restore those that were written if one cannot be read.

    Args:
        writes: result of `read_ahead`; empty afterwards, so that each is released once it is written.
        old_values: function that returns the current values of a name.
        write: function that writes values to a name.
    """
    with Rollback() as undo:
        try:
            while writes:
                name, array, values, is_view = writes.pop(0)
                if values is None:
                    values = array.read()
                    undo.keep(name, old_values(name))
                elif is_view:
                    array.read()  # a mapped file releases the pages of the array before
                write(name, values)
        except BaseException:
            for name, old in undo:
                write(name, old)
            raise


def _is_stable_view(values: Array, array: Lazy) -> bool:
    """Return whether another read of `array` returns the memory of `values`, because they are a view of permanent
    memory."""
    root: Any = values
    while isinstance(root.base, np.ndarray):
        root = root.base
    if root.base is None and root is values:
        return False
    return bool(values.__array_interface__["data"][0] == array.read().__array_interface__["data"][0])


class Rollback:
    """Store of old values by name; a context manager that releases them.

    Args:
        limit: maximum bytes kept in memory.

    Example:
        >>> import numpy as np
        >>> with Rollback(limit=8) as undo:
        ...     undo.keep("a", np.ones(1))
        ...     undo.keep("b", np.arange(3))
        ...     kept = {name: array.tolist() for name, array in undo}
        >>> kept
        {'b': [0, 1, 2], 'a': [1.0]}
    """

    def __init__(self, limit: int = MEMORY_LIMIT) -> None:
        self._left = limit
        self._kept: list[tuple[str, Any]] = []
        self._file: IO[bytes] | None = None
        self._open = contextlib.ExitStack()

    def keep(self, name: str, array: Array) -> None:
        """Keep a copy of an array.

        Raises:
            OSError: the copy exceeds the limit, and the temporary folder is full.
        """
        if array.nbytes <= self._left:
            self._left -= array.nbytes
            self._kept.append((name, np.array(array)))
            return
        if self._file is None:
            self._file = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # closed with this object
        place = self._file.seek(0, 2)
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(self._file)
        self._kept.append((name, (place, array.shape, array.dtype)))

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, values), the last first."""
        for name, kept in reversed(self._kept):
            if isinstance(kept, np.ndarray):
                yield name, kept
                continue
            place, shape, dtype = kept
            assert self._file is not None  # the values are in the file
            self._file.seek(place)
            count = int(np.prod(shape))
            yield name, np.fromfile(self._file, np.uint8, count * dtype.itemsize).view(dtype).reshape(shape)

    def __enter__(self) -> Rollback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept.clear()
        self._open.close()
