"""The arrays of an equinox model, layer by layer: which there are, where they lie, and what they are called.

`equinox` gives them forms. What needs more than the fields of a module stands here: the `State` of a BatchNorm,
`nn.Shared`, layers that `eqx.filter_vmap` stacked, `nn.MLP`.
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
from polyamp.porting.layouts.forms import Form
from polyamp.porting.layouts.register import form_of
from polyamp_jax import compat
from polyamp_jax.arrays import path_name
from polyamp_jax.porting import probing
from polyamp_jax.porting.equinox_layers import row_of
from polyamp_jax.porting.function_names import groups
from polyamp_jax.porting.places import LONG, Place, Weight, numbered

nn: Final = eqx.nn
COUNTER: Final = "counts the batches behind a running statistic; a port sets it so that nothing is corrected any more"


@dataclasses.dataclass(frozen=True)
class Part:
    """A layer, or a parameter of none.

    Attributes:
        path: of the module, or of the parameter.
        layer: the module as it is, but that a slice of a stack has shapes in place of arrays; None of a parameter.
        weights: its arrays by their names in it; of a parameter "value".
        said: attributes that the module around it gives it.
        forms: what it may be, where its class is the user's own and its arrays are named as a layer's are.
    """

    path: str
    layer: Any
    weights: Mapping[str, Weight]
    said: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    forms: tuple[Form, ...] = ()

    def name(self, local: str) -> str:
        """The full name of one of its arrays."""
        return self.path if self.layer is None and local == "value" else joined(self.path, local)


class Walk:
    """All parts of a model, in the order of its fields.

    Args:
        model: an equinox module, or `(module, eqx.nn.State)`.

    Attributes:
        parts: the layers and parameters.
        left: name of an array that is no weight -> why.
    """

    def __init__(self, model: Any) -> None:
        self.parts: list[Part] = []
        self.left: dict[str, str] = {}
        tree = numbered(model)
        module, state = tree if isinstance(model, tuple) else (tree, None)
        self._state: Any = state
        self._visit(module, "", {})

    def weights(self) -> dict[str, Weight]:
        """Name -> weight, of every array once."""
        return {
            part.name(local): weight
            for part in self.parts
            for local, weight in part.weights.items()
            if weight.tied is None
        }

    def _visit(self, node: Any, path: str, said: Mapping[str, Any]) -> None:
        if isinstance(node, Place | _Shared):
            self._leaf(node, path)
        elif isinstance(node, nn.StateIndex):
            self._index(node, path)
        elif isinstance(node, nn.SpectralNorm | nn.WeightNorm):
            raise PortError(
                f"eqx.nn.{type(node).__name__} at {path or 'the root'} computes the weight of the layer in it anew in "
                "every call; no other framework has it in the same way. Put the layer itself there, with the weight "
                "that it computes."
            )
        elif (length := _stack(node)) is not None and not _holds_the_stack(node):
            for number in range(length):
                self._visit(_sliced(node, number), joined(path, str(number)), said)
        elif isinstance(node, nn.Shared):
            for name, child in children(_expanded(node, path)):
                self._visit(child, joined(path, joined("pytree", name)), said)
        elif isinstance(node, nn.MLP):
            self._mlp(node, path)
        elif not self._is_layer(node):
            self._own(node, path)
        else:
            weights = {}
            for name, place in _leaves(node):
                if isinstance(place, _Shared) or place.is_weight:
                    weights[name] = _weight(place)
                elif place.is_array:
                    self.left[joined(path, name)] = "no floating numbers"
            if isinstance(node, nn.BatchNorm):
                weights |= self._statistics(node, path)
            if isinstance(node, nn.Dropout) and weights:
                self.left |= {joined(path, name): "the rate of a dropout" for name in weights}
                weights = {}
            self.parts.append(Part(path, _seen(node), weights, said))

    def _is_layer(self, node: Any) -> bool:
        if isinstance(node, nn.Lambda) and _has_weights(node):
            return False  # a module in a Lambda: its arrays are its own
        return row_of(node) is not None or (isinstance(node, eqx.Module) and form_of(_seen(node)) is not None)

    def _own(self, node: Any, path: str) -> None:
        """A container, or a module of the user's own; a kernel and a bias in one are a layer."""
        found = dict(children(node))
        shapes = {name: place.shape for name, place in found.items() if isinstance(place, Place) and place.is_weight}
        grouped = {}
        for group in groups(path, shapes) if isinstance(node, eqx.Module) else ():
            if len(group.names) > 1 and not group.path:
                grouped = {native: _weight(found[native]) for native in group.names}
                forms = tuple(
                    _renamed(form, {local: native for native, local in group.names.items()}) for form in group.forms
                )
                self.parts.append(Part(path, None, grouped, forms=forms))
        for name, child in found.items():
            if name not in grouped:
                self._visit(child, joined(path, name), {})

    def _leaf(self, place: Any, path: str) -> None:
        if isinstance(place, _Shared):
            self.parts.append(Part(path, None, {"value": _weight(place)}))
        elif place.is_weight:
            self.parts.append(Part(path, None, {"value": Weight(place)}))
        elif place.is_array:
            self.left[path] = "no floating numbers"

    def _mlp(self, node: Any, path: str) -> None:
        layers = node.layers
        if node.scan and node.depth > 0:
            hidden = [_sliced(layers[1], number) for number in range(node.depth - 1)]
            layers = (layers[0], *hidden, layers[2])
        learnt, learnt_last = _has_weights(node.activation), _has_weights(node.final_activation)
        inner = {} if learnt else probing.attributes(_seen(node.activation))
        final = {} if learnt_last else probing.attributes(_seen(node.final_activation))
        for number, layer in enumerate(layers):
            said = final if number == len(layers) - 1 else inner
            self._visit(layer, joined(path, f"layers/{number}"), said)
        if learnt:
            for number in range(node.depth):
                self._visit(_sliced(node.activation, number), joined(path, f"activation/{number}"), {})
        if learnt_last:
            self._visit(node.final_activation, joined(path, "final_activation"), {})

    def _at(self, index: Any, path: str) -> Any:
        """The numbered value of a state."""
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
            name = joined(path, path_name(keys))
            if place.is_weight:
                self.parts.append(Part(name, None, {"value": Weight(place, trainable=False)}))
            else:
                self.left[name] = "no floating numbers"

    def _statistics(self, node: Any, path: str) -> dict[str, Weight]:
        if node.mode == "ema":
            mean, variance = self._at(node.ema_state_index, path)
            first = self._at(node.ema_first_time_index, path)
            self.left[joined(path, "ema_first_time")] = "tells whether there are statistics; a port says that there are"
            return {
                name: Weight(place, trainable=False, settled={first.number: False})
                for name, place in (("mean", mean), ("variance", variance))
            }
        hidden = self._at(node.batch_state_index, path)
        counter = self._at(node.batch_counter, path)
        self.left[joined(path, "batch_counter")] = COUNTER

        def average(place: Place) -> Any:
            count = counter.held
            return place.held / jnp.where(count == 0, 1, 1 - node.momentum**count)

        return {
            name: Weight(place, False, functools.partial(average, place), settled={counter.number: LONG})
            for name, place in zip(("mean", "variance"), hidden, strict=True)
        }


