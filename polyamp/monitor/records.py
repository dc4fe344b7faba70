"""`MonitorRecord`: what a monitor read in one step, and its form in a file of JSON lines.

A number that is not finite is written as the string "inf", "-inf" or "nan", since JSON has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from polyamp.errors import ArgumentError

FORMAT_VERSION: Final = 1
PRODUCT_OPERANDS: Final = ("inputs", "weights", "gradients")
"""Fields of `ProductStats`: the operands of the three products of a layer in 8 bits."""
ScaleWord = Literal["searching", "settled", "sinking"]


class TensorStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the elements of a module's gradients or weights.

    Gradients are judged as the backward pass has them, multiplied by the loss scale, since these numbers are cast.

    Attributes:
        elements: their number.
        zero: share that is zero. What a 16-bit backward pass lost is among them.
        underflow: share that is not zero and that the cast to the compute dtype makes zero: below half of its smallest
            number.
        subnormal: share between that and the smallest normal number of the compute dtype.
        overflow: share that is not finite, or from the power of two on that follows the largest number of the compute
            dtype (2^16 for float16).
        norm: L2 norm, of gradients unscaled.
        first_exponent: the binary exponent of the first of `exponents`.
        exponents: number of elements with a magnitude from 2^e to below 2^(e + 1), for each exponent e from the first.
    """

    elements: int
    zero: float
    underflow: float
    subnormal: float
    overflow: float
    norm: float
    first_exponent: int
    exponents: list[int]


class OutputStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the elements of a module's outputs, as the module returned them.

    Attributes:
        elements: their number, over all calls and micro-batches; of outputs that every process of a tensor-parallel
            group holds, those of each.
        zero: share that is zero.
        underflow: share that is not zero and that a cast to the compute dtype makes zero.
        subnormal: share between that and the smallest normal number of the compute dtype.
        overflow: share that is not finite, or that a cast to the compute dtype makes infinite.
        rms: square root of the mean of the squares.
        largest: the largest absolute value; inf if one is not finite.
    """

    elements: int
    zero: float
    underflow: float
    subnormal: float
    overflow: float
    rms: float
    largest: float


class RoundingStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the rounding of an operand to 8 bits lost, over all products of a module in a step.

    Attributes:
        elements: their number.
        underflow: share that is not zero and that the rounding makes zero.
        sqnr: ratio of the sum of squares to that of the squares of what the rounding changed, in dB; inf if it changed
            nothing. None if all elements are zero, or one is not finite.
    """

    elements: int
    underflow: float
    sqnr: float | None


class ProductStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the products in 8 bits with one module's parameters (S36).

    Attributes:
        inputs: of the activations.
        weights: of the parameters.
        gradients: of the gradients that enter the backward products, multiplied by the loss scale.
    """

    inputs: RoundingStats
    weights: RoundingStats
    gradients: RoundingStats


class ModuleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one module's own parameters, of its outputs, and of its products in 8 bits.

    Attributes:
        module: its path; "" for the model itself.
        gradients, weights: None if not collected; `gradients` also if none of its parameters has one.
        update_ratio: L2 norm of the update divided by that of the weights; None if not collected or the weights are 0.
        activations: of its outputs; None if not collected or it was not called.
        products: of its products in 8 bits; None if not collected, or if no backward pass went through one.
    """

    module: str
    gradients: TensorStats | None = None
    weights: TensorStats | None = None
    update_ratio: float | None = None
    activations: OutputStats | None = None
    products: ProductStats | None = None


class MonitorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a monitor read in one step.

    Attributes:
        call: number of steps that were run since the monitor began, skipped ones included.
        step: number of updates that were applied until then, as in `StepResult`.
        loss: the unscaled loss, as it came out.
        grad_norm: norm of the unscaled gradients before clipping, as it came out.
        scale: the loss scale of this step.
        next_scale: that of the next one.
        skipped: whether this step was skipped.
        skips: number of skipped steps since the last record, this one included; None if it is not known.
        word: "searching", "settled" or "sinking"; see `scale_words`.
        reason: the numbers behind the word.
        modules: per module; empty if nothing per module is collected.
    """

    call: int
    step: int
    loss: float
    grad_norm: float
    scale: float
    next_scale: float
    skipped: bool
    skips: int | None
    word: ScaleWord
    reason: str
    modules: list[ModuleRecord] = msgspec.field(default_factory=list)


class MonitorHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a file: what the records are of.

    Attributes:
        polyamp_monitor: version of the format.
        compute: the policy's compute dtype.
        policy: the policy as text.
        every: steps between two records.
        backend: name of the backend.
    """

    polyamp_monitor: int
    compute: str
    policy: str
    every: int
    backend: str


class MonitorFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a file of JSON lines holds.

    Attributes:
        header: its first line.
        records: the others, in order.
        torn: whether its last line was not finished, and was left out.
    """

    header: MonitorHeader
    records: list[MonitorRecord]
    torn: bool = False


def encode_line(line: MonitorHeader | MonitorRecord) -> str:
    """Return a line of a file, without its end."""
    return msgspec.json.encode(_named_numbers(msgspec.to_builtins(line))).decode()


def read_monitor_file(path: str | Path) -> MonitorFile:
    """Read a file that a `JsonLinesWriter` wrote, also one whose writer was killed.

    Raises:
        ArgumentError: it cannot be read, or is no such file.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ArgumentError(f"path must be a file that can be read. Received: {str(path)!r}, {error}.") from error
    try:
        header = msgspec.json.decode(lines[0], type=MonitorHeader)
    except msgspec.MsgspecError as error:
        raise ArgumentError(
            f"path must be a file that a monitor's JsonLinesWriter wrote. Received: {str(path)!r}, whose first line is "
            f"no such header ({error})."
        ) from error
    *whole, rest = lines[1:] or [b""]
    return MonitorFile(header=header, records=list(_decode_records(whole, path)), torn=bool(rest))


def _decode_records(lines: Iterable[bytes], path: str | Path) -> Iterator[MonitorRecord]:
    for number, line in enumerate(lines, 2):
        try:
            yield msgspec.convert(_plain_numbers(msgspec.json.decode(line)), MonitorRecord)
        except msgspec.MsgspecError as error:
            raise ArgumentError(f"line {number} of {str(path)!r} is no record of a monitor: {error}.") from error


def _named_numbers(value: Any) -> Any:
    """Return plain data with names for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _named_numbers(each) for key, each in value.items()}
    return [_named_numbers(each) for each in value] if isinstance(value, list) else value


def _plain_numbers(value: Any) -> Any:
    """Return plain data with numbers for their names. No module is called so: texts stand under other keys."""
    if isinstance(value, dict):
        return {
            key: float(each)
            if each in ("inf", "-inf", "nan") and key not in ("module", "reason")
            else _plain_numbers(each)
            for key, each in value.items()
        }
    return [_plain_numbers(each) for each in value] if isinstance(value, list) else value
