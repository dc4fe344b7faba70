"""Pairing of nodes of one mass that all fit each other.

The criteria are, in this order: names, numbers, roles, the order of definition. If none of them decides, no pair is
guessed.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence

from polyamp.porting.matching.module_names import NATURAL_ORDER, ModuleName, parse_module_name
from polyamp.porting.matching.module_tree import ModuleNode

_FINAL_ROLES = ("head", "final norm")
"""Roles of modules that are usually called last."""
_BLOCK_NORM_ROLES = ("attention norm", "norm", "mlp norm")
"""Roles of a block's norms, in their order."""
NodePairs = list[tuple[ModuleNode, ModuleNode, str]]
"""(source, target, evidence)."""


def pair_nodes(
    source: Sequence[ModuleNode], target: Sequence[ModuleNode], *, ordered: tuple[bool, bool], in_step: bool
) -> NodePairs | None:
    """Return the nodes of two groups of equal length in pairs; None if no criterion decides.

    Args:
        source: nodes that fit every node of the other side.
        target: the nodes of the other side.
        ordered: whether the order of definition is meaningful, for each side.
        in_step: whether the surrounding nodes have the same order on both sides.
    """
    found = _pair_by_name_or_order(source, target, ordered, in_step)
    if found is not None:
        return found
    some, others = _add_implicit_zeros(source), _add_implicit_zeros(target)
    found = _pair_by_name_or_order(list(some), list(others), ordered, in_step)
    return None if found is None else [(some[one], others[other], told) for one, other, told in found]


def _add_implicit_zeros(nodes: Sequence[ModuleNode]) -> dict[ModuleNode, ModuleNode]:
    """Map nodes with explicit zeros to the original nodes. A zero is added to an unnumbered segment if similar segments
    have numbers: Keras and haiku omit the first one's (`block/norm`, `block/norm_1`, `block_1/norm`)."""
    alike: dict[tuple[str, ...], list[ModuleNode]] = {}
    for node in nodes:
        alike.setdefault(tuple(parse_module_name(segment).stem for segment in node.path.split("/")), []).append(node)
    made = {}
    for group in alike.values():
        paths = [node.path.split("/") for node in group]
        firsts = [_implicit_zero_segments({path[place] for path in paths}) for place in range(len(paths[0]))]
        for node in group:
            path = "/".join(
                f"{segment}_0" if segment in first else segment
                for segment, first in zip(node.path.split("/"), firsts, strict=True)
            )
            made[node] = dataclasses.replace(node, path=path)
    return {made[node]: node for node in nodes}


def _implicit_zero_segments(segments: set[str]) -> set[str]:
    """Return segments without a number whose siblings have one: `dense` next to `dense_1`; not `fc`, and not next to
    `dense_0`."""
    counted = {segment.rpartition("_")[0] for segment in segments if re.search(r"_\d+$", segment)}
    return {segment for segment in segments & counted if f"{segment}_0" not in segments}


def _pair_by_name_or_order(
    source: Sequence[ModuleNode], target: Sequence[ModuleNode], ordered: tuple[bool, bool], in_step: bool
) -> NodePairs | None:
    ours, theirs = [node.name for node in source], [node.name for node in target]
    if (
        len(set(ours)) == len(ours)
        and set(ours) == set(theirs)
        and not (_has_mixed_naming(source) or _has_mixed_naming(target))
    ):
        by_name = dict(zip(theirs, target, strict=True))
        return [(node, by_name[name], "name") for node, name in zip(source, ours, strict=True)]
    if (
        _has_counting_numbers(source, ordered[0])
        and _has_counting_numbers(target, ordered[1])
        and not _has_role_conflict(ours[0], theirs[0])
    ):
        return _pair_in_number_order(source, target)
    if _branch_counts(ours) != _branch_counts(theirs):
        # an actor and a critic against dense_2 and dense_3: neither numbers nor an order decides
        return None
    in_blocks = _has_block_norms(source) and _has_block_norms(target)
    if all(ordered) and in_step and not in_blocks and (lined := _pair_by_definition_order(source, target)) is not None:
        return lined
    return _pair_by_stems(source, target) or _pair_by_numbers(source, target, ordered)


def _is_numbered_family(names: Sequence[ModuleName]) -> bool:
    """Return whether the names are one stem with different numbers: `h_0`, `h_1`, ...; `dense`, `dense_1`."""
    return len({name.stem for name in names}) == 1 and len({name.numbers for name in names}) == len(names)


