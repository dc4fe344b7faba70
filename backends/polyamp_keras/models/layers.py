"""Layers of a Keras model, listed by path, and a record of them that detects added or replaced layers and weights."""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import keras

from polyamp.errors import ModelError
from polyamp_keras.arrays import dtype_name
from polyamp_keras.compat import (
    child_layers,
    flatten_layers,
    is_keras_code,
    lookup_layers,
    own_trainable_variables,
    tracked_layers,
)

OWN_CLASS: Final = "polyamp_own_class"
"""Attribute of a class that polyamp derived from a model's class; its value is the original class."""

_END: Final = object()


class LayerEntry(NamedTuple):
    """A layer inside a model.

    Attributes:
        layer: the layer.
        path: names of its parent layers and its own name, separated by `/`; "" for the model itself. Overrides (S5)
            match this path.
        stable_path: the same with Keras's automatic names numbered within their parent. "dense_7" is "dense_1" if it
            is its parent's second Dense, however many models the process has built. Checkpoints use this path.
        parent: the parent layer; None for the model itself.
        other_paths: further paths of a shared layer, in the form of `path`.
    """

    layer: Any
    path: str
    stable_path: str
    parent: Any = None
    other_paths: tuple[str, ...] = ()


def is_layer(model: Any) -> bool:
    """Return whether an object is a Keras layer or model."""
    return isinstance(model, keras.Layer)


def own_class(layer: Any) -> type[Any]:
    """Return the class of a model or layer as its author wrote it, also if it saves settings."""
    cls: type[Any] = getattr(type(layer), OWN_CLASS, type(layer))
    return cls


def is_built(model: Any) -> bool:
    """Return whether all layers have created their variables."""
    layers = flatten_layers(model) if is_layer(model) else []
    never_marked = lookup_layers(layers)
    return all(layer.built or layer in never_marked for layer in layers)


def build_by_call(layer: Any, args: Any, kwargs: Any) -> None:
    """Create a layer's variables and child layers by a symbolic call with the shapes and dtypes of these arguments,
    which computes nothing."""

    def symbolic(leaf: Any) -> Any:
        return keras.KerasTensor(tuple(leaf.shape), dtype_name(leaf)) if keras.ops.is_tensor(leaf) else leaf

    args, kwargs = keras.tree.map_structure(symbolic, (args, kwargs))
    layer(*args, **kwargs)


def require_built(model: Any, function: str) -> None:
    """Raise unless a Keras model is built.

    Raises:
        ModelError: names the function that needs it, and how to build a model.
    """
    if not is_built(model):
        raise ModelError(
            f"{function} takes a built model, whose layers all exist. Received: {model.name!r}, which is not built. "
            "Call it once on a batch, give it a keras.Input, or build it."
        )


def check_is_model(model: Any) -> None:
    """Raise unless an object is a model.

    Raises:
        ModelError: the object is not callable, or has no `trainable_variables`.
    """
    if not callable(model) or not hasattr(model, "trainable_variables"):
        raise ModelError(
            "model must be a keras.Model or layer, or a callable with trainable_variables such as a tf.Module. "
            f"Received: {type(model).__module__}.{type(model).__qualname__}."
        )


def list_layers(model: Any) -> list[LayerEntry]:
    """Return every layer of a Keras model once, the model itself first; an empty list for other models.

    The path of a shared layer is that of its first occurrence; `other_paths` has the others.
    """
    if not is_layer(model):
        return []
    paths: defaultdict[int, dict[str, None]] = defaultdict(dict)
    for layer, path in _layer_paths(model, "", ()):
        paths[id(layer)].setdefault(path)
    return [
        module._replace(other_paths=tuple(path for path in paths[id(module.layer)] if path != module.path))
        for module in _walk(LayerEntry(model, "", ""), set())
    ]


def recurrent_cells(layer: Any) -> list[LayerEntry]:
    """Return the cell of a recurrent layer and the layers in it; empty for another layer. Keras calls them an
    unspecified number of times, so that what they run belongs to the recurrent layer."""
    return list_layers(layer.cell) if isinstance(layer, keras.layers.RNN) else []


