"""Traversal of an equinox model: its layers, and the names and places of their arrays.

It handles what is not in a module's own fields: the `State` of a BatchNorm, `nn.Shared`, layers stacked by
`eqx.filter_vmap`, and `nn.MLP`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp

from polyamp.errors import ModelError, PortError
from polyamp.porting.layouts.layer_layout import Form
from polyamp.porting.layouts.layer_registration import registered_form
from polyamp_jax import compat
from polyamp_jax.arrays import join_path, path_name, shape_struct
from polyamp_jax.porting.jax_only.array_places import LARGE_COUNT, ArrayPlace, Weight, number_leaves
from polyamp_jax.porting.layers.activations import activation_attributes
from polyamp_jax.porting.libraries.equinox_layers import find_layer_spec, is_array_or_shape
from polyamp_jax.porting.libraries.layer_inference import group_arrays

nn: Final = eqx.nn
COUNTER_REASON: Final = (
    "counts the batches behind a running statistic; a port sets it so that nothing is corrected any more"
)


@dataclasses.dataclass(frozen=True)
class EquinoxLayer:
    """A layer, or a parameter of no layer.

    Attributes:
        path: path of the module or parameter.
        layer: the module; a slice of a stack has shapes in place of arrays. None for a parameter.
        weights: its arrays by their names in the layer; "value" for a parameter.
        attributes: attributes set by the enclosing module.
        forms: possible forms, for a custom class whose arrays are named as those of a layer.
    """

    path: str
    layer: Any
    weights: Mapping[str, Weight]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    forms: tuple[Form, ...] = ()

    def name(self, local: str) -> str:
        """Return the full name of one of its arrays."""
        return self.path if self.layer is None and local == "value" else join_path(self.path, local)


class EquinoxTraversal:
    """All layers and parameters of a model, in the order of its fields.

    Args:
        model: an equinox module, or `(module, eqx.nn.State)`.

    Attributes:
        parts: the layers and parameters.
        other_arrays: name of an array that is no weight -> why.
    """

    def __init__(self, model: Any) -> None:
        self.parts: list[EquinoxLayer] = []
        self.other_arrays: dict[str, str] = {}
        tree = number_leaves(model)
        module, state = tree if isinstance(model, tuple) else (tree, None)
        self._state: Any = state
        self._visit(module, "", {})

    def weights(self) -> dict[str, Weight]:
        """Return name -> weight, every array once."""
        return {
            part.name(local): weight
            for part in self.parts
            for local, weight in part.weights.items()
            if weight.tied is None
        }

    def _visit(self, node: Any, path: str, attributes: Mapping[str, Any]) -> None:
        if isinstance(node, ArrayPlace | _SharedArray):
            self._leaf(node, path)
        elif isinstance(node, nn.StateIndex):
            self._index(node, path)
        elif isinstance(node, nn.SpectralNorm | nn.WeightNorm):
            raise PortError(
                f"eqx.nn.{type(node).__name__} at {path or 'the root'} computes the weight of the layer in it anew in "
                "every call; no other framework has it in the same way. Put the layer itself there, with the weight "
                "that it computes."
            )
        elif (length := _stack_size(node)) is not None and not _has_inner_stack(node):
            for number in range(length):
                self._visit(_slice_places(node, number), join_path(path, str(number)), attributes)
        elif isinstance(node, nn.Shared):
            for name, child in named_children(_expand_shared(node, path)):
                self._visit(child, join_path(path, join_path("pytree", name)), attributes)
        elif isinstance(node, nn.MLP):
            self._mlp(node, path)
        elif not self._is_layer(node):
            self._own(node, path)
        else:
            weights = {}
            for name, place in _named_leaves(node):
                if isinstance(place, _SharedArray) or place.is_weight:
                    weights[name] = _make_weight(place)
                elif place.is_array:
                    self.other_arrays[join_path(path, name)] = "no floating numbers"
            if isinstance(node, nn.BatchNorm):
                weights |= self._statistics(node, path)
            if isinstance(node, nn.Dropout) and weights:
                self.other_arrays |= {join_path(path, name): "the rate of a dropout" for name in weights}
                weights = {}
            self.parts.append(EquinoxLayer(path, _with_values(node), weights, attributes))

    def _is_layer(self, node: Any) -> bool:
        if isinstance(node, nn.Lambda) and _has_weights(node):
            return False  # a Lambda around a module: the arrays belong to that module
        return find_layer_spec(node) is not None or (
            isinstance(node, eqx.Module) and registered_form(_with_values(node)) is not None
        )

    def _own(self, node: Any, path: str) -> None:
        """Visit a container or custom module. A kernel and a bias directly in a module are a layer."""
        found = dict(named_children(node))
        shapes = {
            name: place.shape for name, place in found.items() if isinstance(place, ArrayPlace) and place.is_weight
        }
        grouped = {}
        for group in group_arrays(path, shapes) if isinstance(node, eqx.Module) else ():
            if len(group.names) > 1 and not group.path:
                grouped = {native: _make_weight(found[native]) for native in group.names}
                forms = tuple(
                    form.with_native_names({local: native for native, local in group.names.items()})
                    for form in group.forms
                )
                self.parts.append(EquinoxLayer(path, None, grouped, forms=forms))
        for name, child in found.items():
            if name not in grouped:
                self._visit(child, join_path(path, name), {})

    def _leaf(self, place: Any, path: str) -> None:
        if isinstance(place, _SharedArray) or place.is_weight:
            self.parts.append(EquinoxLayer(path, None, {"value": _make_weight(place)}))
        elif place.is_array:
            self.other_arrays[path] = "no floating numbers"

    def _mlp(self, node: Any, path: str) -> None:
        layers = node.layers
        if node.scan and node.depth > 0:
            hidden = [_slice_places(layers[1], number) for number in range(node.depth - 1)]
            layers = (layers[0], *hidden, layers[2])
        learnt, learnt_last = _has_weights(node.activation), _has_weights(node.final_activation)
        inner = {} if learnt else activation_attributes(_with_values(node.activation))
        final = {} if learnt_last else activation_attributes(_with_values(node.final_activation))
        for number, layer in enumerate(layers):
            attributes = final if number == len(layers) - 1 else inner
            self._visit(layer, join_path(path, f"layers/{number}"), attributes)
        if learnt:
            for number in range(node.depth):
                self._visit(_slice_places(node.activation, number), join_path(path, f"activation/{number}"), {})
        if learnt_last:
            self._visit(node.final_activation, join_path(path, "final_activation"), {})

    def _at(self, index: Any, path: str) -> Any:
        """Return the value of a state index, with numbered leaves."""
        if self._state is not None:
            return self._state.get(index)
        if not jax.tree.leaves(index.init):
            raise ModelError(
                f"the equinox module keeps a state at {path!r}: pass the model as (module, state), as "
                "eqx.nn.make_with_state(...) returned it."
            )
        return index.init

    def _index(self, node: Any, path: str) -> None:
        value = self._at(node, path)
        for keys, place in jax.tree_util.tree_leaves_with_path(value):
            name = join_path(path, path_name(keys))
            if place.is_weight:
                self.parts.append(EquinoxLayer(name, None, {"value": Weight(place, trainable=False)}))
            else:
                self.other_arrays[name] = "no floating numbers"

    def _statistics(self, node: Any, path: str) -> dict[str, Weight]:
        if node.mode == "ema":
            mean, variance = self._at(node.ema_state_index, path)
            first = self._at(node.ema_first_time_index, path)
            self.other_arrays[join_path(path, "ema_first_time")] = (
                "tells whether there are statistics; a port says that there are"
            )
            return {
                name: Weight(place, trainable=False, counters={first.number: False})
                for name, place in (("mean", mean), ("variance", variance))
            }
        hidden = self._at(node.batch_state_index, path)
        counter = self._at(node.batch_counter, path)
        self.other_arrays[join_path(path, "batch_counter")] = COUNTER_REASON

        def average(place: ArrayPlace) -> Any:
            count = counter.leaf
            return place.leaf / jnp.where(count == 0, 1, 1 - node.momentum**count)

        return {
            name: Weight(place, False, functools.partial(average, place), counters={counter.number: LARGE_COUNT})
            for name, place in zip(("mean", "variance"), hidden, strict=True)
        }


@dataclasses.dataclass(frozen=True)
class _SharedArray:
    """Replacement for an array that `nn.Shared` removed: the source array, and a function of it.

    Attributes:
        place: place of the source array.
        name: name of the source weight.
        value: its shape and dtype here; the axes have another order if it is transposed.
        read: returns its values here.
    """

    place: ArrayPlace
    name: str
    value: Any
    read: Any

    is_array = False  # it has no own place


def _make_weight(place: Any) -> Weight:
    if isinstance(place, _SharedArray):
        # a separate place that is never written, because tied arrays are not filled
        own = ArrayPlace(place.place.number, place.value)
        return Weight(own, read=place.read, tied=place.name, origin=place.place)
    return Weight(place)


def named_children(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, child) for a node of a numbered tree."""
    flat, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda item: item is not node)
    if not jax.tree_util.treedef_is_leaf(structure):
        for keys, child in flat:
            yield path_name(keys), child


