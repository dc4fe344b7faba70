"""What a comparison of trainings found, as data. `report.Report` is it with what writes it down: `said`, `page` and
`picture` read it from here, so that none of them imports what calls it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Kind = Literal["dtype", "epsilon", "layout", "formula", "factor", "randomness", "not finite", "missing", "unknown"]
"""What a difference looks like: other dtypes, an epsilon of a normalization, the same numbers in another order, another
formula, all values times one factor, random numbers, inf or NaN on one side, something that one side does not have."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One side's values at a divergence.

    Attributes:
        path: as this side calls the module or the array.
        dtype: of the values; "" of a number.
        shape: in canonical layout.
        mean, rms, largest: of its finite values.
        nonfinite: how many are inf or NaN.
        zeros: how many are 0.
        width: the narrowest dtype that holds all of them.
        number: where it is a number and no array.
        operations: what ran in the module, and in which dtype ("softmax in bfloat16").
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
    number: float | None = None
    operations: list[str] = msgspec.field(default_factory=list)


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where two trainings part first.

    Attributes:
        phase: "float32", or the policy under which it was found.
        step: number of the training step, from 1.
        stage: "forward", "backward", "step" or "update".
        module: path of the module, or of the layer that owns the parameter; "" of the whole model.
        what: the quantity: "output", "loss", "gradient", "exp_avg", ... (`trace.Entry.what`).
        name: the array in its layer ("kernel"); "" where there is none.
        sides: label -> its values.
        distance: how far apart they are, relative to the larger; None where one is not finite.
        allowed: how far apart rounding allows them to be, relative to the same.
        own: label -> how far the side is from its own wider run; None where there was none.
        kind: what it looks like.
        sentence: the same in words.
        evidence: what that is read from, a sentence each.
        after: path of the last module before it that agrees; "" if there is none.
    """

    phase: str
    step: int
    stage: str
    module: str
    what: str
    name: str = ""
    sides: dict[str, Shown] = msgspec.field(default_factory=dict)
    distance: float | None = None
    allowed: float | None = None
    own: dict[str, float | None] = msgspec.field(default_factory=dict)
    kind: Kind = "unknown"
    sentence: str = ""
    evidence: list[str] = msgspec.field(default_factory=list)
    after: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table: one quantity of one module, in one phase, at its worst step up to that in which the sides
    part there.

    Attributes:
        phase, module, what, name: as in `Divergence`.
        stage: the pass.
        step: the step at which `distance / allowed` is largest.
        dtypes: of the first side, of the second.
        distance: relative, at that step; None where one is not finite.
        allowed: relative.
        counts: whether it counts as a difference.
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


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """What a side's steps reported under one policy; None where a number is not finite.

    Attributes:
        side: label.
        phase: policy, or "float64" of the judge.
        loss, grad_norm, scale: a number per step; empty where nothing reports them.
        skipped: numbers of the steps that applied nothing.
    """

    side: str
    phase: str
    loss: list[float | None] = msgspec.field(default_factory=list)
    grad_norm: list[float | None] = msgspec.field(default_factory=list)
    scale: list[float | None] = msgspec.field(default_factory=list)
    skipped: list[int] = msgspec.field(default_factory=list)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two sides.

    Attributes:
        sides: the labels; modules have the names of the first.
        first: where they part; None where they do not, or where nobody knows because something failed.
        rows: the table, in the order of the first side's program.
        notes: what was not compared and why; what weights do not carry (`polyamp.port`'s report).
    """

    sides: tuple[str, str]
    first: Divergence | None
    rows: list[Row] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A side that did not come to its end.

    Attributes:
        side: label.
        phase: where it was; "" before the first.
        step: the step that it did not finish; 0 before the first.
        reason: "missing" (the framework is not installed), "error" (what the user's code or polyamp raised), "crashed",
            "killed", "timeout" or "interrupted".
        message: what is known, and what to do.
    """

    side: str
    phase: str
    step: int
    reason: Literal["missing", "error", "crashed", "killed", "timeout", "interrupted"]
    message: str


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where a side ran.

    Attributes:
        side: label.
        backend: polyamp's name of the framework.
        versions: distribution -> version.
        device: the device.
        model: class of the model.
        parameters: how many trained values.
    """

    side: str
    backend: str
    versions: dict[str, str]
    device: str
    model: str
    parameters: int


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """All that a comparison found; `report.Report` says what the fields are."""

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
        """True where every side came to its end and no two part."""
        return not self.failures and bool(self.comparisons) and self.first is None

    @property
    def first(self) -> Divergence | None:
        """The first divergence of the first two sides that part."""
        return next((each.first for each in self.comparisons if each.first is not None), None)


def encoded(findings: Findings) -> bytes:
    """Findings as indented JSON; what is not finite is null there."""
    return msgspec.json.format(msgspec.json.encode(findings, enc_hook=_plain), indent=1)


def _plain(value: Any) -> Any:
    """A NumPy scalar as Python's: measured numbers are often such."""
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return value.item()
    # what msgspec asks an encoding hook to raise for a type that it does not know
    raise NotImplementedError(f"a report holds plain data. Received: {type(value).__qualname__}.")
