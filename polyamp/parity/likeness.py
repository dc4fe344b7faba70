"""What a difference looks like: dtype, epsilon, layout, formula, a factor, randomness, with what that is read from.

Called by `verdict` with the first entry that counts. The order of the questions is that of how sure their answers are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from polyamp.parity.aligned import Agreed
from polyamp.parity.phases import FLOAT32, Phase
from polyamp.parity.report import Divergence, Kind, Shown
from polyamp.parity.trace import Entry, Trace
from polyamp.parity.unseen import is_absent

if TYPE_CHECKING:
    from polyamp.parity.distances import Compared
    from polyamp.parity.sketch import Sketch

_ALIKE: Final = 1e-4
"""How far two factors may be apart to be one."""
_MOVED: Final = 1e-2
"""Relative distance from which the same numbers in another order are looked for."""
_EPSILONS: Final = ("epsilon", "eps")
_SHOWN: Final = 6
"""How many operations of a module are listed."""


class Likeness(NamedTuple):
    """What a difference looks like, a sentence, and what that is read from."""

    kind: Kind
    sentence: str
    evidence: list[str]


def divergence(
    found: Compared,
    phase: Phase,
    labels: tuple[str, str],
    agreed: Agreed,
    traces: tuple[Trace, Trace],
    after: str,
    between: Sequence[str] = (),
    ran: str | None = None,
) -> Divergence:
    """The first divergence, with what it looks like.

    Args:
        found: the entry at which two sides part.
        phase: the phase.
        labels: of both sides.
        agreed: what the sides agreed on.
        traces: of both sides.
        after: path of the last module that agrees.
        between: layers that run before the entry and after that, and show nothing.
        ran: what ran in other dtypes there, in words.
    """
    one, two = found.one, found.two
    made = likeness(found, labels, agreed, phase, after)
    if ran:
        made = made._replace(evidence=[f"{ran}.", *made.evidence])
    if between:
        made = made._replace(evidence=[_inside(one.module, between), *made.evidence])
    scale = found.scale or 1.0
    module = one.module.partition("#")[0]
    return Divergence(
        phase=phase.shown,
        step=one.step,
        stage=one.stage,
        module=between[0] if between else one.module,
        what=one.what,
        name=one.name,
        sides={
            label: _shown(entry, trace, module) for label, entry, trace in zip(labels, (one, two), traces, strict=True)
        },
        distance=found.distance / scale if math.isfinite(found.distance) else None,
        allowed=found.allowed / scale,
        own={label: None if own is None else own / scale for label, own in zip(labels, found.own, strict=True)},
        kind=made.kind,
        sentence=made.sentence,
        evidence=made.evidence,
        after=after,
    )


def likeness(found: Compared, labels: tuple[str, str], agreed: Agreed, phase: Phase, after: str) -> Likeness:
    """What a difference looks like."""
    a, b = found.one.sketch, found.two.sketch
    where = _where(found.one, after)
    if a is None or b is None:
        return _of_numbers(found, labels)
    if a.nonfinite != b.nonfinite:
        counts = f"{a.nonfinite} of {a.size} in {labels[0]}, {b.nonfinite} in {labels[1]}"
        return Likeness("not finite", f"Only one side has inf or NaN {where}.", [f"inf or NaN: {counts}."])
    size = found.scale or 1.0
    if found.kind == "randomness":
        own = [
            f"{label}: two runs of it differ by {each / size:.1e} (relative)."
            for label, each in zip(labels, found.own, strict=True)
            if each is not None
        ]
        return Likeness(
            "randomness", f"One side does not repeat itself {where}: something random runs in the model.", own
        )
    if found.kind == "operations":
        path = repr(found.one.module) if found.one.module else "the model"
        return Likeness("dtype", f"In {path} one side runs in 16 bits what the other keeps in float32.", [])
    if found.kind == "dtype":
        return Likeness(
            "dtype",
            f"{labels[0]} gives {a.dtype} and {labels[1]} {b.dtype} {where}.",
            [_widths(labels, a, b)],
        )
    if found.kind == "missing":
        without, other = labels if is_absent(found.one) else labels[::-1]
        return Likeness(
            "missing",
            f"Of {found.one.name!r} of {found.one.module!r} the loss of {without} does not know; that of {other} does.",
            [f"{other} has a gradient of root mean square {max(a.rms, b.rms):.3g}; {without} has none."],
        )
    its = found.one.what != "input"  # what a layer is given is not its own work
    told = agreed.differs.get(found.one.module.partition("#")[0], []) if its else []
    kinds = agreed.structure.get(found.one.module.partition("#")[0], []) if its else []
    if any(kind in _EPSILONS for kind in kinds):
        return Likeness("epsilon", f"Another epsilon {where}.", told)
    if found.one.step == 0:
        return _arrived(found, labels)
    if found.one.what == "parameter":
        return _optimizer(found, labels)
    if told and found.one.what == "statistic":
        return Likeness("formula", f"Other settings {where}.", told)
    factor = _factor(a, b)
    if factor is not None:
        return Likeness(
            "factor",
            f"Every value of {labels[1]} is {factor:.6g} times that of {labels[0]} {where}.",
            [f"The ratio is the same in all {a.samples().size} elements that were looked at."],
        )
    if found.distance > _MOVED * size and _permuted(a, b):
        return Likeness(
            "layout",
            f"The same numbers in another order {where}.",
            [f"Mean {a.mean:.6g}, root mean square {a.rms:.6g} and largest {a.largest:.6g} are alike on both sides."],
        )
    if told:
        return Likeness("formula", f"Other settings {where}.", told)
    if a.zeros != b.zeros and _where_both(a, b):
        return Likeness(
            "randomness",
            f"Other elements are 0 {where}, and the rest agrees up to a factor: a dropout.",
            [f"{a.zeros} of {a.size} are 0 in {labels[0]}, {b.zeros} in {labels[1]}."],
        )
    if a.width != b.width and "float32" in (a.width, b.width):
        return Likeness("dtype", f"One side was rounded to fewer digits {where}.", [_widths(labels, a, b)])
    said = f"relative distance {found.distance / size:.1e}, {found.allowed / size:.1e} allowed"
    if phase.name != FLOAT32:
        return Likeness("dtype", f"Alike in float32, and further apart than the policy explains {where}.", [f"{said}."])
    small = found.distance < 1e-2 * found.scale
    return Likeness(
        "formula",
        f"Another formula {where}{': a small one, such as an approximation or an epsilon' if small else ''}.",
        [f"In float32, where rounding explains little: {said}."],
    )


def _optimizer(found: Compared, labels: tuple[str, str]) -> Likeness:
    """A parameter after an update, whose gradient and whose optimizer's slots agree."""
    what = f"parameter {found.one.name!r} of {found.one.module!r}"
    size = found.scale or 1.0
    said = f"Its gradient and the optimizer's slots agree; relative distance {found.distance / size:.1e}."
    if found.why:
        why = found.why.replace("The second side's", f"{labels[1]}'s").replace("the first's", f"{labels[0]}'s")
        return Likeness("formula", f"The optimizers move {what} in another way.", [why, said])
    return Likeness("formula", f"The optimizers move {what} in another way: by another rate, decay or epsilon.", [said])


