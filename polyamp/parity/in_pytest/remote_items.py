"""Proxy items: tests that run in their framework's process, and tests whose framework is not installed.

They replace the collected items after collection. pytest runs a proxy as any item (`-x`, `--lf`, durations, junit,
reruns); its reports are those of the framework's process.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Final, Literal

import pytest

from polyamp.parity.in_pytest import backend_selection
from polyamp.parity.in_pytest.framework_processes import FrameworkProcesses, RemoteTestResult

IN_CHILD_KEY: Final = pytest.StashKey[bool]()
"""Stash key of the config of a framework's process: its tests are not replaced."""
_PLUGIN_NAME: Final = "polyamp_processes"


class ProxyItem(pytest.Item):
    """Item that replaces another one."""

    def __init__(self, *, original: pytest.Item, **given: Any) -> None:
        super().__init__(**given)
        self.original = original
        self.own_markers = list(original.own_markers)
        self.obj = getattr(original, "obj", None)  # pytest evaluates string conditions in its globals

    def reportinfo(self) -> Any:
        """Return the location of the test."""
        return self.original.reportinfo()


class MissingBackendItem(ProxyItem):
    """Test that fails because its framework is not installed."""

    def runtest(self) -> None:
        """Fail with the installation message."""
        problem = self.original.stash[backend_selection.MISSING_KEY]
        pytest.fail(f"{problem}\n--polyamp-skip-missing makes this a skip.", pytrace=False)


class RemoteItem(ProxyItem):
    """Test that runs in the process of its framework."""

    def __init__(self, *, backend: str, plugin: RemoteSessionPlugin, **given: Any) -> None:
        super().__init__(**given)
        self.backend, self.plugin = backend, plugin
        self.remote_result = RemoteTestResult()

    def setup(self) -> None:
        """Start the test in its process, and wait until it is set up."""
        self.remote_result = RemoteTestResult()
        self.plugin.begin(self)

    def runtest(self) -> None:
        """Wait for the test's call; fail if the process ended, also during set-up."""
        self.plugin.wait(self, "call")
        if self.remote_result.ended:
            pytest.fail(f"the process of {self.backend} {self.remote_result.ended}", pytrace=False)

    def teardown(self) -> None:
        """Wait until the test's fixtures are torn down."""
        before = self.remote_result.ended
        self.plugin.wait(self, "teardown")
        if self.remote_result.ended and not before:
            pytest.fail(f"the process of {self.backend} {self.remote_result.ended}", pytrace=False)


class RemoteSessionPlugin:
    """Plugin of a session with tests in other processes.

    Args:
        session: the session, after collection.
        homes: for each item of the session the backend in whose process it runs, or None.
    """

    def __init__(self, session: pytest.Session, backends: Sequence[str | None]) -> None:
        self._config = session.config
        self._distributed = hasattr(session.config, "workerinput")
        self._next: pytest.Item | None = None
        self._order: dict[str, list[RemoteItem]] = {name: [] for name in backends if name is not None}
        self._numbers: dict[pytest.Item, int] = {}
        for number, (item, backend) in enumerate(zip(session.items, backends, strict=True)):
            if backend is not None and item.parent is not None:
                proxy = RemoteItem.from_parent(
                    item.parent,
                    name=item.name,
                    nodeid=_remote_nodeid(item, backend),
                    original=item,
                    backend=backend,
                    plugin=self,
                )
                session.items[number] = proxy
                self._numbers[proxy] = len(self._order[backend])
                self._order[backend].append(proxy)
        self._processes = FrameworkProcesses(
            session.config, {name: [each.original for each in items] for name, items in self._order.items()}
        )

    def begin(self, item: RemoteItem) -> None:
        """Start an item in its process and wait for its set-up."""
        after = self._next_remote_item(item)
        number = self._numbers[item]
        self._processes.run(item.backend, number, None if after is None else self._numbers[after], item.session)
        self.wait(item, "setup")

    def wait(self, item: RemoteItem, when: Literal["setup", "call", "teardown"]) -> None:
        """Wait until a phase of the running item is reported, or the process has ended."""
        if not item.remote_result.ended:
            self._processes.wait(item.backend, when, item, item.remote_result)

    def _next_remote_item(self, item: RemoteItem) -> RemoteItem | None:
        """Return the next known item of the same process: fixtures that it shares stay set up."""
        if self._distributed:  # pytest-xdist determines the next item, and may add more later
            after = self._next
            return after if isinstance(after, RemoteItem) and after.backend == item.backend else None
        order = self._order[item.backend]
        return next(iter(order[self._numbers[item] + 1 :]), None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, nextitem: pytest.Item | None) -> Generator[None, object, object]:
        """Record the next item."""
        self._next = nextitem
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Replace this process's report by that of the other process."""
        report = yield
        found = item.remote_result.reports.get(call.when) if isinstance(item, RemoteItem) else None
        return report if found is None else found

    def pytest_report_collectionfinish(self) -> str:
        """Return a line that pytest prints below the number of collected tests."""
        counts = [f"{name} ({len(items)})" for name, items in self._order.items()]
        return f"polyamp: a process for each of {', '.join(counts)}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """End the processes, patiently if all went well."""
        self._processes.end(patient=exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))

    def pytest_unconfigure(self) -> None:
        """End all remaining processes."""
        self._processes.end(patient=False)


def replace_items(session: pytest.Session) -> None:
    """Replace a session's items by proxies."""
    if IN_CHILD_KEY in session.config.stash or session.config.option.collectonly:
        return
    for number, item in enumerate(session.items):
        if backend_selection.MISSING_KEY in item.stash and item.parent is not None:
            session.items[number] = MissingBackendItem.from_parent(
                item.parent, name=item.name, nodeid=item.nodeid, original=item
            )
    backends = [
        None if isinstance(item, MissingBackendItem) else backend_selection.process_backend(item)
        for item in session.items
    ]
    if len({backend for backend in backends if backend is not None}) < 2:
        return
    if session.config.option.usepdb or session.config.option.trace:
        return  # a debugger needs the terminal: all tests run in this process, as documented in the guide
    session.config.pluginmanager.register(RemoteSessionPlugin(session, backends), _PLUGIN_NAME)


def _remote_nodeid(item: pytest.Item, backend: str) -> str:
    """Return an item's node ID, with its group where pytest-xdist keeps groups together.

    pytest-xdist 3.8 adds the group itself, in an attribute that pytest 9.1 and later do not read.
    """
    suffix = f"@{backend_selection.xdist_group_name(backend)}"
    marked = any(
        mark.args == (backend_selection.xdist_group_name(backend),) for mark in item.iter_markers("xdist_group")
    )
    add = marked and hasattr(item.config, "workerinput") and backend_selection.has_xdist_groups(item.config)
    return item.nodeid + suffix if add and not item.nodeid.endswith(suffix) else item.nodeid
