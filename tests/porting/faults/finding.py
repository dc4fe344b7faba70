"""Whether `polyamp.port(check=)` finds a fault, and what it names. Called by the command and the tests."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import polyamp
from polyamp.errors import PortError
from polyamp.porting.check import Batch
from tests.porting.faults.planting import Fault, carrying, models, sized

_ANY = float("inf")
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
    differences: tuple[Any, ...] = ()
    by, named, said = "", (), ""
    with carrying(target, fault.carried):
        try:
            _, report = polyamp.port(source, target, names=fault.names, check=given)
            differences = tuple(report.differences)
        except PortError as error:
            said = str(error)
            by = "check" if said.startswith("check:") else "error"
            if by == "check":
                named = (_first(said),)
                unlimited = given.__class__(given.source, given.target, _ANY, _ANY)
                differences = tuple(_report(source, target, fault, unlimited))
            else:
                named = tuple(re.findall(r"(\S+): ", said))
    if differences:
        by = f"report, {by}" if by else "report"
        named = tuple(dict.fromkeys((*(each.target for each in differences), *named)))
        said = str(differences[0])
    right = [path for path in named if re.fullmatch(fault.at, path)]
    return Verdict(by, named, bool(right) and (by == "error" or len(right) == len(named)), said)


def _report(source: Any, target: Any, fault: Fault, unlimited: Batch) -> Any:
    try:
        return polyamp.port(source, target, names=fault.names, check=unlimited)[1].differences
    except PortError:  # the outputs have other shapes
        return ()


def _first(said: str) -> str:
    """The path that a check's message names."""
    behind = re.search(r"All matched layers agree, '([^']*)' the last", said)
    if behind:
        return f"behind {behind[1]}"
    layer = re.search(r"is '([^']*)' \(", said)
    if layer:
        return layer[1]
    gradient = re.search(r"first in the model's order: (\S+)\.$", said)
    return gradient[1].rpartition("/")[0] if gradient else "no path"
