"""Which layer of one model is which of the other: by structure, kind, shape and names, and never by guessing.

Two trees of modules are laid beside each other. Nodes of equal mass that fit are paired, largest first; where the same
mass lies several times, `pairing` asks their names. What fits nothing is opened, module by module, until all are
layers. Called by `port`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.matching import composites, neighbours
from polyamp.porting.matching.fits import Fit, fit
from polyamp.porting.matching.pairing import pair
from polyamp.porting.matching.renaming import renamed
from polyamp.porting.matching.tree import Node, in_turn, mass_of, tree

_Sides = tuple[list[Node], list[Node]]


class Match(NamedTuple):
    """A layer of the source and the layer of the target that it is.

    Attributes:
        source: the source's layer; of several that the other framework keeps as one, all in one.
        target: the target's.
        fit: how the arrays of one go into the other.
        told: what told: "names=", "name", "number", "alone" (nothing else fits), "neighbour"
            (the layer beside it is known), "order" (the weakest).
    """

    source: NativeLayer
    target: NativeLayer
    fit: Fit
    told: str


@dataclasses.dataclass
class Matching:
    """What was found.

    Attributes:
        pairs: the layers that have a partner.
        alone: layers without one: of the source, of the target.
        alike: groups of layers that all fit each other and that nothing tells apart.
    """

    pairs: list[Match] = dataclasses.field(default_factory=list)
    alone: tuple[list[NativeLayer], list[NativeLayer]] = dataclasses.field(default_factory=lambda: ([], []))
    alike: list[tuple[list[NativeLayer], list[NativeLayer]]] = dataclasses.field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether every layer has a partner."""
        return not self.alone[0] and not self.alone[1]

    def add(self, other: Matching) -> None:
        """Take over what a part of the trees gave."""
        self.pairs += other.pairs
        self.alike += other.alike
        self.alone[0].extend(other.alone[0])
        self.alone[1].extend(other.alone[1])


def match(
    source: Inventory, target: Inventory, names: Mapping[str, str], *, tied: tuple[bool, bool] = (False, False)
) -> Matching:
    """The layers of two models in pairs, in the target's order. Layers without arrays are left out, tied ones as well.

    Args:
        source: the model whose values are taken.
        target: the model that gets them.
        names: regular expression -> replacement, applied in turn to the source's paths.
        tied: whether tied arrays count as a layer's own, on either side.

    Raises:
        PortError: an expression of `names` is none, or matches no path.
    """
    ours = [(path, layer) for path, layer in renamed(source.layers, target.layers, names) if layer.leaves]
    theirs = [(layer.path, layer) for layer in target.layers if layer.leaves]
    found = Matching()
    if names:
        ours, theirs = _named(ours, theirs, source, found)
    search = _Search((source.ordered and in_turn(source.layers), target.ordered and in_turn(target.layers)))
    found.add(search.align(tree(ours, tied=tied[0]), tree(theirs, tied=tied[1])))
    _settle_by_neighbours(found)
    place = {layer.path: number for number, layer in enumerate(target.layers)}
    found.pairs.sort(key=lambda each: place.get(each.target.path, 0))
    return found


def _named(
    ours: Sequence[tuple[str, NativeLayer]],
    theirs: Sequence[tuple[str, NativeLayer]],
    source: Inventory,
    found: Matching,
) -> tuple[list[tuple[str, NativeLayer]], list[tuple[str, NativeLayer]]]:
    """Pairs those that `names=` gave the very path of a layer of the target; what is left of both sides."""
    by_path = dict(theirs)
    given = {path for path, layer in ours if path != layer.path}
    taken = set()
    for path, layer in ours:
        other = by_path.get(path)
        if path in given and other is not None and path not in taken and (way := fit(layer, other)) is not None:
            found.pairs.append(Match(layer, other, way, "names="))
            taken.add(path)
    done = {id(each.source) for each in found.pairs}
    return [(path, layer) for path, layer in ours if id(layer) not in done], [
        (path, layer) for path, layer in theirs if path not in taken
    ]


