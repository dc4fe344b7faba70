"""What `torch_side` and `jax_side` measure: sizes, checks, rounds, and the rows that they become.

No framework is imported here: each gives an `Engine`, which builds a `Training` for every side. `course` goes through
the workloads.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

import polyamp
from benchmarks.common import paired_timing, workloads
from benchmarks.common.results import Entry, Side
from benchmarks.common.workloads import Workload
from benchmarks.gpu import devices

BLOCKS: Final = Workload("block", batch=0, width=768, layers=12, heads=12, length=1024)
GPT: Final = Workload("gpt", batch=0, width=768, layers=12, heads=12, length=1024, vocabulary=50304)
RESNET: Final = Workload("resnet", batch=512, width=64, layers=2, length=32, vocabulary=10)
TITLES: Final = {"block": "GPT-2 small's blocks", "gpt": "GPT-2 small", "mlp": "mlp", "resnet": "resnet"}
PRECISIONS: Final = ("float32", "bfloat16", "float16", "TF32")
"""float32 is without TF32, and first: the others are held against it."""
NARROW: Final = ("bfloat16", "float16")
TOLERANCE: Final = {"float32": 1e-4, "TF32": 4e-3, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest relative distance of a side's first losses from those of the handwritten float32 step."""
LEARNING_RATE: Final = 1e-4
SPEED_UP, MEMORY, OVERHEAD = 3.0, 0.65, 1.02
"""Targets, for `BLOCKS`: float32 over 16 bits in time, 16 bits over float32 in memory, polyamp over by hand."""

MIB: Final = 2.0**20


class Waits(NamedTuple):
    """How often a step's host waits for the device.

    Attributes:
        count: a step; None where the counter does not see a wait that is made on purpose.
        how: what counted.
    """

    count: float | None
    how: str


class Training(Protocol):
    """One side: a model, its optimizer and its batch on the device."""

    def losses(self, count: int) -> list[float]:
        """The losses of the next `count` steps."""

    def run(self, count: int) -> tuple[float, float]:
        """Seconds of `count` steps to the end of their last kernel, and until the host was free again."""

    def peak(self) -> float | None:
        """Bytes at the peak of a warm step, its weights, optimizer state and batch included; None if unknown."""

    def waits(self) -> Waits | None:
        """Host synchronisations of a step; None on a CPU."""


