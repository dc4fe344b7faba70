"""flax.linen: `(module, variables)`. Loaded by `converter`.

A linen model's arrays are nested mappings without classes. What can be seen of its modules (`linen_modules`) says what
a layer is; of the others the names and shapes of their arrays do (`linen_names`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import jax
from flax import core, linen

from polyamp.errors import ModelError
from polyamp.porting.forms import Form
from polyamp.porting.inventory import Inventory, Leaf, NativeLayer
from polyamp.porting.register import form_of, qualified
from polyamp_jax.arrays import path_name
from polyamp_jax.models.flax import adapt_linen
from polyamp_jax.porting import linen_names
from polyamp_jax.porting.flax_forms import Maker, RefusedError, parameter
from polyamp_jax.porting.flax_table import ARRAYS, BARE, CELLS, COMPOSITE, MAKERS, class_of, lines, made, refusal
from polyamp_jax.porting.inference import quiet, still
from polyamp_jax.porting.leaves import lazy, movable
from polyamp_jax.porting.library import Batch, Record
from polyamp_jax.porting.linen_modules import Path, Seen, seen, settings

LEFT: Final = ("cache", "intermediates", "losses", "perturbations")
"""Collections that hold no weights."""


class Array(NamedTuple):
    """One array in `variables`.

    Attributes:
        name: as the inventory has it: a parameter's path, or "collection/path".
        collection: "params", "batch_stats", ...
        path: of its module, and its name there last.
        leaf: the array.
    """

    name: str
    collection: str
    path: Path
    leaf: Any


def inventory(model: Any, batch: Batch | None) -> Inventory:
    """See `Library.inventory`."""
    module, variables = _parts(model)
    found = seen(module, variables, batch)
    tree = _Tree(found)
    left = {}
    for array in _flat(variables):
        if array.collection in LEFT:
            left[array.name] = f"the collection {array.collection!r} holds no weights"
        elif not movable(array.leaf):
            left[array.name] = "a random key or no array"
        else:
            tree.add(array)
    layers = list(tree.layers())
    if found.order:
        known = {path[1:]: number for number, path in reversed(list(enumerate(found.order)))}
        firsts = [min((known.get(path, len(known)) for path in tree.paths(layer)), default=0) for layer in layers]
        layers = [layer for _, layer in sorted(zip(firsts, layers, strict=True), key=lambda pair: pair[0])]
    return Inventory(layers, "flax.linen", bool(found.order), left)


def arrays(model: Any) -> Mapping[str, Any]:
    """See `Library.arrays`."""
    return {array.name: array.leaf for array in _flat(_parts(model)[1]) if movable(array.leaf)}


def replaced(model: Any, arrays: Mapping[str, Any]) -> Any:
    """See `Library.replaced`."""
    module, variables = _parts(model)
    names = iter([array.name for array in _flat(variables)])
    return module, jax.tree.map(lambda leaf: arrays.get(next(names), leaf), variables)


def run(model: Any, batch: Batch, record: Record) -> Any:
    """See `Library.run`."""
    module, variables = _parts(model)

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        current = context.module
        if current.scope is None or context.method_name == "setup":
            return call(*args, **kwargs)
        still(current, settings(current))
        if context.method_name == "__call__":
            args, kwargs = quiet(call, args, kwargs, add=False)
        output = call(*args, **kwargs)
        if context.method_name == "__call__":
            record("/".join(current.path), output)
        return output

    args, kwargs = quiet(module.__call__, batch.args, batch.kwargs, add=True)
    mutable = sorted(name for name in variables if name != "params")
    with linen.intercept_methods(intercept):
        return module.apply(variables, *args, mutable=mutable, **kwargs)[0]


def _parts(model: Any) -> tuple[Any, Any]:
    if not isinstance(model, tuple) or len(model) != 2:
        raise ModelError("pass the model as (linen_module, variables): variables is what module.init(...) returned.")
    module, variables = model
    adapt_linen(module, variables)  # which checks it
    return module, variables


def _flat(variables: Any) -> Iterator[Array]:
    """The leaves in JAX's order; a box around an array (`nn.Partitioned`) is a part of the name alone."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(core.unfreeze(variables)):
        collection, *rest = keys
        path = tuple(str(key.key) for key in rest if isinstance(key, jax.tree_util.DictKey))
        name = path_name(tuple(rest))
        yield Array(name if collection.key == "params" else path_name(keys), collection.key, path, leaf)


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


class _Tree:
    """The modules that have arrays, and the layers that they are."""

    def __init__(self, found: Seen) -> None:
        self._root = _Node()
        self._seen = found
        self._of: dict[str, Path] = {}

    def add(self, array: Array) -> None:
        """An array of the model."""
        node = self._root
        for name in array.path[:-1]:
            node = node.children.setdefault(name, _Node())
        own = array.path[-1] if array.path else ""
        if own in node.arrays:
            own = f"{array.collection}/{own}"
        node.arrays[own] = array
        self._of[array.name] = array.path

    def paths(self, layer: NativeLayer) -> list[Path]:
        """Paths of a layer's arrays; of one without any, of its module."""
        return [self._of[leaf.name] for leaf in layer.leaves.values()] or [tuple(layer.path.split("/"))]

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
            forms = linen_names.by_names(path[-1] if path else "", _shapes(held))
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
    leaves = {
        own: Leaf(array.name, lazy(array.name, array.leaf), array.collection == "params") for own, array in held.items()
    }
    return NativeLayer(where, leaves, forms, name, lines(module, forms[0], where))


def _shapes(held: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.leaf.shape) for name, array in held.items()}