class _Search:
    """One matching; remembers what was tried.

    Args:
        ordered: whether the order of definition means something, on either side.
    """

    def __init__(self, ordered: tuple[bool, bool]) -> None:
        self._ordered = ordered
        self._known: dict[tuple[str, str], bool] = {}
        self._signs: dict[int, tuple[NativeLayer, str]] = {}
        self._tried: dict[tuple[int, int], tuple[Node, Node, Matching | None]] = {}

    def align(self, source: Sequence[Node], target: Sequence[Node]) -> Matching:
        """The layers in two lists of nodes."""
        found = Matching()
        sides = list(source), list(target)
        around = list(source), list(target)  # what stood here, in its order, as far as it was opened
        while sides[0] and sides[1]:
            if not self._settle(sides, around, found) and not _open(sides, around):
                break
        for number in (0, 1):
            found.alone[number].extend(leaf.layer for node in sides[number] for leaf in node.leaves() if leaf.layer)
        return _regrouped(found) if found.alone[0] and found.alone[1] else found

    def _settle(self, sides: _Sides, around: _Sides, found: Matching) -> bool:
        """Pair the nodes of the largest mass of which there are equally many on both sides; False if there is none."""
        counts = Counter(node.mass for node in sides[0]), Counter(node.mass for node in sides[1])
        closed = any(node.layer is None for side in sides for node in side)
        for mass in sorted(counts[0], reverse=True):
            if not counts[1].get(mass):
                continue
            groups = tuple([node for node in side if node.mass == mass] for side in sides)
            if len(groups[0]) != len(groups[1]):  # others of the same mass may be no candidates at all
                groups = self._fitting(groups)
            if not groups[0] or len(groups[0]) != len(groups[1]):
                continue
            if groups[0][0].layer is not None and not _all_in_sight(mass, sides):
                continue
            done = self._group(groups[0], groups[1], in_step=_masses(around, 0) == _masses(around, 1))
            if done is None or (closed and done.alike and any(node.layer is not None for node in groups[0])):
                continue  # more is in sight once all is open
            found.add(done)
            for side, group in zip(sides, groups, strict=True):
                side[:] = [node for node in side if node not in group]
            return True
        return False

    def _fitting(self, groups: tuple[list[Node], ...]) -> tuple[list[Node], ...]:
        """Of two groups those nodes that fit one of the other side."""
        return (
            [node for node in groups[0] if any(self._fits(node, other) for other in groups[1])],
            [other for other in groups[1] if any(self._fits(node, other) for node in groups[0])],
        )

    def _group(self, source: list[Node], target: list[Node], *, in_step: bool) -> Matching | None:
        """The layers in two groups of nodes of one mass; None if they do not all have a partner."""
        fitting = {node: [other for other in target if self._fits(node, other)] for node in source}
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
                else pair(ours, theirs, ordered=self._ordered, in_step=in_step)
            )
            if pairs is None:
                found.alike.append((_layers(ours), _layers(theirs)))
                continue
            for one, other, told in pairs:
                part = self._inside(one, other)
                assert part is not None
                if one.layer is not None and len(part.pairs) == 1:
                    part = Matching([part.pairs[0]._replace(told=told)], part.alone, part.alike)
                found.add(part)
        return found

    def _fits(self, source: Node, target: Node) -> bool:
        """Whether the layers of one node go into another; asked once of all layers that are made alike."""
        if source.layer is None or target.layer is None:
            return self._inside(source, target) is not None
        key = self._made(source.layer), self._made(target.layer)
        if key not in self._known:
            self._known[key] = fit(source.layer, target.layer) is not None
        return self._known[key]

    def _made(self, layer: NativeLayer) -> str:
        """What `fit` looks at."""
        if id(layer) not in self._signs:
            forms = [(form.kind, form.rules) for form in layer.forms]
            self._signs[id(layer)] = layer, repr((forms, {name: each.shape for name, each in layer.arrays.items()}))
        return self._signs[id(layer)][1]

    def _inside(self, source: Node, target: Node) -> Matching | None:
        """How the layers of one node go into another; None if they do not all."""
        key = id(source), id(target)
        if key not in self._tried:
            self._tried[key] = source, target, self._try(source, target)
        return self._tried[key][2]

    def _try(self, source: Node, target: Node) -> Matching | None:
        if source.layer is not None and target.layer is not None:
            way = fit(source.layer, target.layer)
            return None if way is None else Matching([Match(source.layer, target.layer, way, "alone")])
        found = self.align(source.children or [source], target.children or [target])
        return found if found.whole else None


