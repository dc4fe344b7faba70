"""pytest session in a framework's process.

It has the parent session's arguments, collects the files of its tests, runs each test on command, and sends the reports
as lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Generator, Mapping
from typing import Any, Final

import pytest

from polyamp.parity.in_pytest.framework_processes import item_key
from polyamp.parity.in_pytest.remote_items import IN_CHILD_KEY
from polyamp.worker_processes import WorkerChannel, claim_stdio

NEUTRAL_OPTIONS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("keyword", "markexpr"), ""),
    **dict.fromkeys(("lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "stepwise_reset"), False),
    **dict.fromkeys(("usepdb", "trace", "setupshow", "cacheclear", "pyargs", "distload", "looponfail"), False),
    **dict.fromkeys(("deselect", "durations", "xmlpath", "numprocesses", "maxprocesses", "cacheshow"), None),
    "maxfail": 0,
    "dist": "no",
    "tx": [],
}
"""Values for options that only the parent session applies: test selection, stopping, and output."""


class ChildSessionPlugin:
    """Plugin that runs tests on command of the parent session.

    Args:
        order: tests to collect, and their folder.
        channel: source of commands, a line of JSON each, `{"run": number, "after": number or None, "left": failures
            that are allowed}`, and destination of messages.
    """

    def __init__(self, order: Mapping[str, Any], channel: WorkerChannel) -> None:
        self._order, (self._commands, self._lines) = order, channel
        self._items: list[pytest.Item | None] = []
        self._errors: list[str] = []

    def _send(self, **message: Any) -> None:
        self._lines.write(json.dumps(message, default=str) + "\n")
        self._lines.flush()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, object, object]:
        """Reset options that only the parent session applies, and select this process's files."""
        config.stash[IN_CHILD_KEY] = True
        for name, value in NEUTRAL_OPTIONS.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        config.option.basetemp = self._order["basetemp"]
        config.args[:] = dict.fromkeys(path for path, *_ in self._order["items"])
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Disable terminal output, which belongs to the parent session."""
        if config.pluginmanager.hasplugin("terminalreporter"):
            config.pluginmanager.unregister(name="terminalreporter")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record collection errors."""
        if report.failed:
            self._errors.append(report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Select this process's tests, in the parent session's order."""
        found = {tuple(item_key(item)): item for item in items}
        self._items = [found.get(tuple(each)) for each in self._order["items"]]
        items[:] = [item for item in self._items if item is not None]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run tests on command until the end of the input."""
        for line in self._commands:
            command = json.loads(line)
            item = self._items[command["run"]] if command["run"] < len(self._items) else None
            if item is None:
                because = "\n".join(self._errors) or (
                    "It collects no test of this name: names must be the same in every process."
                )
                self._send(failed=f"cannot run this test. {because}")
                return True
            after = None if command["after"] is None else self._items[command["after"]]
            session.testsfailed = 0
            session.config.option.maxfail = command["left"]
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            self._send(done=True, stop=str(session.shouldstop or ""))
            if session.shouldstop or session.shouldfail:
                break
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a test's report."""
        config = self._config
        self._send(report=config.hook.pytest_report_to_serializable(config=config, report=report))

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Store the config."""
        self._config = session.config

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Send a test's warning; the parent session has those of the collection itself."""
        if when == "runtest":
            category = warning_message.category
            self._send(
                warning={
                    "text": str(warning_message.message),
                    "module": category.__module__,
                    "category": category.__qualname__,
                    "filename": warning_message.filename,
                    "lineno": warning_message.lineno,
                }
            )

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Report that a test ends the session."""
        error = excinfo.value
        self._send(exit=[str(error.msg), error.returncode] if isinstance(error, pytest.exit.Exception) else None)


def main() -> int:
    """Read the order and run the session."""
    channel = claim_stdio()
    order = json.loads(channel.commands.readline())
    os.chdir(order["dir"])
    sys.path[:] = order["path"]
    return int(pytest.main(order["args"], plugins=[ChildSessionPlugin(order, channel)]))


if __name__ == "__main__":
    sys.exit(main())