def _has_counting_numbers(nodes: Sequence[ModuleNode], ordered: bool) -> bool:
    """Return whether numbers enumerate these nodes. A node without a number is the first (`dense`, `dense_1`). It is
    something else if there is also a 0 (`fc`, `dense_0`), or if it is defined after others (`fc1`, `fc2`, `fc`)."""
    names = [node.name for node in nodes]
    if not _is_numbered_family(names):
        return False
    bare = [node for node in nodes if not node.name.numbers]
    if not bare:
        return True
    joined = all(re.search(r"_\d+$|^\D*$", node.path.rpartition("/")[2]) for node in nodes)
    first = bare[0].place == min(node.place for node in nodes) if ordered else joined
    return first and not _has_mixed_naming(nodes) and (0,) not in [name.numbers for name in names]


def _has_mixed_naming(nodes: Sequence[ModuleNode]) -> bool:
    """Return whether one node has no number and another word for the kind of layer: `fc` next to `dense_1`,
    `dense_2`."""
    if not _is_numbered_family([node.name for node in nodes]) or all(node.name.numbers for node in nodes):
        return False
    return len({re.sub(r"_?\d+$", "", node.path.rpartition("/")[2]) for node in nodes}) > 1


def _branch_counts(names: Sequence[ModuleName]) -> Counter[frozenset[str]] | None:
    """Return the number of nodes in each parallel branch; None if there are no branches."""
    counts = Counter(name.branch for name in names)
    return counts if len(counts) > 1 else None


def _has_role_conflict(one: ModuleName, other: ModuleName) -> bool:
    """Return whether two names have different specific roles."""
    return one.has_role and other.has_role and _last_segment(one) != _last_segment(other)


def _last_segment(name: ModuleName) -> str:
    return name.stem.rpartition("/")[2]


def _pair_in_number_order(source: Sequence[ModuleNode], target: Sequence[ModuleNode]) -> NodePairs:
    def by_number(node: ModuleNode) -> tuple[int, ...]:
        return node.name.numbers

    return [(a, b, "number") for a, b in zip(sorted(source, key=by_number), sorted(target, key=by_number), strict=True)]


def _pair_by_definition_order(source: Sequence[ModuleNode], target: Sequence[ModuleNode]) -> NodePairs | None:
    """Pair nodes in the order of definition; return None if names contradict it."""
    some, others = sorted(source, key=_definition_index), sorted(target, key=_definition_index)
    if _has_distinct_roles(some) != _has_distinct_roles(others) and not (
        _is_in_natural_order(some) and _is_in_natural_order(others)
    ):
        return None
    if (
        not (_is_numbered_in_order(some) and _is_numbered_in_order(others))
        or _has_crossed_names(some, others)
        or _is_parallel_group(some, others)
    ):
        return None
    for one, other in zip(some, others, strict=True):
        shared = len(one.name.words & other.name.words)
        if any(len(one.name.words & each.name.words) > shared for each in others):
            return None
        if any(len(each.name.words & other.name.words) > shared for each in some):
            return None
    return [(one, other, "order") for one, other in zip(some, others, strict=True)]


def _has_crossed_names(source: Sequence[ModuleNode], target: Sequence[ModuleNode]) -> bool:
    """Return whether the names contradict this order: different roles, different branches, or a role on only one side
    of a pair."""
    both = any(node.name.has_role for node in source) and any(node.name.has_role for node in target)
    return any(
        _has_role_conflict(one.name, other.name)
        or one.name.branch != other.name.branch
        or (both and one.name.has_role != other.name.has_role)
        for one, other in zip(source, target, strict=True)
    )


def _is_parallel_group(source: Sequence[ModuleNode], target: Sequence[ModuleNode]) -> bool:
    """Return whether these layers are parallel, such as heads and gates, so that they have no order. Their numbers of
    inputs and features differ, so they cannot follow each other, and each has a separate name on one side."""
    for nodes in (source, target):
        layer = nodes[0].layer
        if layer is None or len({node.name.stem for node in nodes}) != len(nodes):
            continue
        try:
            shapes = layer.forms[0].shapes(layer.arrays)
        except (ValueError, KeyError):
            continue
        kernel = shapes.get("kernel", ())
        if len(kernel) > 1 and kernel[-1] != kernel[-2] and not _has_natural_names([node.name for node in nodes]):
            return True
    return False


def _has_natural_names(names: Sequence[ModuleName]) -> bool:
    """Return whether these have different roles with a usual order. Up and gate have none: w1 is either."""
    lasts = {_last_segment(name) for name in names}
    return lasts <= set(NATURAL_ORDER) and len(lasts) == len(names) and not lasts >= {"up", "gate"}


