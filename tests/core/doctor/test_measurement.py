"""Inputs, roundings and times, and the measurement of a made-up device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from polyamp.doctor.device_measurement import measure
from polyamp.doctor.fastest_times import TimingLimits, fastest_times
from polyamp.doctor.measurements import KnownTrap
from polyamp.doctor.probe import OperationPrograms, ProbeDevice
from polyamp.doctor.problems import ProblemSizes, accumulation_problem, random_array, round_to

DTYPES = {
    "bfloat16": (7, ml_dtypes.bfloat16),
    "float16": (10, np.float16),
    "float8_e4m3fn": (3, ml_dtypes.float8_e4m3fn),
    "float8_e5m2": (2, ml_dtypes.float8_e5m2),
}


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_is_that_of_the_dtype(name: str) -> None:
    bits, dtype = DTYPES[name]
    values = random_array(np.random.default_rng(0), (1000,))
    np.testing.assert_array_equal(round_to(values, bits), values.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("name", DTYPES)
def test_the_accumulation_problem_has_inputs_that_the_dtype_represents(name: str) -> None:
    problem = accumulation_problem(name)
    np.testing.assert_array_equal(problem.a, problem.a.astype(DTYPES[name][1]).astype(np.float32))
    assert problem.exact.dtype == np.float64
    assert (problem.rounding_error is None) is name.startswith("float8")


class Machine:
    """A clock, and programs that take its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: list[str] = []

    def clock(self) -> float:
        return self.now

    def program(self, name: str, seconds: float, disturbed: Sequence[int] = ()) -> Callable[[int], None]:
        """Return a program; its samples of these numbers take 5 s longer."""

        def run(count: int) -> None:
            number = self.runs.count(name)
            self.runs.append(name)
            self.now += seconds * count + (5.0 if number in disturbed else 0.0)

        return run


def test_programs_take_turns_and_the_fastest_sample_counts() -> None:
    machine = Machine()
    programs = {"a": machine.program("a", 1e-3, disturbed=(0, 3)), "b": machine.program("b", 2e-3, disturbed=(2,))}
    found = fastest_times(programs, TimingLimits(sample=0.0, budget=0.0, rounds=4), machine.clock)
    assert found == {"a": pytest.approx(1e-3), "b": pytest.approx(2e-3)}
    assert machine.runs == ["a", "a", "b", *["a", "b"] * 4]


def test_a_long_program_runs_twice_and_short_ones_many_times_in_a_sample() -> None:
    machine = Machine()
    programs = {"long": machine.program("long", 0.2), "short": machine.program("short", 1e-4)}
    limits = TimingLimits(sample=9.5e-4, budget=10.0, rounds=2, most_rounds=3)
    found = fastest_times(programs, limits, machine.clock)
    assert found == {"long": pytest.approx(0.2), "short": pytest.approx(1e-4)}
    assert machine.runs == ["long", "long", "short", "short", "short", "short"]
    assert machine.now == pytest.approx(0.4 + 1e-4 * (1 + 3 * 10))


class MadeUpProbe:
    """A probe whose bfloat16 has no gradients, and whose float16 raises."""

    tf32_switch = "switch()"
    traps = (
        KnownTrap(summary="a", advice="", source="", first="1", last="2", devices=("gpu",)),
        KnownTrap(summary="b", advice="", source="", first="1", last="2", devices=("cpu",)),
        KnownTrap(summary="c", advice="", source="", first="1", last="1.9"),
    )

    def devices(self) -> list[ProbeDevice]:
        return [ProbeDevice("gpu:0", "gpu", "Made up 1")]

    def dtypes(self) -> list[str]:
        return ["float32", "bfloat16", "float16"]

    def programs(self, operation: str, dtype: str, device: str, inputs: Sequence[Any]) -> OperationPrograms:
        if dtype == "float16":
            raise TypeError(f"no {dtype}\non {device}")

        def run(count: int) -> None:
            np.dot(np.ones(100), np.ones(100))

        def gradients(count: int) -> None:
            if dtype == "bfloat16":
                raise NotImplementedError("x" * 300)
            run(count)

        return OperationPrograms(run, gradients)

    def product(self, dtype: str, device: str, a: Any, b: Any) -> Any:
        if dtype == "float16":
            raise TypeError
        return (a.astype(np.float64) @ b).astype(np.float32)


