"""Data classes of the doctor: what was measured of a dtype, and what follows from it."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Verdict = Literal["native", "emulated", "float32 in disguise", "fails", "missing"]
"""What a dtype is on a device:

- "native": it runs, and faster than float32.
- "emulated": it runs with its own rounding, and not faster than float32.
- "float32 in disguise": the framework accepts it and computes in float32; results are more exact than it can be.
- "fails": the framework has it, and a matrix product in it raises.
- "missing": this version of the framework does not have it.
"""
Operation = Literal["matmul", "convolution", "attention"]
OPERATIONS: Final[tuple[Operation, ...]] = ("matmul", "convolution", "attention")
"""The operations that are measured, each forward, and forward and backward."""
BASELINE: Final = "float32"
"""The dtype whose times the others are compared with. TF32 is off while it is measured."""


class DtypeFormat(msgspec.Struct, frozen=True):
    """What the doctor knows of a dtype.

    Attributes:
        name: as ml_dtypes names it; "tf32" for float32 arrays whose products round their inputs to 10 bits.
        bits: of an element in a product.
        fraction_bits: stored bits of the significand.
    """

    name: str
    bits: int
    fraction_bits: int


FORMATS_MEASURED: Final = {
    each.name: each
    for each in (
        DtypeFormat(BASELINE, 32, 23),
        DtypeFormat("tf32", 19, 10),
        DtypeFormat("bfloat16", 16, 7),
        DtypeFormat("float16", 16, 10),
        DtypeFormat("float8_e4m3fn", 8, 3),
        DtypeFormat("float8_e5m2", 8, 2),
    )
}
"""Dtypes that the doctor measures, in the order of its table."""


class OperationTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one operation in one dtype: the fastest of several runs.

    Attributes:
        forward: of the operation; None if it does not run.
        forward_backward: of the operation and the gradients of all its inputs; None if they do not run.
        problem: the framework's message for what does not run.
        left_out: whether it was not measured because the time for the device was over.
    """

    forward: float | None = None
    forward_backward: float | None = None
    problem: str | None = None
    left_out: bool = False


class DtypeMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one dtype on one device.

    Attributes:
        exists: whether this version of the framework has it.
        operations: operation -> its times.
        accumulation_error: relative error (root mean square) of a matrix product of 4,096 terms against float64, for
            inputs that the dtype represents exactly; None if it does not run.
        rounding_error: the same error of the exact product rounded once to the dtype; for TF32, of the exact product of
            rounded inputs. None for 8-bit formats.
        slowdown: of that product relative to float32, if it was so slow that nothing more was measured; else None.
    """

    exists: bool
    operations: dict[Operation, OperationTimes] = msgspec.field(default_factory=dict)
    accumulation_error: float | None = None
    rounding_error: float | None = None
    slowdown: float | None = None


class OperationCapability(msgspec.Struct, frozen=True, kw_only=True):
    """One operation in one dtype, beside float32.

    Attributes:
        forward_ms, forward_backward_ms: its times in milliseconds; None if it does not run.
        forward_speed, training_speed: float32's time divided by these; None if either does not run.
        problem: the framework's message for what does not run.
        left_out: whether it was not measured because the time for the device was over.
    """

    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    forward_speed: float | None = None
    training_speed: float | None = None
    problem: str | None = None
    left_out: bool = False


class DtypeCapability(msgspec.Struct, frozen=True, kw_only=True):
    """One dtype on one device.

    Attributes:
        verdict: what it is here.
        reason: the measurement behind the verdict, as a sentence.
        speed: of a matrix product, forward and backward, relative to float32; None if it does not run.
        accumulation_error, rounding_error: those of `DtypeMeasurement`.
        operations: operation -> what was measured of it.
    """

    verdict: Verdict
    reason: str
    speed: float | None = None
    accumulation_error: float | None = None
    rounding_error: float | None = None
    operations: dict[Operation, OperationCapability] = msgspec.field(default_factory=dict)


class KnownTrap(msgspec.Struct, frozen=True, kw_only=True):
    """A defect or a surprise of certain versions of a framework in mixed precision.

    Attributes:
        summary: what happens.
        advice: what to do about it.
        source: address of the documentation or the issue.
        first, last: versions between which it was seen, compared as far as they are written: "2.13" includes 2.13.1.
        devices: kinds of devices that it happens on; empty for all.
    """

    summary: str
    advice: str
    source: str
    first: str
    last: str
    devices: tuple[str, ...] = ()

    def holds_for(self, version: str, device_kind: str) -> bool:
        """Return whether it was seen in this version on this kind of device.

        >>> trap = KnownTrap(summary="", advice="", source="", first="2.7", last="2.13", devices=("cpu",))
        >>> trap.holds_for("2.13.0+cpu", "cpu"), trap.holds_for("2.6.1", "cpu"), trap.holds_for("2.13.0", "cuda")
        (True, False, False)
        """
        first, last = version_numbers(self.first), version_numbers(self.last)
        found = version_numbers(version)
        return (not self.devices or device_kind in self.devices) and first <= found and found[: len(last)] <= last


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """The policy to train with on a device.

    Attributes:
        code: Python expression of the policy, to paste.
        reason: why, with the measured speeds.
    """

    code: str
    reason: str


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, up to the first part that is none.

    >>> version_numbers("2.13.0+cpu"), version_numbers("0.10.2")
    ((2, 13, 0), (0, 10, 2))
    """
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
