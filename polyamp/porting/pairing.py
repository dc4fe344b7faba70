"""Which of several alike is which: an order for nodes of one mass that all fit each other. Called by `matching`.

Names come first, then numbers, then roles, then the order of definition; where none of these tells, nobody guesses.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from polyamp.porting.names import NATURAL, Name, name_of
from polyamp.porting.tree import Node

Pairs = list[tuple[Node, Node, str]]
"""(source, target, what told)."""


def pair(source: Sequence[Node], target: Sequence[Node], *, ordered: tuple[bool, bool], in_step: bool) -> Pairs | None:
    """The nodes of two equally long groups in pairs; None if nothing tells.

    Args:
        source: nodes that all fit all of the other side.
        target: those of the other side.
        ordered: whether the order of definition means something, on either side.
        in_step: whether all that lies around them comes in the same order on both sides.
    """
    found = _paired(source, target, ordered, in_step)
    if found is not None:
        return found
    some, others = _counted(source), _counted(target)
    found = _paired(list(some), list(others), ordered, in_step)
    return None if found is None else [(some[one], others[other], told) for one, other, told in found]


def _counted(nodes: Sequence[Node]) -> dict[Node, Node]:
    """A node with a 0 in each segment where others of the same segments have a number and it has none, as Keras and
    haiku leave out the first's (`block/norm`, `block/norm_1`, `block_1/norm`) -> the node itself."""
    segments = {node: [name_of(segment) for segment in node.path.split("/")] for node in nodes}
    alike: dict[tuple[str, ...], list[Node]] = {}
    for node, names in segments.items():
        alike.setdefault(tuple(name.stem for name in names), []).append(node)
    found = {}
    for group in alike.values():
        numbered = [any(segments[node][place].numbers for node in group) for place in range(len(segments[group[0]]))]
        for node in group:
            path = "/".join(
                f"{segment}_0" if some and not name.numbers else segment
                for segment, name, some in zip(node.path.split("/"), segments[node], numbered, strict=True)
            )
            found[dataclasses.replace(node, path=path)] = node
    return {made: node for node in nodes for made, own in found.items() if own is node}


def _paired(source: Sequence[Node], target: Sequence[Node], ordered: tuple[bool, bool], in_step: bool) -> Pairs | None:
    ours, theirs = [node.name for node in source], [node.name for node in target]
    if len(set(ours)) == len(ours) and set(ours) == set(theirs):
        by_name = dict(zip(theirs, target, strict=True))
        return [(node, by_name[name], "name") for node, name in zip(source, ours, strict=True)]
    if _family(ours) and _family(theirs) and not _contradict(ours[0], theirs[0]):
        return _ranked(source, target, "number")
    if all(ordered) and in_step and (lined := _lined(source, target)) is not None:
        return lined
    return _by_stems(source, target) or _by_numbers(source, target, ordered)


def _family(names: Sequence[Name]) -> bool:
    """One stem with different numbers: `h_0`, `h_1`, ...; `dense`, `dense_1`."""
    return len({name.stem for name in names}) == 1 and len({name.numbers for name in names}) == len(names)


def _contradict(one: Name, other: Name) -> bool:
    """Whether two names have a role for themselves, and not the same."""
    return one.known and other.known and _last(one) != _last(other)


def _last(name: Name) -> str:
    return name.stem.rpartition("/")[2]


def _ranked(source: Sequence[Node], target: Sequence[Node], told: str) -> Pairs:
    def by_number(node: Node) -> tuple[int, ...]:
        return node.name.numbers

    return [(a, b, told) for a, b in zip(sorted(source, key=by_number), sorted(target, key=by_number), strict=True)]


def _lined(source: Sequence[Node], target: Sequence[Node]) -> Pairs | None:
    """In the order of definition; None where names say something else."""
    some, others = sorted(source, key=_place), sorted(target, key=_place)
    if _roles(some) != _roles(others) and not (_natural(some) and _natural(others)):
        return None
    for one, other in zip(some, others, strict=True):
        shared = len(one.name.words & other.name.words)
        if _contradict(one.name, other.name):
            return None
        if any(len(one.name.words & each.name.words) > shared for each in others):
            return None
        if any(len(each.name.words & other.name.words) > shared for each in some):
            return None
    return [(one, other, "order") for one, other in zip(some, others, strict=True)]


