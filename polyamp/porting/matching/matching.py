"""Matching of two models' layers by structure, kind, shape and names, without guessing.

Two module trees are aligned. Nodes of equal mass that fit are paired, largest first. If several nodes have the same
mass, `pairing` compares their names. Modules that do not fit are replaced by their children until only layers remain.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.matching import attention_groups, neighbour_pairing
from polyamp.porting.matching.layer_fit import LayerFit, find_layer_fit
from polyamp.porting.matching.module_tree import ModuleNode, build_module_tree, count_values, is_in_call_order
from polyamp.porting.matching.pairing import pair_nodes
from polyamp.porting.matching.path_spelling import share_spelling
from polyamp.porting.matching.rename_rules import apply_rename_rules

_Sides = tuple[list[ModuleNode], list[ModuleNode]]


class LayerMatch(NamedTuple):
    """A layer of the source and its counterpart in the target.

    Attributes:
        source: the source's layer; several layers are merged if the other framework has them as one.
        target: the target's.
        fit: conversion of the arrays from one to the other.
        evidence: "names=", "name", "number", "alone" (nothing else fits), "neighbour" (the layer next to it is
            matched), "batch" (both models were run), "order" (the weakest).
    """

    source: NativeLayer
    target: NativeLayer
    fit: LayerFit
    evidence: str


@dataclasses.dataclass
class Matching:
    """Result of a matching.

    Attributes:
        pairs: the layers that have a partner.
        unmatched: layers without a partner: of the source, of the target.
        indistinguishable: groups of layers that all fit each other and cannot be distinguished.
    """

    pairs: list[LayerMatch] = dataclasses.field(default_factory=list)
    unmatched: tuple[list[NativeLayer], list[NativeLayer]] = dataclasses.field(default_factory=lambda: ([], []))
    indistinguishable: list[tuple[list[NativeLayer], list[NativeLayer]]] = dataclasses.field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every layer has a partner."""
        return not self.unmatched[0] and not self.unmatched[1]

    def add(self, other: Matching) -> None:
        """Add the result of a subtree."""
        self.pairs += other.pairs
        self.indistinguishable += other.indistinguishable
        self.unmatched[0].extend(other.unmatched[0])
        self.unmatched[1].extend(other.unmatched[1])


def match_layers(
    source: Inventory,
    target: Inventory,
    names: Mapping[str, str],
    *,
    tied: tuple[bool, bool] = (False, False),
    once: bool = False,
    absent_bias: bool = False,
) -> Matching:
    """Return the layers of two models in pairs, in the target's order. Layers without arrays and tied layers are left
    out.

    Args:
        source: the model whose values are taken.
        target: the model that receives them.
        names: regular expression -> replacement, applied in turn to the source's paths.
        tied: whether tied arrays count as a layer's own, for each side.
        once: whether tied arrays count once for each kind of layer, so that three embeddings and a head of one array
            are an embedding and a head.
        absent_bias: whether a dense layer or convolution may have a bias that its counterpart lacks.

    Raises:
        PortError: an expression of `names` is invalid, or matches no path.
    """
    ours, theirs = (
        [(path, layer) for path, layer in side if layer.leaves]
        for side in apply_rename_rules(source.layers, target.layers, names)
    )
    if once:
        ours, theirs = _one_per_kind(ours), _one_per_kind(theirs)
    matching = Matching()
    if names:
        ours, theirs = _pair_named(ours, theirs, matching, absent_bias=absent_bias)
    search = _Search(
        (source.ordered and is_in_call_order(source.layers), target.ordered and is_in_call_order(target.layers)),
        absent_bias=absent_bias,
    )
    ours, theirs = share_spelling(ours, theirs)
    trees = [
        build_module_tree(layers, tied=each, biases=not absent_bias)
        for layers, each in zip((ours, theirs), tied, strict=True)
    ]
    matching.add(search.align(*trees))
    _pair_by_neighbours(matching, absent_bias=absent_bias)
    place = {layer.path: number for number, layer in enumerate(target.layers)}
    matching.pairs.sort(key=lambda each: place.get(each.target.path, 0))
    return matching


