"""flax.linen: `(module, variables)`. Loaded by `converter`.

A linen model's arrays are nested mappings without classes. What can be seen of its modules (`linen_modules`) says what
a layer is; of the others the names and shapes of their arrays do (`linen_names`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
from flax import core, linen

from polyamp.errors import ModelError
from polyamp.porting.layouts.inventory import Inventory
from polyamp_jax.arrays import path_name
from polyamp_jax.models.flax import adapt_linen
from polyamp_jax.porting.inference import quiet, still
from polyamp_jax.porting.leaves import movable
from polyamp_jax.porting.library import Batch, Record
from polyamp_jax.porting.linen_modules import seen
from polyamp_jax.porting.linen_tree import Array, Tree, settings
from polyamp_jax.porting.stacks import unstacked

LEFT: Final = ("cache", "intermediates", "losses", "perturbations")
"""Collections that hold no weights."""


def inventory(model: Any, batch: Batch | None) -> Inventory:
    """See `Library.inventory`."""
    module, variables = _parts(model)
    found = seen(module, variables, batch)
    calls = {path: number for number, path in enumerate(found.modules)}
    tree, left, weights = Tree(found), {}, []
    for array in _flat(variables):
        if array.collection in LEFT:
            left[array.name] = f"the collection {array.collection!r} holds no weights"
        elif not movable(array.leaf):
            left[array.name] = "a random key or no array"
        else:
            weights.append(array)
    for array in unstacked(weights, found):
        tree.add(array)
    layers = list(tree.layers())
    if found.order:
        order = {path[1:]: number for number, path in reversed(list(enumerate(found.order)))}
        layers.sort(key=lambda layer: tree.place(layer, order, calls))
    return Inventory(layers, "flax.linen", bool(found.order), left)


def arrays(model: Any) -> Mapping[str, Any]:
    """See `Library.arrays`."""
    return {array.name: array.leaf for array in _flat(_parts(model)[1]) if movable(array.leaf)}


def replaced(model: Any, arrays: Mapping[str, Any]) -> Any:
    """See `Library.replaced`."""
    module, variables = _parts(model)
    names = iter([array.name for array in _flat(variables)])
    return module, jax.tree.map(lambda leaf: arrays.get(next(names), leaf), variables)


def run(model: Any, batch: Batch, record: Record) -> Any:
    """See `Library.run`."""
    module, variables = _parts(model)

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        current = context.module
        if current.scope is None or context.method_name == "setup":
            return call(*args, **kwargs)
        still(current, settings(current))
        if context.method_name == "__call__":
            args, kwargs = quiet(call, args, kwargs, add=False)
        output = call(*args, **kwargs)
        if context.method_name == "__call__":
            if isinstance(current, linen.RNN):  # its cell, which is the layer, runs in a scan
                record("/".join(current.cell.path), output[1] if isinstance(output, tuple) else output)
            record("/".join(current.path), output)
        return output

    args, kwargs = quiet(module.__call__, batch.args, batch.kwargs, add=True)
    mutable = sorted(name for name in variables if name != "params")
    with linen.intercept_methods(intercept):
        return module.apply(variables, *args, mutable=mutable, **kwargs)[0]


def _parts(model: Any) -> tuple[Any, Any]:
    if not isinstance(model, tuple) or len(model) != 2:
        raise ModelError("pass the model as (linen_module, variables): variables is what module.init(...) returned.")
    module, variables = model
    adapt_linen(module, variables)  # which checks it
    return module, variables


def _flat(variables: Any) -> Iterator[Array]:
    """The leaves in JAX's order; a box around an array (`nn.Partitioned`) is a part of the name alone."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(core.unfreeze(variables)):
        collection, *rest = keys
        path = tuple(str(key.key) for key in rest if isinstance(key, jax.tree_util.DictKey))
        name = path_name(tuple(rest))
        trained = collection.key == "params"
        yield Array(name if trained else path_name(keys), collection.key, path, leaf, trained)
