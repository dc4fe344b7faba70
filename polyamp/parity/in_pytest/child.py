"""What runs in a framework's process: the session's own pytest with the session's arguments, which collects the files
of its tests, runs one when it is told to, and tells in lines of JSON what it reported. `processes` starts it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Generator, Mapping
from typing import Any, Final

import pytest

from polyamp.parity.in_pytest.processes import key
from polyamp.parity.in_pytest.standing_in import HERE
from polyamp.workers import Channel, claimed

NEUTRAL: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("keyword", "markexpr"), ""),
    **dict.fromkeys(("lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "stepwise_reset"), False),
    **dict.fromkeys(("usepdb", "trace", "setupshow", "cacheclear", "pyargs", "distload", "looponfail"), False),
    **dict.fromkeys(("deselect", "durations", "xmlpath", "numprocesses", "maxprocesses", "cacheshow"), None),
    "maxfail": 0,
    "dist": "no",
    "tx": [],
}
"""Options that are the session's business: which tests run, when it stops, what is written of it."""


class Child:
    """The plugin that obeys.

    Args:
        order: what to collect, and where.
        channel: has commands, a line of JSON each, `{"run": number, "after": number or None, "left": failures that
            are allowed}`, and takes messages.
    """

    def __init__(self, order: Mapping[str, Any], channel: Channel) -> None:
        self._order, (self._commands, self._lines) = order, channel
        self._items: list[pytest.Item | None] = []
        self._errors: list[str] = []

    def _tell(self, **message: Any) -> None:
        self._lines.write(json.dumps(message, default=str) + "\n")
        self._lines.flush()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, object, object]:
        """The session's arguments, less what is the session's business, and this process's files."""
        config.stash[HERE] = True
        for name, value in NEUTRAL.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        config.option.basetemp = self._order["basetemp"]
        config.args[:] = dict.fromkeys(path for path, *_ in self._order["items"])
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """The session has the terminal."""
        if config.pluginmanager.hasplugin("terminalreporter"):
            config.pluginmanager.unregister(name="terminalreporter")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what cannot be collected here."""
        if report.failed:
            self._errors.append(report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """This process's tests, in the session's order."""
        found = {tuple(key(item)): item for item in items}
        self._items = [found.get(tuple(each)) for each in self._order["items"]]
        items[:] = [item for item in self._items if item is not None]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Obey."""
        for line in self._commands:
            command = json.loads(line)
            item = self._items[command["run"]] if command["run"] < len(self._items) else None
            if item is None:
                because = "\n".join(self._errors) or (
                    "It collects no test of this name: names must be the same in every process."
                )
                self._tell(failed=f"cannot run this test. {because}")
                return True
            after = None if command["after"] is None else self._items[command["after"]]
            session.testsfailed = 0
            session.config.option.maxfail = command["left"]
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            self._tell(done=True, stop=str(session.shouldstop or ""))
            if session.shouldstop or session.shouldfail:
                break
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell."""
        config = self._config
        self._tell(report=config.hook.pytest_report_to_serializable(config=config, report=report))

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep the config."""
        self._config = session.config

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Tell of a test's warning; the session has its own of the collection."""
        if when == "runtest":
            category = warning_message.category
            self._tell(
                warning={
                    "text": str(warning_message.message),
                    "module": category.__module__,
                    "category": category.__qualname__,
                    "filename": warning_message.filename,
                    "lineno": warning_message.lineno,
                }
            )

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """A test that ends the session."""
        error = excinfo.value
        self._tell(exit=[str(error.msg), error.returncode] if isinstance(error, pytest.exit.Exception) else None)


def main() -> int:
    """Read the order, and obey."""
    channel = claimed()
    order = json.loads(channel.commands.readline())
    os.chdir(order["dir"])
    sys.path[:] = order["path"]
    return int(pytest.main(order["args"], plugins=[Child(order, channel)]))


if __name__ == "__main__":
    sys.exit(main())