def _one_per_kind(layers: Sequence[tuple[str, NativeLayer]]) -> list[tuple[str, NativeLayer]]:
    """Return the layers without tied ones of which another layer has the same kind and arrays."""
    found, known = [], set()
    for path, layer in layers:
        key = layer.forms[0].kind, tuple(leaf.tied or leaf.name for leaf in layer.leaves.values())
        if key not in known or any(leaf.tied is None for leaf in layer.leaves.values()):
            found.append((path, layer))
        known.add(key)
    return found


def _pair_named(
    ours: Sequence[tuple[str, NativeLayer]],
    theirs: Sequence[tuple[str, NativeLayer]],
    matching: Matching,
    *,
    absent_bias: bool,
) -> tuple[list[tuple[str, NativeLayer]], list[tuple[str, NativeLayer]]]:
    """Pair layers whose path after `names=` is exactly a path of the target; return the remaining layers of both
    sides."""
    by_path = dict(theirs)
    given = {path for path, layer in ours if path != layer.path}
    taken = set()
    for path, layer in ours:
        other = by_path.get(path)
        if (
            path in given
            and other is not None
            and path not in taken
            and (fit := find_layer_fit(layer, other, absent_bias=absent_bias)) is not None
        ):
            matching.pairs.append(LayerMatch(layer, other, fit, "names="))
            taken.add(path)
    done = {id(each.source) for each in matching.pairs}
    return [(path, layer) for path, layer in ours if id(layer) not in done], [
        (path, layer) for path, layer in theirs if path not in taken
    ]


