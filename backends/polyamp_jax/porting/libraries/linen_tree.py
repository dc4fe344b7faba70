"""Tree of a linen model's arrays by module, and the layers in it. Checkpoints use the same tree.

It does not need flax: the visible modules of a model are passed as `LinenStructure`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from polyamp.porting.layouts.inventory import InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_kinds import RECURRENT_KINDS
from polyamp.porting.layouts.layer_layout import Form, parameter_form
from polyamp.porting.layouts.layer_registration import qualified_name, registered_form
from polyamp_jax.porting.jax_only.lazy_leaves import to_lazy
from polyamp_jax.porting.layers.refusal import RefusedError
from polyamp_jax.porting.libraries import linen_layer_inference
from polyamp_jax.porting.libraries.flax_composites import NORM_SUBMODULES
from polyamp_jax.porting.libraries.flax_layer_spec import FormMaker
from polyamp_jax.porting.libraries.flax_layer_table import (
    ARRAY_NAMES,
    attribute_lines,
    find_layer_spec,
    make_form,
    refusal_error,
)

LinenPath = tuple[str, ...]


@dataclasses.dataclass
class LinenStructure:
    """Visible structure of a model.

    Attributes:
        modules: path -> module, in the order of discovery.
        reverse: path of a recurrent layer's cell -> whether it reads from the end.
        order: names of arrays in creation order, "collection/path"; empty without a batch.
        shapes: path -> name of an array that the module itself uses -> its shape there; only with a batch. For a
            stacked array it is the shape of one layer.
    """

    modules: dict[LinenPath, Any] = dataclasses.field(default_factory=dict)
    reverse: dict[LinenPath, bool] = dataclasses.field(default_factory=dict)
    order: list[LinenPath] = dataclasses.field(default_factory=list)
    shapes: dict[LinenPath, dict[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)


def module_settings(module: Any) -> dict[str, Any]:
    """Return the fields of a module by name."""
    return {field.name: getattr(module, field.name) for field in dataclasses.fields(module) if field.name != "parent"}


class LinenArray(NamedTuple):
    """One array in `variables`.

    Attributes:
        name: its name in the inventory: a parameter's path, or "collection/path".
        collection: "params", "batch_stats", ...
        path: path of its module, followed by its name there.
        leaf: the array.
        trainable: whether it is a parameter.
        stack: for a slice of a stacked array (`stacked_layers`), the length of its path up to the index.
    """

    name: str
    collection: str
    path: LinenPath
    leaf: Any
    trainable: bool
    stack: int | None = None

    def place(self, order: Mapping[LinenPath, int], calls: Mapping[LinenPath, int]) -> tuple[int, int, int]:
        """Return its sort key, from the positions of array paths and module calls.

        Slices are sorted by index, then in the order of the modules' calls: inside a lifted transformation flax sorts
        names.
        """
        last = len(order)
        if self.stack is None:
            return order.get(self.path, last), 0, 0
        around, number = self.path[: self.stack], int(self.path[self.stack])
        first = min((at for path, at in order.items() if path[: self.stack] == around), default=last)
        return first, number, calls.get((*around, *self.path[self.stack + 1 : -1]), len(calls))


class _LinenNode:
    """A module: its own arrays and its submodules."""

    def __init__(self) -> None:
        self.arrays: dict[str, LinenArray] = {}
        self.children: dict[str, _LinenNode] = {}

    def arrays_by_path(self, but: frozenset[str] = frozenset()) -> dict[str, LinenArray]:
        """Return all arrays at and below this node by their paths from here."""
        found = dict(self.arrays)
        for name, child in self.children.items():
            if name not in but:
                found |= {f"{name}/{inner}": array for inner, array in child.arrays_by_path().items()}
        return found

    def select_submodules(self, names: frozenset[str]) -> _LinenNode:
        """Return a node with only these submodules."""
        made = _LinenNode()
        made.children = {name: child for name, child in self.children.items() if name in names}
        return made


class LinenTree:
    """Tree of the modules with arrays, and their layers."""

    def __init__(self, structure: LinenStructure) -> None:
        self._root = _LinenNode()
        self._structure = structure
        self._arrays: dict[str, LinenArray] = {}

    def add(self, array: LinenArray) -> None:
        """Add an array of the model."""
        node = self._root
        for name in array.path[:-1]:
            node = node.children.setdefault(name, _LinenNode())
        own = array.path[-1] if array.path else ""
        if own in node.arrays:
            own = f"{array.collection}/{own}"
        node.arrays[own] = array
        self._arrays[array.name] = array

    def place(
        self, layer: NativeLayer, order: Mapping[LinenPath, int], calls: Mapping[LinenPath, int]
    ) -> tuple[int, int, int]:
        """Return a layer's sort key: that of its first array; without arrays, the end."""
        places = [self._arrays[leaf.name].place(order, calls) for leaf in layer.leaves.values()]
        return min(places, default=(len(order), 0, 0))

    def layers(self) -> Iterator[NativeLayer]:
        """Yield all layers, including visible layers without arrays."""
        found = list(self._under(self._root, ()))
        yield from found
        listed = {layer.path for layer in found}
        for path, module in self._structure.modules.items():
            spec = find_layer_spec(module)
            if spec is not None and spec.can_be_arrayless and "/".join(path) not in listed:
                yield self._layer(path, {}, module)

    def _under(self, node: _LinenNode, path: LinenPath) -> Iterator[NativeLayer]:
        module = self._structure.modules.get(path)
        spec = None if module is None else find_layer_spec(module)
        if module is not None and (form := registered_form(module)) is not None:
            yield _native_layer(path, node.arrays_by_path(), (form,), qualified_name(type(module)))
            return
        if spec is not None and spec.is_composite:
            yield self._layer(path, node.arrays_by_path(NORM_SUBMODULES), module)
            node = node.select_submodules(NORM_SUBMODULES)
        elif spec is not None:
            yield self._layer(path, {name: array for name, array in node.arrays.items() if name in ARRAY_NAMES}, module)
            node.arrays = {name: array for name, array in node.arrays.items() if name not in ARRAY_NAMES}
        elif (maker := self._composite(node, path, module)) is not None:
            arrays = node.arrays_by_path(NORM_SUBMODULES)
            yield _native_layer(path, arrays, (maker(_array_shapes(arrays), {}),))
            node = node.select_submodules(NORM_SUBMODULES)
        yield from self._by_names(node, path)
        for name, child in node.children.items():
            yield from self._under(child, (*path, name))

    def _composite(self, node: _LinenNode, path: LinenPath, module: Any) -> FormMaker | None:
        """Return the form maker of a module of unknown class, from the names of its submodules."""
        if module is not None or node.arrays:
            return None
        try:
            return linen_layer_inference.composite_maker(
                {name: _array_shapes(child.arrays) for name, child in node.children.items()}
            )
        except RefusedError as error:
            raise refusal_error("/".join(path), f"flax.linen.{error}") from None

    def _by_names(self, node: _LinenNode, path: LinenPath) -> Iterator[NativeLayer]:
        for names in linen_layer_inference.group_arrays(node.arrays):
            arrays = {name: node.arrays[name] for name in names}
            try:
                forms = linen_layer_inference.forms_by_name(path[-1] if path else "", _array_shapes(arrays))
            except RefusedError as error:
                raise refusal_error("/".join(path), f"flax.linen: {error}") from None
            if len(arrays) > 1 and forms:
                yield _native_layer(path, arrays, forms)
                continue
            for name, array in arrays.items():
                single = forms or (parameter_form(name),)
                whole = single[0].kind != "parameter"
                yield _native_layer(path if whole else (*path, name), {name: array}, single)

    def _layer(self, path: LinenPath, arrays: Mapping[str, LinenArray], module: Any) -> NativeLayer:
        form = make_form(module, _array_shapes(arrays), module_settings(module), "/".join(path))
        if form.kind in RECURRENT_KINDS and path in self._structure.reverse:
            form = Form(form.kind, form.rules, {**form.attributes, "reverse": self._structure.reverse[path]})
        return _native_layer(path, arrays, (form,), f"flax.linen.{type(module).__name__}", module)


def _native_layer(
    path: LinenPath, arrays: Mapping[str, LinenArray], forms: tuple[Form, ...], name: str = "", module: Any = None
) -> NativeLayer:
    where = "/".join(path)
    leaves = {
        own: InventoryLeaf(array.name, to_lazy(array.name, array.leaf), array.trainable)
        for own, array in arrays.items()
    }
    return NativeLayer(where, leaves, forms, name, attribute_lines(module, forms[0], where))


def _array_shapes(arrays: Mapping[str, LinenArray]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.leaf.shape) for name, array in arrays.items()}
