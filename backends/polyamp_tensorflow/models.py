"""What a model is made of: its layers by path, its variables by role, and the callable that `loss_fn` sees.

Called by the state, the policy and the step.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from polyamp.errors import ModelError
from polyamp.policy import Policy
from polyamp_tensorflow.arrays import cast, is_floating, raw


class Module(NamedTuple):
    """A layer inside a model.

    Attributes:
        layer: the layer.
        path: names of the layers it lies in and its own, `/`-separated; "" for the model itself. Overrides (S5)
            match it.
        stable_path: the same with Keras's automatic names numbered within their parent. "dense_7" is "dense_1" if it
            is its parent's second Dense, however many models the process has built. Checkpoints are named by it.
    """

    layer: Any
    path: str
    stable_path: str


class Variables(NamedTuple):
    """A model's variables by name, sorted by what a training step does with them.

    Attributes:
        parameters: trainable, in the order of `model.trainable_variables`.
        frozen: weights of layers with `trainable=False`; the step leaves them alone.
        running: statistics that the forward pass updates, such as BatchNorm's moving mean.
        rng: state that is not floating: the seeds of dropout, counters.
    """

    parameters: dict[str, Any]
    frozen: dict[str, Any]
    running: dict[str, Any]
    rng: dict[str, Any]


class BoundModel:
    """The model as `loss_fn` sees it: in training mode unless told otherwise, outputs in the policy's dtype (S1).

    Attributes that it does not have are the model's own, such as `model.losses`. A layer among them is bound likewise,
    and a method that takes `training` gets it.
    """

    def __init__(self, model: Any, policy: Policy) -> None:
        self._model = model
        self._policy = policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_layer(self._model):
            kwargs.setdefault("training", True)
        return cast(self._model(*args, **kwargs), self._policy.output, float64=self._policy.casts_float64)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if is_layer(value):
            return BoundModel(value, self._policy)
        if inspect.ismethod(value) and "training" in inspect.signature(value).parameters:
            return functools.partial(value, training=True)
        return value


def is_layer(model: Any) -> bool:
    """True for a Keras layer or model."""
    return isinstance(model, keras.Layer)


def is_built(model: Any) -> bool:
    """True unless a layer still waits for its first input to create its variables."""
    return not is_layer(model) or all(layer.built for layer in model._flatten_layers())


def check_model(model: Any) -> None:
    """Refuse what is not a model.

    Raises:
        ModelError: not callable, or without `trainable_variables`.
    """
    if not callable(model) or not hasattr(model, "trainable_variables"):
        raise ModelError(
            "model must be a keras.Model or layer, or a callable with trainable_variables such as a tf.Module. "
            f"Received: {type(model).__module__}.{type(model).__qualname__}."
        )


def modules(model: Any) -> list[Module]:
    """Every layer of a Keras model once, the model itself first; nothing for other models."""
    return list(_walk(Module(model, "", ""), set())) if is_layer(model) else []


def _walk(module: Module, seen: set[int]) -> Iterator[Module]:
    seen.add(id(module.layer))
    yield module
    siblings: Counter[str] = Counter()
    for child in module.layer._flatten_layers(include_self=False, recursive=False):
        if id(child) in seen or isinstance(child, keras.layers.InputLayer):
            continue
        prefixes = [f"{path}/" if path else "" for path in (module.path, module.stable_path)]
        yield from _walk(Module(child, prefixes[0] + child.name, prefixes[1] + _stable_name(child, siblings)), seen)


def _stable_name(layer: Any, siblings: Counter[str]) -> str:
    """The layer's name, or where Keras made it up ("dense_7") the same word counted among the layer's siblings."""
    word = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", type(layer).__name__)
    word = re.sub(r"([a-z])([A-Z])", r"\1_\2", word).lower()
    if not re.fullmatch(rf"{re.escape(word)}(_\d+)?", layer.name):
        return str(layer.name)
    siblings[word] += 1
    return word if siblings[word] == 1 else f"{word}_{siblings[word] - 1}"


def variables_of(model: Any) -> Variables:
    """The variables of a built model, by name and role."""
    names, weights = _names(model)
    trainable = {id(raw(variable)) for variable in model.trainable_variables}
    found = Variables({}, {}, {}, {})
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
    return found


def _names(model: Any) -> tuple[dict[int, str], set[int]]:
    """Names of the variables that layers own, and which of them were created as weights."""
    names: dict[int, str] = {}
    weights: set[int] = set()
    for module in modules(model):
        prefix = f"{module.stable_path}/" if module.stable_path else ""
        layer = module.layer
        weights.update(id(raw(variable)) for variable in layer._trainable_variables)
        siblings: Counter[str] = Counter()
        for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
            word = re.sub(r"^variable_\d+$", "variable", variable.name)  # Keras numbers unnamed ones by the process
            number, siblings[word] = siblings[word], siblings[word] + 1
            names.setdefault(id(raw(variable)), prefix + (f"{word}_{number}" if number else word))
        for number, generator in enumerate(layer._seed_generators):
            names.setdefault(id(raw(generator.state)), f"{prefix}seed_{number}")
    return names, weights


def _role(variable: Any, weight: bool, found: Variables) -> dict[str, Any]:
    if not is_floating(raw(variable)):
        return found.rng
    return found.frozen if weight else found.running


def _own_name(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name)).partition(":")[0]


def _unique(name: str, found: Variables) -> str:
    taken = {known for role in found for known in role}
    number, candidate = 1, name
    while candidate in taken:
        number, candidate = number + 1, f"{name}_{number}"
    return candidate
