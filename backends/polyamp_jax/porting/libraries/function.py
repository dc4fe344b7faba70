"""`PortingLibrary` for plain functions, `(apply_fn, params)`, with any pytree of arrays.

Layers are recognised only by names and shapes (`layer_inference`): `{"w": ..., "b": ...}`, a tuple of a kernel and a
bias as in JAX's own examples, or `w1` with `b1`. There are no modules, so a batch adds no information.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax

from polyamp.errors import ModelError, describe_value
from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp_jax.arrays import join_path, named_leaves, path_name
from polyamp_jax.porting.jax_only import array_places
from polyamp_jax.porting.jax_only.array_places import ArrayPlace, Weight
from polyamp_jax.porting.jax_only.inference_flags import set_inference_arguments
from polyamp_jax.porting.libraries.layer_inference import group_arrays
from polyamp_jax.porting.libraries.porting_library import CallInputs, RecordCall

_KEYS: Final = ("key", "rng")
"""Arguments that accept a random key, which is not used in inference."""


def inventory(model: Any, batch: CallInputs | None) -> Inventory:
    """Return the layers; see `PortingLibrary.inventory`."""
    _, params = _split_model(model)
    left: dict[str, str] = {}
    layers = list(_walk_layers(array_places.number_leaves(params), "", left))
    return Inventory(layers, "a function", not _has_sorted_mapping(params), left)


def arrays(model: Any) -> Mapping[str, Any]:
    """Return the arrays by name; see `PortingLibrary.arrays`."""
    return {name: weight.array for name, weight in _named_weights(_split_model(model)[1]).items()}


def replace_arrays(model: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a new model with other arrays; see `PortingLibrary.replace_arrays`."""
    apply, params = _split_model(model)
    return apply, array_places.replace_leaves(params, _named_weights(params), arrays)


def inference_model(model: Any, stack: contextlib.ExitStack) -> Any:
    """Return the function in inference mode, with its parameters; see `PortingLibrary.inference_model`."""
    apply, params = model

    @functools.wraps(apply)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = set_inference_arguments(apply, args, kwargs, add=True)
        bound = inspect.signature(apply).bind_partial(*args, **kwargs).arguments
        for name, parameter in inspect.signature(apply).parameters.items():
            if name in _KEYS and name not in bound and parameter.default is parameter.empty:
                kwargs[name] = jax.random.key(0)
        return apply(*args, **kwargs)

    return call, params


def run(model: Any, batch: CallInputs, record: RecordCall) -> Any:
    """Return the outputs on a batch; see `PortingLibrary.run`."""
    with contextlib.ExitStack() as stack:
        apply, params = inference_model(_split_model(model), stack)
    return apply(params, *batch.args, **batch.kwargs)


def _split_model(model: Any) -> tuple[Any, Any]:
    apply, params = model
    named_leaves(params)  # raises for two arrays of the same name
    if not jax.tree.leaves(params):
        raise ModelError(f"params must be a pytree of arrays. Received: {describe_value(params)}.")
    return apply, params


def _named_weights(params: Any) -> dict[str, Weight]:
    leaves = jax.tree_util.tree_leaves_with_path(array_places.number_leaves(params))
    return {path_name(keys): Weight(place) for keys, place in leaves if place.is_weight}


def _has_sorted_mapping(node: Any) -> bool:
    """Return whether the containers include a mapping, whose keys JAX sorts."""
    if isinstance(node, Mapping):
        return True
    return isinstance(node, list | tuple) and any(_has_sorted_mapping(item) for item in node)


def _walk_layers(node: Any, path: str, left: dict[str, str]) -> Iterator[NativeLayer]:
    if isinstance(node, ArrayPlace):  # the parameters are a single array
        node = {"": node}
    flat, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda item: item is not node)
    children = {path_name(keys): child for keys, child in flat}
    here = {name: child for name, child in children.items() if isinstance(child, ArrayPlace)}
    for name, place in here.items():
        if not place.is_weight:
            left[join_path(path, name)] = "no array of floating numbers"
    shapes = {name: place.shape for name, place in here.items() if place.is_weight}
    begun = {next(iter(group.names)): group for group in group_arrays(path, shapes, others=len(children) > len(shapes))}
    for name, child in children.items():
        if name in begun:
            group = begun[name]
            leaves = {
                local: Weight(here[native]).inventory_leaf(join_path(path, native))
                for native, local in group.names.items()
            }
            yield NativeLayer(join_path(path, group.path), leaves, group.forms)
        elif name not in here:
            yield from _walk_layers(child, join_path(path, name), left)
