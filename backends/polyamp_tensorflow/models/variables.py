"""A model's variables by name and by role: what a training step does with each.

Called by the state and the loops of one's own.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

import keras

from polyamp_tensorflow.arrays import is_floating, raw, variable_name
from polyamp_tensorflow.compat import own_state, own_trainable, seed_generators
from polyamp_tensorflow.models.layers import modules


class Variables(NamedTuple):
    """A model's variables by name, sorted by what a training step does with them.

    Attributes:
        parameters: trainable, in the order of `model.trainable_variables`.
        frozen: weights of layers with `trainable=False`; the step leaves them alone.
        running: statistics that the forward pass updates, such as BatchNorm's moving mean.
        rng: state that is not floating: the seeds of dropout, counters.
        rewritten: parameters that the forward pass itself changes, as SpectralNormalization does; they are among
            `parameters` or `frozen` too.
    """

    parameters: dict[str, Any]
    frozen: dict[str, Any]
    running: dict[str, Any]
    rng: dict[str, Any]
    rewritten: dict[str, Any]

    @property
    def left_by_a_forward_pass(self) -> dict[str, Any]:
        """What is floating and changed by a forward pass: it must come back when a step is skipped (S12)."""
        return {**self.running, **self.rewritten}


def variables_of(model: Any) -> Variables:
    """The variables of a built model, by name and role."""
    names, weights = _names(model)
    trainable = {id(raw(variable)) for variable in model.trainable_variables}
    found = Variables({}, {}, {}, {}, {})
    seen: set[int] = set()
    for variable in [*model.trainable_variables, *getattr(model, "variables", ())]:
        key = id(raw(variable))
        if key in seen:
            continue
        seen.add(key)
        role = found.parameters if key in trainable else _role(variable, key in weights, found)
        role[_unique(names.get(key) or _own_name(variable), found)] = variable
    for module in modules(model):  # not among a model's variables, but they are state that a forward pass leaves
        if isinstance(module.layer, keras.layers.RNN) and module.layer.stateful:
            for number, variable in enumerate(keras.tree.flatten(module.layer.states)):
                found.running[f"{module.stable_path}/state_{number}"] = variable
        if isinstance(module.layer, keras.layers.SpectralNormalization):
            found.rewritten[f"{module.stable_path}/rewritten_kernel"] = module.layer.kernel
    return found


def own_variables(layer: Any) -> list[Any]:
    """The variables that a layer itself created, without those of the layers inside."""
    return [*own_trainable(layer), *own_state(layer)]


def streams_of(model: Any) -> dict[str, Any]:
    """The seeds that the model's layers draw their random numbers from, by name. Keras saves none of them."""
    states = {id(raw(g.state)) for module in modules(model) for g in seed_generators(module.layer)}
    return {name: variable for name, variable in variables_of(model).rng.items() if id(raw(variable)) in states}


def _names(model: Any) -> tuple[dict[int, str], set[int]]:
    """Names of the variables that layers own, and which of them were created as weights."""
    names: dict[int, str] = {}
    weights: set[int] = set()
    for module in modules(model):
        prefix = f"{module.stable_path}/" if module.stable_path else ""
        layer = module.layer
        weights.update(id(raw(variable)) for variable in own_trainable(layer))
        siblings: Counter[str] = Counter()
        for variable in own_variables(layer):
            word = re.sub(r"^variable_\d+$", "variable", variable.name)  # Keras numbers unnamed ones by the process
            number, siblings[word] = siblings[word], siblings[word] + 1
            names.setdefault(id(raw(variable)), prefix + (f"{word}_{number}" if number else word))
        for number, generator in enumerate(seed_generators(layer)):
            names.setdefault(id(raw(generator.state)), f"{prefix}seed_{number}")
    return names, weights


def _role(variable: Any, weight: bool, found: Variables) -> dict[str, Any]:
    if not is_floating(raw(variable)):
        return found.rng
    return found.frozen if weight else found.running


def _own_name(variable: Any) -> str:
    return variable_name(variable).partition(":")[0]


def _unique(name: str, found: Variables) -> str:
    taken = {known for role in found for known in role}
    number, candidate = 1, name
    while candidate in taken:
        number, candidate = number + 1, f"{name}_{number}"
    return candidate
