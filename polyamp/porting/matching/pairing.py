"""Which of several alike is which: an order for nodes of one mass that all fit each other. Called by `matching`.

Names come first, then numbers, then roles, then the order of definition; where none of these tells, nobody guesses.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

from polyamp.porting.matching.names import NATURAL, Name, name_of
from polyamp.porting.matching.tree import Node

_LATE = ("head", "final norm")
"""Roles of what everybody calls last."""
_NORMS = ("attention norm", "norm", "mlp norm")
"""Norms of a block, in their order."""
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
    some, others = _from_0(source), _from_0(target)
    found = _paired(list(some), list(others), ordered, in_step)
    return None if found is None else [(some[one], others[other], told) for one, other, told in found]


def _from_0(nodes: Sequence[Node]) -> dict[Node, Node]:
    """A node with a 0 in each segment where others of the same segments have a number and it has none, as Keras and
    haiku leave out the first's (`block/norm`, `block/norm_1`, `block_1/norm`) -> the node itself."""
    alike: dict[tuple[str, ...], list[Node]] = {}
    for node in nodes:
        alike.setdefault(tuple(name_of(segment).stem for segment in node.path.split("/")), []).append(node)
    made = {}
    for group in alike.values():
        paths = [node.path.split("/") for node in group]
        firsts = [_firsts({path[place] for path in paths}) for place in range(len(paths[0]))]
        for node in group:
            path = "/".join(
                f"{segment}_0" if segment in first else segment
                for segment, first in zip(node.path.split("/"), firsts, strict=True)
            )
            made[node] = dataclasses.replace(node, path=path)
    return {made[node]: node for node in nodes}


def _firsts(segments: set[str]) -> set[str]:
    """Those that stand beside others with a number and have none: `dense` beside `dense_1`; not `fc`, and not beside
    `dense_0`."""
    counted = {segment.rpartition("_")[0] for segment in segments if re.search(r"_\d+$", segment)}
    return {segment for segment in segments & counted if f"{segment}_0" not in segments}


def _paired(source: Sequence[Node], target: Sequence[Node], ordered: tuple[bool, bool], in_step: bool) -> Pairs | None:
    ours, theirs = [node.name for node in source], [node.name for node in target]
    if len(set(ours)) == len(ours) and set(ours) == set(theirs) and not (_mixed(source) or _mixed(target)):
        by_name = dict(zip(theirs, target, strict=True))
        return [(node, by_name[name], "name") for node, name in zip(source, ours, strict=True)]
    if _counted(source, ordered[0]) and _counted(target, ordered[1]) and not _contradict(ours[0], theirs[0]):
        return _ranked(source, target, "number")
    if _branches(ours) != _branches(theirs):
        # an actor and a critic, and a dense_2 and a dense_3: neither numbers nor an order tell
        return None
    in_blocks = _norms(source) and _norms(target)
    if all(ordered) and in_step and not in_blocks and (lined := _lined(source, target)) is not None:
        return lined
    return _by_stems(source, target) or _by_numbers(source, target, ordered)


def _family(names: Sequence[Name]) -> bool:
    """One stem with different numbers: `h_0`, `h_1`, ...; `dense`, `dense_1`."""
    return len({name.stem for name in names}) == 1 and len({name.numbers for name in names}) == len(names)


def _counted(nodes: Sequence[Node], ordered: bool) -> bool:
    """Whether numbers count these. One without a number is the first (`dense`, `dense_1`), unless there is a 0 as well
    (`fc`, `dense_0`) or it is defined behind others (`fc1`, `fc2`, `fc`): then it is something else."""
    names = [node.name for node in nodes]
    if not _family(names):
        return False
    bare = [node for node in nodes if not node.name.numbers]
    if not bare:
        return True
    joined = all(re.search(r"_\d+$|^\D*$", node.path.rpartition("/")[2]) for node in nodes)
    first = bare[0].place == min(node.place for node in nodes) if ordered else joined
    return first and not _mixed(nodes) and (0,) not in [name.numbers for name in names]


def _mixed(nodes: Sequence[Node]) -> bool:
    """Whether one of these has no number and another word for the kind of layer: `fc` beside `dense_1`, `dense_2`."""
    if not _family([node.name for node in nodes]) or all(node.name.numbers for node in nodes):
        return False
    return len({re.sub(r"_?\d+$", "", node.path.rpartition("/")[2]) for node in nodes}) > 1


