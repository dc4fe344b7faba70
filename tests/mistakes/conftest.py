"""`--framework NAME`: which framework the mistakes are made in."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--framework", choices=["torch", "tensorflow", "jax"], required=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each row as a test of its own, under the code that is typed."""
    if "row" in metafunc.fixturenames:
        from tests.mistakes.table import of

        rows = of(metafunc.config.getoption("--framework"))
        metafunc.parametrize("row", rows, ids=[row.typed for row in rows])
