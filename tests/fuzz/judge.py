"""`judged`: which differences of float curves a network's own sensitivity explains.

A network may blow up the last digit of a float: a normalisation of nearly equal numbers, Adam's first steps on tiny
gradients. So before a difference of numbers becomes a finding, the description is trained once more in one framework
with every weight moved by one part in 2^23, and what that moves the curve by, times `FACTOR`, is allowed between
frameworks. Called by the command and the tests; skips, scales, counters and bits are never excused.
"""

from __future__ import annotations

import re
from typing import Final

from tests.fuzz.compare import CURVES, distance, findings
from tests.fuzz.grammar import Description
from tests.fuzz.pool import Pool

JIGGLE: Final = 2.0**-23
FACTOR: Final = 20.0
_NUMBERS: Final = re.compile(r"(float32 )?(loss|plain|grad_norm) is (\S+) apart|float32 (parameters|running) ")


def judged(description: Description, found: list[str], pool: Pool) -> list[str]:
    """The findings that stand."""
    if not any(_NUMBERS.match(finding) for finding in found):
        return found
    name = next(name for name in pool.workers if name != "reference")
    moved = sensitivity(description, name, pool)
    return [finding for finding in found if not _explained(finding, moved)]


def sensitivity(description: Description, framework: str, pool: Pool) -> dict[str, float]:
    """How far the float32 curves and arrays of one framework move when its weights do, in the last digit."""
    single = {**description, "policy": {"name": "float32"}}
    one = _alone(single, framework, pool)
    other = _alone({**single, "jiggle": JIGGLE}, framework, pool)
    if "error" in one or "error" in other:
        return {}
    moved = {what: distance(one[what], other[what]) for what in CURVES}
    moved["arrays"] = float(any("elements differ" in text for text in findings(single, {}, {"a": one, "b": other})))
    return moved


def _alone(description: Description, framework: str, pool: Pool) -> dict[str, object]:
    worker = pool.workers[framework]
    worker.submit({"description": description, "policy": None, "compile": None, "plant": None})
    return worker.result()


def _explained(finding: str, moved: dict[str, float]) -> bool:
    match = _NUMBERS.match(finding)
    if match is None:
        return False
    if match[3] is None:
        return bool(moved.get("arrays"))
    return float(match[3]) <= FACTOR * moved.get(match[2], 0.0)
