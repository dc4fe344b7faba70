"""`judged`: which differences of numbers a network's own sensitivity explains.

A network may blow up the last digit of a float: a normalisation of nearly equal numbers, Adam's first steps on tiny
gradients, a relu at its corner. So before a difference of numbers becomes a finding, one framework trains the
description again in float32 with every weight moved by its last digit: that of float32, once more with what every
layer gives moved as well, with the rows the other way round and in other directions, or for 16-bit policies that of
the policy's dtype, several times in random directions, and once toward zero for a framework that cuts its products
off. What that moves the numbers by, times a factor, is allowed between frameworks.
Called by the command and the tests; skips, scales, counters and bits are never excused. Only torch moves what layers
give; it is the first of the frameworks.
"""

from __future__ import annotations

import re
from typing import Any, Final

from tests.fuzz.compare import CURVES, CUT_OFF, distance, findings, first_steps
from tests.fuzz.grammar import Description
from tests.fuzz.pool import Pool
from tests.fuzz.worker import Record

JIGGLE: Final = {"float32": 2.0**-23, "mixed_bfloat16": 2.0**-9, "mixed_float16": 2.0**-12}
FACTOR: Final = 20.0
"""For one move in the last digit of float32: rounding goes on in every operation."""
FACTOR_NARROW: Final = 2.0
"""For the largest of `TRIES` moves in the last digit of 16 bits."""
TRIES: Final = 32
"""A relu at its corner turns over in one direction of eight."""
CUT: Final = 1.44
"""What a cut takes away on average, in moves of the last digit: 1 / ln 2, of numbers that are spread evenly over their
logarithms."""
DIRECTIONS: Final = 8
"""Of the moves in the last digit of float32: one may move a number by a seventieth of what another moves it."""
_FLOAT32: Final = re.compile(r"float32 (?:(?:loss|plain|grad_norm) is \S+ apart|parameters |running )")
_CURVE: Final = re.compile(r"float32 (loss|plain|grad_norm) is (\S+) apart")
_NARROW: Final = re.compile(r"\w+ is (\S+) from its float32 at the first steps \((plain|grad_norm)\)")


def judged(description: Description, found: list[str], pool: Pool) -> list[str]:
    """The findings that stand."""
    name = next(name for name in pool.workers if name != "reference")
    if any(_FLOAT32.match(finding) for finding in found):
        moved = sensitivity(description, name, pool)
        found = [finding for finding in found if not _explained(finding, moved)]
    if any(_NARROW.match(finding) for finding in found):
        moved = narrow_sensitivity(description, name, pool)
        found = [finding for finding in found if not _explained_narrow(finding, moved)]
    if any(_NARROW.match(finding) and finding.endswith(CUT_OFF) for finding in found):
        moved = narrow_sensitivity(description, name, pool, toward_zero=True)
        found = [each for each in found if not (each.endswith(CUT_OFF) and _explained_narrow(each, moved))]
    return found


def sensitivity(description: Description, framework: str, pool: Pool) -> dict[str, float]:
    """How far the float32 curves and arrays of one framework move when its weights do, in the last digit."""
    single = {**description, "policy": {"name": "float32"}}
    one = _alone(single, framework, pool)
    other = _alone({**single, "jiggle": JIGGLE["float32"]}, framework, pool)
    if "error" in one or "error" in other:
        return {}
    moved = {what: distance(one[what], other[what]) for what in CURVES}
    moved["arrays"] = float(_differ(single, one, other))
    # a sum that is 0 but for rounding stays so where equal terms move alike, and Adam and Lion make a step of its sign
    digit = JIGGLE["float32"]
    directions = [{"jiggle": digit, "rounding": digit, "jiggled": number} for number in range(DIRECTIONS)]
    for change in (directions[0], {"reversed": True}, *directions[1:]):
        if moved["arrays"]:
            break
        apart = _alone({**single, **change}, framework, pool)
        if "error" not in apart and _differ(single, one, apart):
            moved = {what: max(moved[what], distance(one[what], apart[what])) for what in CURVES} | {"arrays": 1.0}
    return moved


def _differ(description: Description, one: Record, other: Record) -> bool:
    """Whether some array does, or a curve, behind which arrays are not looked at."""
    return any(map(_FLOAT32.match, findings(description, {}, {"a": one, "b": other})))


def narrow_sensitivity(
    description: Description, framework: str, pool: Pool, *, toward_zero: bool = False
) -> dict[str, float]:
    """How far the first steps move in float32 when weights and layers' results do, in the policy's last digit.

    Args:
        description: what was trained.
        framework: which one moves.
        pool: its worker.
        toward_zero: move what layers give toward zero by as much as a cut takes on average, and no weights.
    """
    single = {**description, "policy": {"name": "float32"}}
    one = _alone(single, framework, pool)
    moved = dict.fromkeys(("plain", "grad_norm"), 0.0)
    digit = JIGGLE[description["policy"]["name"]]
    changes: list[dict[str, Any]] = [{"jiggle": digit, "rounding": digit, "jiggled": n} for n in range(TRIES)]
    for change in [{"toward_zero": CUT * digit}] if toward_zero else changes:
        other = _alone({**single, **change}, framework, pool)
        if "error" not in one and "error" not in other:
            moved = {what: max(value, first_steps(other, one)[what]) for what, value in moved.items()}
    return moved


def _alone(description: Description, framework: str, pool: Pool) -> Record:
    worker = pool.workers[framework]
    worker.submit({"description": description, "policy": None, "compile": None, "plant": None})
    return worker.result()


def _explained(finding: str, moved: dict[str, float]) -> bool:
    if not _FLOAT32.match(finding):
        return False
    curve = _CURVE.match(finding)
    if curve is None:
        return bool(moved.get("arrays")) and "elements differ" in finding
    return float(curve[2]) <= FACTOR * moved.get(curve[1], 0.0)


def _explained_narrow(finding: str, moved: dict[str, float]) -> bool:
    match = _NARROW.match(finding)
    return match is not None and float(match[1]) <= FACTOR_NARROW * moved[match[2]]
