"""`Aligned`: which module of one side is which of the other, and what stands between their outputs.

Made from the layers that `polyamp.port` matched (`porting.settled`). Modules that hold layers are matched by the layers
that they hold. `party` writes traces by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from polyamp.porting.layouts.forms import Form
from polyamp.porting.layouts.inventory import NativeLayer
from polyamp.porting.layouts.operations import Merge
from polyamp.porting.matching.differences import RECURRENT, Difference, listed
from polyamp.porting.matching.matching import Match
from polyamp.porting.settled import Settled
from polyamp.porting.states.canonical import Way

_LINEAR: Final = (None, "linear")


class Agreed(msgspec.Struct, frozen=True, kw_only=True):
    """What two sides have to know of each other, as plain data: the second side says it.

    Attributes:
        modules: path in the second side -> path in the first, of layers and of the modules that hold them.
        holders: paths, in the first, of modules that hold layers and are none.
        behind: path in the first -> the first's activation where the second's layer has its own inside: the first's
            output is compared behind it.
        applied: path in the second -> the second's activation where the first's layer has its own inside.
        merged: paths, in the first, of layers that keep in two arrays what the other side adds up in one: their
            biases move twice as far.
        kinds: path in the first -> the layer's kind.
        turned: paths, in the first, of dense layers beside a flatten, whose inputs come in two orders.
        biased: paths, in the first, of layers whose running variance is that of the batch on one side and an estimate
            of the population's on the other (n / (n - 1) times it).
        differs: path in the first -> what weights do not carry and differs there, as sentences.
        structure: path in the first -> kinds of what differs there ("epsilon").
        notes: the same for a person, and what has no partner.
    """

    modules: dict[str, str]
    holders: list[str] = msgspec.field(default_factory=list)
    behind: dict[str, str] = msgspec.field(default_factory=dict)
    applied: dict[str, str] = msgspec.field(default_factory=dict)
    merged: list[str] = msgspec.field(default_factory=list)
    kinds: dict[str, str] = msgspec.field(default_factory=dict)
    turned: list[str] = msgspec.field(default_factory=list)
    biased: list[str] = msgspec.field(default_factory=list)
    differs: dict[str, list[str]] = msgspec.field(default_factory=dict)
    structure: dict[str, list[str]] = msgspec.field(default_factory=dict)
    notes: list[str] = msgspec.field(default_factory=list)


class Ways(NamedTuple):
    """How the arrays of a side lead to canonical ones under the first side's names.

    Attributes:
        first: of the first side.
        second: of the other.
    """

    first: list[Way]
    second: list[Way]


def agreed(way: Settled) -> Agreed:
    """What two sides have to know of each other."""
    leaves = {each.target.path: each.source.path for each in way.pairs}
    holders = _holders(leaves)
    behind, applied = _activations(way.pairs, way.compared.differences)
    differs: dict[str, list[str]] = {}
    structure: dict[str, list[str]] = {}
    for each in way.compared.differences:
        for path in {
            each.source: 0,
            leaves.get(each.target, each.source): 0,
        }:  # an activation may be a layer's or its own
            differs.setdefault(path, []).append(str(each))
            structure.setdefault(path, []).append(each.attribute)
    notes = [f"the weights do not carry: {line}" for line in listed(way.compared.differences)]
    notes += [f"no partner for {path} of the first side" for path in way.unused]
    notes += [f"no partner for {path} of the second side" for path in way.missing]
    merged = [each.source.path for each in way.pairs if _merges(each)]
    if merged:
        notes.append(
            f"one side adds two biases where the other has one: {_few(merged)}. Either is trained for itself, so that "
            "their sum moves twice as far, and the norm counts both: the first forward and backward pass are compared, "
            "and no update"
        )
    biased = [each.source.path for each in way.pairs if _differ(each, "unbiased")]
    if biased:
        notes.append(
            f"running variances are the batch's on one side and an estimate of the population's on the other, as the "
            f"frameworks have it: {_few(biased)}. They are not compared"
        )
    return Agreed(
        modules={"": "", **holders, **leaves},
        holders=sorted(set(holders.values())),
        behind=behind,
        applied=applied,
        merged=merged,
        kinds={each.source.path: each.fit.source.kind for each in way.pairs},
        biased=biased,
        turned=[each.source.path for each in way.pairs if each.target.path in way.turned],
        differs=differs,
        structure=structure,
        notes=notes,
    )


def ways(way: Settled) -> Ways:
    """How arrays become comparable; the first side's names are used for both."""
    first = [Way(each.source.path, each.source, each.fit.source) for each in way.pairs]
    second = [
        Way(each.source.path, each.target, each.fit.target, way.turned.get(each.target.path)) for each in way.pairs
    ]
    return Ways(first, second)


def _differ(match: Match, attribute: str) -> bool:
    """Whether both sides show an attribute, and not the same."""
    ours, theirs = (form.attributes.get(attribute) for form in (match.fit.source, match.fit.target))
    return None not in (ours, theirs) and ours != theirs


def _merges(match: Match) -> bool:
    forms = (match.fit.source, match.fit.target)
    found = [any(isinstance(o, Merge) for rule in form.rules for o in rule.operations) for form in forms]
    return found[0] != found[1]


def _activations(pairs: Sequence[Match], differences: Sequence[Difference]) -> tuple[dict[str, str], dict[str, str]]:
    """What `Agreed.behind` and `Agreed.applied` say: each side's own activation, which may not be its partner's."""
    own = {each.target: str(each.ours) for each in differences if each.attribute == "activation"}
    others = {each.source: str(each.theirs) for each in differences if each.attribute == "activation"}
    behind, applied = {}, {}
    for each in pairs:
        ours, theirs = (_inside(*side) for side in ((each.source, each.fit.source), (each.target, each.fit.target)))
        if each.fit.source.kind in RECURRENT or (ours in _LINEAR) == (theirs in _LINEAR):
            continue
        if ours in _LINEAR:
            behind[each.source.path] = own.get(each.target.path, str(theirs))
        else:
            applied[each.target.path] = others.get(each.source.path, str(ours))
    return behind, applied


def _inside(layer: NativeLayer, form: Form) -> object:
    """The activation that is in a layer's own output: that of a Linear is run by what holds it, such as an MLP."""
    return None if layer.module.endswith(".Linear") else form.attributes.get("activation")


def _holders(leaves: Mapping[str, str]) -> dict[str, str]:
    """Module of the second side -> module of the first, of those that hold the same two layers or more, and where no
    other on either side holds just these."""
    ours, theirs = _held(leaves.values()), _held(leaves)
    partner = {frozenset(leaves[path] for path in held): holder for held, holder in theirs.items()}
    return {
        partner[held]: holder
        for held, holder in ours.items()
        if held in partner and partner[held] not in leaves and holder not in leaves.values()
    }


def _held(paths: Iterable[str]) -> dict[frozenset[str], str]:
    """The layers that a module holds -> its path; without what several modules hold alike."""
    held: dict[str, set[str]] = {}
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts)):
            held.setdefault("/".join(parts[:end]), set()).add(path)
    found: dict[frozenset[str], list[str]] = {}
    for holder, inside in held.items():
        if len(inside) > 1:
            found.setdefault(frozenset(inside), []).append(holder)
    return {inside: holders[0] for inside, holders in found.items() if len(holders) == 1}


def _few(paths: Sequence[str]) -> str:
    return f"{', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"
