"""Parent-side handles of the frameworks' processes in a pytest session.

A process starts with its first test, reports each phase of its tests, and ends with the session. `child_session` runs
in it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import pytest

from polyamp import worker_processes
from polyamp.worker_processes import Reaper, Worker

CHILD_MODULE: Final = "polyamp.parity.in_pytest.child_session"
_EXIT_TIMEOUT: Final = 60.0
"""Seconds that a process has to tear down its fixtures after the last test."""


class RemoteTestResult:
    """Reports of one test from a process.

    Attributes:
        reports: "setup", "call" and "teardown" -> report of pytest.
        ended: how the process ended, or why it cannot run the test; "" while it can.
    """

    def __init__(self) -> None:
        self.reports: dict[str, pytest.TestReport] = {}
        self.ended = ""


class FrameworkProcess:
    """One process, with its messages and output.

    Attributes:
        failed: why it cannot run tests, or ended; "" while it can.
    """

    def __init__(self, backend: str, folder: Path, reaper: Reaper, order: Mapping[str, Any]) -> None:
        self.failed = ""
        self._lines: worker_processes.OutputQueue = SimpleQueue()
        self._log = folder / f"{backend}-{order['number']}.log"
        self._read_bytes = 0
        self._worker = Worker(backend, sys.executable, CHILD_MODULE, log=self._log, output=self._lines, reaper=reaper)
        self.send(order)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        self._worker.send(json.dumps(message).encode() + b"\n")

    def next_message(self) -> dict[str, Any] | None:
        """Return the next message; None, with `failed` set, if the process can send no more."""
        _, line = self._lines.get()
        if line is not None:
            message: dict[str, Any] = json.loads(line)
            return message
        status = self._worker.status()
        how = f"with status {status}"
        if status is not None and status < 0:
            with contextlib.suppress(ValueError):
                how = f"by {signal.Signals(-status).name}"
        tail = self._worker.tail()
        self.failed = f"ended {how}." + (f" The last lines that it wrote:\n{tail}" if tail else " It wrote nothing.")
        return None

    def read_output(self) -> str:
        """Return its output since the last call; for `-s`, which does not capture output."""
        with self._log.open("rb") as file:
            file.seek(self._read_bytes)
            found = file.read()
        self._read_bytes += len(found)
        return found.decode(errors="replace")

    def end(self, *, patient: bool) -> None:
        """End the process; with `patient` it may first tear down its fixtures."""
        if patient and not self.failed:
            self._worker.close_stdin()
            with contextlib.suppress(Empty):
                while self._lines.get(timeout=_EXIT_TIMEOUT)[1] is not None:
                    pass
            status = self._worker.status()
            if status not in (0, 1):
                warnings.warn(
                    pytest.PytestWarning(
                        f"the process of {self._worker.name} ended with status {status} after its last test:\n"
                        f"{self._worker.tail()}"
                    ),
                    stacklevel=2,
                )
        self._worker.end()


class FrameworkProcesses:
    """All processes of a session.

    Args:
        config: the session's.
        items: backend -> the tests that run in its process, in order.
    """

    def __init__(self, config: pytest.Config, items: Mapping[str, Sequence[pytest.Item]]) -> None:
        self._config, self._items = config, items
        self._running: dict[str, FrameworkProcess] = {}
        self._started = 0
        self._exit_stack: contextlib.ExitStack | None = None

    def run(self, backend: str, number: int, after: int | None, session: pytest.Session) -> None:
        """Start a test.

        Args:
            backend: backend in whose process it runs.
            number: the test's number in its process.
            after: number of the next test there; None tears down all fixtures.
            session: counts failures, which may end it.
        """
        process = self._running.get(backend) or self._start(backend)
        limit = self._config.getoption("maxfail") or 0
        left = max(limit - session.testsfailed, 1) if limit else 0
        process.send({"run": number, "after": after, "left": left})

    def wait(self, backend: str, when: str, item: pytest.Item, result: RemoteTestResult) -> None:
        """Wait until a phase of the running test is reported; after the last phase, until the test is finished.

        If the process ends, `heard.ended` is set, and a later test gets a new process.

        Raises:
            pytest.exit.Exception: the test ended the session.
        """
        process = self._running[backend]
        try:
            done = False
            while not done and (when not in result.reports or when == "teardown"):
                message = process.next_message()
                if message is None or "failed" in message:
                    result.ended = process.failed if message is None else message["failed"]
                    self._discard(backend)
                    return
                done = self._handle_message(item, result, message)
        except BaseException:
            result.ended = "was ended by the session."
            self._discard(backend)  # Ctrl-C or a time limit: its test is still running
            raise
        if when == "teardown" and self._config.getoption("capture") == "no":
            sys.stdout.write(process.read_output())

    def _handle_message(self, item: pytest.Item, result: RemoteTestResult, message: Mapping[str, Any]) -> bool:
        """Handle a message and return whether the test is finished."""
        if "report" in message:
            data = {**message["report"], "nodeid": item.nodeid}
            for field in ("location", "longrepr"):  # JSON has no tuples, and pytest checks for some
                if isinstance(data.get(field), list):
                    data[field] = tuple(data[field])
            for field in ("user_properties", "sections"):
                data[field] = [tuple(pair) for pair in data.get(field, ())]
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
            result.reports[report.when] = report
        elif "warning" in message:
            self._forward_warning(item, message["warning"])
        elif "exit" in message:
            if message["exit"] is None:
                raise KeyboardInterrupt
            pytest.exit(*message["exit"])
        elif message.get("done"):
            if message.get("stop"):
                item.session.shouldstop = message["stop"]
            return True
        return False

    def _forward_warning(self, item: pytest.Item, data: Mapping[str, Any]) -> None:
        category = getattr(sys.modules.get(data["module"]), data["category"], None)
        text = data["text"]
        if not (isinstance(category, type) and issubclass(category, Warning)):  # a framework's own category
            category, text = UserWarning, f"{data['module']}.{data['category']}: {text}"
        self._config.hook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": warnings.WarningMessage(text, category, data["filename"], data["lineno"]),
                "when": "runtest",
                "nodeid": item.nodeid,
                "location": None,
            }
        )

    def _start(self, backend: str) -> FrameworkProcess:
        if self._exit_stack is None:
            self._exit_stack = contextlib.ExitStack()
            self._folder = Path(self._exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="polyamp-pytest-")))
            self._reaper = self._exit_stack.enter_context(Reaper(self._folder))
        worker = getattr(self._config, "workerinput", None)
        arguments = self._config.invocation_params.args if worker is None else worker["polyamp_args"]
        config: Any = self._config  # as in pytest-xdist: outside a fixture the session's folder is private to pytest
        base: Path = config._tmp_path_factory.getbasetemp()
        self._started += 1
        process = FrameworkProcess(
            backend,
            self._folder,
            self._reaper,
            {
                "number": self._started,
                "args": [*map(str, arguments), *(["--no-cov"] if self._config.pluginmanager.hasplugin("_cov") else [])],
                "dir": str(self._config.invocation_params.dir),
                "path": sys.path,
                "basetemp": str(base / f"polyamp-{backend}-{self._started}"),
                "items": [item_key(item) for item in self._items[backend]],
            },
        )
        self._running[backend] = process
        return process

    def _discard(self, backend: str) -> None:
        process = self._running.pop(backend, None)
        if process is not None:
            process.end(patient=False)

    def end(self, *, patient: bool) -> None:
        """End all processes."""
        for backend in list(self._running):
            self._running.pop(backend).end(patient=patient)
        if self._exit_stack is not None:
            self._exit_stack.close()
            self._exit_stack = None


def item_key(item: pytest.Item) -> list[str]:
    """Return the key of an item in every process: its file, and the names below it."""
    above = (pytest.Session, pytest.Directory, pytest.File)
    return [str(item.path), *(node.name for node in item.listchain() if not isinstance(node, above))]
