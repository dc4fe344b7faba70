"""`Alignment`: which module of one side corresponds to which of the other, and how their outputs compare.

It is built from the layers that `polyamp.port` matched (`porting.transfer_plan`). Containers are matched by the layers
in them; a module whose only layer is a bare parameter, such as a norm of the user's own, by that parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from polyamp.errors import join_first
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
        containers: paths, in the first, of containers.
        parameter_owners: those of them that hold one bare parameter and nothing else, on both sides.
        activations_after_first: path in the first -> the first's activation, where only the second's layer includes
            one: the first's output is compared after it.
        activations_after_second: path in the second -> the second's activation, where only the first's layer includes
            one.
        merged_biases: paths, in the first, of layers with two bias arrays on one side and one on the other: the sum of
            the two moves twice as far.
        layer_kinds: path in the first -> the layer's kind.
        reordered: paths, in the first, of dense layers next to a flatten, whose input order differs.
        variance_conventions: paths, in the first, of layers whose running variance is that of the batch on one side and
            an estimate of the population's on the other (n / (n - 1) times it).
        differences: path in the first -> differences that weights do not carry, as sentences.
        differing_attributes: path in the first -> attributes that differ there ("epsilon").
        notes: the differences as text, and modules without a partner.
    """

    modules: dict[str, str]
    containers: list[str] = msgspec.field(default_factory=list)
    parameter_owners: list[str] = msgspec.field(default_factory=list)
    activations_after_first: dict[str, str] = msgspec.field(default_factory=dict)
    activations_after_second: dict[str, str] = msgspec.field(default_factory=dict)
    merged_biases: list[str] = msgspec.field(default_factory=list)
    layer_kinds: dict[str, str] = msgspec.field(default_factory=dict)
    reordered: list[str] = msgspec.field(default_factory=list)
    variance_conventions: list[str] = msgspec.field(default_factory=list)
    differences: dict[str, list[str]] = msgspec.field(default_factory=dict)
    differing_attributes: dict[str, list[str]] = msgspec.field(default_factory=dict)
    notes: list[str] = msgspec.field(default_factory=list)


class ArrayMappingPair(NamedTuple):
    """Mappings from the arrays of both sides to canonical ones, under the first side's names.

    Attributes:
        first: of the first side.
        second: of the other.
    """

    first: list[ArrayMapping]
    second: list[ArrayMapping]


def nearest_module(path: str, known: Container[str]) -> str:
    """Return the innermost known module that is or contains a module; "" if there is none."""
    while path and path not in known:
        path = path.rpartition("/")[0]
    return path


def align(plan: TransferPlan) -> Alignment:
    """Return the alignment of two sides."""
    layers = {each.target.path: each.source.path for each in plan.pairs}
    kinds = {each.source.path: each.fit.source.kind for each in plan.pairs}
    owners = _parameter_owner_pairs(layers, kinds)
    containers = {**_container_pairs(layers), **owners}
    after_first, after_second = _fused_activations(plan.pairs, plan.comparison.differences)
    differences: dict[str, list[str]] = {}
    attributes: dict[str, list[str]] = {}
    for each in plan.comparison.differences:
        for path in {
            each.source: 0,
            layers.get(each.target, each.source): 0,
        }:  # an activation may be a layer's or its own
            differences.setdefault(path, []).append(str(each))
            attributes.setdefault(path, []).append(each.attribute)
    notes = [f"the weights do not carry: {line}" for line in format_differences(plan.comparison.differences)]
    notes += [f"no partner for {path} of the first side" for path in plan.unused]
    notes += [f"no partner for {path} of the second side" for path in plan.missing]
    merged = [each.source.path for each in plan.pairs if _has_merge_mismatch(each)]
    if merged:
        notes.append(
            f"one side adds two biases where the other has one: {join_first(merged, 3)}. Either is trained for "
            "itself, so that their sum moves twice as far, and the norm counts both: the first forward and backward "
            "pass are compared, and no update"
        )
    biased = [each.source.path for each in plan.pairs if _has_attribute_difference(each, "unbiased")]
    if biased:
        notes.append(
            f"running variances are the batch's on one side and an estimate of the population's on the other, as the "
            f"frameworks have it: {join_first(biased, 3)}. They are not compared"
        )
    return Alignment(
        modules={"": "", **containers, **layers},
        containers=sorted(set(containers.values())),
        parameter_owners=sorted(set(owners.values())),
        activations_after_first=after_first,
        activations_after_second=after_second,
        merged_biases=merged,
        layer_kinds=kinds,
        variance_conventions=biased,
        reordered=[each.source.path for each in plan.pairs if each.target.path in plan.channel_orders],
        differences=differences,
        differing_attributes=attributes,
        notes=notes,
    )


