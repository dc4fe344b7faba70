"""The pytest plugin for users: a test's backends, and assertions that two trainings are the same.

pytest loads it in every session of an environment that has polyamp (entry point `polyamp`; `-p no:polyamp` leaves it
out), so only pytest is imported here; what a session that uses it needs is in `polyamp.parity.in_pytest`.

    @pytest.mark.backends("torch", "jax")
    def test_shapes(polyamp_backend):              # twice, each in a process of its own
        model = {"torch": torch_net, "jax": jax_net}[polyamp_backend]()

    @pytest.mark.backends("torch", "jax")
    def test_trains_alike(assert_parity):
        assert_parity(build={"torch": torch_net, "jax": jax_net}, data=batch, loss_fn=loss_fn, recipe=recipe, steps=3)

Options, each with an ini setting of the same name in underscores: `--polyamp-backends=torch,jax` (of the backends that
tests are marked with, these), `--polyamp-skip-missing` (a framework that is not installed is a skip and no failure),
`--polyamp-report-dir=DIR` (where reports of failed assertions go; else into the test's `tmp_path`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from polyamp.parity.in_pytest.asserting import AssertParity
    from polyamp.parity.in_pytest.choice import Named


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("polyamp", "polyamp: tests in several frameworks")
    group.addoption(
        "--polyamp-backends",
        action="append",
        metavar="NAMES",
        help="of the backends that tests are marked with, run these: torch,jax (default: all)",
    )
    group.addoption(
        "--polyamp-skip-missing",
        action="store_true",
        default=None,
        help="skip tests of a framework that is not installed, instead of failing them",
    )
    group.addoption(
        "--polyamp-report-dir", metavar="DIR", help="folder for the reports of failed assert_parity (default: tmp_path)"
    )
    parser.addini("polyamp_backends", "the same as --polyamp-backends, which goes before", type="args", default=[])
    parser.addini("polyamp_skip_missing", "the same as --polyamp-skip-missing", type="bool", default=False)
    parser.addini("polyamp_report_dir", "the same as --polyamp-report-dir, from the ini file's folder", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "backends(*names): the polyamp backends that a test is for. With the fixture polyamp_backend it runs once for "
        "each; with one name alone it runs in that framework's process.",
    )
    if config.getoption("polyamp_backends"):
        from polyamp.parity.in_pytest import choice

        choice.selection(config)  # a name that is none is an error whatever is collected


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "polyamp_backend" in metafunc.fixturenames:
        from polyamp.parity.in_pytest import choice

        names = choice.names_of(metafunc.definition, fixture=True)
        metafunc.parametrize("polyamp_backend", names, ids=names, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("backends") or "polyamp_backend" in _fixtures(item) for item in items):
        from polyamp.parity.in_pytest import choice

        choice.choose(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if any(item.get_closest_marker("backends") or "polyamp_backend" in _fixtures(item) for item in session.items):
        from polyamp.parity.in_pytest import standing_in

        standing_in.take_over(session)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist's: a worker is told the arguments, which it needs for further processes, and has not."""
    node.workerinput["polyamp_args"] = [str(each) for each in node.config.invocation_params.args]


def _fixtures(item: pytest.Item) -> Any:
    return getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def polyamp_backend(request: pytest.FixtureRequest) -> Named:
    """The name of a backend of the marker `backends`: a str, with the `Backend` object as `.backend`."""
    from polyamp.parity.in_pytest import choice

    return choice.named(request)


@pytest.fixture
def assert_parity(request: pytest.FixtureRequest) -> AssertParity:
    """Asserts that two trainings are the same: `polyamp.parity.run` of `build=`, or `polyamp.compare` of two models."""
    from polyamp.parity.in_pytest.asserting import AssertParity

    return AssertParity(request)
