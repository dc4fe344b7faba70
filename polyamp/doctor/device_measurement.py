"""Measurement of one device through a backend's probe: each operation in each dtype, and how products accumulate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from polyamp.doctor.device_capabilities import Capabilities
from polyamp.doctor.fastest_times import TimingLimits, fastest_times
from polyamp.doctor.measurements import (
    BASELINE,
    FORMATS_MEASURED,
    OPERATIONS,
    DtypeMeasurement,
    Operation,
    OperationTimes,
)
from polyamp.doctor.probe import CapabilityProbe, HostArray, OperationPrograms, ProbeDevice
from polyamp.doctor.problems import (
    ACCELERATOR_SIZES,
    CPU_SIZES,
    AccumulationProblem,
    ProblemSizes,
    accumulation_problem,
    relative_error,
)
from polyamp.doctor.recommendation import recommend
from polyamp.doctor.verdicts import judge

OnProgress = Callable[[int, int], None]
"""`on_progress(done, total)`, after each part of a measurement."""
_CPU_LIMITS: Final = TimingLimits(sample=0.001, budget=0.15)
_ACCELERATOR_LIMITS: Final = TimingLimits(sample=0.01, budget=0.3)
_SLOW: Final = 0.3
"""Seconds of the accumulation problem from which on a dtype may be too slow to be measured further."""
_SLOW_FACTOR: Final = 20.0
"""Multiple of float32's time from which on it is; compilation, which is a part of both, is within this factor."""
_LONGEST: Final = {True: 10.0, False: 26.0}
"""Whether a device is a CPU -> seconds after which no convolution and no attention is begun on it: a GPU's compiler
tries many kernels for each."""
_LONGEST_PROBLEM: Final = 160
"""Characters of a framework's message that are kept."""


def measure(
    probe: CapabilityProbe,
    device: ProbeDevice,
    *,
    backend: str,
    version: str,
    on_progress: OnProgress | None = None,
    sizes: ProblemSizes | None = None,
    limits: TimingLimits | None = None,
    longest: float | None = None,
) -> Capabilities:
    """Measure every dtype on a device and judge it.

    Args:
        probe: the backend's.
        device: one of its devices.
        backend: the backend's name.
        version: the framework's version.
        on_progress: called after each part.
        sizes: of the operations; None for those of the kind of device.
        limits: of the times; None for those of the kind of device.
        longest: seconds after which nothing but products is begun (of processor time on a CPU); None for that of the
            kind of device. What is left out is named.
    """
    on_cpu = device.kind == "cpu"
    sizes = sizes or (CPU_SIZES if on_cpu else ACCELERATOR_SIZES)
    limits = limits or (_CPU_LIMITS if on_cpu else _ACCELERATOR_LIMITS)
    began = time.perf_counter()
    longest = _LONGEST[on_cpu] if longest is None else longest
    run = _DeviceRun(probe, device, sizes, limits, on_progress or _ignore_progress, longest)
    dtypes = judge(run.measurements())
    return Capabilities(
        backend=backend,
        version=version,
        device=device.name,
        device_label=device.label,
        dtypes=dtypes,
        recommendation=recommend(dtypes, probe.tf32_switch),
        traps=[trap for trap in probe.traps if trap.holds_for(version, device.kind)],
        seconds=time.perf_counter() - began,
    )


