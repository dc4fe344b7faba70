"""The processes of the frameworks in a session of pytest, seen from the session: started when their first test comes,
heard until a test's phase is reported, ended with the session. `standing_in` asks; `child` is what runs in them.
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

from polyamp import workers
from polyamp.workers import Guard, Worker

CHILD: Final = "polyamp.parity.in_pytest.child"
_PATIENCE: Final = 60.0
"""Seconds that a process has for its last fixtures after the last test."""


class Heard:
    """What a process told of one test.

    Attributes:
        reports: "setup", "call" and "teardown" -> what pytest reported.
        ended: how the process ended, or why it cannot run the test; "" while it can.
    """

    def __init__(self) -> None:
        self.reports: dict[str, pytest.TestReport] = {}
        self.ended = ""


class Process:
    """One process, and what it told.

    Attributes:
        failed: why it cannot run tests, or ended; "" while it can.
    """

    def __init__(self, backend: str, folder: Path, guard: Guard, order: Mapping[str, Any]) -> None:
        self.failed = ""
        self._lines: workers.Heard = SimpleQueue()
        self._log = folder / f"{backend}-{order['number']}.log"
        self._shown = 0
        self._worker = Worker(backend, sys.executable, CHILD, log=self._log, heard=self._lines, guard=guard)
        self.send(order)

    def send(self, message: Mapping[str, Any]) -> None:
        """Tell it something."""
        self._worker.send(json.dumps(message).encode() + b"\n")

    def next(self) -> dict[str, Any] | None:
        """The next message; None, and `failed` is set, where there will be none."""
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

    def written(self) -> str:
        """What it wrote since the last call; for `-s`, which catches no output."""
        with self._log.open("rb") as file:
            file.seek(self._shown)
            found = file.read()
        self._shown += len(found)
        return found.decode(errors="replace")

    def end(self, *, patient: bool) -> None:
        """It ends; with patience by itself, after its last fixtures."""
        if patient and not self.failed:
            self._worker.send_no_more()
            with contextlib.suppress(Empty):
                while self._lines.get(timeout=_PATIENCE)[1] is not None:
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


class Processes:
    """All of them.

    Args:
        config: the session's.
        items: backend -> the tests that belong into its process, in order.
    """

    def __init__(self, config: pytest.Config, items: Mapping[str, Sequence[pytest.Item]]) -> None:
        self._config, self._items = config, items
        self._running: dict[str, Process] = {}
        self._started = 0
        self._open: contextlib.ExitStack | None = None

    def run(self, backend: str, number: int, after: int | None, session: pytest.Session) -> None:
        """Begin a test.

        Args:
            backend: whose process it runs in.
            number: the test's number in its process.
            after: number of the test that comes after it there; None tears down all that is set up.
            session: counts the failures that end it.
        """
        process = self._running.get(backend) or self._start(backend)
        limit = self._config.getoption("maxfail") or 0
        left = max(limit - session.testsfailed, 1) if limit else 0
        process.send({"run": number, "after": after, "left": left})

    def wait(self, backend: str, when: str, item: pytest.Item, heard: Heard) -> None:
        """Until a phase of the running test is reported; the last one also until the process is done with it.

        Where the process ends, `heard.ended` says so, and a later test gets a new one.

        Raises:
            pytest.exit.Exception: the test ended the session.
        """
        process = self._running[backend]
        try:
            done = False
            while not done and (when not in heard.reports or when == "teardown"):
                message = process.next()
                if message is None or "failed" in message:
                    heard.ended = process.failed if message is None else message["failed"]
                    self._drop(backend)
                    return
                done = self._take(item, heard, message)
        except BaseException:
            heard.ended = "was ended by the session."
            self._drop(backend)  # Ctrl-C, a time limit: the test in it runs on
            raise
        if when == "teardown" and self._config.getoption("capture") == "no":
            sys.stdout.write(process.written())

    def _take(self, item: pytest.Item, heard: Heard, message: Mapping[str, Any]) -> bool:
        """Take in a message; whether the test is done with."""
        if "report" in message:
            data = {**message["report"], "nodeid": item.nodeid}
            for field in ("location", "longrepr"):  # JSON has no tuples, and pytest looks for some
                if isinstance(data.get(field), list):
                    data[field] = tuple(data[field])
            for field in ("user_properties", "sections"):
                data[field] = [tuple(pair) for pair in data.get(field, ())]
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
            heard.reports[report.when] = report
        elif "warning" in message:
            self._warn(item, message["warning"])
        elif "exit" in message:
            if message["exit"] is None:
                raise KeyboardInterrupt
            pytest.exit(*message["exit"])
        elif message.get("done"):
            if message.get("stop"):
                item.session.shouldstop = message["stop"]
            return True
        return False

    def _warn(self, item: pytest.Item, data: Mapping[str, Any]) -> None:
        category = getattr(sys.modules.get(data["module"]), data["category"], None)
        text = data["text"]
        if not (isinstance(category, type) and issubclass(category, Warning)):  # one of a framework's own
            category, text = UserWarning, f"{data['module']}.{data['category']}: {text}"
        self._config.hook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": warnings.WarningMessage(text, category, data["filename"], data["lineno"]),
                "when": "runtest",
                "nodeid": item.nodeid,
                "location": None,
            }
        )

    def _start(self, backend: str) -> Process:
        if self._open is None:
            self._open = contextlib.ExitStack()
            self._folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="polyamp-pytest-")))
            self._guard = self._open.enter_context(Guard(self._folder))
        worker = getattr(self._config, "workerinput", None)
        arguments = self._config.invocation_params.args if worker is None else worker["polyamp_args"]
        # As pytest-xdist does: pytest has no public way to the session's folder outside of a fixture.
        base: Path = self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # xdist asks for it so, too
        self._started += 1
        process = Process(
            backend,
            self._folder,
            self._guard,
            {
                "number": self._started,
                "args": [*map(str, arguments), *(["--no-cov"] if self._config.pluginmanager.hasplugin("_cov") else [])],
                "dir": str(self._config.invocation_params.dir),
                "path": sys.path,
                "basetemp": str(base / f"polyamp-{backend}-{self._started}"),
                "items": [key(item) for item in self._items[backend]],
            },
        )
        self._running[backend] = process
        return process

    def _drop(self, backend: str) -> None:
        process = self._running.pop(backend, None)
        if process is not None:
            process.end(patient=False)

    def end(self, *, patient: bool) -> None:
        """All end."""
        for backend in list(self._running):
            self._running.pop(backend).end(patient=patient)
        if self._open is not None:
            self._open.close()
            self._open = None


def key(item: pytest.Item) -> list[str]:
    """What an item is called in every process: its file, and the names below it."""
    above = (pytest.Session, pytest.Directory, pytest.File)
    return [str(item.path), *(node.name for node in item.listchain() if not isinstance(node, above))]
