"""Progress bar for work on models of many gigabytes, such as writing files and filling a target.

The bar is shown on standard error if that is a terminal or a notebook. It appears after one second of work and
disappears at the end.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from polyamp.porting.layouts.lazy_array import Array, Lazy

SHOW_AFTER_SECONDS: Final = 1.0
"""Seconds of work before the bar is shown."""


@contextlib.contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Context manager that yields a function to call with the number of bytes just processed.

    Args:
        what: label of the work, such as "writing model.safetensors".
        total: total number of bytes.

    Example:
        >>> with progress_bar("copying", 10) as advance:
        ...     advance(10)
    """
    started, done, bars = time.monotonic(), 0, None
    task: Any = None
    possible = _is_interactive()

    def advance(count: int) -> None:
        nonlocal bars, done, task
        done += count
        if bars is None and possible and time.monotonic() - started >= SHOW_AFTER_SECONDS:
            bars = _make_bar()
            task = bars.add_task(what, total=total)
            bars.start()
        if bars is not None:
            bars.update(task, completed=min(done, total))

    try:
        yield advance
    finally:
        if bars is not None:
            bars.stop()


@contextlib.contextmanager
def track_reads(what: str, arrays: Mapping[str, Lazy]) -> Iterator[dict[str, Lazy]]:
    """Context manager that yields the same arrays; the first read of each advances a bar.

    Example:
        >>> import numpy as np
        >>> with track_reads("filling", {"kernel": Lazy.of(np.ones(2))}) as arrays:
        ...     arrays["kernel"].read().tolist()
        [1.0, 1.0]
    """
    with progress_bar(what, sum(array.nbytes for array in arrays.values())) as advance:

        def reader(array: Lazy) -> Callable[[], Array]:
            left = array.nbytes

            def read() -> Array:
                nonlocal left
                values = array.read()
                advance(left)
                left = 0
                return values

            return read

        yield {name: Lazy(array.shape, array.dtype, reader(array)) for name, array in arrays.items()}


def _is_interactive() -> bool:
    """Return whether standard error is a terminal or a notebook."""
    return sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)


def _make_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)