class _Search:
    """State of one matching, with a cache of tried pairs.

    Args:
        ordered: whether the order of definition is meaningful, for each side.
        absent_bias: whether a dense layer or convolution may have a bias that its counterpart lacks.
    """

    def __init__(self, ordered: tuple[bool, bool], *, absent_bias: bool) -> None:
        self._ordered, self._absent_bias = ordered, absent_bias
        self._known: dict[tuple[str, str], tuple[bool, bool]] = {}
        self._signs: dict[int, tuple[NativeLayer, str]] = {}
        self._tried: dict[tuple[int, int], tuple[ModuleNode, ModuleNode, Matching | None]] = {}

    def align(self, source: Sequence[ModuleNode], target: Sequence[ModuleNode]) -> Matching:
        """Match the layers in two lists of nodes."""
        matching = Matching()
        sides = list(source), list(target)
        all_nodes = list(source), list(target)  # all nodes in order, at the current depth
        while sides[0] and sides[1]:
            if not self._pair_heaviest(sides, all_nodes, matching) and not _open_heaviest(sides, all_nodes):
                break
        for number in (0, 1):
            matching.unmatched[number].extend(
                leaf.layer for node in sides[number] for leaf in node.leaves() if leaf.layer
            )
        if not matching.unmatched[0] or not matching.unmatched[1]:
            return matching
        regrouped = _regroup_attention(matching)
        left = [
            [leaf for node in side for leaf in node.leaves() if any(leaf.layer is layer for layer in layers)]
            for side, layers in zip(sides, regrouped.unmatched, strict=True)
        ]
        if len(regrouped.pairs) == len(matching.pairs) or not all(left):
            return regrouped
        again = self.align(*left)  # what was hidden by the projections, such as a pooler of their shape
        regrouped.unmatched = ([], [])
        regrouped.add(again)
        return regrouped

    def _pair_heaviest(self, sides: _Sides, all_nodes: _Sides, matching: Matching) -> bool:
        """Pair the nodes of the largest mass with equal counts on both sides; return False if there are none."""
        counts = Counter(node.mass for node in sides[0]), Counter(node.mass for node in sides[1])
        closed = any(node.layer is None for side in sides for node in side)
        for mass in sorted(counts[0], reverse=True):
            if not counts[1].get(mass):
                continue
            groups = tuple([node for node in side if node.mass == mass] for side in sides)
            if len(groups[0]) != len(groups[1]):  # some nodes of this mass may not fit at all
                groups = self._fitting_nodes(groups)
            if not groups[0] or len(groups[0]) != len(groups[1]):
                continue
            if groups[0][0].layer is not None and not _is_mass_exhausted(mass, sides):
                continue
            done = self._group(groups[0], groups[1], in_step=_node_masses(all_nodes, 0) == _node_masses(all_nodes, 1))
            if done is None or (
                closed and done.indistinguishable and any(node.layer is not None for node in groups[0])
            ):
                continue  # opened modules may distinguish them
            matching.add(done)
            for side, group in zip(sides, groups, strict=True):
                side[:] = [node for node in side if node not in group]
            return True
        return False

    def _fitting_nodes(self, groups: tuple[list[ModuleNode], ...]) -> tuple[list[ModuleNode], ...]:
        """Return the nodes of both groups that fit a node of the other group."""
        return (
            [node for node in groups[0] if any(self._fits(node, other) for other in groups[1])],
            [other for other in groups[1] if any(self._fits(node, other) for node in groups[0])],
        )

    def _group(self, source: list[ModuleNode], target: list[ModuleNode], *, in_step: bool) -> Matching | None:
        """Match the layers in two groups of nodes of one mass; return None if some have no partner."""
        fitting = self._fitting_partners(source, target)
        found = Matching()
        left = list(source)
        while left:
            theirs = fitting[left[0]]
            ours = [node for node in left if any(other in fitting[node] for other in theirs)]
            if not theirs or any(fitting[node] != theirs for node in ours) or len(ours) != len(theirs):
                return None
            left = [node for node in left if node not in ours]
            pairs = (
                [(ours[0], theirs[0], "alone")]
                if len(ours) == 1
                else pair_nodes(ours, theirs, ordered=self._ordered, in_step=in_step)
            )
            if pairs is None:
                found.indistinguishable.append((_node_layers(ours), _node_layers(theirs)))
                continue
            for one, other, evidence in pairs:
                part = self._match_nodes(one, other)
                assert part is not None
                if one.layer is not None and len(part.pairs) == 1:
                    part = Matching([part.pairs[0]._replace(evidence=evidence)], part.unmatched, part.indistinguishable)
                found.add(part)
        return found

    def _fitting_partners(
        self, source: Sequence[ModuleNode], target: Sequence[ModuleNode]
    ) -> dict[ModuleNode, list[ModuleNode]]:
        """Return the nodes of the target that fit each node of the source. Where every layer has a partner that fits as
        it is, other readings do not count: a kernel (48, 32) is no transposed one of (32, 48)."""
        fitting = {node: [other for other in target if self._fits(node, other)] for node in source}
        if any(node.layer is None for node in (*source, *target)):
            return fitting
        direct = {
            node: [other for other in others if self._fits(node, other, direct=True)]
            for node, others in fitting.items()
        }
        covered = {id(other) for others in direct.values() for other in others}
        return direct if all(direct.values()) and len(covered) == len(target) else fitting

    def _fits(self, source: ModuleNode, target: ModuleNode, *, direct: bool = False) -> bool:
        """Return whether one node's layers fit another's; cached for layers with the same signature.

        Args:
            source: a node.
            target: a node of the other side.
            direct: for two layers, whether their arrays have to fit as they are: not transposed, and all of them.
        """
        if source.layer is None or target.layer is None:
            return self._match_nodes(source, target) is not None
        key = self._layer_signature(source.layer), self._layer_signature(target.layer)
        if key not in self._known:
            fit = find_layer_fit(source.layer, target.layer, absent_bias=self._absent_bias)
            is_direct = fit is not None and not fit.is_turned and not fit.absent_bias
            self._known[key] = fit is not None, is_direct
        return self._known[key][direct]

    def _layer_signature(self, layer: NativeLayer) -> str:
        """Return the properties of a layer that `find_layer_fit` depends on."""
        if id(layer) not in self._signs:
            forms = [(form.kind, form.rules) for form in layer.forms]
            self._signs[id(layer)] = layer, repr((forms, {name: each.shape for name, each in layer.arrays.items()}))
        return self._signs[id(layer)][1]

    def _match_nodes(self, source: ModuleNode, target: ModuleNode) -> Matching | None:
        """Match all layers of one node to another's; return None if some have no partner."""
        key = id(source), id(target)
        if key not in self._tried:
            self._tried[key] = source, target, self._try(source, target)
        return self._tried[key][2]

    def _try(self, source: ModuleNode, target: ModuleNode) -> Matching | None:
        if source.layer is not None and target.layer is not None:
            fit = find_layer_fit(source.layer, target.layer, absent_bias=self._absent_bias)
            return None if fit is None else Matching([LayerMatch(source.layer, target.layer, fit, "alone")])
        found = self.align(source.children or [source], target.children or [target])
        return found if found.is_complete else None


