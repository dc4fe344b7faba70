"""Data classes of a parity report. `report.Report` adds rendering and saving to `Findings`."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

DivergenceKind = Literal[
    "dtype", "epsilon", "layout", "formula", "factor", "randomness", "not finite", "missing", "unknown"
]
"""Likely cause of a difference: other dtypes, the epsilon of a normalization, the same numbers in another order,
another formula, a common factor, random numbers, inf or NaN on one side, a quantity that one side lacks."""


class SideValues(msgspec.Struct, frozen=True, kw_only=True):
    """One side's values at a divergence.

    Attributes:
        path: of the module or the array, in this side's names.
        dtype: of the values; "" for a number.
        shape: in canonical layout.
        mean, rms, largest: of its finite values.
        nonfinite: number of elements that are inf or NaN.
        zeros: number of elements that are 0.
        width: the narrowest dtype that represents all values exactly.
        worst: the stored element at which the sides differ most; None if elements do not compare.
        worst_index: its index in `shape`.
        number: the value, if it is a number and not an array.
        operations: operations that ran in the module, with their dtypes ("softmax in bfloat16").
    """

    path: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    mean: float | None = None
    rms: float | None = None
    largest: float | None = None
    nonfinite: int = 0
    zeros: int = 0
    width: str = ""
    worst: float | None = None
    worst_index: tuple[int, ...] = ()
    number: float | None = None
    operations: list[str] = msgspec.field(default_factory=list)


class OperationSite(msgspec.Struct, frozen=True, kw_only=True):
    """The operation of one side at which its forward pass parts from the other's.

    Attributes:
        operation: its name in the framework.
        file, line, code: the line that asked for it; "" and 0 if no line outside the framework did, or if its source is
            not known.
        is_missing: whether the other side goes on with an operation that this side lacks; then it is this side's last.
    """

    operation: str
    file: str = ""
    line: int = 0
    code: str = ""
    is_missing: bool = False


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """First divergence of two trainings.

    Attributes:
        phase: "float32", or the policy under which it was found.
        step: number of the training step, from 1.
        stage: "forward", "backward", "step" or "update".
        module: path of the module, or of the layer that owns the parameter; "" for the whole model.
        what: the quantity: "output", "loss", "gradient", "exp_avg", ... (`trace.Entry.what`).
        name: the array in its layer ("kernel"); "" if there is none.
        sides: label -> its values.
        distance: relative to the larger side; None where one is not finite.
        allowed: largest distance that rounding explains, relative to the same.
        own: label -> distance of the side from its own wider run; None if there was none.
        kind: likely cause.
        sentence: the likely cause in words.
        evidence: the observations that support it, a sentence each.
        after: path of the last module before it that agrees; "" if there is none.
        sites: label -> the operation at which its forward pass parts; empty where single operations do not show it.
    """

    phase: str
    step: int
    stage: str
    module: str
    what: str
    name: str = ""
    sides: dict[str, SideValues] = msgspec.field(default_factory=dict)
    distance: float | None = None
    allowed: float | None = None
    own: dict[str, float | None] = msgspec.field(default_factory=dict)
    kind: DivergenceKind = "unknown"
    sentence: str = ""
    evidence: list[str] = msgspec.field(default_factory=list)
    after: str = ""
    sites: dict[str, OperationSite] = msgspec.field(default_factory=dict)


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """Row of the comparison table: one quantity of one module in one phase, at its worst step up to the divergence.

    Attributes:
        phase, module, what, name: as in `Divergence`.
        stage: the pass.
        step: the step at which `distance / allowed` is largest.
        dtypes: of the first side, of the second.
        distance: relative, at that step; None where one is not finite.
        allowed: relative.
        counts: whether the row counts as a difference.
    """

    phase: str
    module: str
    stage: str
    what: str
    name: str
    step: int
    dtypes: tuple[str, str]
    distance: float | None
    allowed: float
    counts: bool

    @property
    def allowed_share(self) -> float:
        """The distance as a share of the allowed one; infinite if it is not finite."""
        if self.distance is None:
            return math.inf
        return self.distance / self.allowed if self.allowed else (math.inf if self.distance else 0.0)


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of a side's steps under one policy; None where a number is not finite.

    Attributes:
        side: label.
        phase: policy, or "float64" for the reference run.
        loss, grad_norm, scale: a number per step; empty if not reported.
        skipped: numbers of the skipped steps.
    """

    side: str
    phase: str
    loss: list[float | None] = msgspec.field(default_factory=list)
    grad_norm: list[float | None] = msgspec.field(default_factory=list)
    scale: list[float | None] = msgspec.field(default_factory=list)
    skipped: list[int] = msgspec.field(default_factory=list)


class JudgedUpdates(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the parameters that both sides updated in a phase had an update that could be judged.

    Attributes:
        phase: as in `Divergence`.
        judged: parameters with an update that was judged; those of the others are hidden by their gradients' rounding.
        updated: all of them, up to the divergence.
    """

    phase: str
    judged: int
    updated: int


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of two sides.

    Attributes:
        sides: the labels; modules have the names of the first.
        first: first divergence; None if there is none, or if a failure left it unknown.
        rows: the table, in the order of the first side's program.
        notes: what was not compared and why; settings that weights do not carry (`polyamp.port`'s report).
        updates: how many parameters' updates were judged, in each phase that trained.
    """

    sides: tuple[str, str]
    first: Divergence | None
    rows: list[ComparisonRow] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    updates: list[JudgedUpdates] = msgspec.field(default_factory=list)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Failure of a side that did not finish.

    Attributes:
        side: label.
        phase: the phase it was in; "" before the first.
        step: the step that it did not finish; 0 before the first.
        reason: "missing" (the framework is not installed), "error" (raised by the user's code or polyamp), "crashed",
            "killed", "timeout" or "interrupted".
        message: the cause, and what to do.
    """

    side: str
    phase: str
    step: int
    reason: Literal["missing", "error", "crashed", "killed", "timeout", "interrupted"]
    message: str


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Environment of one side.

    Attributes:
        side: label.
        backend: name of the backend.
        versions: distribution -> version.
        device: the device.
        model: class of the model.
        parameters: number of trained values.
    """

    side: str
    backend: str
    versions: dict[str, str]
    device: str
    model: str
    parameters: int


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a comparison; the fields are documented in `report.Report`."""

    polyamp: str
    recipes: dict[str, dict[str, Any]]
    phases: list[str]
    steps: int
    environments: list[Environment]
    comparisons: list[Comparison]
    curves: list[Curve]
    failures: list[Failure]
    randomness: str
    seconds: float
    own_seconds: float

    @property
    def agrees(self) -> bool:
        """Whether every side finished and no two diverge."""
        return not self.failures and bool(self.comparisons) and self.first is None

    @property
    def first(self) -> Divergence | None:
        """The first divergence of the first comparison that has one."""
        return next((each.first for each in self.comparisons if each.first is not None), None)


def encode_report(findings: Findings) -> bytes:
    """Return findings as indented JSON; numbers that are not finite become null."""
    return msgspec.json.format(msgspec.json.encode(findings, enc_hook=_encode_numpy_scalar), indent=1)


def _encode_numpy_scalar(value: Any) -> Any:
    """Convert a NumPy scalar to a Python scalar."""
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return value.item()
    # the exception that msgspec requires of an encoding hook for an unknown type
    raise NotImplementedError(f"a report holds plain data. Received: {type(value).__qualname__}.")
