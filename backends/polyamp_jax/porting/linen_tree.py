"""linen's modules as a tree of arrays, and the layers that they are. Called by `linen`, and by `files` for checkpoints.

Needs no flax: what was seen of a model's modules comes as `Seen`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from polyamp.porting.layouts.forms import Form
from polyamp.porting.layouts.inventory import Leaf, NativeLayer
from polyamp.porting.layouts.register import form_of, qualified
from polyamp_jax.porting import linen_names
from polyamp_jax.porting.flax_forms import Maker, RefusedError, parameter
from polyamp_jax.porting.flax_table import ARRAYS, BARE, CELLS, COMPOSITE, MAKERS, class_of, lines, made, refusal
from polyamp_jax.porting.leaves import lazy

Path = tuple[str, ...]


@dataclasses.dataclass
class Seen:
    """What was seen of a model.

    Attributes:
        modules: path -> module, in the order in which they were met.
        reverse: path of a recurrent layer's cell -> whether it reads from the end.
        order: names of arrays in the order of their making, "collection/path"; empty without a batch.
        shapes: path -> name of an array that a module uses itself -> its shape there, which of a stacked one is that of
            one layer; with a batch.
    """

    modules: dict[Path, Any] = dataclasses.field(default_factory=dict)
    reverse: dict[Path, bool] = dataclasses.field(default_factory=dict)
    order: list[Path] = dataclasses.field(default_factory=list)
    shapes: dict[Path, dict[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)


def settings(module: Any) -> dict[str, Any]:
    """The fields of a module by name."""
    return {field.name: getattr(module, field.name) for field in dataclasses.fields(module) if field.name != "parent"}


class Array(NamedTuple):
    """One array in `variables`.

    Attributes:
        name: as the inventory has it: a parameter's path, or "collection/path".
        collection: "params", "batch_stats", ...
        path: of its module, and its name there last.
        leaf: the array.
        trainable: whether it is a parameter.
        stack: of a slice of a stacked one (`stacks`), the length of its path up to the index.
    """

    name: str
    collection: str
    path: Path
    leaf: Any
    trainable: bool
    stack: int | None = None

    def place(self, order: Mapping[Path, int], calls: Mapping[Path, int]) -> tuple[int, int, int]:
        """Where it comes among the arrays whose paths' numbers these are; slices by their index, and for one index as
        the modules are called: inside of a lifted transformation flax sorts names."""
        last = len(order)
        if self.stack is None:
            return order.get(self.path, last), 0, 0
        around, number = self.path[: self.stack], int(self.path[self.stack])
        first = min((at for path, at in order.items() if path[: self.stack] == around), default=last)
        return first, number, calls.get((*around, *self.path[self.stack + 1 : -1]), len(calls))


class _Node:
    """A module: its own arrays and its submodules."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.children: dict[str, _Node] = {}

    def below(self, but: frozenset[str] = frozenset()) -> dict[str, Array]:
        """All arrays at and below it, by their paths from here."""
        found = dict(self.arrays)
        for name, child in self.children.items():
            if name not in but:
                found |= {f"{name}/{inner}": array for inner, array in child.below().items()}
        return found

    def only(self, names: frozenset[str]) -> _Node:
        """A module that has these submodules alone."""
        made = _Node()
        made.children = {name: child for name, child in self.children.items() if name in names}
        return made


class Tree:
    """The modules that have arrays, and the layers that they are."""

    def __init__(self, found: Seen) -> None:
        self._root = _Node()
        self._seen = found
        self._arrays: dict[str, Array] = {}

    def add(self, array: Array) -> None:
        """An array of the model."""
        node = self._root
        for name in array.path[:-1]:
            node = node.children.setdefault(name, _Node())
        own = array.path[-1] if array.path else ""
        if own in node.arrays:
            own = f"{array.collection}/{own}"
        node.arrays[own] = array
        self._arrays[array.name] = array

    def place(self, layer: NativeLayer, order: Mapping[Path, int], calls: Mapping[Path, int]) -> tuple[int, int, int]:
        """Where a layer comes: with the first of its arrays; without any, at the end."""
        places = [self._arrays[leaf.name].place(order, calls) for leaf in layer.leaves.values()]
        return min(places, default=(len(order), 0, 0))

    def layers(self) -> Iterator[NativeLayer]:
        """All of them, and those without arrays that were seen."""
        found = list(self._under(self._root, ()))
        yield from found
        listed = {layer.path for layer in found}
        for path, module in self._seen.modules.items():
            kind = class_of(module)
            if kind is not None and kind.__name__ in BARE and "/".join(path) not in listed:
                yield self._layer(path, {}, module)

    def _under(self, node: _Node, path: Path) -> Iterator[NativeLayer]:
        module = self._seen.modules.get(path)
        kind = None if module is None else class_of(module)
        if module is not None and (form := form_of(module)) is not None:
            yield _native(path, node.below(), (form,), qualified(type(module)))
            return
        if kind is not None and MAKERS.get(kind.__name__) in COMPOSITE:
            yield self._layer(path, node.below(linen_names.NORMS), module)
            node = node.only(linen_names.NORMS)
        elif kind is not None:
            yield self._layer(path, {name: array for name, array in node.arrays.items() if name in ARRAYS}, module)
            node.arrays = {name: array for name, array in node.arrays.items() if name not in ARRAYS}
        elif (maker := self._composite(node, path, module)) is not None:
            held = node.below(linen_names.NORMS)
            yield _native(path, held, (maker(_shapes(held), {}),))
            node = node.only(linen_names.NORMS)
        yield from self._by_names(node, path)
        for name, child in node.children.items():
            yield from self._under(child, (*path, name))

    def _composite(self, node: _Node, path: Path, module: Any) -> Maker | None:
        """What a module is by the names of its submodules, where its class was not seen."""
        if module is not None or node.arrays:
            return None
        try:
            return linen_names.composite({name: _shapes(child.arrays) for name, child in node.children.items()})
        except RefusedError as error:
            raise refusal("/".join(path), f"flax.linen.{error}") from None

    def _by_names(self, node: _Node, path: Path) -> Iterator[NativeLayer]:
        for names in linen_names.groups(node.arrays):
            held = {name: node.arrays[name] for name in names}
            try:
                forms = linen_names.by_names(path[-1] if path else "", _shapes(held))
            except RefusedError as error:
                raise refusal("/".join(path), f"flax.linen: {error}") from None
            if len(held) > 1 and forms:
                yield _native(path, held, forms)
                continue
            for name, array in held.items():
                single = forms or (parameter(name),)
                whole = single[0].kind != "parameter"
                yield _native(path if whole else (*path, name), {name: array}, single)

    def _layer(self, path: Path, held: Mapping[str, Array], module: Any) -> NativeLayer:
        form = made(module, _shapes(held), settings(module), "/".join(path))
        if form.kind in CELLS and path in self._seen.reverse:
            form = Form(form.kind, form.rules, {**form.attributes, "reverse": self._seen.reverse[path]})
        return _native(path, held, (form,), f"flax.linen.{type(module).__name__}", module)


def _native(
    path: Path, held: Mapping[str, Array], forms: tuple[Form, ...], name: str = "", module: Any = None
) -> NativeLayer:
    where = "/".join(path)
    leaves = {own: Leaf(array.name, lazy(array.name, array.leaf), array.trainable) for own, array in held.items()}
    return NativeLayer(where, leaves, forms, name, lines(module, forms[0], where))


def _shapes(held: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.leaf.shape) for name, array in held.items()}
