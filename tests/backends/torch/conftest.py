"""Fixtures of the torch tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from polyamp_torch.own_loop import native_scaler
from polyamp_torch.own_loop.torch_only import scaler_state


@pytest.fixture(params=["reading is free", "reading waits"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """`GradScaler` as on the CPU, and on the path that accelerators take, which reads nothing that need not be read."""
    if request.param == "reading waits":
        monkeypatch.setattr(native_scaler, "can_read_without_sync", lambda device: False)
        monkeypatch.setattr(scaler_state, "can_read_without_sync", lambda device: False)
    return str(request.param)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where whoever started the tests has it ignored, as a shell's `&` does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
