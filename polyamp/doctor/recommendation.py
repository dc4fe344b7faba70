"""The policy that the doctor recommends for a device, from its verdicts and the speeds of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from polyamp.doctor.measurements import OPERATIONS, DtypeCapability, Operation, Recommendation
from polyamp.float_formats import HALF_DTYPES

WORTH: Final = 1.1
"""Speed of training, relative to float32, from which on a mixed policy is recommended."""
FLOAT16_WORTH: Final = 1.5
"""Speed of float16 relative to bfloat16 from which on float16, which needs a loss scale, is recommended instead."""
_SLOW: Final = 0.5
"""Speed below which the reason names an operation that is slower than in float32."""


def recommend(dtypes: Mapping[str, DtypeCapability], tf32_switch: str) -> Recommendation:
    """Return the recommended policy with its reason.

    bfloat16 comes first where it is native: it has float32's range and needs no loss scale. Its gain is the geometric
    mean of the speeds of training of all operations that were measured in both 16-bit dtypes.

    Args:
        dtypes: dtype -> what it is on the device.
        tf32_switch: the line of Python that turns TF32 on, for the reason.
    """
    measured = _measured_operations(dtypes)
    listed = f"{', '.join(measured[:-1])} and {measured[-1]}" if len(measured) > 1 else "".join(measured)
    gains = {name: _training_gain(dtypes[name], measured) for name in HALF_DTYPES if name in dtypes}
    bfloat16, float16 = gains.get("bfloat16"), gains.get("float16")
    if float16 is not None and float16 >= max(WORTH, FLOAT16_WORTH * (bfloat16 or 0.0)):
        return _recommendation("mixed_float16", _float16_reason(dtypes, float16, bfloat16, listed))
    if bfloat16 is not None and bfloat16 >= WORTH:
        reason = (
            f"bfloat16 is native here: {bfloat16:.2g} times float32's speed in training over {listed}. "
            "It has float32's range, so no loss scale is needed."
        )
        return _recommendation("mixed_bfloat16", reason + _slow_operations(dtypes["bfloat16"]))
    reasons = [_refusal(name, dtypes[name], gains[name], listed) for name in gains]
    if "tf32" in dtypes and dtypes["tf32"].verdict == "native":
        reasons.append(f"TF32 is native: {dtypes['tf32'].speed:.2g} times float32's speed with {tf32_switch}.")
    return _recommendation("float32", " ".join(["No 16-bit dtype trains faster here.", *reasons]))


def _recommendation(policy: str, reason: str) -> Recommendation:
    return Recommendation(code=f'polyamp.Policy("{policy}")', reason=reason)


def _measured_operations(dtypes: Mapping[str, DtypeCapability]) -> list[Operation]:
    """Return the operations that were left out of no 16-bit dtype."""
    halves = [dtypes[name].operations for name in HALF_DTYPES if name in dtypes]
    return [name for name in OPERATIONS if not any(name in times and times[name].left_out for times in halves)]


def _training_gain(found: DtypeCapability, measured: Sequence[Operation]) -> float | None:
    """Return the mean speed of training; None if the dtype is not native or an operation does not run."""
    speeds = [found.operations[name].training_speed for name in measured if name in found.operations]
    if found.verdict != "native" or len(speeds) < len(measured) or None in speeds:
        return None
    return math.prod(speed for speed in speeds if speed is not None) ** (1.0 / len(speeds))


def _float16_reason(dtypes: Mapping[str, DtypeCapability], float16: float, bfloat16: float | None, listed: str) -> str:
    other = f"trains at {bfloat16:.2g} times" if bfloat16 is not None else f"is {_state_of(dtypes.get('bfloat16'))}"
    return (
        f"float16 is native here: {float16:.2g} times float32's speed in training over {listed}; "
        f"bfloat16 {other}. A Recipe with this policy scales the loss." + _slow_operations(dtypes["float16"])
    )


def _refusal(name: str, found: DtypeCapability, gain: float | None, listed: str) -> str:
    if gain is not None:
        return f"{name}: training over {listed} has {gain:.2g} times float32's speed."
    failed = [
        operation
        for operation, times in found.operations.items()
        if times.training_speed is None and not times.left_out
    ]
    if found.verdict == "native" and failed:
        return f"{name} is native, but no gradients of {' and '.join(failed)} run."
    return f"{name} is {_state_of(found)}: {found.reason}."


def _state_of(found: DtypeCapability | None) -> str:
    if found is None:
        return "not measured"
    return "not usable" if found.verdict == "fails" else found.verdict


def _slow_operations(found: DtypeCapability) -> str:
    slow = [
        f"{name} ({times.training_speed:.2g} times)"
        for name, times in found.operations.items()
        if times.training_speed is not None and times.training_speed < _SLOW
    ]
    return f" Slower than float32 in training: {', '.join(slow)}." if slow else ""
