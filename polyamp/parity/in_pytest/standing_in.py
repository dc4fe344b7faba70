"""Items that stand in the places of collected ones: tests that run in their framework's process, and tests whose
framework is not installed. `polyamp.parity.plugin` has them take over when all is collected.

pytest runs a stand-in as any item (`-x`, `--lf`, durations, junit, reruns), and what it reports is what the process of
the framework reported.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Final, Literal

import pytest

from polyamp.parity.in_pytest import choice
from polyamp.parity.in_pytest.processes import Heard, Processes

HERE: Final = pytest.StashKey[bool]()
"""On the config of a framework's process: its tests run where they are."""
_PLUGIN: Final = "polyamp_processes"


class StandIn(pytest.Item):
    """An item in the place of another one."""

    def __init__(self, *, instead: pytest.Item, **given: Any) -> None:
        super().__init__(**given)
        self.instead = instead
        self.own_markers = list(instead.own_markers)
        self.obj = getattr(instead, "obj", None)  # pytest evaluates a condition that is a string among its globals

    def reportinfo(self) -> Any:
        """Where the test stands."""
        return self.instead.reportinfo()


class Missing(StandIn):
    """A test whose framework is not installed, and which therefore fails."""

    def runtest(self) -> None:
        """Fail."""
        problem = self.instead.stash[choice.MISSING]
        pytest.fail(f"{problem}\n--polyamp-skip-missing makes this a skip.", pytrace=False)


class Remote(StandIn):
    """A test that runs in the process of its framework."""

    def __init__(self, *, backend: str, others: Others, **given: Any) -> None:
        super().__init__(**given)
        self.backend, self.others = backend, others
        self.heard = Heard()

    def setup(self) -> None:
        """Have the process begin the test, and wait until it is set up."""
        self.heard = Heard()
        self.others.begin(self)

    def runtest(self) -> None:
        """Wait for the test itself; fail where the process ended, in its set-up too."""
        self.others.wait(self, "call")
        if self.heard.ended:
            pytest.fail(f"the process of {self.backend} {self.heard.ended}", pytrace=False)

    def teardown(self) -> None:
        """Wait until the test's fixtures are torn down."""
        before = self.heard.ended
        self.others.wait(self, "teardown")
        if self.heard.ended and not before:
            pytest.fail(f"the process of {self.backend} {self.heard.ended}", pytrace=False)


class Others:
    """The plugin of a session whose tests run in other processes.

    Args:
        session: what is collected.
        homes: for each item of the session the backend in whose process it runs, or None.
    """

    def __init__(self, session: pytest.Session, homes: Sequence[str | None]) -> None:
        self._config = session.config
        self._distributed = hasattr(session.config, "workerinput")
        self._next: pytest.Item | None = None
        self._order: dict[str, list[Remote]] = {name: [] for name in homes if name is not None}
        self._numbers: dict[pytest.Item, int] = {}
        for number, (item, home) in enumerate(zip(session.items, homes, strict=True)):
            if home is not None and item.parent is not None:
                stand_in = Remote.from_parent(
                    item.parent, name=item.name, nodeid=_nodeid(item, home), instead=item, backend=home, others=self
                )
                session.items[number] = stand_in
                self._numbers[stand_in] = len(self._order[home])
                self._order[home].append(stand_in)
        self._processes = Processes(
            session.config, {name: [each.instead for each in items] for name, items in self._order.items()}
        )

    def begin(self, item: Remote) -> None:
        """Run an item in its process, as far as its set-up."""
        after = self._after(item)
        number = self._numbers[item]
        self._processes.run(item.backend, number, None if after is None else self._numbers[after], item.session)
        self.wait(item, "setup")

    def wait(self, item: Remote, when: Literal["setup", "call", "teardown"]) -> None:
        """Until a phase of the running item is reported, or the process ended."""
        if not item.heard.ended:
            self._processes.wait(item.backend, when, item, item.heard)

    def _after(self, item: Remote) -> Remote | None:
        """What runs next in the same process, as far as that is known: until then fixtures of modules may stay."""
        if self._distributed:  # pytest-xdist says what comes next, and may have more later
            after = self._next
            return after if isinstance(after, Remote) and after.backend == item.backend else None
        order = self._order[item.backend]
        return next(iter(order[self._numbers[item] + 1 :]), None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, nextitem: pytest.Item | None) -> Generator[None, object, object]:
        """Keep what comes next."""
        self._next = nextitem
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """The other process's report in the place of this one's."""
        report = yield
        found = item.heard.reports.get(call.when) if isinstance(item, Remote) else None
        return report if found is None else found

    def pytest_report_collectionfinish(self) -> str:
        """A line below the number of collected tests."""
        counts = [f"{name} ({len(items)})" for name, items in self._order.items()]
        return f"polyamp: a process for each of {', '.join(counts)}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """The processes end; where all went well, by themselves."""
        self._processes.end(patient=exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))

    def pytest_unconfigure(self) -> None:
        """No process stays, whatever happened."""
        self._processes.end(patient=False)


def take_over(session: pytest.Session) -> None:
    """Put stand-ins in the places of a session's items."""
    if HERE in session.config.stash or session.config.option.collectonly:
        return
    for number, item in enumerate(session.items):
        if choice.MISSING in item.stash and item.parent is not None:
            session.items[number] = Missing.from_parent(item.parent, name=item.name, nodeid=item.nodeid, instead=item)
    homes = [None if isinstance(item, Missing) else choice.home_of(item) for item in session.items]
    if len({home for home in homes if home is not None}) < 2:
        return
    if session.config.option.usepdb or session.config.option.trace:
        return  # a debugger needs the terminal: all tests run in this process, as the guide says
    session.config.pluginmanager.register(Others(session, homes), _PLUGIN)


def _nodeid(item: pytest.Item, home: str) -> str:
    """The item's own; where pytest-xdist keeps groups together, with the group, by which it does so.

    pytest-xdist 3.8 adds the group itself, in an attribute that pytest 9.1 and later do not read.
    """
    suffix = f"@{choice.group(home)}"
    marked = any(mark.args == (choice.group(home),) for mark in item.iter_markers("xdist_group"))
    add = marked and hasattr(item.config, "workerinput") and choice.grouped(item.config)
    return item.nodeid + suffix if add and not item.nodeid.endswith(suffix) else item.nodeid
