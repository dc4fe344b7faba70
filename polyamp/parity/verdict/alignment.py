"""`Alignment`: which module of one side corresponds to which of the other, and how their outputs compare.

It is built from the layers that `polyamp.port` matched (`porting.transfer_plan`). Containers are matched by the layers
in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from polyamp.porting.layouts.inventory import NativeLayer
from polyamp.porting.layouts.layer_kinds import RECURRENT_KINDS
from polyamp.porting.layouts.layer_layout import Form
from polyamp.porting.layouts.operations import Merge
from polyamp.porting.matching.attribute_differences import Difference, format_differences
from polyamp.porting.matching.matching import LayerMatch
from polyamp.porting.states.training_state import ArrayMapping
from polyamp.porting.transfer_plan import TransferPlan

_LINEAR: Final = (None, "linear")


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """Correspondence of two sides as plain data, made by the second side.

    Attributes:
        modules: path in the second side -> path in the first, of layers and of their containers.
        holders: paths, in the first, of containers.
        behind: path in the first -> the first's activation, where only the second's layer includes one: the first's
            output is compared after it.
        applied: path in the second -> the second's activation, where only the first's layer includes one.
        merged: paths, in the first, of layers with two bias arrays on one side and one on the other: the sum of the
            two moves twice as far.
        kinds: path in the first -> the layer's kind.
        turned: paths, in the first, of dense layers next to a flatten, whose input order differs.
        biased: paths, in the first, of layers whose running variance is that of the batch on one side and an estimate
            of the population's on the other (n / (n - 1) times it).
        differs: path in the first -> differences that weights do not carry, as sentences.
        structure: path in the first -> attributes that differ there ("epsilon").
        notes: the differences as text, and modules without a partner.
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


class ArrayMappingPair(NamedTuple):
    """Mappings from the arrays of both sides to canonical ones, under the first side's names.

    Attributes:
        first: of the first side.
        second: of the other.
    """

    first: list[ArrayMapping]
    second: list[ArrayMapping]


def align(way: TransferPlan) -> Alignment:
    """Return the alignment of two sides."""
    leaves = {each.target.path: each.source.path for each in way.pairs}
    holders = _container_pairs(leaves)
    behind, applied = _fused_activations(way.pairs, way.comparison.differences)
    differs: dict[str, list[str]] = {}
    structure: dict[str, list[str]] = {}
    for each in way.comparison.differences:
        for path in {
            each.source: 0,
            leaves.get(each.target, each.source): 0,
        }:  # an activation may be a layer's or its own
            differs.setdefault(path, []).append(str(each))
            structure.setdefault(path, []).append(each.attribute)
    notes = [f"the weights do not carry: {line}" for line in format_differences(way.comparison.differences)]
    notes += [f"no partner for {path} of the first side" for path in way.unused]
    notes += [f"no partner for {path} of the second side" for path in way.missing]
    merged = [each.source.path for each in way.pairs if _has_merge_mismatch(each)]
    if merged:
        notes.append(
            f"one side adds two biases where the other has one: {_join_first_paths(merged)}. Either is trained for "
            "itself, so that their sum moves twice as far, and the norm counts both: the first forward and backward "
            "pass are compared, and no update"
        )
    biased = [each.source.path for each in way.pairs if _has_attribute_difference(each, "unbiased")]
    if biased:
        notes.append(
            f"running variances are the batch's on one side and an estimate of the population's on the other, as the "
            f"frameworks have it: {_join_first_paths(biased)}. They are not compared"
        )
    return Alignment(
        modules={"": "", **holders, **leaves},
        holders=sorted(set(holders.values())),
        behind=behind,
        applied=applied,
        merged=merged,
        kinds={each.source.path: each.fit.source.kind for each in way.pairs},
        biased=biased,
        turned=[each.source.path for each in way.pairs if each.target.path in way.channel_orders],
        differs=differs,
        structure=structure,
        notes=notes,
    )


def array_mappings(way: TransferPlan) -> ArrayMappingPair:
    """Return the array mappings of both sides, under the first side's names."""
    first = [ArrayMapping(each.source.path, each.source, each.fit.source) for each in way.pairs]
    second = [
        ArrayMapping(each.source.path, each.target, each.fit.target, way.channel_orders.get(each.target.path))
        for each in way.pairs
    ]
    return ArrayMappingPair(first, second)


def _has_attribute_difference(match: LayerMatch, attribute: str) -> bool:
    """Return whether both sides have an attribute, with different values."""
    ours, theirs = (form.attributes.get(attribute) for form in (match.fit.source, match.fit.target))
    return None not in (ours, theirs) and ours != theirs


def _has_merge_mismatch(match: LayerMatch) -> bool:
    forms = (match.fit.source, match.fit.target)
    found = [any(isinstance(o, Merge) for rule in form.rules for o in rule.operations) for form in forms]
    return found[0] != found[1]


def _fused_activations(
    pairs: Sequence[LayerMatch], differences: Sequence[Difference]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return `Alignment.behind` and `Alignment.applied`: activations that only one side's layer includes."""
    own = {each.target: str(each.ours) for each in differences if each.attribute == "activation"}
    others = {each.source: str(each.theirs) for each in differences if each.attribute == "activation"}
    behind, applied = {}, {}
    for each in pairs:
        ours, theirs = (
            _own_activation(*side) for side in ((each.source, each.fit.source), (each.target, each.fit.target))
        )
        if each.fit.source.kind in RECURRENT_KINDS or (ours in _LINEAR) == (theirs in _LINEAR):
            continue
        if ours in _LINEAR:
            behind[each.source.path] = own.get(each.target.path, str(theirs))
        else:
            applied[each.target.path] = others.get(each.source.path, str(ours))
    return behind, applied


def _own_activation(layer: NativeLayer, form: Form) -> object:
    """Return the activation that a layer's own output includes. A Linear's is run by its container, such as an MLP."""
    return None if layer.module.endswith(".Linear") else form.attributes.get("activation")


def _container_pairs(leaves: Mapping[str, str]) -> dict[str, str]:
    """Return container of the second side -> container of the first, where both have the same two or more layers.

    Sets of layers that several containers of a side share are left out.
    """
    ours, theirs = _containers_by_layers(leaves.values()), _containers_by_layers(leaves)
    partner = {frozenset(leaves[path] for path in held): holder for held, holder in theirs.items()}
    return {
        partner[held]: holder
        for held, holder in ours.items()
        if held in partner and partner[held] not in leaves and holder not in leaves.values()
    }


def _containers_by_layers(paths: Iterable[str]) -> dict[frozenset[str], str]:
    """Return set of layers -> path of their container, without sets that several containers share."""
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


def _join_first_paths(paths: Sequence[str]) -> str:
    return f"{', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"
