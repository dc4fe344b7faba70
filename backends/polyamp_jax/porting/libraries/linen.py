"""`PortingLibrary` for flax.linen models, `(module, variables)`.

A linen model's arrays are nested mappings without classes. Layers of visible modules are read from these
(`linen_modules`). The others are inferred from the names and shapes of their arrays (`linen_layer_inference`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
from flax import core, linen

from polyamp.porting.layouts.inventory import Inventory
from polyamp_jax.arrays import path_name
from polyamp_jax.models.adapters.linen import split_model
from polyamp_jax.porting.jax_only.inference_flags import set_float32, set_inference_arguments, set_inference_flags
from polyamp_jax.porting.jax_only.lazy_leaves import is_movable
from polyamp_jax.porting.libraries.library import CallInputs, RecordOutput
from polyamp_jax.porting.libraries.linen_modules import inspect_modules
from polyamp_jax.porting.libraries.linen_tree import LinenArray, LinenTree
from polyamp_jax.porting.libraries.stacked_layers import unstack_arrays

IGNORED_COLLECTIONS: Final = ("cache", "intermediates", "losses", "perturbations")
"""Collections without weights."""


def inventory(model: Any, batch: CallInputs | None) -> Inventory:
    """Return the layers; see `PortingLibrary.inventory`."""
    module, variables = _check_model(model)
    found = inspect_modules(module, variables, batch)
    calls = {path: number for number, path in enumerate(found.modules)}
    tree, left, weights = LinenTree(found), {}, []
    for array in _flat_arrays(variables):
        if array.collection in IGNORED_COLLECTIONS:
            left[array.name] = f"the collection {array.collection!r} holds no weights"
        elif not is_movable(array.leaf):
            left[array.name] = "a random key or no array"
        else:
            weights.append(array)
    for array in unstack_arrays(weights, found):
        tree.add(array)
    layers = list(tree.layers())
    if found.order:
        order = {path[1:]: number for number, path in reversed(list(enumerate(found.order)))}
        layers.sort(key=lambda layer: tree.place(layer, order, calls))
    return Inventory(layers, "flax.linen", bool(found.order), left)


def arrays(model: Any) -> Mapping[str, Any]:
    """Return the arrays by name; see `PortingLibrary.arrays`."""
    return {array.name: array.leaf for array in _flat_arrays(_check_model(model)[1]) if is_movable(array.leaf)}


def replace_arrays(model: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a new model with other arrays; see `PortingLibrary.replace_arrays`."""
    module, variables = _check_model(model)
    names = iter([array.name for array in _flat_arrays(variables)])
    return module, jax.tree.map(lambda leaf: arrays.get(next(names), leaf), variables)


def inference_model(model: Any, stack: contextlib.ExitStack) -> Any:
    """Return the model, which is in inference mode until `stack` closes; see `PortingLibrary.inference_model`."""
    stack.enter_context(linen.intercept_methods(_call_in_inference))
    return model


def run(model: Any, batch: CallInputs, record: RecordOutput) -> Any:
    """Return the outputs on a batch; see `PortingLibrary.run`."""
    module, variables = _check_model(model)

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        current = context.module
        if current.scope is None or context.method_name == "setup":
            return call(*args, **kwargs)
        set_float32(current, vars(current))
        output = call(*args, **kwargs)
        if context.method_name == "__call__":
            if isinstance(current, linen.RNN):  # the cell, which is the layer, runs in a scan
                record("/".join(current.cell.path), output[1] if isinstance(output, tuple) else output)
            record("/".join(current.path), output)
        return output

    mutable = sorted(name for name in variables if name != "params")
    with contextlib.ExitStack() as stack:
        inference_model(model, stack)
        stack.enter_context(linen.intercept_methods(intercept))
        return module.apply(variables, *batch.args, mutable=mutable, **batch.kwargs)[0]


def _call_in_inference(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    if module.scope is None or context.method_name == "setup":
        return call(*args, **kwargs)
    set_inference_flags(module, vars(module))
    if context.method_name == "__call__":
        args, kwargs = set_inference_arguments(module.__call__, args, kwargs, add=not module.path)
    return call(*args, **kwargs)


def _check_model(model: Any) -> Any:
    split_model(model)  # raises if it is no linen model
    return model


def _flat_arrays(variables: Any) -> Iterator[LinenArray]:
    """Yield the leaves in JAX's order. A box around an array (`nn.Partitioned`) is only a part of the name."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(core.unfreeze(variables)):
        collection, *rest = keys
        path = tuple(str(key.key) for key in rest if isinstance(key, jax.tree_util.DictKey))
        name = path_name(tuple(rest))
        trained = collection.key == "params"
        yield LinenArray(name if trained else path_name(keys), collection.key, path, leaf, trained)
