"""What the doctor measures and says of products in 8 bits on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyamp.doctor.fastest_times import TimingLimits
from polyamp.doctor.float8_measurement import MISSING, measure_float8
from polyamp.doctor.float8_probe import ProductPrograms, ProductShape
from polyamp.doctor.probe import ProbeDevice
from polyamp.recipe.float8 import Float8

GPU, CPU = ProbeDevice("gpu:0", "gpu", "Made up 1"), ProbeDevice("cpu", "cpu", "cpu")
LIMITS = TimingLimits(0.0, 0.0, 1, 1)


class MadeUpProbe:
    """Products whose time is the number of their rows, on a clock of its own; 8 bits have half of it and 1,500 s."""

    always_compiles = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: int = 0) -> None:
        self.now, self.broken = 0.0, broken
        self.asked: list[Any] = []
        for clock in ("perf_counter", "process_time"):
            monkeypatch.setattr(f"polyamp.doctor.float8_measurement.time.{clock}", lambda: self.now)

    def multiplies_float8(self, device: str) -> bool:
        return device == "gpu:0"

    def programs(self, shape: ProductShape, float8: Float8, device: str, *, compiled: bool) -> ProductPrograms:
        if shape.rows == self.broken:
            raise RuntimeError("no memory\nfor it")
        self.asked.append((shape, float8.emulate, device, compiled))
        return ProductPrograms(self._program(shape.rows), self._program(shape.rows / 2 + 1500))

    def _program(self, seconds: float) -> Callable[[int], None]:
        def run(count: int) -> None:
            self.now += seconds * count

        return run


def test_a_device_with_products_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = MadeUpProbe(monkeypatch)
    found = measure_float8(probe, GPU, limits=LIMITS)  # type: ignore[arg-type]  # a part of the protocol
    shapes = [each.shape for each in found.times]
    assert shapes == [(1024, 1024, 1024), (1024, 2048, 1024), (4096, 4096, 4096), (4096, 8192, 16384)]
    assert probe.asked == [(shape, False, "gpu:0", True) for shape in shapes]
    assert (found.verdict, found.problem, found.compiled) == ("native", None, True)
    assert found.times[0].bfloat16_ms == pytest.approx(1024e3)
    assert found.times[0].speed == pytest.approx(1024 / 2012)
    assert found.summary() == "faster than bfloat16 at 4096x4096x4096, 4096x8192x16384"
    slow = measure_float8(probe, GPU, limits=LIMITS, shapes=shapes[:2])  # type: ignore[arg-type]  # as above
    assert slow.summary() == "no shape is faster than bfloat16"


def test_a_device_without_them_emulates_small_ones_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = MadeUpProbe(monkeypatch)
    found = measure_float8(probe, CPU, limits=LIMITS)  # type: ignore[arg-type]  # a part of the protocol
    assert probe.asked == [((128, 256, 128), True, "cpu", False), ((256, 512, 512), True, "cpu", False)]
    assert (found.verdict, found.compiled) == ("emulated", False)
    assert found.summary().startswith("this device multiplies no 8-bit floats: ")


def test_a_product_that_fails_is_named_after_those_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = MadeUpProbe(monkeypatch, broken=4096)
    found = measure_float8(probe, GPU, limits=LIMITS)  # type: ignore[arg-type]  # a part of the protocol
    assert (found.verdict, len(found.times)) == ("fails", 2)
    assert found.summary() == "4096x4096x4096: RuntimeError: no memory"


def test_a_backend_without_products_in_8_bits_says_so() -> None:
    assert (MISSING.verdict, MISSING.times) == ("missing", [])
    assert MISSING.summary() == "this backend has no products in 8 bits to measure"
