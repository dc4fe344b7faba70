"""Inventory of a Keras model: every layer once, and every variable in exactly one layer or in `left`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from polyamp.errors import ModelError, PortError
from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_layout import Form, parameter_form
from polyamp.porting.layouts.layer_registration import registered_form
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_keras.arrays import is_floating, native_variable, numpy_dtype, variable_key
from polyamp_keras.compat import own_non_trainable_variables, own_trainable_variables, seed_generators
from polyamp_keras.engine import ENGINE
from polyamp_keras.models.layers import LayerEntry, is_built, is_layer, list_layers
from polyamp_keras.models.variables import model_variables
from polyamp_keras.porting.input_orders import input_orders
from polyamp_keras.porting.layers import layer_table
from polyamp_keras.porting.layers.layer_record import (
    LayerRecord,
    all_variables,
    class_name,
    inner_layers,
    own_variables,
    refuse_modified_kernel,
)
from polyamp_keras.porting.suggested_code import attribute_lines, layer_expressions
from polyamp_keras.precision.bound_model import native_model


class KerasInventory:
    """Layers and variables of a model.

    Args:
        model: a built Keras layer or model, or another model with variables.

    Attributes:
        variables: leaf name -> Keras or TensorFlow variable; a tied leaf has the variable of the first place.
        paths: id of a Keras layer -> its path in the inventory.
        inventory: the layers.
    """

    def __init__(self, model: Any) -> None:
        self.variables: dict[str, Any] = {}
        self.paths: dict[int, str] = {}
        roles = model_variables(model)
        self._names = {variable_key(variable): name for role in roles for name, variable in role.items()}
        self._weights = {
            variable_key(item) for module in list_layers(model) for item in own_trainable_variables(module.layer)
        }
        self._weights.update(variable_key(variable) for variable in getattr(model, "trainable_variables", ()))
        self._first: dict[int, str] = {}
        listed = list(self._of_layers(model) if is_layer(model) else self._of_another(model))
        left = dict(self._left(model))
        self.inventory = Inventory(
            _set_flatten_channels(listed, model),
            "keras" if is_layer(model) else "tensorflow",
            True,
            left,
            input_orders(model, self.paths),
        )

    def _of_layers(self, model: Any) -> Iterator[NativeLayer]:
        found = list_layers(model)
        spellings = layer_expressions(model)
        inner: set[int] = set()
        for module in found:
            self.paths.setdefault(id(module.layer), module.stable_path)
            if id(module.layer) in inner:
                continue
            refuse_modified_kernel(module.layer, module.path)
            parts, custom = self._parts(module)
            for part in parts:
                inner.update(id(layer) for layer in part.inner_layers)
                path = "/".join(name for name in (module.stable_path, part.suffix) if name)
                if (
                    part.inner_layers and part.suffix
                ):  # a bidirectional layer's half is identified by position, not by name
                    self.paths[id(part.inner_layers[0])] = path
                owner = part.owner or module.layer
                lines = {} if custom else attribute_lines(owner, part.form, spellings[id(owner)])
                yield self._layer(path, part, class_name(module.layer), lines)
            named = {variable_key(variable) for part in parts for variable in part.arrays.values()}
            yield from self._parameters(module, named)

    def _parts(self, module: LayerEntry) -> tuple[list[LayerRecord], bool]:
        """Return a layer's readings, and whether they come from a registered form."""
        registered = registered_form(module.layer)
        if registered is not None:
            return [_registered_reading(module, registered)], True
        return layer_table.read_layer(module.layer) or [], False

    def _layer(self, path: str, part: LayerRecord, module: str, lines: Mapping[str, Any]) -> NativeLayer:
        names = [name for rule in part.form.rules for name in rule.native]
        leaves = {name: self._leaf(f"{path}/{name}" if path else name, part.arrays[name]) for name in names}
        return NativeLayer(path, leaves, (part.form,), module, lines)

    def _leaf(self, place: str, variable: Any) -> InventoryLeaf:
        """Return a leaf named as the variable in checkpoints, or after its place if that variable is tied."""
        key = variable_key(variable)
        tied = self._first.get(key)
        name = self._names.get(key, place) if tied is None else place
        if name in self.variables:
            name = _unused_name(name, self.variables)
        self._first.setdefault(key, name)
        self.variables[name] = variable
        return InventoryLeaf(name, to_lazy(variable), key in self._weights, tied)

    def _parameters(self, module: LayerEntry, named: set[int]) -> Iterator[NativeLayer]:
        """Yield the variables of a layer that its forms do not name, as parameters of no layer.

        A variable that it shares with an inner layer, as SpectralNormalization does, belongs to the inner layer.
        """
        named = named | {
            variable_key(variable) for layer in inner_layers(module.layer) for variable in own_variables(layer).values()
        }
        for name, variable in own_variables(module.layer).items():
            key = variable_key(variable)
            if key in named or not is_floating(native_variable(variable)):
                continue
            path = "/".join(word for word in (module.stable_path, name) if word)
            leaves = {"value": self._leaf(path, variable)}
            yield NativeLayer(path, leaves, (parameter_form(),), class_name(module.layer))

    def _of_another(self, model: Any) -> Iterator[NativeLayer]:
        """Yield the variables of a model that is no Keras layer, of which only names are known."""
        found = model_variables(model)
        for name, variable in (*found.parameters.items(), *found.running.items()):
            yield NativeLayer(name, {"value": self._leaf(name, variable)}, (parameter_form(),), class_name(model))

    def _left(self, model: Any) -> Iterator[tuple[str, str]]:
        generators = [item for module in list_layers(model) for item in seed_generators(module.layer)]
        seeds = {variable_key(generator.state) for generator in generators}
        counters = {
            variable_key(item) for module in list_layers(model) for item in own_non_trainable_variables(module.layer)
        }
        for key, name in self._names.items():
            if key in self._first:
                continue
            if key in seeds:
                yield name, "the state of a random stream"
            elif key in counters or key in self._weights:
                yield name, "a counter, no floating number"
            else:
                yield name, "a state between two batches, no weight"


