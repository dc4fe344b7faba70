"""`NonfiniteReport`: the first operation and module whose result is not finite."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from polyamp.display import first_lines
from polyamp.parity.trace.operation_log import SourcePlace

Origin = Literal["none", "data", "parameters", "forward", "backward"]


class ValueRange(msgspec.Struct, frozen=True, kw_only=True):
    """A value that an operation was given or made. Attributes: its dtype, its least and greatest finite element, the
    number of its elements, and of those that are not finite."""

    dtype: str
    least: float
    greatest: float
    elements: int
    nonfinite: int

    def __str__(self) -> str:
        if self.nonfinite == self.elements:
            return f"{self.dtype}, none of {self.elements} finite"
        bad = f", {self.nonfinite} of {self.elements} not finite" if self.nonfinite else ""
        return f"{self.dtype} from {self.least:.4g} to {self.greatest:.4g}{bad}"


class NonfiniteReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `polyamp.find_nonfinite` found; `print` it.

    Attributes:
        origin: "none": everything is finite; "data": the batch is not; "parameters": a parameter is not; "forward" or
            "backward": the pass in which a first value is not finite though what it was made of is.
        module: the first module whose output (backward: the gradient with respect to its output, or of its parameters)
            is not finite; the name of the array for "data" and "parameters"; "" if it is none.
        between: whether what `module` was given is not finite already: the operation stands in code before it.
        finite_until: backward: the module whose gradient with respect to its output was the last finite one before, so
            that the operation stands in this module or in code between the two; "" if there was none, or where
            `module`'s parameters alone have such a gradient.
        operation: the framework's name of the operation; backward: of the forward pass's, whose derivative is not
            finite at what it was given. "" where none is visible.
        place: the source line that asked for it; None if unknown.
        iterations: the turns, from 0, of the compiled loops around it (JAX's scan), the outermost first.
        inputs, output: ranges of the operation's values.
        by_precision: whether the same pass in float32 is finite; None for "none", "data" and "parameters", and with
            `own_cast`.
        own_cast: the 16-bit dtype in which the operation runs under float32 too, because the program casts there; "" if
            it does not.
        policy: the policy of the pass.
        loss_scale: the factor of the loss in it.
    """

    origin: Origin
    module: str = ""
    between: bool = False
    finite_until: str = ""
    operation: str = ""
    place: SourcePlace | None = None
    iterations: list[int] = msgspec.field(default_factory=list)
    inputs: list[ValueRange] = msgspec.field(default_factory=list)
    output: ValueRange | None = None
    by_precision: bool | None = None
    own_cast: str = ""
    policy: str = ""
    loss_scale: float = 1.0

    def __str__(self) -> str:
        if self.origin == "none":
            return f"Loss and gradients are finite under {self.policy} with a loss scale of {self.loss_scale:g}."
        if self.origin == "data":
            return f"The batch is not finite: {self.module}. This is no matter of precision."
        if self.origin == "parameters":
            return f"The parameter {self.module} is not finite already. Look at an earlier step, or at the file."
        where = f"before {self.module or 'the loss'}" if self.between else f"in {self.module or 'the loss function'}"
        if self.finite_until:
            where = (
                f"between {self.module} and {self.finite_until}: the gradient that enters {self.finite_until} is "
                f"finite, the one that reaches the output of {self.module} is not"
            )
        lines = [f"The first value that is not finite arises in the {self.origin} pass, {where}."]
        if self.operation:
            turns = "".join(f", in iteration {number} of a scan" for number in self.iterations)
            given = "".join(f"\n    given {each}" for each in self.inputs)
            slope = ", whose derivative is not finite there" if self.origin == "backward" else ""
            lines.append(f"  operation: {self.operation}{slope}{turns}{given}")
        if self.output is not None:
            lines.append(f"    makes {self.output}")
        if self.place is not None:
            lines.append(f"  {self.place.file}:{self.place.line}: {self.place.code}")
        if self.by_precision:
            lines.append("In float32 the same pass is finite: it is a matter of precision.")
            if self.origin == "backward" and self.loss_scale > 1.0:
                lines.append(
                    f"The loss scale was {self.loss_scale:g}. A dynamic one halves until the gradients fit, which is "
                    "no fault: give the scale of your training, loss_scale=float(result.scale)."
                )
            else:
                override = f'Policy(overrides={{"{self.module or "..."}": "float32"}})'
                lines.append(f"Keep it in float32: {override}; polyamp.diagnose finds all such modules.")
        elif self.own_cast:
            lines.append(
                f"The program itself computes in {self.own_cast} there, under any policy, so float32 was not tried. "
                "Take that cast away, and call this again."
            )
        elif self.by_precision is not None:
            lines.append("In float32 the same pass is not finite either: it is no matter of precision.")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return first_lines(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found
