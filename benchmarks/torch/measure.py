"""What the torch benchmarks measure besides time: when a backward pass ended, what a step reads on the host, what it
allocates, in what dtype it multiplies; and the versions.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import polyamp
from benchmarks.common import results
from benchmarks.common.paired_timing import Step

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler says on stderr when it starts and stops

_READS: Final = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "Memcpy DtoH")
"""What waits for a device: `item()` and all that goes through it, results whose size depends on values, copies."""
MIB: Final = 2.0**20


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


def environment(**versions: str) -> dict[str, Any]:
    """Versions and the machine."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    ours = {"polyamp": polyamp.__version__, "torch": str(torch.__version__)}
    return {**ours, **versions, "device": device, **results.machine()}


def _profiled(step: Step, *, memory: bool = False) -> list[Any]:
    """What torch's profiler records of a step, calls of one operation by another included."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, profile_memory=memory) as found:
        step()
    events: list[Any] = found.profiler.kineto_results.events()
    return events


def host_reads(step: Step) -> int:
    """How often a step waits for a device: what it reads there, also inside of operations.

    What torch's fused optimizers read inside of their kernels for the CPU is left out: their kernels for other devices
    do not. On the CPU a copy to the host cannot be told from others, and what comes by `Tensor.numpy()` is not seen:
    neither can be done to a tensor elsewhere without a copy that is.
    """
    events = _profiled(step)
    kernels = [(event.start_ns(), event.end_ns()) for event in events if event.name().startswith("aten::_fused_")]
    reads = [event.start_ns() for event in events if event.name().startswith(_READS)]
    return sum(not any(begin <= read <= end for begin, end in kernels) for read in reads)


@contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """A block in which polyamp's step does on the CPU what it does elsewhere: by itself it reads flags on the CPU,
    where nothing waits, to spare work.

    Raises:
        RuntimeError: polyamp's torch backend has no such switch any more.
    """
    homes = [
        home
        for name, home in sys.modules.items()
        if name.startswith("polyamp_torch.") and hasattr(home, "can_read_without_sync")
    ]
    if not homes:
        raise RuntimeError(
            "no module of polyamp_torch has can_read_without_sync(), which says whether the host may read."
        )
    native = [vars(home)["can_read_without_sync"] for home in homes]
    for home in homes:
        vars(home)["can_read_without_sync"] = lambda device: False
    try:
        yield
    finally:
        for home, looks in zip(homes, native, strict=True):
            vars(home)["can_read_without_sync"] = looks


def peak(step: Step, model: nn.Module) -> float:
    """MiB that a step holds at its peak above the model and the optimizer's state: activations, gradients, temporaries.

    Every call of torch's allocator counts, those inside kernels too, but not the scratch memory that oneDNN asks of
    the C library. Gradients of the step before are let go first, so that they count as this step's.
    """
    for parameter in model.parameters():
        parameter.grad = None
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    changes = [event for event in _profiled(step, memory=True) if event.name() == "[memory]"]
    held = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most / MIB


def check_counters() -> None:
    """Refuse to measure with counters that miss a known case.

    Raises:
        RuntimeError: what was counted, and what there was.
    """
    x = torch.ones(1 << 20, device="cuda" if torch.cuda.is_available() else "cpu")
    reads = host_reads(lambda: (x.sum().item(), bool(x[0] > 0)))
    held = peak(lambda: (x + 1, torch.empty_like(x)), nn.Identity())
    if (reads, held) != (2, 8.0):
        raise RuntimeError(f"counted {reads} of 2 reads and {held} of 8.0 MiB: this torch records them otherwise.")


class _Products(TorchDispatchMode):
    """Notes the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.dtypes.append(str(args[1].dtype).removeprefix("torch."))
        return func(*args, **(kwargs or {}))


def products(step: Step) -> Counter[str]:
    """How many matrix products of a step are in which dtype."""
    with _Products() as seen:
        step()
    return Counter(seen.dtypes)
