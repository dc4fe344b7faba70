"""pytest plugin with the options and fixtures of the conformance suite.

`pytest --pyargs polyamp.conformance --polyamp-backend=NAME` runs it on any registered backend, or with LIBRARY-NAME on
its models of another library (`subjects`). The file given by `--polyamp-deviations` lists rules that a backend does not
follow yet. It is strict: a listed test that starts passing fails the run.
"""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from polyamp.conformance.subjects import Subject
    from polyamp.contract.backend import Backend
    from polyamp.contract.harness import Harness

SUITE = "polyamp.conformance"


class Deviation(NamedTuple):
    """Rule that a backend does not follow yet.

    Attributes:
        backend: the name given by `--polyamp-backend`.
        rule: start of the test's name after `test_`, with its parameter if it matters: "s04", "s09_replicas",
            "s03_inner_dtype[autocast-".
        reason: why, in one sentence.
    """

    backend: str
    rule: str
    reason: str


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("polyamp")
    group.addoption("--polyamp-backend", metavar="NAME", help="backend, or library-backend, that the suite runs on")
    group.addoption(
        "--polyamp-deviations", metavar="FILE", help="Python file with DEVIATIONS, a list of (backend, rule, reason)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suite = [item for item in items if getattr(getattr(item, "module", None), "__name__", "").startswith(SUITE)]
    if not suite:
        return
    name = config.getoption("--polyamp-backend")
    if not name:
        raise pytest.UsageError("the conformance suite needs --polyamp-backend=NAME, a name from polyamp.backends()")
    for deviation in _deviations(config, name):
        matching = [item for item in suite if item.name.startswith(f"test_{deviation.rule}")]
        if not matching:
            raise pytest.UsageError(f"{deviation} names no test of the suite")
        for item in matching:
            item.add_marker(pytest.mark.xfail(strict=True, reason=deviation.reason))


def _deviations(config: pytest.Config, backend: str) -> list[Deviation]:
    path = config.getoption("--polyamp-deviations")
    if not path:
        return []
    rows = [Deviation(*row) for row in runpy.run_path(path)["DEVIATIONS"]]
    return [row for row in rows if row.backend == backend]


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Subject:
    """Return the backend under test with its models; a missing framework is a failure, not a skip."""
    from polyamp.conformance.subjects import find_subject

    return find_subject(request.config.getoption("--polyamp-backend"))


@pytest.fixture(scope="session")
def backend(subject: Subject) -> Backend:
    """Return the backend under test."""
    return subject.backend


@pytest.fixture(scope="session")
def harness(subject: Subject) -> Harness:
    """Return the harness of the models under test."""
    return subject.harness
