"""What parameter groups ask of a model's parameters (S27). Called by the optimizers' room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyamp.rules.kinds import Leaf, class_names
from polyamp_tensorflow.arrays import raw
from polyamp_tensorflow.compat import own_trainable
from polyamp_tensorflow.models.layers import modules, names_of


def leaves_of(model: Any, parameters: Mapping[str, Any]) -> list[Leaf]:
    """Every parameter with all of its paths and the class of the layer that owns it.

    Args:
        model: a Keras layer or model, or another model, whose parameters belong to no known class.
        parameters: path -> variable, in order; the paths are those of checkpoints (`Module.stable_path`).
    """
    owners: dict[int, list[tuple[str, ...]]] = {}
    classes: dict[int, tuple[str, ...]] = {}
    names = names_of(modules(model))
    for module in modules(model):
        for variable in own_trainable(module.layer):
            key = id(raw(variable))
            owners.setdefault(key, []).append(names[module.path])
            classes[key] = (*classes.get(key, ()), *class_names(module.layer))
    found = []
    for path, variable in parameters.items():
        key, own = id(raw(variable)), path.rpartition("/")[2]
        called = {f"{place}/{own}".lstrip("/"): None for places in owners.get(key, []) for place in places}
        found.append(Leaf(path, len(variable.shape), classes.get(key), tuple(called)))
    return found