def layer_path_aliases(found: list[LayerEntry]) -> dict[str, tuple[str, ...]]:
    """Map each layer's path to all its paths: its locations, and `stable_path` unless that is another layer's path.

    So "dense_1" is the second Dense of a model, however many others the process has built. A layer whose actual name is
    "dense_1" takes precedence.
    """
    taken = {path for module in found for path in (module.path, *module.other_paths)}
    return {module.path: (module.path, *module.other_paths, *({module.stable_path} - taken)) for module in found}


def _walk(module: LayerEntry, seen: set[int]) -> Iterator[LayerEntry]:
    seen.add(id(module.layer))
    yield module
    siblings: Counter[str] = Counter()
    for child in _child_layers(module.layer):
        if id(child) in seen:
            continue
        prefixes = [f"{path}/" if path else "" for path in (module.path, module.stable_path)]
        stable = prefixes[1] + _stable_name(child, siblings)
        yield from _walk(LayerEntry(child, prefixes[0] + child.name, stable, module.layer), seen)


def _layer_paths(layer: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[Any, str]]:
    """Yield every (layer, path); a shared layer once for each location."""
    yield layer, path
    for child in _child_layers(layer):
        if id(child) not in above:
            yield from _layer_paths(child, f"{path}/{child.name}" if path else child.name, (*above, id(layer)))


def _child_layers(layer: Any) -> list[Any]:
    return [child for child in child_layers(layer) if not isinstance(child, keras.layers.InputLayer)]


def is_container(layer: Any) -> bool:
    """Return whether a layer is a functional or sequential model, which only calls its layers."""
    container = isinstance(layer, keras.Sequential | keras.Function)
    return container and is_keras_code(type(layer).call)


def _stable_name(layer: Any, siblings: Counter[str]) -> str:
    """Return the layer's name; an automatic name of Keras ("dense_7") is numbered among the layer's siblings."""
    word = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", own_class(layer).__name__)
    word = re.sub(r"([a-z])([A-Z])", r"\1_\2", word).lower()
    if not re.fullmatch(rf"{re.escape(word)}(_\d+)?", layer.name):
        return str(layer.name)
    siblings[word] += 1
    return word if siblings[word] == 1 else f"{word}_{siblings[word] - 1}"


@contextlib.contextmanager
def replace_calls(calls: Iterable[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Context manager that replaces the `call` of layers.

    Args:
        calls: (layer, function), consumed one at a time, so that a later function may wrap an earlier one.
    """
    before: list[tuple[Any, Any]] = []
    try:
        for layer, call in calls:
            before.append((layer, vars(layer).get("call")))
            vars(layer)["call"] = call
        yield
    finally:
        for layer, own in reversed(before):
            vars(layer).pop("call", None)
            if own is not None:
                vars(layer)["call"] = own


class StructureSnapshot:
    """Layers and weights of every layer of a model, recorded at construction.

    Args:
        model: a built model. Without Keras layers there is nothing to record, and `changed` returns None.
    """

    def __init__(self, model: Any) -> None:
        self._modules = list_layers(model)
        self._layers = [module.layer for module in self._modules]
        self._members = list(self._current_members())
        self._before = [(list(tracked_layers(layer)), list(own_trainable_variables(layer))) for layer in self._layers]

    def changed(self) -> str | None:
        """Return the start of a sentence that names the first changed layer; None if nothing changed."""
        if all(
            map(operator.is_, self._current_members(), self._members)
        ):  # by identity; the end mark detects another length
            return None
        for module, before in zip(self._modules, self._before, strict=True):
            now = (tracked_layers(module.layer), own_trainable_variables(module.layer))
            for word, current, old in zip(("layers", "weights"), now, before, strict=True):
                if len(current) != len(old) or not all(map(operator.is_, current, old)):
                    return f"layer {module.path!r} has other {word}" if module.path else f"the model has other {word}"
        return None

    def _current_members(self) -> Iterator[Any]:
        """Iterate over all layers and weights at C speed, since every step compares them."""
        layers, weights = map(tracked_layers, self._layers), map(own_trainable_variables, self._layers)
        return itertools.chain(itertools.chain.from_iterable(itertools.chain(layers, weights)), (_END,))
