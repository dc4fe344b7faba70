"""Writers of a monitor's records: JSON lines, CSV, TensorBoard, and trackers with a `log` method.

A writer has two methods, `write(record)` and `close()`; `begin(header)` is called before the first record if it has
that too. None of them may end a training: `Monitor` warns once if one fails, and goes on without it.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from polyamp.errors import ArgumentError, describe_value
from polyamp.monitor.records import PRODUCT_OPERANDS, MonitorHeader, MonitorRecord, RoundingStats, encode_line

_COLUMNS = ("call", "step", "loss", "grad_norm", "scale", "next_scale", "skipped", "skips", "word")


class MonitorWriter(Protocol):
    """Where a monitor's records go."""

    def write(self, record: MonitorRecord) -> None:
        """Write a record, so that it is not lost if the process ends."""

    def close(self) -> None:
        """Release what is open. May be called twice."""


class _FileWriter:
    """A file that is opened at the first line and written to without a buffer. What comes after `close` is appended."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ArgumentError(f"path must be a file's path. Received: {describe_value(path)}.")
        self.path = Path(path)
        self._file: io.FileIO | None = None
        self._has_lines = False

    def _append(self, lines: str) -> None:
        """Write whole lines, or none: what a full disk cuts off is taken back."""
        if self._file is None:
            self._file = io.FileIO(self.path, "ab" if self._has_lines else "wb")
        file = self._file
        end = file.tell()
        rest = lines.encode()
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # a device, which has no length
                file.truncate(end)
            self.close()
            raise
        self._has_lines = True

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}


class JsonLinesWriter(_FileWriter):
    """Writes a header and one line per record, which `polyamp monitor FILE` draws.

    Each line is written at once and whole: after a crash the file has all records but, at most, the last.

    Args:
        path: of the file, which is replaced.
    """

    def begin(self, header: MonitorHeader) -> None:
        """Write the header."""
        self._append(encode_line(header) + "\n")

    def write(self, record: MonitorRecord) -> None:
        """Write a record."""
        self._append(encode_line(record) + "\n")


class CsvWriter(_FileWriter):
    """Writes the numbers of each record, without those of modules, as a line of a table.

    Args:
        path: of the file, which is replaced.
    """

    def write(self, record: MonitorRecord) -> None:
        """Write a record."""
        lines = io.StringIO(newline="")
        table = csv.writer(lines)
        if not self._has_lines:
            table.writerow(_COLUMNS)
        table.writerow([getattr(record, name) for name in _COLUMNS])
        self._append(lines.getvalue())


class TrackerWriter:
    """Gives each record to an experiment tracker as numbers by name: a `wandb` or `trackio` run, or the module.

    Args:
        tracker: an object with `log(numbers, step=...)`, or `log_metrics` (`mlflow`, Lightning's loggers).
        prefix: of the names.
        first_step: added to a record's call, for a training that goes on from a checkpoint.

    Raises:
        ArgumentError: it has neither method.

    Example:
        >>> class Run:
        ...     def log(self, numbers, step):
        ...         print(step, sorted(numbers)[:3])
        >>> writer = TrackerWriter(Run())
    """

    def __init__(self, tracker: Any, prefix: str = "polyamp/", first_step: int = 0) -> None:
        log = getattr(tracker, "log_metrics", None) or getattr(tracker, "log", None)
        if not callable(log):
            raise ArgumentError(
                "tracker must have log(numbers, step=...), as wandb and trackio have, or log_metrics, as mlflow has. "
                f"Received: {describe_value(tracker)}."
            )
        self._log = log
        self._prefix = prefix
        self._first_step = first_step

    def write(self, record: MonitorRecord) -> None:
        """Log a record's numbers under its call."""
        numbers = {self._prefix + name: value for name, value in scalar_values(record)}
        self._log(numbers, step=self._first_step + record.call)

    def close(self) -> None:
        """Do nothing: the run belongs to the user."""


class TensorBoardWriter:
    """Writes a record's numbers as scalars into TensorBoard's event files.

    Args:
        target: the folder of the event files, for `tensorboard.summary.Writer` (which imports TensorFlow where it is
            installed); or a `SummaryWriter` of torch or tensorboardX, or another object with
            `add_scalar(name, value, step)`, `flush()` and `close()`.

    Raises:
        ArgumentError: `target` is neither; or the package `tensorboard` is not installed.
    """

    def __init__(self, target: Any) -> None:
        if not isinstance(target, str | os.PathLike) and not callable(getattr(target, "add_scalar", None)):
            raise ArgumentError(
                "target must be a folder, or an object with add_scalar(name, value, step) such as a SummaryWriter. "
                f"Received: {describe_value(target)}."
            )
        self._events = _summary_writer(str(target)) if isinstance(target, str | os.PathLike) else target
        self._closed = False

    def write(self, record: MonitorRecord) -> None:
        """Write a record."""
        try:
            for name, value in scalar_values(record):
                self._events.add_scalar(f"polyamp/{name}", value, record.call)
            self._events.flush()
        except OSError:
            with contextlib.suppress(OSError):
                self.close()  # waits for tensorboard's thread, whose traceback would abort an interpreter that ends
            raise

    def close(self) -> None:
        """Close the event file."""
        if not self._closed:
            self._events.close()
        self._closed = True


def scalar_values(record: MonitorRecord) -> Iterator[tuple[str, float]]:
    """Yield a record's numbers with names such as `gradients/layers/0/underflow`."""
    yield from (("loss", record.loss), ("grad_norm", record.grad_norm), ("loss_scale", record.scale))
    yield "skipped", float(record.skipped)
    if record.skips is not None:
        yield "skips", float(record.skips)
    for module in record.modules:
        name = module.module or "model"
        if module.update_ratio is not None:
            yield f"update_ratio/{name}", module.update_ratio
        for kind, stats in (("gradients", module.gradients), ("weights", module.weights)):
            if stats is not None:
                for share in ("zero", "underflow", "subnormal", "overflow", "norm"):
                    yield f"{kind}/{name}/{share}", getattr(stats, share)
        if module.activations is not None:
            for figure in ("zero", "underflow", "subnormal", "overflow", "rms", "largest"):
                yield f"activations/{name}/{figure}", getattr(module.activations, figure)
        for operand in PRODUCT_OPERANDS if module.products is not None else ():
            rounding: RoundingStats = getattr(module.products, operand)
            yield f"products/{name}/{operand}/underflow", rounding.underflow
            if rounding.sqnr is not None:
                yield f"products/{name}/{operand}/sqnr", rounding.sqnr


def _summary_writer(folder: str) -> Any:
    try:
        from tensorboard.summary import Writer  # type: ignore[import-untyped]  # the package has no types
    except ImportError as error:
        raise ArgumentError(
            "TensorBoardWriter needs the package tensorboard, which cannot be imported. Run: pip install tensorboard."
        ) from error
    return Writer(folder)