def array_mappings(plan: TransferPlan) -> ArrayMappingPair:
    """Return the array mappings of both sides, under the first side's names."""
    first = [ArrayMapping(each.source.path, each.source, each.fit.source) for each in plan.pairs]
    second = [
        ArrayMapping(each.source.path, each.target, each.fit.target, plan.channel_orders.get(each.target.path))
        for each in plan.pairs
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
    """Return `activations_after_first` and `activations_after_second` of an `Alignment`."""
    own = {each.target: str(each.ours) for each in differences if each.attribute == "activation"}
    others = {each.source: str(each.theirs) for each in differences if each.attribute == "activation"}
    after_first, after_second = {}, {}
    for each in pairs:
        ours, theirs = (
            _own_activation(*side) for side in ((each.source, each.fit.source), (each.target, each.fit.target))
        )
        if each.fit.source.kind in RECURRENT_KINDS or (ours in _LINEAR) == (theirs in _LINEAR):
            continue
        if ours in _LINEAR:
            after_first[each.source.path] = own.get(each.target.path, str(theirs))
        else:
            after_second[each.target.path] = others.get(each.source.path, str(ours))
    return after_first, after_second


def _own_activation(layer: NativeLayer, form: Form) -> object:
    """Return the activation that a layer's own output includes. A Linear's is run by its container, such as an MLP."""
    return None if layer.module.endswith(".Linear") else form.attributes.get("activation")


def _container_pairs(layers: Mapping[str, str]) -> dict[str, str]:
    """Return container of the second side -> container of the first, where both have the same two or more layers.

    Sets of layers that several containers of a side share are left out.
    """
    ours, theirs = _containers_by_layers(layers.values()), _containers_by_layers(layers)
    partner = {
        frozenset(layers[path] for path in inside_layers): container for inside_layers, container in theirs.items()
    }
    return {
        partner[inside_layers]: container
        for inside_layers, container in ours.items()
        if inside_layers in partner and partner[inside_layers] not in layers and container not in layers.values()
    }


def _parameter_owner_pairs(layers: Mapping[str, str], kinds: Mapping[str, str]) -> dict[str, str]:
    """Return module of the second side -> module of the first, where either holds the same bare parameter and no other
    layer."""
    counts = [
        Counter("/".join(path.split("/")[:end]) for path in side for end in range(1, path.count("/") + 1))
        for side in (layers, layers.values())
    ]
    found = {}
    for theirs, ours in layers.items():
        owners = [path.rpartition("/")[0] for path in (theirs, ours)]
        alone = [count[owner] == 1 for count, owner in zip(counts, owners, strict=True)]
        if kinds[ours] == "parameter" and all(alone) and owners[0] not in layers and owners[1] not in layers.values():
            found[owners[0]] = owners[1]
    return found


def _containers_by_layers(paths: Iterable[str]) -> dict[frozenset[str], str]:
    """Return set of layers -> path of their container, without sets that several containers share."""
    inside_layers: dict[str, set[str]] = {}
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts)):
            inside_layers.setdefault("/".join(parts[:end]), set()).add(path)
    found: dict[frozenset[str], list[str]] = {}
    for container, inside in inside_layers.items():
        if len(inside) > 1:
            found.setdefault(frozenset(inside), []).append(container)
    return {inside: containers[0] for inside, containers in found.items() if len(containers) == 1}
