"""Worker processes that report in lines: start, communication and complete termination.

A parent starts a `Worker` for each framework; the module that runs in it begins with `claim_stdio`.

A worker has its own process group, so Ctrl-C in the terminal does not reach it. It is ended with all its descendants,
on Linux also those in other groups (`process_reaper`). If the parent is killed, a small process, `Reaper`, ends them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, Final, NamedTuple, Self, TextIO, TypeVar

import msgspec

from polyamp import process_reaper as program

TAIL_LINES: Final = 15
"""Number of a worker's last lines on standard error that a message about its end contains."""
_ENVIRONMENT: Final = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
"""Environment variables of a worker, unless the user sets others: workers share a GPU, which XLA and TensorFlow
otherwise preallocate."""
_STACK_START: Final = re.compile(r"(Fatal Python error: |Current thread 0x)")
_TAIL_BYTES: Final = 1 << 16
_EXIT_TIMEOUT: Final = 5.0
"""Seconds that a worker may live after it closed its output, and that the system may take to end one."""
_Message = TypeVar("_Message")
OutputQueue = SimpleQueue["tuple[Worker, bytes | None]"]
"""Queue of (worker, a line of its output); the line is None at the end of the output."""


class Reaper:
    """Separate process that ends workers whose parent was killed; a context manager around the workers' lifetime.

    It reads a pipe, which closes when the parent ends. On systems without process groups (Windows) it does nothing.

    Args:
        folder: folder that the parent removes at its own end; removed here if the parent cannot.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if os.name == "posix":
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", program.__file__], stdin=subprocess.PIPE, start_new_session=True
            )
        if folder is not None:
            self._write_line(f"={folder}\n")

    def watch_group(self, group: int, mark: str) -> None:
        """End this group, and processes with the mark, when this process ends."""
        self._write_line(f"+{group} {mark}\n")

    def unwatch_group(self, group: int, mark: str) -> None:
        """Stop watching a group that is gone."""
        self._write_line(f"-{group} {mark}\n")

    def _write_line(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._write_line("=\n")
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()


class Worker:
    """Python process that runs a module. As a context manager it ends the process and its descendants on exit.

    Args:
        name: name for the caller.
        python: the interpreter.
        module: the module, as for `python -m`. The current folder is not on its path (`-P`).
        log: file for its standard error.
        output: queue for the lines of its standard output.
        reaper: ends it if this process cannot.

    Raises:
        OSError: the interpreter cannot be started.
    """

    def __init__(self, name: str, python: str, module: str, *, log: Path, output: OutputQueue, reaper: Reaper) -> None:
        self.name = name
        self._log, self._reaper = log, reaper
        self._mark = os.urandom(8).hex()
        environment: Mapping[str, str] = {**_ENVIRONMENT, **os.environ, program.MARK_VARIABLE: self._mark}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        reaper.watch_group(self._process.pid, self._mark)
        self._threads = [
            threading.Thread(target=each, args=arguments, daemon=True)
            for each, arguments in ((self._read_output, (output,)), (self._wait, ()))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def number(self) -> int:
        """Process id, which is also the id of its group."""
        return self._process.pid

    def send(self, line: bytes) -> None:
        """Write to its standard input. A process that is gone is detected by the end of its output."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def close_stdin(self) -> None:
        """Close its standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def status(self) -> int | None:
        """Return its exit status, below 0 for a signal, once its output ends; None if it closed that and still runs."""
        try:
            return self._process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            return None

    def dump_stacks(self) -> None:
        """Make it write the stacks of its threads to its log, and wait a moment for that."""
        if hasattr(signal, "SIGUSR1") and self._process.poll() is None:
            before = self._log.stat().st_size
            with contextlib.suppress(OSError):
                self._process.send_signal(signal.SIGUSR1)
            for _ in range(10):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.05)
                    return
                if self._log.stat().st_size > before:
                    return

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines of its standard error; "" if there are none. If a crash left a stack, whose innermost
        call is the first line, return the first lines of that."""
        with self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            written = file.read().decode(errors="replace")
        found = [line.rstrip() for line in written.splitlines() if line.strip()]
        stacks = [n for n, line in enumerate(found) if _STACK_START.match(line)]
        if stacks and len(found) - stacks[-1] > lines // 2:
            begin = max(0, stacks[-1] - lines // 5)
            return "\n".join(found[begin : begin + lines])
        return "\n".join(found[-lines:])

    def end(self) -> None:
        """End it and its descendants."""
        self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_TIMEOUT)
        self.close_stdin()
        for thread in self._threads:
            thread.join(_EXIT_TIMEOUT)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _kill(self) -> None:
        if os.name != "posix":
            self._process.kill()
        elif any(thread.is_alive() for thread in self._threads):  # else the id may already belong to another process
            program.kill_group(self._process.pid, self._mark)

    def _read_output(self, output: OutputQueue) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            output.put((self, line))
        output.put((self, None))

    def _wait(self) -> None:
        """Wait for its end, then end its remaining descendants, which would keep its output open."""
        if os.name == "posix":
            if hasattr(os, "waitid"):  # its id is not reused while its status has not been read
                with contextlib.suppress(OSError):
                    os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            else:
                self._process.wait()
            program.kill_group(self._process.pid, self._mark)
            self._reaper.unwatch_group(self._process.pid, self._mark)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end()


class WorkerChannel(NamedTuple):
    """A worker's ends of the pipes to its parent.

    Attributes:
        commands: input from the parent.
        lines: output to the parent.
    """

    commands: IO[bytes]
    lines: TextIO

    def send(self, message: Any) -> None:
        """Write a message to the parent, as a line of JSON."""
        self.lines.write(msgspec.json.encode(message).decode() + "\n")
        self.lines.flush()

    def receive(self, kind: type[_Message]) -> _Message | None:
        """Read the next message from the parent; None at the end of the input."""
        line = self.commands.readline()
        return msgspec.json.decode(line, type=kind) if line else None


def claim_stdio() -> WorkerChannel:
    """Return a worker's standard input and output as private files. Workers call this first.

    From then on prints go to standard error, and reads of standard input find its end. A stack is written to standard
    error when the process crashes, and all stacks on request (`Worker.dump_stacks`).
    """
    import faulthandler

    channel = WorkerChannel(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a crash would lose buffered lines
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    return channel