def _is_numbered_in_order(nodes: Sequence[ModuleNode]) -> bool:
    """Return whether the order of definition follows the numbers in the names and puts final roles last; otherwise it
    is not the call order."""
    last: dict[str, tuple[int, ...]] = {}
    for node in nodes:
        if "forward" in node.name.stem.split("/") and node.name.stem.replace("forward", "backward") in last:
            return False
        stem, numbers = node.name.stem, node.name.numbers
        if stem in last and numbers < last[stem]:
            return False
        last[stem] = numbers
    return not any(_last_segment(node.name) in _FINAL_ROLES for node in nodes[:-1])


def _pair_by_stems(source: Sequence[ModuleNode], target: Sequence[ModuleNode]) -> NodePairs | None:
    """Pair groups with the same stem; a single remaining stem on each side is paired too."""
    ours, theirs = Counter(node.name.stem for node in source), Counter(node.name.stem for node in target)
    if len(ours) == 1 or len(theirs) == 1:
        return None
    # stems do not pair {norm1, x} with {ln_2, y}: norm1 may be the partner of y
    bare = [
        {each.name.stem: each.name.numbers for each in side if _is_bare_name(each.name)} for side in (source, target)
    ]
    sure = all(
        not numbers or not bare[1].get(stem) or numbers == bare[1][stem] or ours[stem] > 1
        for stem, numbers in bare[0].items()
    )
    alike = _match_stems(ours, theirs, sure=sure)
    if len(alike) != len(ours) or len(alike) != len(theirs):
        return None
    pairs: NodePairs = []
    for stem, other in alike.items():
        some = [node for node in source if node.name.stem == stem]
        others = [node for node in target if node.name.stem == other]
        if len(some) == 1:
            pairs.append((some[0], others[0], "name"))
        elif (
            len(some) > 1
            and _is_numbered_family([node.name for node in some])
            and _is_numbered_family([node.name for node in others])
        ):
            pairs += _pair_in_number_order(some, others)
        else:
            return None
    return pairs


def _is_bare_name(name: ModuleName) -> bool:
    """Return whether the last segment is only a kind of layer or a letter."""
    return len(_last_segment(name)) < 2 or not ModuleName(_last_segment(name), ()).words


def _match_stems(ours: Counter[str], theirs: Counter[str], *, sure: bool) -> dict[str, str]:
    """Map stems of the source to equivalent stems of the target. They are compared whole, by last segment, by first
    segment, by words, and by own words. If the others are sure, a single remaining stem is matched too."""

    parts: tuple[Callable[[str], object], ...] = (
        lambda stem: stem,
        lambda stem: stem.rpartition("/")[2],
        lambda stem: stem.partition("/")[0],
        lambda stem: ModuleName(stem, ()).words or stem,
        lambda stem: ModuleName(stem, ()).own or stem,
    )
    alike: dict[str, str] = {}
    for part in parts:
        for stem in [stem for stem in ours if stem not in alike]:
            close = [o for o in theirs if o not in alike.values() and part(o) == part(stem)]
            twice = [o for o in ours if o not in alike and part(o) == part(stem)]
            if len(close) == len(twice) == 1 and theirs[close[0]] == ours[stem]:
                alike[stem] = close[0]
    left = [stem for stem in ours if stem not in alike], [s for s in theirs if s not in alike.values()]
    others = ModuleName(next(iter(left[0]), ""), ()), ModuleName(next(iter(left[1]), ""), ())
    if (
        len(left[0]) == len(left[1]) == 1
        and alike
        and sure
        and ours[left[0][0]] == theirs[left[1][0]]
        and not _has_role_conflict(*others)
    ):
        alike[left[0][0]] = left[1][0]
    return alike


def _pair_by_numbers(
    source: Sequence[ModuleNode], target: Sequence[ModuleNode], ordered: tuple[bool, bool]
) -> NodePairs | None:
    """Pair nodes in the order of their names, if the sides number differently or use roles with a usual order."""
    first, second = (
        _phase_sequence(side, each) or _name_sequence(side, each)
        for side, each in zip((source, target), ordered, strict=True)
    )
    if (
        first is None
        or second is None
        or (_has_crossed_names(first, second) and not (_has_block_norms(first) and _has_block_norms(second)))
    ):
        return None
    return [(a, b, "order") for a, b in zip(first, second, strict=True)]


def _definition_index(node: ModuleNode) -> int:
    return node.place


