"""Plain functions: `(apply_fn, params)`, any pytree of arrays. Loaded by `converter`.

Only names and shapes say what a layer is (`function_names`): `{"w": ..., "b": ...}`, a tuple of a kernel and a bias as
in JAX's own examples, `w1` beside `b1`. Nothing is known of modules, so that a batch shows nothing more.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax

from polyamp.errors import ModelError, described
from polyamp.porting.layouts.inventory import Inventory, Leaf, NativeLayer
from polyamp_jax.arrays import named_leaves, path_name
from polyamp_jax.porting import places
from polyamp_jax.porting.function_names import groups
from polyamp_jax.porting.inference import quiet
from polyamp_jax.porting.library import Batch, Record
from polyamp_jax.porting.places import Place, Weight

_KEYS: Final = ("key", "rng")
"""Arguments that take a random key; in inference nothing is drawn with it."""


def inventory(model: Any, batch: Batch | None) -> Inventory:
    """See `Library.inventory`."""
    _, params = _parts(model)
    left: dict[str, str] = {}
    layers = list(_layers(places.numbered(params), "", left))
    return Inventory(layers, "a function", not _sorted(params), left)


def arrays(model: Any) -> Mapping[str, Any]:
    """See `Library.arrays`."""
    return {name: weight.array for name, weight in _weights(_parts(model)[1]).items()}


def replaced(model: Any, arrays: Mapping[str, Any]) -> Any:
    """See `Library.replaced`."""
    apply, params = _parts(model)
    return apply, places.replaced(params, _weights(params), arrays)


def run(model: Any, batch: Batch, record: Record) -> Any:
    """See `Library.run`."""
    apply, params = _parts(model)
    args, kwargs = quiet(apply, (params, *batch.args), batch.kwargs, add=True)
    bound = inspect.signature(apply).bind_partial(*args, **kwargs).arguments
    for name, parameter in inspect.signature(apply).parameters.items():
        if name in _KEYS and name not in bound and parameter.default is parameter.empty:
            kwargs[name] = jax.random.key(0)
    return apply(*args, **kwargs)


def _parts(model: Any) -> tuple[Any, Any]:
    apply, params = model
    named_leaves(params)  # refuses two arrays of one name
    if not jax.tree.leaves(params):
        raise ModelError(f"params must be a pytree of arrays. Received: {described(params)}.")
    return apply, params


def _weights(params: Any) -> dict[str, Weight]:
    leaves = jax.tree_util.tree_leaves_with_path(places.numbered(params))
    return {path_name(keys): Weight(place) for keys, place in leaves if place.is_weight}


def _sorted(node: Any) -> bool:
    """Whether a mapping is among the containers: JAX sorts its keys."""
    if isinstance(node, Mapping):
        return True
    return isinstance(node, list | tuple) and any(_sorted(item) for item in node)


def _layers(node: Any, path: str, left: dict[str, str]) -> Iterator[NativeLayer]:
    if isinstance(node, Place):  # the parameters are one array
        node = {"": node}
    flat, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda item: item is not node)
    children = {path_name(keys): child for keys, child in flat}
    here = {name: child for name, child in children.items() if isinstance(child, Place)}
    for name, place in here.items():
        if not place.is_weight:
            left[_joined(path, name)] = "no array of floating numbers"
    shapes = {name: place.shape for name, place in here.items() if place.is_weight}
    begun = {next(iter(group.names)): group for group in groups(path, shapes, others=len(children) > len(shapes))}
    for name, child in children.items():
        if name in begun:
            group = begun[name]
            leaves = {}
            for native, local in group.names.items():
                full = _joined(path, native)
                leaves[local] = Leaf(full, Weight(here[native]).lazy(full))
            yield NativeLayer(_joined(path, group.path), leaves, group.forms)
        elif name not in here:
            yield from _layers(child, _joined(path, name), left)


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path and name else path or name