def _branches(names: Sequence[Name]) -> Counter[frozenset[str]] | None:
    """What of several things beside each other these belong to, and how many to each; None if to nothing like it."""
    counts = Counter(name.branch for name in names)
    return counts if len(counts) > 1 else None


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
    if not (_in_turn(some) and _in_turn(others)) or _crossed(some, others) or _side_by_side(some, others):
        return None
    for one, other in zip(some, others, strict=True):
        shared = len(one.name.words & other.name.words)
        if any(len(one.name.words & each.name.words) > shared for each in others):
            return None
        if any(len(each.name.words & other.name.words) > shared for each in some):
            return None
    return [(one, other, "order") for one, other in zip(some, others, strict=True)]


def _crossed(source: Sequence[Node], target: Sequence[Node]) -> bool:
    """Whether the names of two sides, in this order, say something else: two roles, or a role that both sides have a
    name for, and not in the same place."""
    both = any(node.name.known for node in source) and any(node.name.known for node in target)
    return any(
        _contradict(one.name, other.name)
        or one.name.branch != other.name.branch
        or (both and one.name.known != other.name.known)
        for one, other in zip(source, target, strict=True)
    )


def _side_by_side(source: Sequence[Node], target: Sequence[Node]) -> bool:
    """Whether these are layers that cannot follow each other (their inputs are not as many as their features), each
    with a name of its own on one side: heads, gates. No order is theirs then."""
    for nodes in (source, target):
        layer = nodes[0].layer
        if layer is None or len({node.name.stem for node in nodes}) != len(nodes):
            continue
        try:
            shapes = layer.forms[0].shapes(layer.arrays)
        except (ValueError, KeyError):
            continue
        kernel = shapes.get("kernel", ())
        if len(kernel) > 1 and kernel[-1] != kernel[-2] and not _naturally_named([node.name for node in nodes]):
            return True
    return False


def _naturally_named(names: Sequence[Name]) -> bool:
    """Whether these have different roles whose order is everybody's. Up and gate have none: w1 is either."""
    lasts = {_last(name) for name in names}
    return lasts <= set(NATURAL) and len(lasts) == len(names) and not lasts >= {"up", "gate"}


def _in_turn(nodes: Sequence[Node]) -> bool:
    """Whether the order of definition is that of the numbers in the names, and what comes last by its name comes last;
    otherwise it is not the order of calls."""
    last: dict[str, tuple[int, ...]] = {}
    for node in nodes:
        if "forward" in node.name.stem.split("/") and node.name.stem.replace("forward", "backward") in last:
            return False
        stem, numbers = node.name.stem, node.name.numbers
        if stem in last and numbers < last[stem]:
            return False
        last[stem] = numbers
    return not any(_last(node.name) in _LATE for node in nodes[:-1])


def _by_stems(source: Sequence[Node], target: Sequence[Node]) -> Pairs | None:
    """Groups of one stem to groups of the same stem; of one stem that is left on each side, these to each other."""
    ours, theirs = Counter(node.name.stem for node in source), Counter(node.name.stem for node in target)
    if len(ours) == 1 or len(theirs) == 1:
        return None
    # norm1 and one more are not ln_2 and one more by their stems: the other one may be the partner
    bare = [{each.name.stem: each.name.numbers for each in side if _bare(each.name)} for side in (source, target)]
    sure = all(
        not numbers or not bare[1].get(stem) or numbers == bare[1][stem] or ours[stem] > 1
        for stem, numbers in bare[0].items()
    )
    alike = _alike_stems(ours, theirs, sure=sure)
    if len(alike) != len(ours) or len(alike) != len(theirs):
        return None
    pairs: Pairs = []
    for stem, other in alike.items():
        some = [node for node in source if node.name.stem == stem]
        others = [node for node in target if node.name.stem == other]
        if len(some) == 1:
            pairs.append((some[0], others[0], "name"))
        elif len(some) > 1 and _family([node.name for node in some]) and _family([node.name for node in others]):
            pairs += _ranked(some, others, "number")
        else:
            return None
    return pairs


def _bare(name: Name) -> bool:
    """Whether its last segment says what kind of layer it is, or is a letter, and no more."""
    return len(_last(name)) < 2 or not Name(_last(name), ()).words


