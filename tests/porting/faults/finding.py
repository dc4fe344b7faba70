"""Whether `polyamp.port(check=)` finds a fault, and what it names. Called by the command and the tests."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import polyamp
from polyamp.errors import PortError
from polyamp.porting.check import Batch
from tests.porting.faults.planting import Fault, carrying, models, sized

_SIZES = tuple[tuple[str, Any], ...]


class Verdict(NamedTuple):
    """What came of one fault.

    Attributes:
        by: "report", "check" or "error"; "" if nothing saw it.
        named: the target's paths that were named.
        right: whether all of them, and at least one, are where the fault is.
        said: the first line of what was said.
    """

    by: str
    named: tuple[str, ...]
    right: bool
    said: str


def batch(model: str, libraries: tuple[Any, Any], sizes: _SIZES = ()) -> Batch:
    """Inputs of a model for both sides."""
    given = sized(sizes).inputs(model)
    return Batch(*(library.native(model, given) for library in libraries))


def verdict(fault: Fault, seed: int = 0) -> Verdict:
    """Plant a fault and move the model."""
    both = fault.both or {}
    ours = models(fault.source, (*both.get(fault.source, ()), *fault.ours))
    theirs = models(fault.target, (*both.get(fault.target, ()), *fault.edits))
    given = batch(fault.model, (ours, theirs))
    source, target = ours.build(fault.model, seed), theirs.build(fault.model, seed + 1)
    by, named, said = "", (), ""
    with carrying(target, fault.carried):
        try:
            _, report = polyamp.port(source, target, names=fault.names, check=given)
            said = "\n".join(f"  {each}" for each in report.differences)
        except PortError as error:
            said = str(error)
            by = "check" if said.startswith("check:") else "error"
            named = _first(said) if by == "check" else tuple(re.findall(r"([^\s']+)'?(?:: | is )", said))
    if by != "error" and (differences := re.findall(r"^  (\S+): \w+ is ", said, re.MULTILINE)):
        by = f"report, {by}" if by else "report"
        named = tuple(dict.fromkeys((*differences, *named)))
    right = [path for path in named if re.fullmatch(fault.at, path)]
    return Verdict(by, named, bool(right) and (by == "error" or len(right) == len(named)), said)


def _first(said: str) -> tuple[str, ...]:
    """The paths that a check's message names."""
    shown = re.search(r"not shown by both sides: ([^.]*)\.", said)
    hidden = re.findall("'([^']*)'", shown[1]) if shown else []
    behind = re.search(r"All matched layers agree, '([^']*)' the last", said)
    layer = re.search(r"differs, (?:after '[^']*', which agrees, )?is '([^']*)' \(", said)
    gradient = re.search(r"first in the model's order: (\S+)\.$", said, re.MULTILINE)
    named = [f"behind {behind[1]}"] if behind else [layer[1]] if layer else []
    named += [gradient[1].rpartition("/")[0]] if gradient else []
    return (*hidden, *named)