def _name_sequence(nodes: Sequence[ModuleNode], ordered: bool) -> list[ModuleNode] | None:
    """Return the nodes in the order of their names; None if the names define none.

    Numbers define an order, and so do roles with a usual order. A node without a number is outside of the blocks and
    keeps its defined position: a last norm comes after them.
    """
    names = [node.name for node in nodes]
    if _has_natural_names(names):
        if ordered and not _is_in_natural_order(sorted(nodes, key=_definition_index)):
            return None
        return sorted(nodes, key=lambda node: NATURAL_ORDER.index(_last_segment(node.name)))
    outside = [node for node in nodes if not node.name.numbers]
    late = [node for node in nodes if _last_segment(node.name) == "final norm"]
    early = [node for node in nodes if node not in late]
    if len(late) < 2 and early and _has_block_norms(early):
        return sorted(early, key=_norm_rank) + late
    inside = sorted((node for node in nodes if node.name.numbers), key=lambda node: _number_rank(node.name))
    if _has_counting_numbers(nodes, ordered):
        return outside + inside
    inner = [node.name for node in inside]
    roles = all(_last_segment(name) in NATURAL_ORDER for name in inner) and len(set(map(_number_rank, inner))) == len(
        inner
    )
    if not (_is_numbered_family(inner) or roles) or len(outside) > 1:
        return None
    places = [node.place for node in inside]
    if ordered and all(node.place < min(places) for node in outside):
        # "norm" before the blocks: the embedding's, or the last one, defined early?
        vague = any(_last_segment(node.name) in _FINAL_ROLES or node.name.stem == "norm" for node in outside)
        return None if vague else outside + inside
    if all((ordered and node.place > max(places)) or _last_segment(node.name) in _FINAL_ROLES for node in outside):
        return inside + outside
    return None


def _phase_sequence(nodes: Sequence[ModuleNode], ordered: bool) -> list[ModuleNode] | None:
    """Return the nodes of an encoder, then those of the decoder, each in sequence; None unless there are both."""
    parts = [[node for node in nodes if role in node.name.stem.split("/")] for role in ("encoder", "decoder")]
    if not all(parts) or sum(map(len, parts)) != len(nodes):
        return None
    first, second = (list(part) if len(part) == 1 else _name_sequence(part, ordered) for part in parts)
    return None if first is None or second is None else first + second


def _has_block_norms(nodes: Sequence[ModuleNode]) -> bool:
    """Return whether these are the norms of blocks, some with a role and others numbered. The attention's comes first,
    the MLP's last."""
    blocks: dict[tuple[int, ...], list[ModuleName]] = {}
    for node in nodes:
        blocks.setdefault(_block_numbers(node), []).append(node.name)
    return all(map(_is_one_block_norms, blocks.values()))


def _is_one_block_norms(names: Sequence[ModuleName]) -> bool:
    lasts = [_last_segment(name) for name in names]
    plain = [name for name in names if _last_segment(name) == "norm"]
    return (
        set(lasts) <= set(_BLOCK_NORM_ROLES)
        and len(names) > 1
        and len(names) - len(plain) == len(set(lasts) - {"norm"})
        and len({name.numbers for name in plain}) == len(plain)
        and all(name.numbers for name in plain)
    )


def _norm_rank(node: ModuleNode) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    return _block_numbers(node), _BLOCK_NORM_ROLES.index(_last_segment(node.name)), node.name.numbers


def _block_numbers(node: ModuleNode) -> tuple[int, ...]:
    return parse_module_name(node.path.rpartition("/")[0]).numbers


def _number_rank(name: ModuleName) -> tuple[tuple[int, ...], int]:
    """Return the numbers of a name, then its position among the roles of one block."""
    return name.numbers, NATURAL_ORDER.index(_last_segment(name)) if _last_segment(name) in NATURAL_ORDER else -1


def _has_distinct_roles(nodes: Sequence[ModuleNode]) -> bool:
    """Return whether these nodes have different roles."""
    return len({_last_segment(node.name) for node in nodes if node.name.has_role}) > 1


def _is_in_natural_order(nodes: Sequence[ModuleNode]) -> bool:
    """Return whether the nodes with a role are in the usual order; True if none has a role."""
    order = [
        NATURAL_ORDER.index(_last_segment(node.name)) for node in nodes if _last_segment(node.name) in NATURAL_ORDER
    ]
    unknown = [node for node in nodes if node.name.has_role and _last_segment(node.name) not in NATURAL_ORDER]
    return order == sorted(order) and not unknown