def _arrived(found: Compared, labels: tuple[str, str]) -> Likeness:
    """A weight that differs before the first step."""
    a, b = found.one.sketch, found.two.sketch
    assert a is not None
    assert b is not None
    what = f"{found.one.what} {found.one.name!r} of {found.one.module!r}"
    said = f"relative distance {found.distance / (found.scale or 1.0):.1e} before the first step"
    if _permuted(a, b):
        return Likeness("layout", f"{labels[1]} began with the values of {what} in another order.", [f"{said}."])
    if a.width != b.width:
        return Likeness("dtype", f"{labels[1]} began with {what} in fewer digits.", [_widths(labels, a, b), f"{said}."])
    return Likeness("layout", f"{labels[1]} began with other values of {what}.", [f"{said}."])


def _of_numbers(found: Compared, labels: tuple[str, str]) -> Likeness:
    one, two = found.one.number or 0.0, found.two.number or 0.0
    what = found.one.what
    said = f"{what}: {one:.6g} in {labels[0]}, {two:.6g} in {labels[1]}."
    if not (math.isfinite(one) and math.isfinite(two)):
        return Likeness("not finite", f"The {what} is finite on one side alone.", [said])
    if what == "finite":
        return Likeness("formula", "One side skips the step and the other does not.", [said])
    times = _times(one, two, labels)
    if what == "loss":
        why = "All outputs agree and the loss does not: the loss functions differ."
        return Likeness("factor" if times else "formula", why, [said, *times])
    return Likeness("factor" if times else "formula", f"The {what} differs.", [said, *times])