def inventory(model: Any, batch: Any = None) -> Inventory:
    """Return the layers of a model; see `Converter.inventory`."""
    return read_keras_model(native_model(model)).inventory


def read_keras_model(model: Any) -> KerasInventory:
    """Return the layers and variables of a model.

    Raises:
        ModelError: the object is no model, or is not built.
        PortError: a layer is quantized or has LoRA matrices.
    """
    if not is_layer(model) and not hasattr(model, "trainable_variables"):
        raise ModelError(
            "a model to move must be a keras.Model or layer, or have trainable_variables as a tf.Module has. Received: "
            f"{type(model).__module__}.{type(model).__qualname__}."
        )
    if is_layer(model) and not is_built(model):
        waiting = next((module.path for module in list_layers(model) if module.path and not module.layer.built), None)
        name = f" Layer {waiting!r} waits for its input." if waiting else ""
        raise ModelError(
            f"the Keras model {model.name!r} is not built, so it has no variables yet.{name} Call it once on a batch, "
            "or model.build(shape), before it is moved."
        )
    return KerasInventory(model)


def to_lazy(variable: Any) -> Lazy:
    """Return a variable's values as a lazy array; reading gives a view where the framework supports it."""
    value = native_variable(variable)
    return Lazy(tuple(value.shape), numpy_dtype(value), lambda: ENGINE.host_values(variable))


def _registered_reading(module: LayerEntry, form: Form) -> LayerRecord:
    """Return the reading of a registered form. Its rules name weights of the layer or inner layers, or attributes."""
    layer = module.layer
    there = all_variables(layer)
    names = [name for rule in form.rules for name in rule.native]
    arrays = {name: there.get(name, getattr(layer, name, None)) for name in names}
    missing = [name for name, variable in arrays.items() if not hasattr(variable, "assign")]
    if missing:
        raise PortError(
            f"the form registered for {class_name(layer)} names {missing[0]!r}, which layer {module.path!r} does not "
            f"have. Its variables: {', '.join(there) or 'none'}."
        )
    keys = {variable_key(variable) for variable in arrays.values()}
    covered = [
        item
        for item in inner_layers(layer)
        if any(variable_key(variable) in keys for variable in own_variables(item).values())
    ]
    return LayerRecord(form, arrays, inner_layers=tuple(covered))


def _set_flatten_channels(listed: list[NativeLayer], model: Any) -> list[NativeLayer]:
    """Set flatten layers to channels first if the model's convolutions are, unless `data_format` says so already."""
    flattens = [module.layer for module in list_layers(model) if isinstance(module.layer, keras.layers.Flatten)]
    told = any(getattr(layer, "data_format", None) == "channels_first" for layer in flattens)
    if told or Inventory(listed, "keras").channels != "first":
        return listed
    first = (Form("flatten", (), {"channels": "first"}),)
    return [dataclasses.replace(layer, forms=first) if layer.forms[0].kind == "flatten" else layer for layer in listed]


def _unused_name(name: str, taken: Mapping[str, Any]) -> str:
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"
