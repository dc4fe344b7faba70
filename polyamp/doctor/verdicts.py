"""Verdicts on dtypes, from measurements alone: is a dtype native, emulated, or float32 in disguise?

The limits lie between what was measured of native and of other dtypes, far from both, so that noise moves no verdict:
16 bits are 2 to 15 times as fast as float32 where hardware computes in them, and at most 1.2 times elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from polyamp.doctor.measurements import (
    BASELINE,
    FORMATS_MEASURED,
    OPERATIONS,
    DtypeCapability,
    DtypeFormat,
    DtypeMeasurement,
    Operation,
    OperationCapability,
    OperationTimes,
    Verdict,
)

NATIVE_SPEED: Final = 1.45
"""Speed relative to float32 from which on a dtype is native."""
NATIVE_SPEED_UNROUNDED: Final = 1.8
"""The same for a dtype whose results are not rounded to it: a compiler may fuse the cast to float32 into a native
product, but without hardware for the dtype it is at best as fast as float32 with half of its memory traffic."""
NARROW_SPEED: Final = 1.15
"""Speed relative to the fastest 16-bit format from which on an 8-bit format is native: a product that first widens its
inputs to 16 bits is faster than float32 too."""
_UNROUNDED: Final = 0.25
"""Share of the error of one rounding below which results were not rounded to the dtype."""
_NARROW_SUMS: Final = 4.0
"""Multiple of the error of one rounding above which sums were accumulated in less than float32."""


def judge(measured: Mapping[str, DtypeMeasurement]) -> dict[str, DtypeCapability]:
    """Return what each dtype is on the device that the measurements are of.

    Args:
        measured: dtype -> measurement. Without times of a float32 product no dtype has a speed.
    """
    base = measured[BASELINE].operations
    speeds = {dtype: _product_speed(found, base) for dtype, found in measured.items()}
    sixteen = max((s for dtype, s in speeds.items() if s is not None and FORMATS_MEASURED[dtype].bits == 16), default=0)
    return {
        dtype: _judge_dtype(FORMATS_MEASURED[dtype], found, speeds[dtype], sixteen, base)
        for dtype, found in measured.items()
    }


def _judge_dtype(
    form: DtypeFormat,
    found: DtypeMeasurement,
    speed: float | None,
    sixteen: float,
    base: Mapping[Operation, OperationTimes],
) -> DtypeCapability:
    verdict, reason = _verdict(form, found, speed, sixteen)
    return DtypeCapability(
        verdict=verdict,
        reason=reason,
        speed=speed,
        accumulation_error=found.accumulation_error,
        rounding_error=found.rounding_error,
        operations={
            name: _compare_times(found.operations[name], base.get(name, OperationTimes()))
            for name in OPERATIONS
            if name in found.operations
        },
    )


def _verdict(form: DtypeFormat, found: DtypeMeasurement, speed: float | None, sixteen: float) -> tuple[Verdict, str]:
    """Return the verdict on one dtype, and its reason."""
    if not found.exists:
        return "missing", "this version of the framework does not have it"
    if found.slowdown is not None:
        return "emulated", f"a small product takes {found.slowdown:.0f} times float32's time"
    if found.operations["matmul"].forward is None:
        return "fails", found.operations["matmul"].problem or "a matrix product does not run"
    if form.name == BASELINE:
        return "native", "the others are compared with it"
    if speed is None:
        return "fails", "there is no float32 product to compare it with"
    rounding = _error_in_roundings(found)
    unrounded = rounding is not None and rounding < _UNROUNDED
    sums = "; sums are accumulated in less than float32" if rounding is not None and rounding > _NARROW_SUMS else ""
    if unrounded and (form.name == "tf32" or speed < NATIVE_SPEED_UNROUNDED):
        shown = f"products have float32's precision, not that of {form.name}, at {speed:.2g} times float32's speed"
        return "float32 in disguise", shown
    if speed < NATIVE_SPEED and form.name != "tf32":  # nothing emulates TF32, which is hardly faster on some GPUs
        return "emulated", f"{speed:.2g} times float32's speed{sums}"
    if form.bits < 16 and speed < NARROW_SPEED * sixteen:
        return "emulated", f"{speed:.2g} times float32's speed, and 16 bits have {sixteen:.2g} times{sums}"
    return "native", f"{speed:.2g} times float32's speed{sums}"


def _product_speed(found: DtypeMeasurement, base: Mapping[Operation, OperationTimes]) -> float | None:
    """Return the speed of a matrix product relative to float32: the geometric mean of forward and training, or forward
    alone where the gradients do not run."""
    if found.slowdown is not None:
        return 1.0 / found.slowdown
    if "matmul" not in found.operations or "matmul" not in base:
        return None
    compared = _compare_times(found.operations["matmul"], base["matmul"])
    if compared.forward_speed is None or compared.training_speed is None:
        return compared.forward_speed
    return math.sqrt(compared.forward_speed * compared.training_speed)


def _compare_times(found: OperationTimes, base: OperationTimes) -> OperationCapability:
    return OperationCapability(
        forward_ms=_milliseconds(found.forward),
        forward_backward_ms=_milliseconds(found.forward_backward),
        forward_speed=_ratio(base.forward, found.forward),
        training_speed=_ratio(base.forward_backward, found.forward_backward),
        problem=found.problem,
        left_out=found.left_out,
    )


def _error_in_roundings(found: DtypeMeasurement) -> float | None:
    if found.accumulation_error is None or not found.rounding_error:
        return None
    return found.accumulation_error / found.rounding_error


def _ratio(base: float | None, found: float | None) -> float | None:
    return base / found if base and found else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000.0 * seconds
