"""Processes that do a job and tell in lines what happens: how they are started, heard and ended, and how none is left.

`polyamp.demo.runner` and `polyamp.parity.processes` start a `Worker` for each framework; `polyamp.demo.worker` and
`polyamp.parity.worker` are what runs in it, and begin with `claimed`.

A worker has a process group of its own: Ctrl-C in the terminal does not reach it. It ends with whatever it started, on
Linux in other groups too (`guard`). A small process, `Guard`, sees to that when their parent is gone without a word.
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
from typing import IO, Final, NamedTuple, Self, TextIO

from polyamp import guard as program

TAIL: Final = 15
"""So many lines of what a worker wrote to standard error are in a message about its end."""
_DEFAULTS: Final = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
"""Environment variables of a worker, where the user sets no others: workers share a GPU, which XLA and TensorFlow
otherwise fill when they begin."""
_STACK: Final = re.compile(r"(Fatal Python error: |Current thread 0x)")
_READ: Final = 1 << 16
_PATIENCE: Final = 5.0
"""Seconds that a worker may live after it closed its output, and that the system may take to end one."""
Heard = SimpleQueue["tuple[Worker, bytes | None]"]
"""(worker, a line of its output) as they come; None for the line when there will be no more."""


class Guard:
    """Ends workers whose parent was killed; a context manager, for as long as there are workers.

    A process of its own, which reads a pipe: the pipe's end is the parent's. Where there are no process groups
    (Windows) it does nothing.

    Args:
        folder: what the parent would remove at its own end; removed where it cannot.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if os.name == "posix":
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", program.__file__], stdin=subprocess.PIPE, start_new_session=True
            )
        if folder is not None:
            self._tell(f"={folder}\n")

    def watch(self, group: int, mark: str) -> None:
        """From now on this group, and what has the mark, ends with this process."""
        self._tell(f"+{group} {mark}\n")

    def leave(self, group: int, mark: str) -> None:
        """They are gone."""
        self._tell(f"-{group} {mark}\n")

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._tell("=\n")
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()


class Worker:
    """A Python process that runs a module; a context manager, at whose end it and all that it started are ended.

    Args:
        name: whatever the caller calls it by.
        python: the interpreter.
        module: what it runs, as `python -m` takes it. The folder it is started in is not on its path (`-P`).
        log: file that gets what it writes to standard error.
        heard: gets the lines of its standard output.
        guard: what ends it if this process cannot.

    Raises:
        OSError: the interpreter cannot be started.
    """

    def __init__(self, name: str, python: str, module: str, *, log: Path, heard: Heard, guard: Guard) -> None:
        self.name = name
        self._log, self._guard = log, guard
        self._mark = os.urandom(8).hex()
        environment: Mapping[str, str] = {**_DEFAULTS, **os.environ, program.MARK: self._mark}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        guard.watch(self._process.pid, self._mark)
        self._threads = [
            threading.Thread(target=each, args=arguments, daemon=True)
            for each, arguments in ((self._hear, (heard,)), (self._wait, ()))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def number(self) -> int:
        """The process's id, which is its group's too."""
        return self._process.pid

    def send(self, line: bytes) -> None:
        """Write to its standard input; one that is gone is seen by its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def send_no_more(self) -> None:
        """Close its standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def status(self) -> int | None:
        """Its exit status, below 0 for a signal, once its output is at its end; None where it closed that and lives."""
        try:
            return self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return None

    def tell_where(self) -> None:
        """Have it write to its log what its threads are doing; it has a moment to do so."""
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

    def tail(self, lines: int = TAIL) -> str:
        """The last lines that it wrote to standard error; "" if there are none. Of a stack that a crash left, whose
        innermost call stands first, the first ones."""
        with self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ))
            written = file.read().decode(errors="replace")
        found = [line.rstrip() for line in written.splitlines() if line.strip()]
        stacks = [n for n, line in enumerate(found) if _STACK.match(line)]
        if stacks and len(found) - stacks[-1] > lines // 2:
            begin = max(0, stacks[-1] - lines // 5)
            return "\n".join(found[begin : begin + lines])
        return "\n".join(found[-lines:])

    def end(self) -> None:
        """End it, and what it started."""
        self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        self.send_no_more()
        for thread in self._threads:
            thread.join(_PATIENCE)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _kill(self) -> None:
        if os.name != "posix":
            self._process.kill()
        elif any(thread.is_alive() for thread in self._threads):  # else the number may be another process's by now
            program.end(self._process.pid, self._mark)

    def _hear(self, heard: Heard) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            heard.put((self, line))
        heard.put((self, None))

    def _wait(self) -> None:
        """Wait for its end; what it started and left behind is ended then, or would keep its output open."""
        if os.name == "posix":
            if hasattr(os, "waitid"):  # while nobody has taken its status, its number is nobody else's
                with contextlib.suppress(OSError):
                    os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            else:
                self._process.wait()
            program.end(self._process.pid, self._mark)
            self._guard.leave(self._process.pid, self._mark)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end()


class Channel(NamedTuple):
    """A worker's ends of the pipes to whoever started it.

    Attributes:
        commands: what it is told.
        lines: what it tells.
    """

    commands: IO[bytes]
    lines: TextIO


def claimed() -> Channel:
    """Called first in a worker: its standard input and output as files of its own.

    What is printed goes to standard error from then on, and whoever reads standard input finds its end. A stack goes to
    standard error when the process crashes, and all stacks when it is asked where it is (`Worker.tell_where`).
    """
    import faulthandler

    channel = Channel(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a crash would take what is not written yet
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    return channel