class _DeviceRun:
    """The measurement of one device in progress."""

    def __init__(
        self,
        probe: CapabilityProbe,
        device: ProbeDevice,
        sizes: ProblemSizes,
        limits: TimingLimits,
        on_progress: OnProgress,
        longest: float,
    ) -> None:
        self._probe, self._device, self._sizes, self._limits = probe, device, sizes, limits
        self._on_progress, self._done = on_progress, 0
        self._clock = time.process_time if device.kind == "cpu" else time.perf_counter
        self._longest, self._end = longest, self._clock() + longest
        self._dtypes = [name for name in FORMATS_MEASURED if name in probe.dtypes()]

    def measurements(self) -> dict[str, DtypeMeasurement]:
        found = {dtype: DtypeMeasurement(exists=dtype in self._dtypes) for dtype in FORMATS_MEASURED}
        found |= self._accumulations()
        fast = [dtype for dtype in self._dtypes if found[dtype].slowdown is None]
        narrow = [dtype for dtype in fast if FORMATS_MEASURED[dtype].bits < 16]
        wide = [dtype for dtype in fast if dtype not in narrow]
        times = {"matmul": self._times("matmul", fast)}
        others = [operation for operation in OPERATIONS if operation != "matmul"]
        for operation in others:
            times[operation] = self._times(operation, wide)
        for operation in others:  # last, for 8 bits are for products
            times[operation] |= self._times(operation, narrow)
        for dtype in fast:
            operations = {operation: times[operation][dtype] for operation in OPERATIONS}
            found[dtype] = msgspec.structs.replace(found[dtype], operations=operations)
        return found

    def _accumulations(self) -> dict[str, DtypeMeasurement]:
        """Return the errors of a product in each dtype that exists, and the slowdown of those that are too slow."""
        found = {}
        base = 0.0
        for dtype in [BASELINE, *self._dtypes]:  # the first product starts the device, and its time does not count
            problem = accumulation_problem(dtype)
            product, seconds = self._product(dtype, problem)
            if self._is_slow(seconds, base):  # or its first run loads or tunes kernels
                product, seconds = self._product(dtype, problem)
            base = seconds if dtype == BASELINE else base
            found[dtype] = DtypeMeasurement(
                exists=True,
                accumulation_error=None if product is None else relative_error(product, problem.exact),
                rounding_error=problem.rounding_error,
                slowdown=seconds / base if product is not None and self._is_slow(seconds, base) else None,
            )
            self._advance()
        return found

    def _product(self, dtype: str, problem: AccumulationProblem) -> tuple[HostArray | None, float]:
        """Return the product, None if it does not run, and its seconds."""
        began = self._clock()
        try:
            product = self._probe.product(dtype, self._device.name, problem.a, problem.b)
        except Exception:  # noqa: BLE001  # the same product fails again where times are measured, with a message
            product = None
        return product, self._clock() - began

    @staticmethod
    def _is_slow(seconds: float, base: float) -> bool:
        return base > 0.0 and seconds > max(_SLOW, _SLOW_FACTOR * base)

    def _times(self, operation: Operation, dtypes: Sequence[str]) -> dict[str, OperationTimes]:
        """Return the times of an operation in these dtypes."""
        inputs = self._sizes.inputs(operation)
        forward: dict[str, Callable[[int], None]] = {}
        backward: dict[str, Callable[[int], None]] = {}
        problems: dict[str, str] = {}
        left_out = set()
        for dtype in dtypes:
            if operation != "matmul" and self._clock() > self._end:
                problems[dtype] = f"not measured: the {self._longest:g} s for this device were over"
                left_out.add(dtype)
                self._advance()
                continue
            try:
                programs = self._probe.programs(operation, dtype, self._device.name, inputs)
                self._first_runs(dtype, programs, forward, backward)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is what the table says of the dtype
                problems[dtype] = problem_text(error)
            self._advance()
        forward_times = fastest_times(forward, self._limits, self._clock)
        self._advance()
        backward_times = fastest_times(backward, self._limits, self._clock)
        self._advance()
        return {
            dtype: OperationTimes(
                forward=forward_times.get(dtype),
                forward_backward=backward_times.get(dtype),
                problem=problems.get(dtype),
                left_out=dtype in left_out,
            )
            for dtype in dtypes
        }

    @staticmethod
    def _first_runs(
        dtype: str,
        programs: OperationPrograms,
        forward: dict[str, Callable[[int], None]],
        backward: dict[str, Callable[[int], None]],
    ) -> None:
        """Run both programs once, which compiles them; keep those that run."""
        programs.forward(1)
        forward[dtype] = programs.forward
        programs.forward_backward(1)
        backward[dtype] = programs.forward_backward

    def _advance(self) -> None:
        self._done += 1
        parts = len(self._dtypes)
        self._on_progress(self._done, 1 + parts + len(OPERATIONS) * (parts + 2) + 4)  # a part less for each slow dtype


def _ignore_progress(done: int, total: int) -> None:
    """Ignore progress."""


def problem_text(error: Exception) -> str:
    """Return the first line of an error's message, after its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = f"{type(error).__name__}: {lines[0]}"
    return text if len(text) <= _LONGEST_PROBLEM else text[: _LONGEST_PROBLEM - 3] + "..."
