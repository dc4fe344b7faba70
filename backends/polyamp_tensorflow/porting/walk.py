"""A Keras model as an `Inventory`: every layer once, every variable in exactly one of them or in `left`.

Called by `converter`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from polyamp.errors import ModelError, PortError
from polyamp.porting.layouts.forms import Form, same
from polyamp.porting.layouts.inventory import Inventory, Leaf, NativeLayer
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.layouts.register import form_of
from polyamp_tensorflow.arrays import is_floating, raw
from polyamp_tensorflow.compat import own_state, own_trainable, seed_generators
from polyamp_tensorflow.models.layers import Module, is_built, is_layer, modules
from polyamp_tensorflow.models.variables import variables_of
from polyamp_tensorflow.porting import layers
from polyamp_tensorflow.porting.lines import lines_of, spelled
from polyamp_tensorflow.porting.parts import Part, class_name, inside, own, refuse_rewritten, under


class Found:
    """What a model holds.

    Args:
        model: a built Keras layer or model, or another model with variables.

    Attributes:
        variables: leaf name -> Keras or TensorFlow variable; a tied leaf's is that of the first place.
        paths: id of a Keras layer -> the path that it has in the inventory.
        inventory: the layers.
    """

    def __init__(self, model: Any) -> None:
        self.variables: dict[str, Any] = {}
        self.paths: dict[int, str] = {}
        roles = variables_of(model)
        self._names = {id(raw(variable)): name for role in roles for name, variable in role.items()}
        self._weights = {id(raw(item)) for module in modules(model) for item in own_trainable(module.layer)}
        self._weights.update(id(raw(variable)) for variable in getattr(model, "trainable_variables", ()))
        self._first: dict[int, str] = {}
        listed = list(self._of_layers(model) if is_layer(model) else self._of_another(model))
        left = dict(self._left(model))
        self.inventory = Inventory(
            _told_channels(listed, model), "keras" if is_layer(model) else "tensorflow", True, left
        )

    def _of_layers(self, model: Any) -> Iterator[NativeLayer]:
        found = modules(model)
        spellings = spelled(model)
        inner: set[int] = set()
        for module in found:
            self.paths.setdefault(id(module.layer), module.stable_path)
            if id(module.layer) in inner:
                continue
            refuse_rewritten(module.layer, module.path)
            parts, custom = self._parts(module)
            for part in parts:
                inner.update(id(layer) for layer in part.inside)
                path = "/".join(name for name in (module.stable_path, part.suffix) if name)
                if part.inside and part.suffix:  # a bidirectional layer's half is known by its place, not by its name
                    self.paths[id(part.inside[0])] = path
                owner = part.owner or module.layer
                lines = {} if custom else lines_of(owner, part.form, spellings[id(owner)])
                yield self._layer(path, part, class_name(module.layer), lines)
            named = {id(raw(variable)) for part in parts for variable in part.arrays.values()}
            yield from self._parameters(module, named)

    def _parts(self, module: Module) -> tuple[list[Part], bool]:
        """What a layer is, and whether a third party says so."""
        registered = form_of(module.layer)
        if registered is not None:
            return [_registered(module, registered)], True
        return layers.parts_of(module.layer) or [], False

    def _layer(self, path: str, part: Part, module: str, lines: Mapping[str, Any]) -> NativeLayer:
        names = [name for rule in part.form.rules for name in rule.native]
        leaves = {name: self._leaf(f"{path}/{name}" if path else name, part.arrays[name]) for name in names}
        return NativeLayer(path, leaves, (part.form,), module, lines)

    def _leaf(self, place: str, variable: Any) -> Leaf:
        """A leaf under the variable's name in checkpoints; under its place where it is another's already."""
        key = id(raw(variable))
        tied = self._first.get(key)
        name = self._names.get(key, place) if tied is None else place
        if name in self.variables:
            name = _other(name, self.variables)
        self._first.setdefault(key, name)
        self.variables[name] = variable
        return Leaf(name, lazy(variable), key in self._weights, tied)

    def _parameters(self, module: Module, named: set[int]) -> Iterator[NativeLayer]:
        """The variables of a layer that its forms do not name: parameters of no layer. One that it holds because
        a layer inside has it, as SpectralNormalization does, is that layer's."""
        named = named | {id(raw(variable)) for layer in inside(module.layer) for variable in own(layer).values()}
        for name, variable in own(module.layer).items():
            key = id(raw(variable))
            if key in named or not is_floating(raw(variable)):
                continue
            path = "/".join(word for word in (module.stable_path, name) if word)
            form = Form("parameter", same("value"))
            yield NativeLayer(path, {"value": self._leaf(path, variable)}, (form,), class_name(module.layer))

    def _of_another(self, model: Any) -> Iterator[NativeLayer]:
        """A model that is no Keras layer has names alone."""
        for name, variable in list(variables_of(model).parameters.items()) + list(variables_of(model).running.items()):
            form = Form("parameter", same("value"))
            yield NativeLayer(name, {"value": self._leaf(name, variable)}, (form,), class_name(model))

    def _left(self, model: Any) -> Iterator[tuple[str, str]]:
        generators = [item for module in modules(model) for item in seed_generators(module.layer)]
        seeds = {id(raw(generator.state)) for generator in generators}
        counters = {id(raw(item)) for module in modules(model) for item in own_state(module.layer)}
        for key, name in self._names.items():
            if key in self._first:
                continue
            if key in seeds:
                yield name, "the state of a random stream"
            elif key in counters or key in self._weights:
                yield name, "a counter, no floating number"
            else:
                yield name, "a state between two batches, no weight"