class Engine(Protocol):
    """A framework on one device."""

    name: str

    def environment(self) -> dict[str, Any]:
        """Versions, and the device's name as the driver gives it under "device"."""

    def memory(self) -> float | None:
        """Bytes of the device that the framework can have; None on a CPU."""

    def needs(self, workload: Workload) -> float | None:
        """Bytes at the peak of the handwritten float32 step; None if they are more than there is."""

    def build(self, workload: Workload, precision: str, *, own: bool) -> Training:
        """A side, from the same weights every time."""

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether that is what an error says."""

    def free(self) -> None:
        """Give back the memory of what is no longer referenced, and forget compiled programs."""


class Settings(NamedTuple):
    """How long to measure.

    Attributes:
        rounds: of a row; at least five are made.
        seconds: after so many, a row ends, if it has five rounds.
        warmup: rounds that are not counted.
        least: seconds of a side's steps in a round, as many as that takes, up to 50.
        budget: seconds after which no further row is begun.
        quick: a short run at a small batch, held against no target.
        rehearse: tiny sizes on a CPU, held against no target.
    """

    rounds: int = 9
    seconds: float = 10.0
    warmup: int = 1
    least: float = 0.15
    budget: float = 250.0
    quick: bool = False
    rehearse: bool = False


class Measured(NamedTuple):
    """A side that is right.

    Attributes:
        training: it.
        distance: of its losses from those of float32 by hand.
        steps: in a round.
    """

    training: Training
    distance: float
    steps: int


def interleaved(sides: Sequence[Measured], settings: Settings) -> list[list[float]]:
    """Seconds a step of every side, one for each round, in which all run in changing order."""
    found: list[list[float]] = [[] for _ in sides]
    started = time.perf_counter()
    gc.collect()
    gc.disable()  # a collection would fall on whichever side made the last object
    try:
        for number in range(settings.warmup + max(5, settings.rounds)):
            if len(found[0]) >= 5 and time.perf_counter() - started > settings.seconds:
                break
            for place in np.random.default_rng(number).permutation(len(sides)):
                seconds, _ = sides[place].training.run(sides[place].steps)
                if number >= settings.warmup:
                    found[place].append(seconds / sides[place].steps)
    finally:
        gc.enable()
    return found


class Comparison:
    """One workload at one batch size: the sides of every precision in turn, and the entries they give."""

    def __init__(self, engine: Engine, workload: Workload, settings: Settings, note: str) -> None:
        self.entries: list[Entry] = []
        self._engine, self._workload, self._settings, self._note = engine, workload, settings, note
        self._title = TITLES[workload.name]
        self._is_transformer = workload.name in ("block", "gpt")
        self._judged = workload.name == "block" and not (settings.quick or settings.rehearse)
        self._reference: list[float] = []
        self._float32: Measured | None = None
        self._float32_peak: float | None = None

    def measure(self, precision: str) -> None:
        """Check both sides, then time them and, beside them, polyamp in float32; adds to `entries`."""
        sides: dict[str, Measured] = {}
        wrong = []
        curves: dict[str, list[float]] = {}
        for name in ("by hand", "polyamp"):
            try:
                training = self._engine.build(self._workload, precision, own=name == "polyamp")
            except polyamp.UnsupportedError as error:
                wrong.append(f"not timed: {error}")
                continue
            curves[name] = training.losses(workloads.CHECKED_STEPS)
            self._reference = self._reference or curves[name]
            far = paired_timing.distance(self._reference, curves[name])
            if not far <= TOLERANCE[precision]:
                wrong.append(
                    f"not timed: the losses of {name}, {_short(curves[name])}, are {far:.1e} from those of float32 by "
                    f"hand, {_short(self._reference)}; {TOLERANCE[precision]:g} would do"
                )
                continue
            seconds, _ = training.run(1)
            sides[name] = Measured(training, far, min(50, math.ceil(self._settings.least / seconds)))
        name = f"{self._title}, {precision}"
        if wrong:
            self._add(name, [], [], note="; ".join(wrong))
            return
        self._compare(name, precision, sides, paired_timing.distance(curves["by hand"], curves["polyamp"]))

    def _compare(self, name: str, precision: str, sides: dict[str, Measured], distance: float) -> None:
        own, base = sides["polyamp"], sides["by hand"]
        peaks = [side.training.peak() for side in (own, base)]
        waits = [side.training.waits() for side in (own, base)]
        third = [] if self._float32 is None else [self._float32]
        found = interleaved([own, base, *third], self._settings)
        seconds, free = own.training.run(1)
        facts = [
            self._note,
            f"losses' distance from those of float32: by hand {base.distance:.1e}, polyamp {own.distance:.1e}",
            "" if distance <= workloads.TOLERANCE.get(precision, TOLERANCE[precision]) else "other numerics",
            f"the host is free after {free / seconds:.0%} of polyamp's step",
        ]
        device = self._engine.environment()["device"]
        peak = devices.peak_flops(device, precision)
        if self._is_transformer and peak is None:
            facts.append(f"no MFU, since benchmarks/gpu/devices.py has no {precision} peak of {device!r}")
        judged = self._judged and precision in NARROW
        note = "; ".join(fact for fact in facts if fact)
        self._add(name, found[0], found[1], target=OVERHEAD if judged else None, distance=distance, note=note)
        self._note = ""
        if self._is_transformer and peak is not None:
            mfu = [[100 * devices.mfu(self._workload, each, peak) for each in times] for times in found[:2]]
            self._add(f"{name}: MFU", mfu[0], mfu[1], unit="%", note=f"of {peak / 1e12:g} TFLOP/s")
        if peaks[0] is not None and peaks[1] is not None:
            self._add(f"{name}: peak memory", [peaks[0] / MIB], [peaks[1] / MIB], unit="MiB", section="memory")
        if waits[0] is not None and waits[1] is not None:
            counted = [] if waits[0].count is None else [waits[0].count]
            how = f"{waits[0].how}; by hand {'unknown' if waits[1].count is None else f'{waits[1].count:g}'}"
            if precision == "float16":
                how += "; whether the loss scale is stuck is read besides, in every 50th and 51st step"
            self._add(f"{name}: host waits in a step", counted, None, unit="", target=self._target(0.0), note=how)
        if precision == "float32":
            self._float32, self._float32_peak = own, peaks[0]
        elif third:
            self._add_against_float32(f"{name} over float32", found, peaks[0], judged=judged)

    def _add_against_float32(self, name: str, found: list[list[float]], peak: float | None, *, judged: bool) -> None:
        times = statistics.median(wide / narrow for wide, narrow in zip(found[2], found[0], strict=True))
        against = "polyamp, float32"
        target = 1 / SPEED_UP if judged else None
        self._add(name, found[0], found[2], target=target, against=against, note=f"{times:.2f} times as fast")
        if peak is not None and self._float32_peak is not None:
            own, base = [peak / MIB], [self._float32_peak / MIB]
            target = MEMORY if judged else None
            self._add(f"{name}: peak memory", own, base, unit="MiB", section="memory", target=target, against=against)

    def _target(self, value: float) -> float | None:
        return None if self._settings.quick or self._settings.rehearse else value

    def _add(
        self,
        name: str,
        own: list[float],
        base: list[float] | None,
        *,
        unit: str = "s",
        section: str = "workloads",
        target: float | None = None,
        against: str = "by hand",
        **facts: Any,
    ) -> None:
        self.entries.append(
            Entry(
                section=section if target is None else "targets",
                name=name,
                unit=unit,
                own=Side("polyamp", own),
                base=None if base is None else Side(against, base),
                target=target,
                **facts,
            )
        )


def _short(losses: Sequence[float]) -> str:
    return " ".join(f"{loss:.4g}" for loss in losses)