def _settle_by_neighbours(found: Matching) -> None:
    """Pair what is alike by the layers beside it. Norms that a number or an order told apart, and that the convolutions
    beside them tell otherwise, are as good as alike."""
    _doubt(found)
    for group in list(found.alike):
        couples = neighbours.told_apart(*group, [(each.source, each.target) for each in found.pairs], _every(found))
        ways = [fit(one, other) for one, other in couples or ()]
        if couples is not None and None not in ways:
            found.alike.remove(group)
            found.pairs += [Match(*each, way, "neighbour") for each, way in zip(couples, ways, strict=True) if way]


def _doubt(found: Matching) -> None:
    """Take back the pairs of norms that those beside them contradict."""
    doubtful = ("number", "order")
    norms = [each for each in found.pairs if each.fit.source.kind.endswith("_norm") and each.told in doubtful]
    others = [(each.source, each.target) for each in found.pairs if each not in norms]
    groups: dict[tuple[int, str], list[Match]] = {}
    for each in norms:
        groups.setdefault((mass_of(each.source), each.fit.source.kind), []).append(each)
    for group in groups.values():
        beside = neighbours.Beside(others, [each.target for each in group], _every(found))
        said = [(beside.partner(each.source), each.target) for each in group]
        if any(partner is not None and partner is not target for partner, target in said):
            found.pairs = [each for each in found.pairs if all(each is not one for one in group)]
            found.alike.append(([each.source for each in group], [each.target for each in group]))


def _every(found: Matching) -> tuple[list[NativeLayer], list[NativeLayer]]:
    """All layers of both sides."""
    ours = [
        *(each.source for each in found.pairs),
        *found.alone[0],
        *(layer for one, _ in found.alike for layer in one),
    ]
    theirs = [
        *(each.target for each in found.pairs),
        *found.alone[1],
        *(layer for _, two in found.alike for layer in two),
    ]
    return ours, theirs


def _masses(sides: _Sides, side: int) -> list[int]:
    """The masses of one side's nodes in their order, but for parameters and embeddings of which there is one: they are
    defined where it pleases."""
    counts = Counter(node.mass for node in sides[side])
    free = [
        node
        for node in sides[side]
        if node.layer is not None and node.layer.forms[0].kind in ("parameter", "embedding") and counts[node.mass] == 1
    ]
    return [node.mass for node in sides[side] if node not in free]


def _layers(nodes: Sequence[Node]) -> list[NativeLayer]:
    return [leaf.layer for node in nodes for leaf in node.leaves() if leaf.layer is not None]


def _all_in_sight(mass: int, sides: _Sides) -> bool:
    """Whether no module that is not open yet has a layer of this mass."""
    return not any(leaf.mass == mass for side in sides for node in side if node.layer is None for leaf in node.leaves())


def _open(sides: _Sides, around: _Sides) -> bool:
    """Put the children of the heaviest modules in their place; False if all are layers."""
    heaviest = max((node.mass for side in sides for node in side if node.layer is None), default=0)
    if not heaviest:
        return False
    for number in (0, 1):
        opened = {id(node): node.dissolved() for node in sides[number] if node.layer is None and node.mass == heaviest}
        for nodes in (sides[number], around[number]):
            nodes[:] = [new for node in nodes for new in opened.get(id(node), [node])]
    return True


def _regrouped(found: Matching) -> Matching:
    """Layers that the other side keeps as one, or as several: attention and its projections."""
    pairs, alone = composites.regrouped(*found.alone)
    return Matching([*found.pairs, *(Match(*each, "name") for each in pairs)], alone, found.alike)
