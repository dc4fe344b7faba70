"""pytest plugin for users: the `backends` marker, and the fixtures `polyamp_backend` and `assert_parity`.

pytest loads it in every session of an environment that has polyamp installed (entry point `polyamp`; disable it with
`-p no:polyamp`), so only pytest is imported here. The rest is in `polyamp.parity.in_pytest`.

    @pytest.mark.backends("torch", "jax")
    def test_shapes(polyamp_backend):              # runs twice, each in a separate process
        model = {"torch": torch_net, "jax": jax_net}[polyamp_backend]()

    @pytest.mark.backends("torch", "jax")
    def test_trains_alike(assert_parity):
        assert_parity(build={"torch": torch_net, "jax": jax_net}, data=batch, loss_fn=loss_fn, recipe=recipe, steps=3)

Options, each with an ini setting of the same name in underscores:

- `--polyamp-backends=torch,jax`: of the marked backends, run only these.
- `--polyamp-skip-missing`: skip tests of a framework that is not installed, instead of failing them.
- `--polyamp-report-dir=DIR`: folder for reports of failed assertions; default: the test's `tmp_path`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from polyamp.parity.in_pytest.assert_parity import AssertParity
    from polyamp.parity.in_pytest.backend_selection import BackendChoice


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
        from polyamp.parity.in_pytest import backend_selection

        backend_selection.selection(config)  # an unknown name is an error whatever is collected


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "polyamp_backend" in metafunc.fixturenames:
        from polyamp.parity.in_pytest import backend_selection

        try:
            names = backend_selection.backend_names(metafunc.definition, fixture=True)
        except pytest.UsageError as error:
            raise pytest.Collector.CollectError(str(error)) from None  # the sentence alone, without this plugin's lines
        metafunc.parametrize("polyamp_backend", names, ids=names, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("backends") or "polyamp_backend" in _fixture_names(item) for item in items):
        from polyamp.parity.in_pytest import backend_selection

        backend_selection.select_items(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if any(item.get_closest_marker("backends") or "polyamp_backend" in _fixture_names(item) for item in session.items):
        from polyamp.parity.in_pytest import remote_items

        remote_items.replace_items(session)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist hook: pass the command-line arguments to a worker, which needs them to start further processes."""
    node.workerinput["polyamp_args"] = [str(each) for each in node.config.invocation_params.args]


def _fixture_names(item: pytest.Item) -> Any:
    return getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def polyamp_backend(request: pytest.FixtureRequest) -> BackendChoice:
    """Name of a backend of the marker `backends`: a str, with the `Backend` object as `.backend`."""
    from polyamp.parity.in_pytest import backend_selection

    return backend_selection.backend_choice(request)


@pytest.fixture
def assert_parity(request: pytest.FixtureRequest) -> AssertParity:
    """Assertion that two trainings agree: `polyamp.parity.run` of `build=`, or `polyamp.compare` of two models."""
    from polyamp.parity.in_pytest.assert_parity import AssertParity

    return AssertParity(request)
