"""`progress`: the bar that work on a model of many gigabytes shows. Called by `files` as it writes and by `port` as it
fills a target; the command line shows no other.

On standard error, where that is a terminal or a notebook; only once the work has taken a second; gone when it ends.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from polyamp.porting.layouts.lazy import Lazy

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

AFTER: Final = 1.0
"""Seconds of work before which nothing is shown."""


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of bytes that were just done, for as long as the block lasts.

    Args:
        what: is being done, such as "writing model.safetensors".
        total: bytes to do.

    Example:
        >>> with progress("copying", 10) as advance:
        ...     advance(10)
    """
    started, done, bars = time.monotonic(), 0, None
    task: Any = None
    possible = _seen()

    def advance(count: int) -> None:
        nonlocal bars, done, task
        done += count
        if bars is None and possible and time.monotonic() - started >= AFTER:
            bars = _bars()
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
def watched(what: str, arrays: Mapping[str, Lazy]) -> Iterator[dict[str, Lazy]]:
    """The same arrays; reading one for the first time moves a bar on.

    Example:
        >>> import numpy as np
        >>> with watched("filling", {"kernel": Lazy.of(np.ones(2))}) as arrays:
        ...     arrays["kernel"].read().tolist()
        [1.0, 1.0]
    """
    with progress(what, sum(array.nbytes for array in arrays.values())) as advance:

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


def _seen() -> bool:
    """Whether somebody looks at standard error."""
    return sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)


def _bars() -> Any:
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
