"""The findings of all workers, made once for all tests of pairs."""

from __future__ import annotations

import pytest

from tests.porting.workers import Findings, work


@pytest.fixture(scope="session")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """What every library's layers and models became in every other."""
    return work(tmp_path_factory.mktemp("porting"))
