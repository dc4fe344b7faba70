"""`OperationLog`: the operations of a forward pass, with a summary of each value and the line that asked for it.

It is recorded once two sides are known to differ in a forward pass. A backend's `OperationObserver` fills an
`OperationRecorder`; `verdict.operation_split` compares two logs.
"""

from __future__ import annotations

import functools
import linecache
import math
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np

from polyamp.contract.backend import State
from polyamp.results import LossFunction

Array = np.ndarray[Any, Any]
_MAX_SORTED_SIZE: Final = 1 << 14
"""Largest number of elements that are sorted for the summary; of a larger array it has the extremes only."""
_QUANTILES: Final = 33
_SAME_ARRAY: Final = 1e-14
"""Tolerance for one array that was summarised twice, perhaps in another order."""
_STANDARD_LIBRARY: Final = sysconfig.get_paths()["stdlib"] + os.sep

SourceFrame = tuple[str, int]
"""File and line number of a frame."""


class ValueSummary(msgspec.Struct, frozen=True):
    """Summary of an array. No transposition and no reshape changes it, but for `ordered`.

    Attributes:
        size: number of elements.
        dtype: in the framework.
        nonfinite: number of elements that are inf or NaN; they count as 0 in everything else.
        total, absolute, squares: sums of the elements, of their absolute values and of their squares.
        quantiles: sorted elements at even distances, the smallest and the largest among them.
        ordered: a sum of the elements with weights that depend on their places; 0 for a large array.
    """

    size: int
    dtype: str
    nonfinite: int
    total: float
    absolute: float
    squares: float
    quantiles: tuple[float, ...]
    ordered: float


class SourcePlace(msgspec.Struct, frozen=True):
    """Line of the source code.

    Attributes:
        file: path of the file.
        line: its number.
        code: its text; "" where the source is not known.
    """

    file: str
    line: int
    code: str


class OperationRecord(msgspec.Struct, frozen=True):
    """One value that an operation made.

    Attributes:
        name: of the operation, as the framework calls it; "" of a value that the pass was given: a parameter, a buffer
            or a part of the batch.
        inputs: indices of the records of its inputs; empty for a constant.
        value: summary of the value.
        place: the line that asked for it; None if no line outside the framework did.
        iterations: turns of the loops around it whose turns are recorded, from 0, outermost first.
    """

    name: str
    inputs: tuple[int, ...]
    value: ValueSummary
    place: SourcePlace | None = None
    iterations: tuple[int, ...] = ()


class OperationLog(msgspec.Struct, frozen=True):
    """Operations of a pass.

    Attributes:
        records: in the order of computation.
        end: index of the record of the value at which the sides differ; None if no operation made it.
    """

    records: list[OperationRecord]
    end: int | None = None


class PassLocation(NamedTuple):
    """Value of a pass at which two sides differ, by a side's own names.

    Attributes:
        path: of the module, with the number of the call ("block/norm#2").
        what: "input", "output" or "loss".
    """

    path: str
    what: str


@runtime_checkable
class OperationObserver(Protocol):
    """Observer that records single operations."""

    def record_operations(self, state: State, loss_fn: LossFunction, batch: Any, recorder: OperationRecorder) -> None:
        """Run the forward pass of `loss_fn` as `Observer.capture_pass` does, and record its operations until
        `recorder.is_closed`; nothing where operations are not visible, such as in a compiled model."""


