"""`SideWorker`: base of the main program of a side's process.

It reads a job, and later commands, from standard input, a JSON line each, and writes one event per line to standard
output. Output of the user's code goes to standard error. Any exception becomes the last event.
"""

from __future__ import annotations

import platform
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import IO, Any, Final, Generic, TypeVar

import msgspec

from polyamp._version import __version__
from polyamp.contract import registry
from polyamp.errors import BackendNotInstalledError, PolyampError
from polyamp.parity.execution import messages
from polyamp.parity.findings import Failure
from polyamp.worker_processes import claim_stdio

EmitMessage = Callable[[Any], None]
_Job = TypeVar("_Job", bound=messages.WorkerJob)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_TRACEBACK_LINES: Final = 12
"""Number of traceback lines in a message."""


class SideWorker(ABC, Generic[_Job]):
    """Execution of one side's job.

    Attributes:
        job: the job.
        emit: sends a message.
        activity: what it does, for the message of a failure; "" if that needs no introduction.
        phase, step: current phase and step.
    """

    def __init__(self, job: _Job, emit: EmitMessage, commands: IO[bytes]) -> None:
        self.job, self.emit, self._commands = job, emit, commands
        self.activity = "before it began"
        self.phase, self.step = "", 0

    @classmethod
    def main(cls, job_type: type[_Job]) -> None:
        """Run the job from standard input."""
        channel = claim_stdio()

        def emit(event: Any) -> None:
            channel.lines.write(msgspec.json.encode(event).decode() + "\n")
            channel.lines.flush()

        emit(messages.HandshakeEvent(polyamp=__version__, python=platform.python_version()))
        job = _read_message(channel.commands, job_type)
        if job is not None:
            cls(job, emit, channel.commands).run_to_end()

    def run_to_end(self) -> None:
        """Run the whole job; an exception becomes the last event."""
        try:
            self.run_job()
        except BaseException as error:  # noqa: BLE001  # sys.exit() in the user's code must be reported too
            traceback.print_exc()
            text = _error_text(error, self.job.side)
            failure = self.failure(
                "missing" if _is_missing_framework(error) else "error",
                f"{self.activity}: {text}" if self.activity else text,
            )
            self.emit(messages.SideFailureEvent(failure=failure))

    def failure(self, reason: messages.FailureReason, message: str) -> Failure:
        """Return a failure in the current phase and step."""
        return Failure(side=self.job.side, phase=self.phase, step=self.step, reason=reason, message=message)

    @abstractmethod
    def run_job(self) -> None:
        """Run the job."""

    def next_command(self, command_type: type[_Struct]) -> _Struct | None:
        """Read the next command; None at the end of the input."""
        return _read_message(self._commands, command_type)


def _read_message(commands: IO[bytes], message_type: type[_Struct]) -> _Struct | None:
    line = commands.readline()
    return msgspec.json.decode(line, type=message_type) if line else None


def _is_missing_framework(error: BaseException) -> bool:
    """Return whether an error means that a framework is not installed."""
    if isinstance(error, BackendNotInstalledError):
        return True
    root = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return root in registry.entries()


def _error_text(error: BaseException, side: str) -> str:
    """Return an error's message and location, with a hint if there is one."""
    if isinstance(error, ModuleNotFoundError):
        known = registry.entries().get((error.name or "").partition(".")[0])
        run = "" if known is None else f" Run there: {registry.install_command(known)}."
        return (
            f"{error.name} is not installed in {sys.executable}.{run} For another environment, name its Python: "
            f"interpreters={{{side!r}: path}}, or --interpreter '{side}=PATH'."
        )
    if isinstance(error, PolyampError):
        return str(error)
    line = traceback.format_exception_only(error)[0].strip()
    if isinstance(error, SystemExit):
        line = f"the code called sys.exit({error.code!r})"
    stack = "".join(traceback.format_tb(error.__traceback__)).splitlines()
    return "\n".join([line, *stack[-_TRACEBACK_LINES:]])