def _alike_stems(ours: Counter[str], theirs: Counter[str], *, sure: bool) -> dict[str, str]:
    """Stem of the source -> stem of the target, as far as they say the same: whole, in their last segment, in their
    first, in words of their own; then, if the others are sure, the one that is left."""

    def whole(stem: str) -> object:
        return stem

    def last(stem: str) -> object:
        return stem.rpartition("/")[2]

    def first(stem: str) -> object:
        return stem.partition("/")[0]

    def words(stem: str) -> object:
        return Name(stem, ()).words or stem

    def own(stem: str) -> object:
        return Name(stem, ()).own or stem

    alike: dict[str, str] = {}
    for part in (whole, last, first, words, own):
        for stem in [stem for stem in ours if stem not in alike]:
            close = [o for o in theirs if o not in alike.values() and part(o) == part(stem)]
            twice = [o for o in ours if o not in alike and part(o) == part(stem)]
            if len(close) == len(twice) == 1 and theirs[close[0]] == ours[stem]:
                alike[stem] = close[0]
    left = [stem for stem in ours if stem not in alike], [s for s in theirs if s not in alike.values()]
    others = Name(next(iter(left[0]), ""), ()), Name(next(iter(left[1]), ""), ())
    if (
        len(left[0]) == len(left[1]) == 1
        and alike
        and sure
        and ours[left[0][0]] == theirs[left[1][0]]
        and not _contradict(*others)
    ):
        alike[left[0][0]] = left[1][0]
    return alike


def _by_numbers(source: Sequence[Node], target: Sequence[Node], ordered: tuple[bool, bool]) -> Pairs | None:
    """As one side numbers what the other side numbers in another way, or names by roles whose order is everybody's."""
    first, second = (
        _by_phases(side, each) or _sequence(side, each) for side, each in zip((source, target), ordered, strict=True)
    )
    if first is None or second is None or (_crossed(first, second) and not (_norms(first) and _norms(second))):
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
    if _naturally_named(names):
        if ordered and not _natural(sorted(nodes, key=_place)):
            return None
        return sorted(nodes, key=lambda node: NATURAL.index(_last(node.name)))
    outside = [node for node in nodes if not node.name.numbers]
    late = [node for node in nodes if _last(node.name) == "final norm"]
    early = [node for node in nodes if node not in late]
    if len(late) < 2 and early and _norms(early):
        return sorted(early, key=_norm_place) + late
    inside = sorted((node for node in nodes if node.name.numbers), key=lambda node: _numbered(node.name))
    if _counted(nodes, ordered):
        return outside + inside
    inner = [node.name for node in inside]
    roles = all(_last(name) in NATURAL for name in inner) and len(set(map(_numbered, inner))) == len(inner)
    if not (_family(inner) or roles) or len(outside) > 1:
        return None
    places = [node.place for node in inside]
    if ordered and all(node.place < min(places) for node in outside):
        # "norm" before the blocks: of the embedding, or the last one that was defined early?
        vague = any(_last(node.name) in _LATE or node.name.stem == "norm" for node in outside)
        return None if vague else outside + inside
    if all((ordered and node.place > max(places)) or _last(node.name) in _LATE for node in outside):
        return inside + outside
    return None


def _by_phases(nodes: Sequence[Node], ordered: bool) -> list[Node] | None:
    """The nodes of an encoder before those of the decoder, each in their sequence; None if they are not of both."""
    parts = [[node for node in nodes if role in node.name.stem.split("/")] for role in ("encoder", "decoder")]
    if not all(parts) or sum(map(len, parts)) != len(nodes):
        return None
    first, second = (list(part) if len(part) == 1 else _sequence(part, ordered) for part in parts)
    return None if first is None or second is None else first + second


def _norms(nodes: Sequence[Node]) -> bool:
    """Whether these are the norms of blocks, some with their role and others numbered: the attention's comes first, the
    other's last."""
    blocks: dict[tuple[int, ...], list[Name]] = {}
    for node in nodes:
        blocks.setdefault(_block(node), []).append(node.name)
    return all(map(_norms_of_a_block, blocks.values()))


def _norms_of_a_block(names: Sequence[Name]) -> bool:
    lasts = [_last(name) for name in names]
    plain = [name for name in names if _last(name) == "norm"]
    return (
        set(lasts) <= set(_NORMS)
        and len(names) > 1
        and len(names) - len(plain) == len(set(lasts) - {"norm"})
        and len({name.numbers for name in plain}) == len(plain)
        and all(name.numbers for name in plain)
    )


def _norm_place(node: Node) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    return _block(node), _NORMS.index(_last(node.name)), node.name.numbers


def _block(node: Node) -> tuple[int, ...]:
    return name_of(node.path.rpartition("/")[0]).numbers


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
