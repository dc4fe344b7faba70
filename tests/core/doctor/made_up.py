"""Made-up measurements of devices, after published figures and the project's own."""

from __future__ import annotations

from collections.abc import Mapping

from polyamp.doctor.device_capabilities import Capabilities
from polyamp.doctor.measurements import (
    OPERATIONS,
    DtypeMeasurement,
    KnownTrap,
    OperationTimes,
)
from polyamp.doctor.recommendation import recommend
from polyamp.doctor.verdicts import judge

FLOAT32_SECONDS = 1e-3
ROUNDING = {"float32": 2.5e-8, "tf32": 2.8e-4, "bfloat16": 1.6e-3, "float16": 2.0e-4}
"""Relative error of one rounding of each dtype."""
FLOAT32_ERROR = 4e-7


def measurement(
    dtype: str,
    speed: float,
    *,
    training: float | None = None,
    error: float | None = None,
    operations: Mapping[str, float] | None = None,
) -> DtypeMeasurement:
    """Return a dtype that runs everything.

    Args:
        dtype: its name.
        speed: forward, relative to float32.
        training: forward and backward, relative to float32; as forward by default.
        error: of the accumulation; that of one rounding by default.
        operations: operation -> its speed of training, where it is another.
    """
    both = training or speed
    return DtypeMeasurement(
        exists=True,
        operations={
            name: OperationTimes(
                forward=FLOAT32_SECONDS / speed,
                forward_backward=3 * FLOAT32_SECONDS / (operations or {}).get(name, both),
            )
            for name in OPERATIONS
        },
        accumulation_error=ROUNDING.get(dtype, 1.6e-3) if error is None else error,
        rounding_error=ROUNDING.get(dtype),
    )


def failure(message: str) -> DtypeMeasurement:
    """Return a dtype in which nothing runs."""
    return DtypeMeasurement(exists=True, operations={name: OperationTimes(problem=message) for name in OPERATIONS})


def device(**dtypes: DtypeMeasurement) -> dict[str, DtypeMeasurement]:
    """Return a device's measurements; float32 is added, and what is not given does not exist."""
    names = ("tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    missing = {name: DtypeMeasurement(exists=False) for name in names}
    return {"float32": measurement("float32", 1.0, error=FLOAT32_ERROR), **missing, **dtypes}


H100 = device(
    tf32=measurement("tf32", 6.5),
    bfloat16=measurement("bfloat16", 12.0),
    float16=measurement("float16", 12.5),
    float8_e4m3fn=measurement("float8_e4m3fn", 21.0),
    float8_e5m2=failure("RuntimeError: Multiplication of two Float8_e5m2 matrices is not supported"),
)
T4 = device(
    tf32=measurement("tf32", 1.0, error=FLOAT32_ERROR),
    bfloat16=measurement("bfloat16", 0.6),
    float16=measurement("float16", 5.5),
    float8_e4m3fn=failure("RuntimeError: torch._scaled_mm is only supported on CUDA devices with 8.9 and newer"),
)
AMX = device(
    tf32=measurement("tf32", 1.0, error=FLOAT32_ERROR),
    bfloat16=measurement("bfloat16", 4.4, training=3.4, operations={"attention": 0.45}),
    float16=measurement("float16", 1.0, operations={"convolution": 0.01}),
)
"""torch on a CPU with AMX: its attention in bfloat16 has a slow backward pass."""
OLD_CPU = device(bfloat16=measurement("bfloat16", 0.3), float16=measurement("float16", 0.004))
XLA_CPU = device(
    tf32=measurement("tf32", 1.0, error=FLOAT32_ERROR),
    bfloat16=measurement("bfloat16", 1.3, error=1e-8),
    float16=measurement("float16", 0.9),
)
"""XLA on a CPU computes products of bfloat16 in float32."""


def capabilities_of_a_gpu() -> Capabilities:
    """Return an H100 with a trap."""
    slower = {"bfloat16": measurement("bfloat16", 10.0)}
    dtypes = judge({**H100, **slower})
    trap = KnownTrap(summary="It happens.", advice="Avoid it.", source="https://example.org", first="2.7", last="2.13")
    return Capabilities(
        backend="torch",
        version="2.13.0",
        device="cuda:0",
        device_label="NVIDIA H100",
        dtypes=dtypes,
        recommendation=recommend(dtypes, "switch()"),
        traps=[trap],
        seconds=4.0,
    )
