"""Variables of a model by name and by role in a training step; parameters with their owning classes (S27)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras

from polyamp.errors import ModelError
from polyamp.rules.parameter_kinds import ParameterLeaf, class_names
from polyamp_keras.arrays import is_floating, native_variable, variable_key, variable_name
from polyamp_keras.compat import own_non_trainable_variables, own_trainable_variables, seed_generators
from polyamp_keras.models.layers import is_built, layer_path_aliases, list_layers


class ModelVariables(NamedTuple):
    """Variables of a model by name, grouped by their role in a training step.

    Attributes:
        parameters: trainable, in the order of `model.trainable_variables`.
        frozen: weights of layers with `trainable=False`; the step does not change them.
        running: statistics that the forward pass updates, such as BatchNorm's moving mean.
        rng: state that is not floating: dropout seeds, counters.
        rewritten: parameters that the forward pass itself changes, as SpectralNormalization does; they are also in
            `parameters` or `frozen`.
    """

    parameters: dict[str, Any]
    frozen: dict[str, Any]
    running: dict[str, Any]
    rng: dict[str, Any]
    rewritten: dict[str, Any]

    @property
    def pass_updated_variables(self) -> dict[str, Any]:
        """Floating variables that a forward pass changes. A skipped step restores them (S12)."""
        return {**self.running, **self.rewritten}


def model_variables(model: Any) -> ModelVariables:
    """Return the variables of a built model by name and role."""
    names, weights = _variable_names(model)
    trainable = {variable_key(variable) for variable in model.trainable_variables}
    found = ModelVariables({}, {}, {}, {}, {})
    seen: set[int] = set()
    for variable in [*model.trainable_variables, *getattr(model, "variables", ())]:
        key = variable_key(variable)
        if key in seen:
            continue
        seen.add(key)
        role = found.parameters if key in trainable else _variables_of_role(variable, key in weights, found)
        role[_unique(names.get(key) or _own_name(variable), found)] = variable
    for module in list_layers(model):  # state of the forward pass that is missing in model.variables
        if isinstance(module.layer, keras.layers.RNN) and module.layer.stateful:
            for number, variable in enumerate(keras.tree.flatten(module.layer.states)):
                found.running[f"{module.stable_path}/state_{number}"] = variable
        if isinstance(module.layer, keras.layers.SpectralNormalization):
            found.rewritten[f"{module.stable_path}/rewritten_kernel"] = module.layer.kernel
    return found


def statistics_variables(model: Any) -> ModelVariables:
    """Return the variables of a model whose running statistics are looked for.

    Raises:
        ModelError: the model is not built.
    """
    if not is_built(model):
        raise ModelError(
            "running statistics are known only of a built model. Build it or call it once first, or give its first "
            "layer an Input."
        )
    return model_variables(model)


def own_variables(layer: Any) -> list[Any]:
    """Return the variables that a layer itself created, without those of its child layers."""
    return [*own_trainable_variables(layer), *own_non_trainable_variables(layer)]


def seed_variables(model: Any) -> dict[str, Any]:
    """Return the seed variables of the model's layers by name. Keras does not save them."""
    states = {variable_key(g.state) for module in list_layers(model) for g in seed_generators(module.layer)}
    return {name: variable for name, variable in model_variables(model).rng.items() if variable_key(variable) in states}


def _variable_names(model: Any) -> tuple[dict[int, str], set[int]]:
    """Return names of the variables that layers own, and ids of those created as weights."""
    names: dict[int, str] = {}
    weights: set[int] = set()
    for module in list_layers(model):
        prefix = f"{module.stable_path}/" if module.stable_path else ""
        layer = module.layer
        weights.update(variable_key(variable) for variable in own_trainable_variables(layer))
        siblings: Counter[str] = Counter()
        for variable in own_variables(layer):
            word = re.sub(r"^variable_\d+$", "variable", variable.name)  # Keras numbers unnamed ones per process
            number, siblings[word] = siblings[word], siblings[word] + 1
            names.setdefault(variable_key(variable), prefix + (f"{word}_{number}" if number else word))
        for number, generator in enumerate(seed_generators(layer)):
            names.setdefault(variable_key(generator.state), f"{prefix}seed_{number}")
    return names, weights


def _variables_of_role(variable: Any, weight: bool, found: ModelVariables) -> dict[str, Any]:
    if not is_floating(native_variable(variable)):
        return found.rng
    return found.frozen if weight else found.running


def _own_name(variable: Any) -> str:
    return variable_name(variable).partition(":")[0]


def _unique(name: str, found: ModelVariables) -> str:
    taken = {known for role in found for known in role}
    number, candidate = 1, name
    while candidate in taken:
        number, candidate = number + 1, f"{name}_{number}"
    return candidate


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
            key = variable_key(variable)
            owners.setdefault(key, []).append(names[module.path])
            classes[key] = (*classes.get(key, ()), *class_names(module.layer))
    found = []
    for path, variable in parameters.items():
        key, own = variable_key(variable), path.rpartition("/")[2]
        paths = {f"{layer}/{own}".lstrip("/"): None for layers in owners.get(key, []) for layer in layers}
        found.append(ParameterLeaf(path, len(variable.shape), classes.get(key), tuple(paths)))
    return found