def test_what_does_not_run_has_its_message_and_stops_nothing() -> None:
    probe = MadeUpProbe()
    sizes, limits = ProblemSizes((2, 2, 2), (1, 1, 4), (1, 1, 2, 2)), TimingLimits(0.0, 0.0, 1, 1)
    found = measure(probe, probe.devices()[0], backend="made", version="1.5", sizes=sizes, limits=limits)
    assert (found.backend, found.version, found.device, found.device_label) == ("made", "1.5", "gpu:0", "Made up 1")
    assert [trap.summary for trap in found.traps] == ["a", "c"]
    assert found.dtypes["tf32"].verdict == "missing"
    half = found.dtypes["float16"]
    assert (half.verdict, half.reason, half.speed) == ("fails", "TypeError: no float16", None)
    wide = found.dtypes["bfloat16"].operations["attention"]
    assert wide.forward_speed is not None
    assert wide.training_speed is None
    assert wide.problem == "NotImplementedError: " + "x" * 136 + "..."
    assert found.recommendation.code == 'polyamp.Policy("float32")'
    shown = " ".join(str(found).split())
    assert "made 1.5 on gpu:0 (Made up 1)" in shown
    assert "float16: TypeError: no float16" in shown
    assert "bfloat16: gradients of matmul, gradients of convolution, gradients of attention: NotImpl" in shown


@pytest.mark.parametrize("slow_runs", [1, 9])
def test_a_dtype_that_is_far_too_slow_is_not_measured_further(monkeypatch: pytest.MonkeyPatch, slow_runs: int) -> None:
    """One slow run alone loads kernels."""
    probe, machine = MadeUpProbe(), Machine()
    monkeypatch.setattr("polyamp.doctor.device_measurement.time.perf_counter", machine.clock)
    product, calls = probe.product, []

    def slow(dtype: str, device: str, a: Any, b: Any) -> Any:
        calls.append(dtype)
        is_slow = dtype == "bfloat16" and calls.count(dtype) <= slow_runs
        machine.now += 2.0 if is_slow else 0.01
        return product(dtype, device, a, b)

    monkeypatch.setattr(probe, "product", slow)
    sizes, limits = ProblemSizes((2, 2, 2), (1, 1, 4), (1, 1, 2, 2)), TimingLimits(0.0, 0.0, 1, 1)
    found = measure(probe, probe.devices()[0], backend="made", version="1.5", sizes=sizes, limits=limits)
    wide = found.dtypes["bfloat16"]
    assert calls.count("bfloat16") == 2
    if slow_runs == 1:
        assert list(wide.operations) == ["matmul", "convolution", "attention"]
        return
    assert (wide.verdict, wide.reason) == ("emulated", "a small product takes 200 times float32's time")
    assert wide.operations == {}
    assert "bfloat16: a small product takes 200 times float32's time" in str(found)


def test_a_slow_compiler_does_not_make_the_measurement_long() -> None:
    """Products are measured in every dtype, and what is left out is named."""
    probe = MadeUpProbe()
    sizes, limits = ProblemSizes((2, 2, 2), (1, 1, 4), (1, 1, 2, 2)), TimingLimits(0.0, 0.0, 1, 1)
    found = measure(probe, probe.devices()[0], backend="made", version="1.5", sizes=sizes, limits=limits, longest=0.0)
    wide = found.dtypes["float32"].operations
    assert wide["matmul"].problem is None
    assert wide["attention"].problem == "not measured: the 0 s for this device were over"
    assert "float32: convolution, attention: not measured: the 0 s for this device were over" in str(found)


def test_products_come_first_and_8_bits_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the time for a device leaves out is what trainings need least."""
    probe, calls = MadeUpProbe(), []
    monkeypatch.setattr(probe, "dtypes", lambda: ("float32", "bfloat16", "float8_e5m2"))
    programs = probe.programs

    def listed(operation: Any, dtype: str, device: str, inputs: Any) -> Any:
        calls.append((operation, dtype))
        return programs(operation, dtype, device, inputs)

    monkeypatch.setattr(probe, "programs", listed)
    sizes, limits = ProblemSizes((2, 2, 2), (1, 1, 4), (1, 1, 2, 2)), TimingLimits(0.0, 0.0, 1, 1)
    progress: list[tuple[int, int]] = []
    measure(
        probe,
        probe.devices()[0],
        backend="made",
        version="1.5",
        sizes=sizes,
        limits=limits,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    wide = ["float32", "bfloat16"]
    assert calls == [
        *(("matmul", dtype) for dtype in (*wide, "float8_e5m2")),
        *(("convolution", dtype) for dtype in wide),
        *(("attention", dtype) for dtype in wide),
        ("convolution", "float8_e5m2"),
        ("attention", "float8_e5m2"),
    ]
    assert progress[-1] == (23, 23)
