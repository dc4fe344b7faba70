"""torch's side of `gpu`: polyamp's step and the handwritten one on one NVIDIA GPU. `rows` says what is measured.

By hand: `torch.autocast` around the forward pass, `GradScaler` in float16, fused AdamW (`loops.by_hand`). TF32 is
switched for matrix products (`torch.set_float32_matmul_precision`) and for cuDNN's convolutions, which have it on by
default. Times are the host's, from a synchronised start to the device's end of several steps.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

import polyamp
from benchmarks.common import results, workloads
from benchmarks.common.paired_timing import Step
from benchmarks.common.workloads import Workload
from benchmarks.gpu import devices, measurements, run_plan
from benchmarks.gpu.measurements import Waits
from benchmarks.torch import loops, models

_COUNTED: Final = 3
"""Steps in which waits are counted."""
_READS: Final = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
"""What waits for a device: `item()` and all that goes through it, and results whose size depends on values."""


class TorchTraining:
    """One side; see `measurements.Training`."""

    def __init__(self, step: Step, *, matmul: str, tf32: bool, batch_bytes: int, allocated_before: int) -> None:
        self._step = step
        self._matmul = matmul
        self._tf32 = tf32
        self._batch_bytes = batch_bytes
        self._allocated_before = allocated_before
        self._held: int | None = None

    def losses(self, count: int) -> list[float]:
        """The first call also tells what this side holds: nothing else is allocated since it was built."""
        self._switch()
        found = loops.losses(self._step, count)
        if self._held is None and _on_cuda():
            self._held = torch.cuda.memory_allocated() - self._allocated_before
        return found

    def run(self, count: int) -> tuple[float, float]:
        """See `measurements.Training`."""
        self._switch()
        _synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            self._step()
        free = time.perf_counter()
        _synchronize()
        return time.perf_counter() - begin, free - begin

    def peak(self) -> float | None:
        """What this side holds, and the allocator's peak during a step above what was allocated at its start."""
        if self._held is None:
            return None
        self._switch()
        _synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._step()
        _synchronize()
        return float(self._batch_bytes + self._held + torch.cuda.max_memory_allocated() - before)

    def waits(self) -> Waits | None:
        """By torch's sync debug mode and by the reading operations in a profile: the larger of the two."""
        if not _on_cuda():
            return None
        self._switch()

        def several() -> None:
            for _ in range(_COUNTED):
                self._step()

        def on_purpose() -> None:
            torch.ones((), device=models.device()).item()

        seen, blind = [], []
        for name, count in (("torch's sync debug mode", _warned), ("the profiler", _profiled)):
            if count(on_purpose) > 0:
                seen.append((name, count(several) / _COUNTED))
            else:
                blind.append(f"{name} does not see a wait made on purpose here")
        how = "; ".join([*(f"by {name} {value:g}" for name, value in seen), *blind])
        return Waits(max(value for _, value in seen) if seen else None, how)

    def _switch(self) -> None:
        torch.set_float32_matmul_precision(self._matmul)
        torch.backends.cudnn.allow_tf32 = self._tf32


def _warned(run: Callable[[], None]) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(each.message) for each in caught)


