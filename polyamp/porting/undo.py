"""`Undo`: what a `fill` overwrites, kept so that it can be put back when a later array cannot be read.

Converters in `backends/*/porting` use it where a model is filled in place. Small models are kept in memory; of a large
one what does not fit lies in a temporary file without a name, so that filling it needs little more than the model.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final

from polyamp.porting.layouts.lazy import Lazy

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

IN_MEMORY: Final = 128 * 2**20
"""Bytes that are kept in memory."""


_SMALL: Final = 1 << 24
_SHARE: Final = 0.05
"""Of all arrays, what is kept of those that every read makes anew; `_SMALL` bytes in any case."""


def ahead(arrays: Mapping[str, Lazy]) -> dict[str, Array | None]:
    """Read every array once, before the first is written anywhere: what cannot be read is found in time.

    An array that is a view of memory which stays (a tensor, a mapped file) costs nothing and is kept, and so are a few
    small ones that are made anew by every read; the others are let go.

    Returns:
        name -> the values, or None where they have to be read again; those come first.
    """
    budget = max(_SMALL, int(_SHARE * sum(array.nbytes for array in arrays.values())))
    found: dict[str, Array | None] = {}
    for name, array in arrays.items():
        values = array.read()
        if stays(values, array):
            found[name] = values
            continue
        budget -= array.nbytes
        found[name] = values if budget >= 0 else None
    return dict(sorted(found.items(), key=lambda item: item[1] is not None))


def stays(values: Array, array: Lazy) -> bool:
    """Whether another read of `array` gives the memory of `values`: they are a view of what is there anyway."""
    import numpy as np

    root: Any = values
    while isinstance(root.base, np.ndarray):
        root = root.base
    if root.base is None and root is values:
        return False
    return bool(values.__array_interface__["data"][0] == array.read().__array_interface__["data"][0])


class Undo:
    """Old values by name; a context manager, which frees them.

    Args:
        limit: bytes that are kept in memory.

    Example:
        >>> import numpy as np
        >>> with Undo(limit=8) as undo:
        ...     undo.keep("a", np.ones(1))
        ...     undo.keep("b", np.arange(3))
        ...     kept = {name: array.tolist() for name, array in undo}
        >>> kept
        {'b': [0, 1, 2], 'a': [1.0]}
    """

    def __init__(self, limit: int = IN_MEMORY) -> None:
        self._left = limit
        self._kept: list[tuple[str, Any]] = []
        self._file: IO[bytes] | None = None
        self._open = contextlib.ExitStack()

    def keep(self, name: str, array: Array) -> None:
        """Keep a copy of an array.

        Raises:
            OSError: it does not fit into memory, and the temporary folder is full.
        """
        import numpy as np

        if array.nbytes <= self._left:
            self._left -= array.nbytes
            self._kept.append((name, np.array(array)))
            return
        if self._file is None:
            self._file = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # it lives as long as this
        place = self._file.seek(0, 2)
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(self._file)
        self._kept.append((name, (place, array.shape, array.dtype)))

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        """(name, values), the last first."""
        import numpy as np

        for name, kept in reversed(self._kept):
            if isinstance(kept, np.ndarray):
                yield name, kept
                continue
            place, shape, dtype = kept
            assert self._file is not None  # it was kept there
            self._file.seek(place)
            count = int(np.prod(shape))
            yield name, np.fromfile(self._file, np.uint8, count * dtype.itemsize).view(dtype).reshape(shape)

    def __enter__(self) -> Undo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept.clear()
        self._open.close()