def _times(one: float, two: float, labels: tuple[str, str]) -> list[str]:
    if not one or not two:
        return []
    ratio = two / one
    for shown, times in ((ratio, labels[1]), (1 / ratio, labels[0])):
        if shown > 1.5 and abs(shown - round(shown)) < _ALIKE * shown:
            return [f"{times} has {round(shown)} times the other's: a sum where the other takes a mean?"]
    return []


def _inside(module: str, between: Sequence[str]) -> str:
    more = f" and {len(between) - _SHOWN} more" if len(between) > _SHOWN else ""
    return (
        f"It shows in the output of {module or 'the model'!r}; before it run layers that do not show theirs on both "
        f"sides: {', '.join(map(repr, between[:_SHOWN]))}{more}."
    )


def _where(entry: Entry, after: str) -> str:
    path = repr(entry.module) if entry.module else "the model"
    if entry.what == "input":
        return f"in what {path} is given" + (f", behind {after!r}, which agrees: between the two" if after else "")
    if entry.stage == "forward":
        return f"in the output of {path}" + (f", after {after!r}, which agrees" if after else "")
    if entry.what == "cotangent":
        return f"in the gradient that reaches the output of {path}"
    return f"in {entry.what} {entry.name!r} of {path}"


def _factor(a: Sketch, b: Sketch) -> float | None:
    """What all elements are times those of the other side; None if there is no one number, or it is 1."""
    import numpy as np

    x, y = a.samples(), b.samples()
    large = np.abs(x) > 1e-3 * (np.max(np.abs(x)) if x.size else 0.0)
    if x.shape != y.shape or int(large.sum()) < 2:
        return None
    ratios = y[large] / x[large]
    middle = float(np.median(ratios))
    spread = float(np.max(np.abs(ratios - middle)))
    return middle if spread < _ALIKE * abs(middle) and abs(middle - 1.0) > 10 * _ALIKE else None


def _permuted(a: Sketch, b: Sketch) -> bool:
    import numpy as np

    def near(one: float, other: float) -> bool:
        return abs(one - other) <= 1e-5 * max(abs(one), abs(other), a.rms)

    if a.size < 2 or not (near(a.mean, b.mean) and near(a.rms, b.rms) and near(a.largest, b.largest)):
        return False
    if not a.sums:
        return bool(np.allclose(np.sort(a.samples()), np.sort(b.samples()), rtol=1e-4, atol=1e-5 * a.rms))
    return bool(np.linalg.norm(a.samples() - b.samples()) > 0.1 * np.linalg.norm(a.samples()))


def _where_both(a: Sketch, b: Sketch) -> bool:
    """Whether the elements that are 0 on neither side agree up to a factor."""
    import numpy as np

    x, y = a.samples(), b.samples()
    both = (x != 0) & (y != 0)
    if int(both.sum()) < 4:
        return False
    ratios = y[both] / x[both]
    return bool(np.max(np.abs(ratios - np.median(ratios))) < 1e-2 * abs(np.median(ratios)))


def _widths(labels: tuple[str, str], a: Sketch, b: Sketch) -> str:
    return (
        "; ".join(
            f"all values of {label} are {'numbers of ' + each.width}"
            for label, each in zip(labels, (a, b), strict=True)
        )
        + "."
    )


def _shown(entry: Entry, trace: Trace, module: str) -> Shown:
    each = entry.sketch
    if each is None:
        return Shown(path=entry.own, number=entry.number)
    ran = [row for row in trace.operations if row.module == module]
    return Shown(
        path=entry.own,
        dtype=each.dtype,
        shape=each.shape,
        mean=each.mean,
        rms=each.rms,
        largest=each.largest,
        nonfinite=each.nonfinite,
        zeros=each.zeros,
        width=each.width,
        operations=[f"{row.name} in {row.dtype}" for row in ran[:_SHOWN]],
    )