def _profiled(run: Callable[[], None]) -> int:
    """Reading operations, those inside of others too. Of the host alone: what records a device's kernels goes on
    slowing them down when the profile is over."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(each.count for each in profile.key_averages() if each.key in _READS)


class TorchEngine:
    """See `measurements.Engine`."""

    name = "torch"

    def __init__(self) -> None:
        self._batch: tuple[Workload, models.Batch] | None = None
        if _on_cuda():
            _warm_up()

    def environment(self) -> dict[str, Any]:
        """Versions and the device."""
        facts: dict[str, Any] = {"torch": str(torch.__version__), "device": "cpu"}
        if _on_cuda():
            facts |= {
                "device": torch.cuda.get_device_name(),
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
            }
        return {**facts, "polyamp": polyamp.__version__, **results.machine()}

    def memory(self) -> float | None:
        """All of the device's, as `torch.cuda.mem_get_info` says."""
        return float(torch.cuda.mem_get_info()[1]) if _on_cuda() else None

    def needs(self, workload: Workload) -> float | None:
        """The peak of a step that is run."""
        found: float | None = None
        try:
            training = self.build(workload, "float32", own=False)
            training.losses(1)
            found = training.peak()
            del training
        except torch.OutOfMemoryError:
            pass  # the tensors are still held by the error's frames here, and no longer below
        self.free()
        return found

    def build(self, workload: Workload, precision: str, *, own: bool) -> TorchTraining:
        """See `measurements.Engine`."""
        gc.collect()
        if _on_cuda():
            torch.cuda.empty_cache()
        batch = self._batch_of(workload)
        before = torch.cuda.memory_allocated() if _on_cuda() else 0
        model = _model(workload)
        dtype = "float32" if precision == "TF32" else precision
        matmul = "high" if precision == "TF32" else "highest"
        if own:
            step = loops.library(
                model,
                [batch],
                models.loss_fn,
                policy=polyamp.Policy(workloads.DTYPES[dtype], float32_matmul=matmul),  # type: ignore[arg-type]  # mypy sees str
                optimizer=polyamp.adamw(measurements.LEARNING_RATE),
                scaler=polyamp.LossScaler(init_scale=workloads.INIT_SCALE) if dtype == "float16" else None,
            )
            matmul = "highest"  # the process's, which the policy changes where it must
        else:
            step = loops.by_hand(
                model,
                [batch],
                models.loss_fn,
                torch.optim.AdamW(model.parameters(), measurements.LEARNING_RATE, fused=True),
                dtype,
                scaler=loops.native_scaler() if dtype == "float16" else None,
            )
        size = sum(each.numel() * each.element_size() for each in batch)
        return TorchTraining(step, matmul=matmul, tf32=precision == "TF32", batch_bytes=size, allocated_before=before)

    def out_of_memory(self, error: BaseException) -> bool:
        """See `measurements.Engine`."""
        return isinstance(error, torch.OutOfMemoryError)

    def free(self) -> None:
        """See `measurements.Engine`."""
        self._batch = None
        gc.collect()
        if _on_cuda():
            torch.cuda.empty_cache()

    def _batch_of(self, workload: Workload) -> models.Batch:
        if self._batch is None or self._batch[0] != workload:
            self._batch = None  # before the next is allocated
            self._batch = (workload, models.batch(workload))
        return self._batch[1]


def _model(workload: Workload) -> nn.Module:
    """`models.build`; of "block" a stack of causal blocks, which `scaled_dot_product_attention` serves."""
    if workload.name == "block":
        torch.manual_seed(0)
        blocks = [models.CausalBlock(workload.width, workload.heads) for _ in range(workload.layers)]
        model: nn.Module = nn.Sequential(*blocks).to(models.device())
    else:
        model = models.build(workload)
    if workload.name in ("block", "gpt"):
        tables = (workload.vocabulary + workload.length) * workload.width if workload.name == "gpt" else 0
        assert sum(p.numel() for p in model.parameters()) == devices.parameters(workload) + tables
    return model


def _on_cuda() -> bool:
    return models.device().type == "cuda"


def _synchronize() -> None:
    if _on_cuda():
        torch.cuda.synchronize()


def _warm_up() -> None:
    """Make cuBLAS's workspaces, which stay allocated, of both threads that multiply, before memory is compared."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer = nn.Linear(256, 256, device="cuda", dtype=dtype)
        layer(torch.ones(256, 256, device="cuda", dtype=dtype)).sum().backward()
    torch.cuda.synchronize()


def open_engine(rehearse: bool) -> TorchEngine | str:
    """The engine, or why there is none."""
    if rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA is not initialised yet
        torch.set_num_threads(1)  # sizes are too small for more
    elif torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA: install one by the selector on pytorch.org"
    elif not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no device: is the driver older than CUDA {torch.version.cuda}?"
    return TorchEngine()


if __name__ == "__main__":
    sys.exit(run_plan.main(__doc__, __file__, open_engine))
