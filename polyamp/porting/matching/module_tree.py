"""Tree of a model's modules for matching: nodes with a mass, in the model's order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Final

from polyamp.porting.layouts.inventory import NativeLayer
from polyamp.porting.layouts.layer_kinds import BIASED_KINDS
from polyamp.porting.matching.module_names import ModuleName, parse_module_name

_FOLLOWING_ROLE: Final = {"block": "head", "encoder": "head", "forward": "backward", "up": "down", "query": "output"}
"""Role -> a role that is never called before it."""


@dataclasses.dataclass(eq=False)
class ModuleNode:
    """Node of the tree: a module or a layer.

    Attributes:
        path: its path relative to the parent; several segments if modules in between were dissolved.
        children: the child nodes; empty for a layer.
        layer: the layer, of a leaf.
        place: number of layers before its first.
        mass: number of canonical values in it without tied ones; the same in all frameworks, however they pack them.
    """

    path: str
    children: list[ModuleNode]
    layer: NativeLayer | None
    place: int
    mass: int

    @property
    def name(self) -> ModuleName:
        """Parsed name of its path."""
        return parse_module_name(self.path)

    def leaves(self) -> Iterator[ModuleNode]:
        """Yield the layers in it, or the node itself if it is a layer."""
        if self.layer is not None:
            yield self
        for child in self.children:
            yield from child.leaves()

    def dissolve(self) -> list[ModuleNode]:
        """Return its children as nodes of the parent module."""
        return [dataclasses.replace(child, path=_join_paths(self.path, child.path)) for child in self.children]


def count_values(layer: NativeLayer, *, tied: bool = False, biases: bool = True) -> int:
    """Return the number of canonical values that a layer owns; with `tied`, of all its values; without `biases`, those
    of dense layers and convolutions are not counted.

    If the form does not fit the arrays, the native arrays are counted.
    """
    own = {name: leaf.array for name, leaf in layer.leaves.items() if tied or leaf.tied is None}
    if len(own) == len(layer.leaves):
        try:
            shapes = layer.forms[0].shapes(own)
        except (ValueError, KeyError):
            pass
        else:
            if not biases and layer.forms[0].kind in BIASED_KINDS:
                shapes.pop("bias", None)
            return sum(map(math.prod, shapes.values()))
    return sum(array.size for array in own.values())


def build_module_tree(
    layers: Sequence[tuple[str, NativeLayer]], *, tied: bool = False, biases: bool = True
) -> list[ModuleNode]:
    """Return the top-level nodes of a model's tree.

    Args:
        layers: (path, layer) in the model's order; those without arrays of their own are left out.
        tied: whether a tied array counts as a separate array.
        biases: whether biases of dense layers and convolutions count.
    """
    top = ModuleNode("", [], None, 0, 0)
    modules: dict[str, ModuleNode] = {"": top}
    for place, (path, layer) in enumerate(layers):
        mass = count_values(layer, tied=tied, biases=biases)
        if not mass:
            continue
        around = _ensure_module(modules, path.rpartition("/")[0], place)
        around.children.append(ModuleNode(path.rpartition("/")[2], [], layer, place, mass))
    _set_masses(top)
    return [_collapse_chain(child) for child in top.children]


def _ensure_module(modules: dict[str, ModuleNode], path: str, place: int) -> ModuleNode:
    if path not in modules:
        parent = _ensure_module(modules, path.rpartition("/")[0], place)
        modules[path] = ModuleNode(path.rpartition("/")[2], [], None, place, 0)
        parent.children.append(modules[path])
    return modules[path]


def _set_masses(node: ModuleNode) -> int:
    if node.layer is None:
        node.mass = sum(_set_masses(child) for child in node.children)
    return node.mass


def _collapse_chain(node: ModuleNode) -> ModuleNode:
    """Return the node without modules that contain only one child."""
    children = [_collapse_chain(child) for child in node.children]
    if len(children) == 1:
        return dataclasses.replace(children[0], path=_join_paths(node.path, children[0].path))
    return dataclasses.replace(node, children=children)


def _join_paths(*paths: str) -> str:
    return "/".join(path for path in paths if path)


def is_in_call_order(layers: Sequence[NativeLayer]) -> bool:
    """Return whether the order of definition may be the call order, as far as names show: numbers do not decrease, and
    no head precedes the blocks.

    A constructor may define modules in any order. If it defines block 1 before block 0, its order is meaningless.
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
            name = parse_module_name(part)
            if len(name.numbers) == 1 and name.numbers < last.get((around, name.stem), ()):
                return False
            if len(name.numbers) == 1:
                last[around, name.stem] = name.numbers
            before = roles.setdefault(around, set())
            if _FOLLOWING_ROLE.get(name.stem) in before:
                return False
            before.add(name.stem)
    return True