def _by_stems(source: Sequence[Node], target: Sequence[Node]) -> Pairs | None:
    """Groups of one stem to groups of the same stem; of one stem that is left on each side, these to each other."""
    ours, theirs = Counter(node.name.stem for node in source), Counter(node.name.stem for node in target)
    if len(ours) == 1 or len(theirs) == 1:
        return None
    alike = _alike_stems(ours, theirs)
    if len(alike) != len(ours) or len(alike) != len(theirs):
        return None
    pairs: Pairs = []
    for stem, other in alike.items():
        some = [node for node in source if node.name.stem == stem]
        others = [node for node in target if node.name.stem == other]
        if len(some) == 1:
            pairs.append((some[0], others[0], "name"))
        elif _family([node.name for node in some]) and _family([node.name for node in others]):
            pairs += _ranked(some, others, "number")
        else:
            return None
    return pairs


def _alike_stems(ours: Counter[str], theirs: Counter[str]) -> dict[str, str]:
    """Stem of the source -> stem of the target, as far as they say the same: whole, in their last segment, in their
    first, in words of their own; then the one that is left."""

    def whole(stem: str) -> object:
        return stem

    def last(stem: str) -> object:
        return stem.rpartition("/")[2]

    def first(stem: str) -> object:
        return stem.partition("/")[0]

    def words(stem: str) -> object:
        return Name(stem, ()).words or stem

    alike: dict[str, str] = {}
    for part in (whole, last, first, words):
        for stem in [stem for stem in ours if stem not in alike]:
            close = [o for o in theirs if o not in alike.values() and part(o) == part(stem)]
            twice = [o for o in ours if o not in alike and part(o) == part(stem)]
            if len(close) == len(twice) == 1 and theirs[close[0]] == ours[stem]:
                alike[stem] = close[0]
    left = [stem for stem in ours if stem not in alike], [s for s in theirs if s not in alike.values()]
    if len(left[0]) == len(left[1]) == 1 and alike and ours[left[0][0]] == theirs[left[1][0]]:
        alike[left[0][0]] = left[1][0]
    return alike


def _by_numbers(source: Sequence[Node], target: Sequence[Node], ordered: tuple[bool, bool]) -> Pairs | None:
    """As one side numbers what the other side numbers in another way, or names by roles whose order is everybody's."""
    first, second = _sequence(source, ordered[0]), _sequence(target, ordered[1])
    if first is None or second is None or any(_contradict(a.name, b.name) for a, b in zip(first, second, strict=True)):
        return None
    return [(a, b, "order") for a, b in zip(first, second, strict=True)]


def _place(node: Node) -> int:
    return node.place


def _sequence(nodes: Sequence[Node], ordered: bool) -> list[Node] | None:
    """The nodes in the order that their names give them; None if they give none.

    Numbers, or roles whose order is everybody's. One that has no number, and so lies outside of the blocks, comes where
    it is defined: a last norm behind them.
    """
    names = [node.name for node in nodes]
    if all(_last(name) in NATURAL for name in names) and len(set(map(_last, names))) == len(names):
        return sorted(nodes, key=lambda node: NATURAL.index(_last(node.name)))
    outside = [node for node in nodes if not node.name.numbers]
    inside = sorted((node for node in nodes if node.name.numbers), key=lambda node: _numbered(node.name))
    if _family(names):
        return outside + inside
    inner = [node.name for node in inside]
    roles = all(_last(name) in NATURAL for name in inner) and len(set(map(_numbered, inner))) == len(inner)
    if not (_family(inner) or roles) or len(outside) > 1:
        return None
    places = [node.place for node in inside]
    if ordered and all(node.place < min(places) for node in outside):
        return outside + inside
    if all((ordered and node.place > max(places)) or _last(node.name) == "final norm" for node in outside):
        return inside + outside
    return None


def _numbered(name: Name) -> tuple[tuple[int, ...], int]:
    """The numbers of a name, then its place among the roles of one block."""
    return name.numbers, NATURAL.index(_last(name)) if _last(name) in NATURAL else -1


def _roles(nodes: Sequence[Node]) -> bool:
    """Whether these have different roles."""
    return len({_last(node.name) for node in nodes if node.name.known}) > 1


def _natural(nodes: Sequence[Node]) -> bool:
    """Whether those that have a role come in the order in which everybody makes them, or have none."""
    order = [NATURAL.index(_last(node.name)) for node in nodes if _last(node.name) in NATURAL]
    unknown = [node for node in nodes if node.name.known and _last(node.name) not in NATURAL]
    return order == sorted(order) and not unknown
