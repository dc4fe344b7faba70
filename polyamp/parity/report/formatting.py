"""Text formatting of a report: names, numbers, verdict and statistics."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from polyamp.parity.report_data import (
    Comparison,
    Divergence,
    Environment,
    Failure,
    Findings,
    JudgedUpdates,
    OperationSite,
    SideValues,
)
from polyamp.report_page.page import Outcome
from polyamp.report_page.text_format import count_text as count_text
from polyamp.report_page.text_format import number as number
from polyamp.report_page.text_format import plain as plain
from polyamp.report_page.text_format import truncate_end as truncate_end
from polyamp.report_page.text_format import truncate_middle as truncate_middle

OUTCOME_TEXTS: Final[dict[Outcome, str]] = {"agree": "agree", "differ": "differ", "unfinished": "no verdict"}
"""Outcome -> its text. Unfinished: no divergence is known, and something failed or nothing was compared."""
_FAILURE_TEXTS: Final[dict[str, str]] = {
    "missing": "is missing",
    "error": "raised an error",
    "crashed": "crashed",
    "killed": "was killed",
    "timeout": "took too long",
    "interrupted": "was interrupted",
}


def ratio_text(value: float | None) -> str:
    """Return a ratio as text, with two significant digits below 1.

    >>> ratio_text(0.2761), ratio_text(1.0371), ratio_text(31.4), ratio_text(671.4)
    ('0.28', '1.04', '31', '671')
    """
    if value is None or not 1 <= value < 1e6:
        return number(value, 2)
    return number(value) if value < 10 else f"{value:.0f}"


def numbers(values: list[float | None], digits: int = 4) -> list[str]:
    """Return numbers as texts with as many digits as their difference needs.

    >>> numbers([0.6931471, 0.6931502]), numbers([1.5, 1.5])
    (['0.693147', '0.69315'], ['1.5', '1.5'])
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    apart = max(known, default=0.0) - min(known, default=0.0)
    while digits < 9:
        shown = [float(number(value, digits)) for value in known]
        if abs(max(shown, default=0.0) - min(shown, default=0.0) - apart) <= 0.1 * apart:
            break
        digits += 1
    return [number(value, digits) for value in values]


def join_words(words: list[str]) -> str:
    """Join words with commas and "and".

    >>> join_words(["torch", "jax", "keras"]), join_words(["jax"]), join_words([])
    ('torch, jax and keras', 'jax', '')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def module(path: str) -> str:
    """Return a module's name; the whole model has no path."""
    return plain(path) or "the model"


def quantity(what: str, name: str) -> str:
    """Return the name of a compared quantity: `gradient of kernel`, `output`."""
    return plain(f"{what} of {name}" if name else what)


def update_counts(counts: Sequence[JudgedUpdates]) -> str:
    """Return in words of how many parameters an update was judged: the fewest of all pairs of sides in each phase.

    >>> update_counts([JudgedUpdates(phase="float32", judged=41, updated=41)])
    'judged: 41 of 41 parameters under float32'
    """
    fewest: dict[str, JudgedUpdates] = {}
    for each in sorted(counts, key=lambda each: each.judged - each.updated, reverse=True):
        fewest = {**fewest, each.phase: each}
    phases = dict.fromkeys(each.phase for each in counts)
    texts = [
        f"{fewest[phase].judged:,} of {count_text(fewest[phase].updated, 'parameter')} under {phase}"
        for phase in phases
    ]
    hidden = any(each.judged < each.updated for each in counts)
    return plain(f"judged: {', '.join(texts)}{'; rounding hides the others' if hidden else ''}")


def failure_text(failure: Failure) -> str:
    """Return a failure in words: `jax crashed in step 2 under float32`."""
    where = f" in step {failure.step}" if failure.step else ""
    under = f" under {failure.phase}" if failure.phase else ""
    return plain(f"{failure.side} {_FAILURE_TEXTS.get(failure.reason, failure.reason)}{where}{under}")


def split_traceback(message: str) -> tuple[str, tuple[str, ...]]:
    """Return the text of a failure's message, and the lines of its traceback, each plain.

    >>> split_traceback("ValueError: no\\n  File 'a.py', line 3, in f\\n    raise ValueError('no')")
    ('ValueError: no', ("File 'a.py', line 3, in f", "raise ValueError('no')"))
    """
    text, *rest = re.split(r"\n(?=  File )", message, maxsplit=1)
    lines = (plain(line) for part in rest for line in part.splitlines())
    return text, tuple(line for line in lines if line.strip("^~ "))


def outcome(report: Findings) -> Outcome:
    """Return the outcome of a report."""
    if report.first is not None:
        return "differ"
    return "agree" if report.agrees else "unfinished"


def divergent_comparison(report: Findings) -> Comparison | None:
    """Return the comparison that `report.first` is from."""
    return next((each for each in report.comparisons if each.first is not None), None)


