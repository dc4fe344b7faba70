"""What a model is made of: its layers by path, its variables by role, and the callable that `loss_fn` sees.

Called by the state, the policies and the step.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import keras
import tensorflow as tf

from polyamp.errors import ModelError
from polyamp.recipe.policy import Policy
from polyamp_tensorflow.arrays import cast, dtype_name, is_floating, raw, variable_name

ASKED: Final[ContextVar[list[Any] | None]] = ContextVar("asked", default=None)
"""The layers of whose own losses `loss_fn` has asked so far; None outside of a step. See `additions`."""
_UNROUNDED: Final = "_polyamp_unrounded"  # as Keras keeps logits on a softmax's result
_MASK: Final = "_keras_mask"


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
        else:
            args, kwargs = self._narrowed(args), self._narrowed(kwargs)
        return as_output(self._model(*args, **kwargs), self._policy)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        asked = ASKED.get() if name == "losses" else None
        if asked is not None:
            asked.append(self._model)
        if is_layer(value):
            return BoundModel(value, self._policy)
        if inspect.ismethod(value) and not is_layer(self._model):
            return lambda *args, **kwargs: as_output(
                value(*self._narrowed(args), **self._narrowed(kwargs)), self._policy
            )
        if inspect.ismethod(value) and "training" in inspect.signature(value).parameters:
            return functools.partial(value, training=True)
        return value

    def _narrowed(self, arguments: Any) -> Any:
        """Arguments in the dtype in which a model that is no layer computes (S3)."""
        return cast(arguments, self._policy.compute, float64=self._policy.casts_float64)


def is_layer(model: Any) -> bool:
    """True for a Keras layer or model."""
    return isinstance(model, keras.Layer)


def is_built(model: Any) -> bool:
    """True unless a layer still waits for its first input to create its variables."""
    layers = model._flatten_layers() if is_layer(model) else []
    lookups = [layer._lookup_layer for layer in layers if isinstance(layer, keras.layers.TextVectorization)]
    return all(layer.built or layer in lookups for layer in layers)  # Keras never marks those as built


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
    inner = layer._flatten_layers(include_self=False, recursive=False)
    return [child for child in inner if not isinstance(child, keras.layers.InputLayer)]


def only_contains(layer: Any) -> bool:
    """True for a functional or sequential model: it computes nothing itself, it only calls what it contains."""
    container = isinstance(layer, keras.Sequential | keras.Function)
    return container and str(type(layer).call.__module__).startswith("keras.")


def in_dtype(tree: Any, dtype: str) -> Any:
    """The tree's floating tensors in `dtype`; one that loses digits remembers the tensor it was made from."""

    def one(leaf: Any) -> Any:
        if not tf.is_tensor(leaf) or not is_floating(leaf) or dtype_name(leaf) in (dtype, "float64"):
            return leaf
        narrow = _with_mask_of(leaf, tf.cast(leaf, dtype))
        if isinstance(narrow, tf.Tensor) and narrow.dtype.size < leaf.dtype.size:
            setattr(narrow, _UNROUNDED, leaf)
        return narrow

    return keras.tree.map_structure(one, tree)


def signature_of(method: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """`stand_in` with the name, documentation and signature of the method whose place it takes: code asks
    `inspect.signature(layer.call)` whether a layer takes `training` or `mask`."""
    functools.update_wrapper(stand_in, method)
    del stand_in.__wrapped__  # type: ignore[attr-defined]  # or AutoGraph would go past the stand-in
    stand_in.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]  # functions take any attribute
    return stand_in


def as_output(tree: Any, policy: Policy) -> Any:
    """A model's output in the policy's dtype (S1), taken from the unrounded tensor where `in_dtype` rounded one."""

    def one(leaf: Any) -> Any:
        wide = getattr(leaf, _UNROUNDED, leaf)
        return _with_mask_of(leaf, cast(wide, policy.output, float64=policy.casts_float64))

    return keras.tree.map_structure(one, tree)


def _with_mask_of(tensor: Any, result: Any) -> Any:
    """`result` with the mask that Keras keeps on a tensor, for the layers and the loss that follow."""
    mask = getattr(tensor, _MASK, None)
    if mask is not None and result is not tensor:
        setattr(result, _MASK, mask)
    return result


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
    return variable_name(variable).partition(":")[0]


def _unique(name: str, found: Variables) -> str:
    taken = {known for role in found for known in role}
    number, candidate = 1, name
    while candidate in taken:
        number, candidate = number + 1, f"{name}_{number}"
    return candidate