def _named_leaves(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, place) for the leaves of a layer, without its states."""
    for name, child in named_children(node):
        if isinstance(child, ArrayPlace | _SharedArray):
            yield name, child
        elif not isinstance(child, nn.StateIndex):
            yield from ((join_path(name, inner), place) for inner, place in _named_leaves(child))


def _with_values(node: Any) -> Any:
    return jax.tree.map(
        lambda place: place.value if isinstance(place, ArrayPlace | _SharedArray) else place,
        node,
        is_leaf=lambda item: isinstance(item, ArrayPlace | _SharedArray),
    )


def _slice_places(node: Any, number: int) -> Any:
    return jax.tree.map(lambda place: place.slice_at(number) if place.is_array else place, node)


def _stack_size(node: Any) -> int | None:
    """Return the number of layers that `jax.vmap` stacked in a module; None for a single layer.

    Every array in a stack has one axis more than its class defines, and that axis has the same length everywhere.
    """
    if not isinstance(node, eqx.Module) or isinstance(node, nn.Shared):
        return None
    weights = [place for place in jax.tree.leaves(node) if isinstance(place, ArrayPlace) and place.is_weight]
    lengths = {place.shape[:1] for place in weights}
    if len(lengths) != 1 or lengths == {()}:
        return None
    spare = [_extra_axes(layer) for layer in _inner_layers(node)]
    known = [axes for axes in spare if axes is not None]
    return int(lengths.pop()[0]) if known and min(known) > 0 else None


def _extra_axes(layer: Any) -> int | None:
    row = find_layer_spec(layer)
    array, axes = (None, 0) if row is None or row.array is None else row.array(layer)
    return len(array.shape) - axes if isinstance(array, ArrayPlace) and array.is_array else None


def _inner_layers(node: Any) -> Iterator[Any]:
    if find_layer_spec(node) is not None:
        yield node
        return
    for _, child in named_children(node):
        if not isinstance(child, ArrayPlace):
            yield from _inner_layers(child)


def _has_inner_stack(node: Any) -> bool:
    """Return whether all arrays of a module are in a single custom submodule; that submodule is the stack."""
    if find_layer_spec(node) is not None:
        return False
    holders = [child for _, child in named_children(node) if _has_weights(child)]
    return len(holders) == 1 and isinstance(holders[0], eqx.Module) and find_layer_spec(holders[0]) is None


def _has_weights(node: Any) -> bool:
    return any(isinstance(place, ArrayPlace) and place.is_weight for place in jax.tree.leaves(node))


def _expand_shared(node: Any, path: str) -> Any:
    """Return the result of calling `nn.Shared` on a numbered tree, with every shared array as a `_SharedArray`."""
    names = {}
    for keys, place in jax.tree_util.tree_leaves_with_path(node.pytree):
        names[place.number] = join_path(path, join_path("pytree", path_name(keys)))
    places = [place for place in jax.tree.leaves(node.pytree) if place.is_array]
    structure: Any = jax.tree.structure(node.pytree)

    def shared(arrays: list[Any]) -> Any:
        given = iter(arrays)
        leaves = [next(given) if place.is_array else place.value for place in jax.tree.leaves(node.pytree)]
        return eqx.filter(node.get.leaf(jax.tree.unflatten(structure, leaves)), is_array_or_shape)

    shapes = [shape_struct(place.shape, place.leaf.dtype) for place in places]
    program, made = jax.make_jaxpr(shared, return_shape=True)(shapes)
    sources = compat.output_sources(program)
    outputs, inner = jax.tree.flatten(made)
    found = []
    for number, (output, source) in enumerate(zip(outputs, sources, strict=True)):
        if len(source) != 1:
            raise PortError(
                f"eqx.nn.Shared at {path!r} makes an array of {len(source)} arrays; one that is tied is made of one."
            )
        place = places[source[0]]

        def read(number: int = number) -> Any:
            return jax.tree.leaves(shared([each.array for each in places]))[number]

        found.append(_SharedArray(place, names[place.number], output, read))
    return eqx.tree_at(node.where.leaf, node.pytree, jax.tree.unflatten(inner, found))
