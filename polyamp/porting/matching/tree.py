"""A model's layers as a tree of its modules, for `matching`: nodes with a mass, in the model's order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from polyamp.porting.layouts.inventory import NativeLayer
from polyamp.porting.matching.names import Name, name_of

_LATER: Final = {"block": "head", "encoder": "head", "forward": "backward", "up": "down", "query": "output"}
"""Role -> one that nobody calls before it."""


@dataclasses.dataclass(eq=False)
class Node:
    """A module, or a layer.

    Attributes:
        path: its path below the node around it; several segments once those between were dissolved.
        children: the nodes in it; none in a layer.
        layer: the layer, of a leaf.
        place: how many layers come before its first.
        mass: number of canonical values in it, tied ones not counted: alike in all frameworks however they pack them.
    """

    path: str
    children: list[Node]
    layer: NativeLayer | None
    place: int
    mass: int

    @property
    def name(self) -> Name:
        """What its path says."""
        return name_of(self.path)

    def leaves(self) -> Iterator[Node]:
        """The layers in it, itself if it is one."""
        if self.layer is not None:
            yield self
        for child in self.children:
            yield from child.leaves()

    def dissolved(self) -> list[Node]:
        """Its children, as nodes of the module around it."""
        return [dataclasses.replace(child, path=_joined(self.path, child.path)) for child in self.children]


def mass_of(layer: NativeLayer, *, tied: bool = False) -> int:
    """Number of canonical values that a layer has of its own; with `tied`, of all that it has.

    Where a form does not fit its arrays, those arrays are counted.
    """
    own = {name: leaf.array for name, leaf in layer.leaves.items() if tied or leaf.tied is None}
    if len(own) == len(layer.leaves):
        try:
            shapes = layer.forms[0].shapes(own)
        except (ValueError, KeyError):
            pass
        else:
            total = 0
            for shape in shapes.values():
                size = 1
                for length in shape:
                    size *= length
                total += size
            return total
    return sum(array.size for array in own.values())


def tree(layers: Sequence[tuple[str, NativeLayer]], *, tied: bool = False) -> list[Node]:
    """The top of a model's tree.

    Args:
        layers: (path, layer) in the model's order; those without arrays of their own are left out.
        tied: what is tied counts as an array of its own.
    """
    top = Node("", [], None, 0, 0)
    modules: dict[str, Node] = {"": top}
    for place, (path, layer) in enumerate(layers):
        mass = mass_of(layer, tied=tied)
        if not mass:
            continue
        around = _module(modules, path.rpartition("/")[0], place)
        around.children.append(Node(path.rpartition("/")[2], [], layer, place, mass))
    _weigh(top)
    return [_chained(child) for child in top.children]


def _module(modules: dict[str, Node], path: str, place: int) -> Node:
    if path not in modules:
        parent = _module(modules, path.rpartition("/")[0], place)
        modules[path] = Node(path.rpartition("/")[2], [], None, place, 0)
        parent.children.append(modules[path])
    return modules[path]


def _weigh(node: Node) -> int:
    if node.layer is None:
        node.mass = sum(_weigh(child) for child in node.children)
    return node.mass


def _chained(node: Node) -> Node:
    """The node without modules around one thing alone."""
    children = [_chained(child) for child in node.children]
    if len(children) == 1:
        return dataclasses.replace(children[0], path=_joined(node.path, children[0].path))
    return dataclasses.replace(node, children=children)


def _joined(*paths: str) -> str:
    return "/".join(path for path in paths if path)


def in_turn(layers: Sequence[NativeLayer]) -> bool:
    """Whether the order of definition may be that of the calls, as far as names tell: nothing is numbered backwards,
    and no head stands before the blocks.

    A constructor may define what it likes first. Where it defines block 1 before block 0, its order says nothing.
    """
    last: dict[tuple[str, str], tuple[int, ...]] = {}
    roles: dict[str, set[str]] = {}
    seen: set[str] = set()
    for layer in layers:
        parts = layer.path.split("/")
        for depth, part in enumerate(parts):
            path, around = "/".join(parts[: depth + 1]), "/".join(parts[:depth])
            if path in seen:
                continue
            seen.add(path)
            name = name_of(part)
            if len(name.numbers) == 1 and name.numbers < last.get((around, name.stem), ()):
                return False
            if len(name.numbers) == 1:
                last[around, name.stem] = name.numbers
            before = roles.setdefault(around, set())
            if _LATER.get(name.stem) in before:
                return False
            before.add(name.stem)
    return True
