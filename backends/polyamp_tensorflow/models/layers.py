"""What a model is made of: its layers by path.

Called by the state, the policies and the step.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import keras

from polyamp.errors import ModelError
from polyamp_tensorflow.compat import every_layer, is_kerass, layers_inside, lookups

OWN_CLASS: Final = "polyamp_own_class"
"""Attribute of a class that polyamp made of a model's own, which it names."""


class Module(NamedTuple):
    """A layer inside a model.

    Attributes:
        layer: the layer.
        path: names of the layers it lies in and its own, `/`-separated; "" for the model itself. Overrides (S5)
            match it.
        stable_path: the same with Keras's automatic names numbered within their parent. "dense_7" is "dense_1" if it
            is its parent's second Dense, however many models the process has built. Checkpoints are named by it.
        parent: the layer it was found in; None for the model itself.
        other_paths: where else the same layer lies in the model, as `path`.
    """

    layer: Any
    path: str
    stable_path: str
    parent: Any = None
    other_paths: tuple[str, ...] = ()


def is_layer(model: Any) -> bool:
    """True for a Keras layer or model."""
    return isinstance(model, keras.Layer)


def own_class(layer: Any) -> type[Any]:
    """The class of a model or layer as its author wrote it, also while it saves settings (see `saved_settings`)."""
    cls: type[Any] = getattr(type(layer), OWN_CLASS, type(layer))
    return cls


def is_built(model: Any) -> bool:
    """True unless a layer still waits for its first input to create its variables."""
    layers = every_layer(model) if is_layer(model) else []
    never_marked = lookups(layers)
    return all(layer.built or layer in never_marked for layer in layers)


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
    """Every layer of a Keras model once, the model itself first; nothing for other models.

    A layer that lies in several places has the path of the first, and the others in `other_paths`.
    """
    if not is_layer(model):
        return []
    paths: defaultdict[int, dict[str, None]] = defaultdict(dict)
    for layer, path in _places(model, "", ()):
        paths[id(layer)].setdefault(path)
    return [
        module._replace(other_paths=tuple(path for path in paths[id(module.layer)] if path != module.path))
        for module in _walk(Module(model, "", ""), set())
    ]


def names_of(found: list[Module]) -> dict[str, tuple[str, ...]]:
    """Path of each module -> every path that names it: where it lies, and `stable_path` unless that is another's path.

    "dense_1" is thus the second Dense of a model also where the process has built others before; if a layer is really
    called so, it is that one.
    """
    taken = {path for module in found for path in (module.path, *module.other_paths)}
    return {module.path: (module.path, *module.other_paths, *({module.stable_path} - taken)) for module in found}


def _walk(module: Module, seen: set[int]) -> Iterator[Module]:
    seen.add(id(module.layer))
    yield module
    siblings: Counter[str] = Counter()
    for child in _children(module.layer):
        if id(child) in seen:
            continue
        prefixes = [f"{path}/" if path else "" for path in (module.path, module.stable_path)]
        stable = prefixes[1] + _stable_name(child, siblings)
        yield from _walk(Module(child, prefixes[0] + child.name, stable, module.layer), seen)


def _places(layer: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[Any, str]]:
    """Every (layer, path), a shared layer once for each place."""
    yield layer, path
    for child in _children(layer):
        if id(child) not in above:
            yield from _places(child, f"{path}/{child.name}" if path else child.name, (*above, id(layer)))


def _children(layer: Any) -> list[Any]:
    return [child for child in layers_inside(layer) if not isinstance(child, keras.layers.InputLayer)]


def only_contains(layer: Any) -> bool:
    """True for a functional or sequential model: it computes nothing itself, it only calls what it contains."""
    container = isinstance(layer, keras.Sequential | keras.Function)
    return container and is_kerass(type(layer).call)


def _stable_name(layer: Any, siblings: Counter[str]) -> str:
    """The layer's name, or where Keras made it up ("dense_7") the same word counted among the layer's siblings."""
    word = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", own_class(layer).__name__)
    word = re.sub(r"([a-z])([A-Z])", r"\1_\2", word).lower()
    if not re.fullmatch(rf"{re.escape(word)}(_\d+)?", layer.name):
        return str(layer.name)
    siblings[word] += 1
    return word if siblings[word] == 1 else f"{word}_{siblings[word] - 1}"


@contextlib.contextmanager
def with_calls(calls: Iterable[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """A block in which layers run another function in the place of their `call`.

    Args:
        calls: (layer, function), taken one after the other: a later function may be made of an earlier one.
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