def _pair_by_neighbours(matching: Matching, *, absent_bias: bool) -> None:
    """Pair indistinguishable layers by their neighbours. Norms matched by number or order are included if the
    convolutions next to them contradict the match."""
    _drop_doubtful_pairs(matching)
    for group in list(matching.indistinguishable):
        couples = neighbour_pairing.pair_by_neighbours(
            *group, [(each.source, each.target) for each in matching.pairs], _all_layers(matching)
        )
        fits = [find_layer_fit(one, other, absent_bias=absent_bias) for one, other in couples or ()]
        if couples is not None and None not in fits:
            matching.indistinguishable.remove(group)
            matching.pairs += [
                LayerMatch(*each, fit, "neighbour") for each, fit in zip(couples, fits, strict=True) if fit
            ]


def _drop_doubtful_pairs(matching: Matching) -> None:
    """Drop the pairs of norms that their neighbours contradict."""
    doubtful = ("number", "order")
    norms = [each for each in matching.pairs if each.fit.source.kind.endswith("_norm") and each.evidence in doubtful]
    others = [(each.source, each.target) for each in matching.pairs if each not in norms]
    groups: dict[tuple[int, str], list[LayerMatch]] = {}
    for each in norms:
        groups.setdefault((count_values(each.source), each.fit.source.kind), []).append(each)
    for group in groups.values():
        neighbour_index = neighbour_pairing.NeighbourIndex(
            others, [each.target for each in group], _all_layers(matching)
        )
        said = [(neighbour_index.find_partner(each.source), each.target) for each in group]
        if any(partner is not None and partner is not target for partner, target in said):
            matching.pairs = [each for each in matching.pairs if all(each is not one for one in group)]
            matching.indistinguishable.append(([each.source for each in group], [each.target for each in group]))


def _all_layers(matching: Matching) -> tuple[list[NativeLayer], list[NativeLayer]]:
    """Return all layers of both sides."""
    paired = [each.source for each in matching.pairs], [each.target for each in matching.pairs]
    ours, theirs = (
        [
            *paired[side],
            *matching.unmatched[side],
            *(one for group in matching.indistinguishable for one in group[side]),
        ]
        for side in (0, 1)
    )
    return ours, theirs


def _node_masses(sides: _Sides, side: int) -> list[int]:
    """Return the masses of one side's nodes in order. Parameters and embeddings that occur once are excluded, because
    their position in the definition is arbitrary."""
    counts = Counter(node.mass for node in sides[side])
    free = [
        node
        for node in sides[side]
        if node.layer is not None and node.layer.forms[0].kind in ("parameter", "embedding") and counts[node.mass] == 1
    ]
    return [node.mass for node in sides[side] if node not in free]


def _node_layers(nodes: Sequence[ModuleNode]) -> list[NativeLayer]:
    return [leaf.layer for node in nodes for leaf in node.leaves() if leaf.layer is not None]


def _is_mass_exhausted(mass: int, sides: _Sides) -> bool:
    """Return whether no unopened module has a layer of this mass."""
    return not any(leaf.mass == mass for side in sides for node in side if node.layer is None for leaf in node.leaves())


def _open_heaviest(sides: _Sides, all_nodes: _Sides) -> bool:
    """Replace the heaviest modules by their children; return False if all nodes are layers."""
    heaviest = max((node.mass for side in sides for node in side if node.layer is None), default=0)
    if not heaviest:
        return False
    for number in (0, 1):
        opened = {id(node): node.dissolve() for node in sides[number] if node.layer is None and node.mass == heaviest}
        for nodes in (sides[number], all_nodes[number]):
            nodes[:] = [new for node in nodes for new in opened.get(id(node), [node])]
    return True


def _regroup_attention(matching: Matching) -> Matching:
    """Match attention and its projections if one side has them as one layer and the other as several."""
    pairs, unmatched = attention_groups.regroup_attention(*matching.unmatched)
    return Matching(
        [*matching.pairs, *(LayerMatch(*each, "name") for each in pairs)], unmatched, matching.indistinguishable
    )
