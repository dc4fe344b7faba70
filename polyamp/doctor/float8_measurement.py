"""`measure_float8`: products in 8 bits against bfloat16 on one device (`polyamp doctor --float8`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from polyamp.doctor.device_measurement import problem_text
from polyamp.doctor.fastest_times import TimingLimits
from polyamp.doctor.float8_probe import Float8Probe, ProductShape
from polyamp.doctor.float8_times import Float8Capability, ProductTime, limits_of, measure_product
from polyamp.doctor.probe import ProbeDevice
from polyamp.recipe.float8 import Float8

_CPU_SHAPES: Final = (ProductShape(128, 256, 128), ProductShape(256, 512, 512))
_ACCELERATOR_SHAPES: Final = (
    ProductShape(1024, 1024, 1024),
    ProductShape(1024, 2048, 1024),
    ProductShape(4096, 4096, 4096),
    ProductShape(4096, 8192, 16384),
)


MISSING: Final = Float8Capability(verdict="missing", problem="this backend has no products in 8 bits to measure")
"""What a backend without a `Float8Probe` has."""


def measure_float8(
    probe: Float8Probe,
    device: ProbeDevice,
    *,
    shapes: Sequence[ProductShape] | None = None,
    limits: TimingLimits | None = None,
) -> Float8Capability:
    """Measure products in 8 bits on a device: native ones compiled, emulated ones as the framework runs them.

    Args:
        probe: the backend's.
        device: one of its devices.
        shapes: what is measured; None for those of the kind of device.
        limits: of the times; None for those of the kind of device.
    """
    on_cpu = device.kind == "cpu"
    native = probe.multiplies_float8(device.name)
    float8 = Float8(emulate=not native)
    times: list[ProductTime] = []
    compiled = native or probe.always_compiles
    for shape in shapes or (_CPU_SHAPES if on_cpu else _ACCELERATOR_SHAPES):
        try:
            found = measure_product(
                probe.programs,
                shape,
                float8,
                device.name,
                compiled=compiled,
                limits=limits or limits_of(device.kind),
                clock=time.process_time if on_cpu else time.perf_counter,
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what the table says of products in 8 bits
            return Float8Capability(
                verdict="fails", problem=f"{shape}: {problem_text(error)}", compiled=compiled, times=times
            )
        times.append(found)
    return Float8Capability(verdict="native" if native else "emulated", compiled=compiled, times=times)
