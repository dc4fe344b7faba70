"""What `torch_step` needs of torch to measure with `paired`: when a backward pass ended, and the versions."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paired
import torch


@contextmanager
def backward_clock() -> Iterator[list[float]]:
    """When the last backward pass ended: both sides come through `torch.autograd.backward`."""
    finished = [0.0]
    native = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        native(*args, **kwargs)
        finished[0] = time.perf_counter()

    torch.autograd.backward = backward
    try:
        yield finished
    finally:
        torch.autograd.backward = native


def environment() -> dict[str, Any]:
    """Versions and the machine."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"torch": str(torch.__version__), "device": device, **paired.machine()}