def found(model: Any) -> Found:
    """What a model holds.

    Raises:
        ModelError: no model, or not built.
        PortError: a layer is quantized or has LoRA matrices.
    """
    if not is_layer(model) and not hasattr(model, "trainable_variables"):
        raise ModelError(
            "a model to move must be a keras.Model or layer, or have trainable_variables as a tf.Module has. Received: "
            f"{type(model).__module__}.{type(model).__qualname__}."
        )
    if is_layer(model) and not is_built(model):
        waiting = next((module.path for module in modules(model) if module.path and not module.layer.built), None)
        name = f" Layer {waiting!r} waits for its input." if waiting else ""
        raise ModelError(
            f"the Keras model {model.name!r} is not built, so it has no variables yet.{name} Call it once on a batch, "
            "or model.build(shape), before it is moved."
        )
    return Found(model)


def lazy(variable: Any) -> Lazy:
    """A variable's values, read late; a view of them where TensorFlow gives one."""
    value = raw(variable)
    return Lazy(tuple(value.shape), tf.as_dtype(value.dtype).as_numpy_dtype, lambda: read(variable))


def read(variable: Any) -> np.ndarray[Any, Any]:
    """What a variable holds now; on the host without a copy. A later `assign` leaves it as it is."""
    return np.asarray(tf.convert_to_tensor(raw(variable)))


def _registered(module: Module, form: Form) -> Part:
    """A third party's form, whose rules name weights of the layer or of those inside, or its attributes."""
    layer = module.layer
    there = under(layer)
    names = [name for rule in form.rules for name in rule.native]
    arrays = {name: there.get(name, getattr(layer, name, None)) for name in names}
    missing = [name for name, variable in arrays.items() if not isinstance(variable, keras.Variable | tf.Variable)]
    if missing:
        raise PortError(
            f"the form registered for {class_name(layer)} names {missing[0]!r}, which layer {module.path!r} does not "
            f"have. Its variables: {', '.join(there) or 'none'}."
        )
    keys = {id(raw(variable)) for variable in arrays.values()}
    covered = [item for item in inside(layer) if any(id(raw(variable)) in keys for variable in own(item).values())]
    return Part(form, arrays, inside=tuple(covered))


def _told_channels(listed: list[NativeLayer], model: Any) -> list[NativeLayer]:
    """A flatten of what convolutions with their channels first gave has them first, unless Keras was told of it."""
    told = any(getattr(module.layer, "data_format", None) == "channels_first" for module in _flattens(model))
    if told or Inventory(listed, "keras").channels != "first":
        return listed
    first = (Form("flatten", (), {"channels": "first"}),)
    return [
        NativeLayer(layer.path, layer.leaves, first, layer.module, layer.lines)
        if layer.forms[0].kind == "flatten"
        else layer
        for layer in listed
    ]


def _flattens(model: Any) -> list[Module]:
    return [module for module in modules(model) if isinstance(module.layer, keras.layers.Flatten)]


def _other(name: str, taken: Mapping[str, Any]) -> str:
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"