class OperationRecorder:
    """Builder of an `OperationLog`.

    Args:
        location: the value at which the record ends.
        opens_loops: whether the turns of a compiled loop are recorded, up to the first whose result is inf or NaN
            though what the loop was given is finite. Otherwise such a loop is one operation.

    Attributes:
        iterations: turns of the loops that run now; of what is added (`OperationRecord.iterations`).

    Example:
        >>> import numpy as np
        >>> recorder = OperationRecorder(PassLocation("head", "output"))
        >>> given = recorder.add_given(np.arange(3.0), "float32")
        >>> number = recorder.add("mul", [given], 2 * np.arange(3.0), "float32", None)
        >>> recorder.see("head", "output", 2 * np.arange(3.0))
        >>> recorder.log().end, recorder.log().records[1].value.total
        (1, 6.0)
    """

    def __init__(self, location: PassLocation, *, opens_loops: bool = False) -> None:
        self._location = location
        self.opens_loops = opens_loops
        self.iterations: tuple[int, ...] = ()
        self._records: list[OperationRecord] = []
        self._end: int | None = None
        self.is_closed = False

    def add(self, name: str, inputs: Sequence[int], array: Array, dtype: str, frame: SourceFrame | None) -> int:
        """Record a value and return its index.

        Args:
            name: of the operation.
            inputs: indices of its inputs; empty for a constant.
            array: the value, on the host, real.
            dtype: its dtype in the framework.
            frame: the innermost one that is the user's; None if there is none.
        """
        place = None if frame is None else SourcePlace(*frame, linecache.getline(*frame).strip())
        self._records.append(OperationRecord(name, tuple(inputs), summarize(array, dtype), place, self.iterations))
        return len(self._records) - 1

    def add_given(self, array: Array, dtype: str) -> int:
        """Record a parameter, a buffer or a part of the batch, and return its index.

        Args:
            array, dtype: as for `add`.
        """
        return self.add("", (), array, dtype, None)

    def see(self, path: str, what: str, array: Array) -> None:
        """Compare a captured array with the location; the record that made its value is the end of the log."""
        if self.is_closed or self._location != (path, what):
            return
        self.is_closed = True
        value = summarize(array, "")
        numbers = range(len(self._records))
        self._end = next((n for n in numbers if are_equal(value, self._records[n].value, _SAME_ARRAY)), None)

    def log(self) -> OperationLog:
        """Return what was recorded."""
        return OperationLog(self._records, self._end)


def summarize(array: Array, dtype: str) -> ValueSummary:
    """Return the summary of an array.

    Args:
        array: of booleans, integers or floats.
        dtype: its dtype in its framework.
    """
    flat = np.asarray(array).reshape(-1).astype(np.float64)
    finite = np.isfinite(flat)
    bad = flat.size - int(np.count_nonzero(finite))
    if bad:
        flat[~finite] = 0.0
    magnitudes = np.abs(flat)
    if flat.size <= _MAX_SORTED_SIZE:
        places = np.linspace(0, max(flat.size - 1, 0), min(flat.size, _QUANTILES)).astype(int)
        quantiles = np.sort(flat)[places]
        ordered = float(flat @ _place_weights()[: flat.size])
    else:
        quantiles, ordered = np.array([flat.min(), flat.max()]), 0.0
    with np.errstate(over="ignore"):
        squares = float(flat @ flat)
    return ValueSummary(
        flat.size,
        dtype,
        bad,
        float(flat.sum()),
        float(magnitudes.sum()),
        squares if math.isfinite(squares) else sys.float_info.max,
        tuple(map(float, quantiles)),
        ordered,
    )


@functools.cache
def _place_weights() -> Array:
    return np.cos(np.arange(_MAX_SORTED_SIZE, dtype=np.float64))


def are_equal(one: ValueSummary, two: ValueSummary, tolerance: float, *, in_order: bool = False) -> bool:
    """Return whether two summaries can be of the same values up to a relative tolerance, in any order or in one."""
    if (one.size, one.nonfinite) != (two.size, two.nonfinite):
        return False
    limit = tolerance * max(one.absolute, two.absolute)
    if abs(one.absolute - two.absolute) > limit or abs(one.total - two.total) > limit:
        return False
    if in_order and abs(one.ordered - two.ordered) > limit:
        return False
    if abs(one.squares - two.squares) > 2 * tolerance * max(one.squares, two.squares):
        return False
    largest = max((abs(value) for value in (*one.quantiles, *two.quantiles)), default=0.0)
    return all(abs(a - b) <= tolerance * largest for a, b in zip(one.quantiles, two.quantiles, strict=True))


def running_frame(packages: Sequence[str]) -> SourceFrame | None:
    """Return the innermost running frame outside polyamp, Python's own library and some packages; None without one."""
    hidden = hidden_folders(packages)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_visible(frame.f_code.co_filename, hidden):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def hidden_folders(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the folders of polyamp and of the packages that are loaded."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in ("polyamp", *packages))
    return tuple(f"{Path(file).parent}{os.sep}" for file in files if file)


def is_visible(file: str, hidden: tuple[str, ...]) -> bool:
    """Return whether a file is the user's, and not in a hidden folder or in Python's own library."""
    if file.startswith(hidden) or file.startswith("<frozen"):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file or "dist-packages" in file