@dataclasses.dataclass(frozen=True)
class _Shared:
    """In the place of an array that `nn.Shared` took away: the one that it is, and a function of it.

    Attributes:
        place: where it lies.
        name: of the weight there.
        value: its shape and dtype here; another order of axes than there if it is turned.
        read: its values here.
    """

    place: Place
    name: str
    value: Any
    read: Any

    is_array = False  # no place of its own


def _weight(place: Any) -> Weight:
    if isinstance(place, _Shared):
        # a place of its own that is never written: what is tied is not filled
        own = Place(place.place.number, place.value)
        return Weight(own, read=place.read, tied=place.name, origin=place.place)
    return Weight(place)


def _renamed(form: Form, names: Mapping[str, str]) -> Form:
    """A form with other names of the native arrays."""
    rules = (dataclasses.replace(rule, native=tuple(names[name] for name in rule.native)) for rule in form.rules)
    return dataclasses.replace(form, rules=tuple(rules))


def joined(path: str, name: str) -> str:
    """A path and what is below it."""
    return f"{path}/{name}" if path and name else path or name


def children(node: Any) -> Iterator[tuple[str, Any]]:
    """(name, child) of a node of a numbered tree."""
    flat, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda item: item is not node)
    if not jax.tree_util.treedef_is_leaf(structure):
        for keys, child in flat:
            yield path_name(keys), child