def location_text(divergence: Divergence) -> str:
    """Return the location of a divergence: phase, step, pass, module and quantity."""
    what = quantity(divergence.what, divergence.name)
    when = f"step {divergence.step}, {divergence.stage}" if divergence.step else "before step 1"
    return f"{divergence.phase}, {when}, {module(divergence.module)} ({what})"


def labels(report: Findings) -> list[str]:
    """Return the labels of the sides in order, including those that never started."""
    known = [each.side for each in report.environments]
    known += [label for each in report.comparisons for label in each.sides]
    return list(dict.fromkeys([*known, *(each.side for each in report.failures)]))


def verdict(report: Findings) -> str:
    """Return the verdict of a report as a sentence."""
    comparison = divergent_comparison(report)
    if comparison is not None and comparison.first is not None:
        return plain(f"{join_words(list(comparison.sides))} differ: {location_text(comparison.first)}")
    under = f"{count_text(report.steps, 'step')} under {join_words(report.phases)}"
    if report.agrees:
        return plain(f"{join_words(labels(report))} agree: {under}")
    if report.failures:
        return plain(f"no verdict: {failure_text(report.failures[0])}")
    return "no verdict: nothing was compared"


def distance(divergence: Divergence) -> str:
    """Return the distance of two sides, and what rounding allows, as text."""
    allows = "" if divergence.allowed is None else f"; rounding allows {number(divergence.allowed)}"
    if divergence.distance is not None:
        beyond = f" ({ratio_text(divergence.distance / divergence.allowed)} times)" if divergence.allowed else ""
        return f"{number(divergence.distance)} relative{allows}{beyond}"
    if any(side.nonfinite for side in divergence.sides.values()):
        return f"one side is not finite{allows}"
    return f"no distance can be told{allows}"


def statistics(first: Divergence) -> dict[str, dict[str, str]]:
    """Return label -> statistic -> text at a divergence, with enough digits to show the difference."""
    sides = first.sides
    found: dict[str, dict[str, str]] = {label: {} for label in sides}
    scalar = first.kind != "missing" and not any(side.dtype for side in sides.values())
    for field in ("number", "mean", "rms", "largest", "worst"):
        values = [getattr(side, field) for side in sides.values()]
        for label, value, text in zip(sides, values, numbers(values), strict=True):
            index = ", ".join(map(str, sides[label].worst_index))
            name = {"number": "value", "worst": f"at [{index}]"}.get(field, field)
            if value is not None or (scalar and field == "number"):
                found[label][name] = text
    worst = [side.worst for side in sides.values() if side.worst is not None]
    if len(worst) == len(sides) == 2:
        last = found[list(sides)[-1]]
        name = next(name for name in last if name.startswith("at ["))
        last[name] += f", {number(abs(worst[0] - worst[1]), 2)} apart"
    for label, side in sides.items():
        size = math.prod(side.shape)
        if side.dtype and side.nonfinite:
            found[label] = {} if side.nonfinite == size else found[label]  # no finite values, no statistics
            found[label]["inf or NaN"] = f"{side.nonfinite:,} of {size:,}"
        if side.dtype and side.zeros:
            found[label]["zeros"] = f"{side.zeros:,}"
        if side.width and side.dtype and side.width != side.dtype and side.nonfinite < size:
            found[label]["fits in"] = side.width
    return found


def operations(side: SideValues) -> list[str]:
    """Return the operations that ran in a side's module, repeated ones once with their count.

    >>> operations(SideValues(path="head", operations=["add in float32", "dot in float16", "add in float32"]))
    ['add in float32, 2 times', 'dot in float16']
    """
    return [
        f"{plain(name)}, {count} times" if count > 1 else plain(name)
        for name, count in Counter(side.operations).items()
    ]


def site_text(site: OperationSite) -> str:
    """Return the line of an operation at which a side parts.

    >>> site_text(OperationSite(operation="add", file="/home/me/model.py", line=41, code="x = x + y"))
    'model.py:41, add in "x = x + y"'
    """
    code = f' in "{site.code}"' if site.code else ""
    place = f"{PurePath(site.file).name}:{site.line}, " if site.file else ""
    last = "nothing after " if site.is_missing else ""
    return plain(f"{last}{place}{site.operation}{code}")


def kind(divergence: Divergence) -> str:
    """Return the likely cause of a difference as a label."""
    return {"unknown": "not recognized", "missing": "missing on one side"}.get(divergence.kind, divergence.kind)


def software(environment: Environment) -> str:
    """Return a side's software and device: `torch 2.13.0 on cpu`."""
    version = environment.versions.get(environment.backend, "")
    return plain(
        f"{environment.backend} {version}".strip() + (f" on {environment.device}" if environment.device else "")
    )
