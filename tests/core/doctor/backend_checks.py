"""What holds for the probe of every backend, with small sizes; each backend's own tests call it."""

from __future__ import annotations

import numpy as np
import pytest

from polyamp.doctor.device_capabilities import Capabilities
from polyamp.doctor.device_measurement import measure
from polyamp.doctor.fastest_times import TimingLimits
from polyamp.doctor.measurements import FORMATS_MEASURED, OPERATIONS
from polyamp.doctor.probe import CapabilityProbe, ProbeDevice
from polyamp.doctor.problems import ProblemSizes

SIZES = ProblemSizes((32, 48, 16), (2, 8, 6), (2, 2, 8, 16))
LIMITS = TimingLimits(sample=0.0, budget=0.0, rounds=1, most_rounds=1)


def measure_small(probe: CapabilityProbe, device: ProbeDevice) -> Capabilities:
    """Measure a device with small sizes, check what holds everywhere, and return the result."""
    steps: list[tuple[int, int]] = []
    found = measure(
        probe,
        device,
        backend="any",
        version="1.0",
        on_progress=lambda done, total: steps.append((done, total)),
        sizes=SIZES,
        limits=LIMITS,
    )
    assert list(found.dtypes) == list(FORMATS_MEASURED)
    assert [done for done, _ in steps] == list(range(1, len(steps) + 1))
    assert steps[-1][0] <= steps[-1][1]
    for name in ("float32", "tf32", "bfloat16"):
        for operation in OPERATIONS:
            times = found.dtypes[name].operations[operation]
            assert times.problem is None, (name, operation)
            assert times.forward_speed is not None
            assert times.training_speed is not None
    errors = {name: dtype.accumulation_error for name, dtype in found.dtypes.items()}
    assert 4e-8 < errors["float32"] < 1e-6  # it depends on the processor: 3e-7 to 8e-7 were seen
    assert errors["tf32"] == errors["float32"]  # no CPU has it
    assert errors["float16"] == pytest.approx(2.04e-4, rel=0.1)
    assert found.dtypes["tf32"].verdict == "float32 in disguise"
    return found


def check_operations(probe: CapabilityProbe, device: ProbeDevice) -> None:
    """Check that the inputs of each operation have the dtype, by the roundoff of a product."""
    a, b = np.full((2, 1), 1.0 + 2.0**-9, np.float32), np.ones((1, 2), np.float32)
    seen = {name: float(probe.product(name, device.name, a, b)[0, 0]) for name in ("float32", "bfloat16", "float16")}
    assert seen == {"float32": 1.0 + 2.0**-9, "bfloat16": 1.0, "float16": 1.0 + 2.0**-9}
