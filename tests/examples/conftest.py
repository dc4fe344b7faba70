"""`--framework NAME`: which framework the examples run in."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--framework", choices=["torch", "tensorflow", "jax"], required=True)


@pytest.fixture
def framework(request: pytest.FixtureRequest) -> str:
    """The framework asked for."""
    name: str = request.config.getoption("--framework")
    return name
