"""What every test of the adapters needs: settings that another library keeps for the whole process are set back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