def _leaves(node: Any) -> Iterator[tuple[str, Any]]:
    """(name, place) of what is in a layer, less its states."""
    for name, child in children(node):
        if isinstance(child, Place | _Shared):
            yield name, child
        elif not isinstance(child, nn.StateIndex):
            yield from ((joined(name, inner), place) for inner, place in _leaves(child))


def _seen(node: Any) -> Any:
    return jax.tree.map(
        lambda place: place.value if isinstance(place, Place | _Shared) else place,
        node,
        is_leaf=lambda item: isinstance(item, Place | _Shared),
    )


def _sliced(node: Any, number: int) -> Any:
    return jax.tree.map(lambda place: place.part(number) if place.is_array else place, node)


def _stack(node: Any) -> int | None:
    """How many layers a module is that `jax.vmap` made several of in one; None where it is one.

    Every array in it has one axis more than its class says, and that axis is as long everywhere.
    """
    if not isinstance(node, eqx.Module) or isinstance(node, nn.Shared):
        return None
    weights = [place for place in jax.tree.leaves(node) if isinstance(place, Place) and place.is_weight]
    lengths = {place.shape[:1] for place in weights}
    if len(lengths) != 1 or lengths == {()}:
        return None
    spare = [_spare(layer) for layer in _layers(node)]
    known = [axes for axes in spare if axes is not None]
    return int(lengths.pop()[0]) if known and min(known) > 0 else None


def _spare(layer: Any) -> int | None:
    row = row_of(layer)
    array, axes = (None, 0) if row is None or row.array is None else row.array(layer)
    return len(array.shape) - axes if isinstance(array, Place) and array.is_array else None


def _layers(node: Any) -> Iterator[Any]:
    if row_of(node) is not None:
        yield node
        return
    for _, child in children(node):
        if not isinstance(child, Place):
            yield from _layers(child)


def _holds_the_stack(node: Any) -> bool:
    """Whether all arrays of a module are in one module of the user's own in it: that one is the stack."""
    if row_of(node) is not None:
        return False
    holders = [child for _, child in children(node) if _has_weights(child)]
    return len(holders) == 1 and isinstance(holders[0], eqx.Module) and row_of(holders[0]) is None


def _has_weights(node: Any) -> bool:
    return any(isinstance(place, Place) and place.is_weight for place in jax.tree.leaves(node))


def _expanded(node: Any, path: str) -> Any:
    """What `nn.Shared` gives when it is called, on a numbered tree: what is shared says so."""
    names = {}
    for keys, place in jax.tree_util.tree_leaves_with_path(node.pytree):
        names[place.number] = joined(path, joined("pytree", path_name(keys)))
    places = [place for place in jax.tree.leaves(node.pytree) if place.is_array]
    structure: Any = jax.tree.structure(node.pytree)

    def shared(arrays: list[Any]) -> Any:
        given = iter(arrays)
        leaves = [next(given) if place.is_array else place.value for place in jax.tree.leaves(node.pytree)]
        return eqx.filter(node.get.held(jax.tree.unflatten(structure, leaves)), _is_array)

    # JAX's class is untyped
    shapes = [jax.ShapeDtypeStruct(place.shape, place.held.dtype) for place in places]  # type: ignore[no-untyped-call]
    program, made = jax.make_jaxpr(shared, return_shape=True)(shapes)
    sources = compat.sources(program)
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

        found.append(_Shared(place, names[place.number], output, read))
    return eqx.tree_at(node.where.held, node.pytree, jax.tree.unflatten(inner, found))


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct)
