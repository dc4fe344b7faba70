"""Paths and owning classes of a model's parameters, for parameter groups (S27)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyamp.rules.parameter_kinds import ParameterLeaf, class_names
from polyamp_tensorflow.arrays import native_variable
from polyamp_tensorflow.compat import own_trainable_variables
from polyamp_tensorflow.models.layers import layer_path_aliases, list_layers


def parameter_leaves(model: Any, parameters: Mapping[str, Any]) -> list[ParameterLeaf]:
    """Return every parameter with all its paths and the class of the layer that owns it.

    Args:
        model: a Keras layer or model. Parameters of any other model belong to no known class.
        parameters: path -> variable, in order; the paths are those of checkpoints (`LayerEntry.stable_path`).
    """
    owners: dict[int, list[tuple[str, ...]]] = {}
    classes: dict[int, tuple[str, ...]] = {}
    names = layer_path_aliases(list_layers(model))
    for module in list_layers(model):
        for variable in own_trainable_variables(module.layer):
            key = id(native_variable(variable))
            owners.setdefault(key, []).append(names[module.path])
            classes[key] = (*classes.get(key, ()), *class_names(module.layer))
    found = []
    for path, variable in parameters.items():
        key, own = id(native_variable(variable)), path.rpartition("/")[2]
        paths = {f"{layer}/{own}".lstrip("/"): None for layers in owners.get(key, []) for layer in layers}
        found.append(ParameterLeaf(path, len(variable.shape), classes.get(key), tuple(paths)))
    return found
