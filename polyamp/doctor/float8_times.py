"""Times of products in bfloat16 and in 8 bits: of one shape (`measure_product`), and what a device has."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from polyamp.doctor.fastest_times import TimingLimits, fastest_times
from polyamp.doctor.float8_probe import MakePrograms, ProductShape
from polyamp.doctor.measurements import Verdict
from polyamp.recipe.float8 import Float8

_CPU_LIMITS: Final = TimingLimits(sample=0.001, budget=0.1)
_ACCELERATOR_LIMITS: Final = TimingLimits(sample=0.01, budget=0.2)


class ProductTime(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one shape of product, with its two gradients, the casts of both and the quantization of 8 bits.

    Attributes:
        rows, inputs, outputs: sizes of the product.
        bfloat16_ms, float8_ms: milliseconds of the three products: the fastest of several runs.
    """

    rows: int
    inputs: int
    outputs: int
    bfloat16_ms: float
    float8_ms: float

    @property
    def shape(self) -> ProductShape:
        """The sizes."""
        return ProductShape(self.rows, self.inputs, self.outputs)

    @property
    def speed(self) -> float:
        """Speed in 8 bits relative to bfloat16: below 1.0 the product is slower in 8 bits."""
        return self.bfloat16_ms / self.float8_ms


class Float8Capability(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy "mixed_float8" is on a device.

    Attributes:
        verdict: "native": the device multiplies 8-bit floats; "emulated": it does not, and the times are of the same
            numbers multiplied in float32; "fails": a product does not run; "missing": the backend has none.
        problem: why it fails or is missing; else None.
        compiled: whether compiled products were measured.
        times: of each shape that runs, from small to large.
    """

    verdict: Verdict
    problem: str | None = None
    compiled: bool = False
    times: list[ProductTime] = msgspec.field(default_factory=list)

    def summary(self) -> str:
        """Return what the times say, as a sentence."""
        if self.problem is not None:
            return self.problem
        if self.verdict == "emulated":
            return "this device multiplies no 8-bit floats: Float8(emulate=True) shows the numbers, and gains no speed"
        faster = [str(each.shape) for each in self.times if each.speed > 1.0]
        return f"faster than bfloat16 at {', '.join(faster)}" if faster else "no shape is faster than bfloat16"


def limits_of(kind: str) -> TimingLimits:
    """Return how long a shape is measured on a kind of device."""
    return _CPU_LIMITS if kind == "cpu" else _ACCELERATOR_LIMITS


def measure_product(
    make_programs: MakePrograms,
    shape: ProductShape,
    float8: Float8,
    device: str,
    *,
    compiled: bool,
    limits: TimingLimits,
    clock: Callable[[], float] = time.perf_counter,
) -> ProductTime:
    """Measure one shape on a device. Both programs run once before their time counts, and then take turns.

    Args:
        make_programs: makes the programs of the shape.
        shape: the sizes.
        float8: settings of the products in 8 bits.
        device: the device's name.
        compiled: as in `MakePrograms`.
        limits: how long to measure.
        clock: as in `fastest_times`.
    """
    programs = make_programs(shape, float8, device, compiled=compiled)
    for program in programs:
        program(1)
    seconds = fastest_times(programs._asdict(), limits, clock)
    return ProductTime(
        **shape._asdict(), bfloat16_ms=1000.0 * seconds["bfloat16"], float8_ms=1000.0 * seconds["float8"]
    )
