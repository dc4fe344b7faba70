"""`PortingLibrary` for flax.linen models, `(module, variables)`.

A linen model's arrays are nested mappings without classes. Layers of visible modules are read from these: the modules
in fields and of `setup`, and with a batch all that are called, under `jax.eval_shape`. The others are inferred from the
names and shapes of their arrays (`linen_layer_inference`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from flax import core, linen

from polyamp.porting.layouts.inventory import Inventory
from polyamp_jax.arrays import path_name
from polyamp_jax.models.adapters.linen import split_model
from polyamp_jax.porting.input_orders import ChainItem, input_orders
from polyamp_jax.porting.jax_only.inference_flags import set_float32, set_inference_arguments, set_inference_flags
from polyamp_jax.porting.jax_only.lazy_leaves import is_movable
from polyamp_jax.porting.libraries.flax_layer_table import flax_chain_item
from polyamp_jax.porting.libraries.linen_tree import LinenArray, LinenStructure, LinenTree
from polyamp_jax.porting.libraries.porting_library import CallInputs, RecordCall, first_array
from polyamp_jax.porting.libraries.stacked_layers import unstack_arrays

IGNORED_COLLECTIONS: Final = ("cache", "intermediates", "losses", "perturbations")
"""Collections without weights."""


def inventory(model: Any, batch: CallInputs | None) -> Inventory:
    """Return the layers; see `PortingLibrary.inventory`."""
    module, variables = _check_model(model)
    found = _inspect_modules(module, variables, batch)
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
    return Inventory(layers, "flax.linen", bool(found.order), left, input_orders(_sequential_chains(found), "last"))


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


def run(model: Any, batch: CallInputs, record: RecordCall) -> Any:
    """Return the outputs on a batch; see `PortingLibrary.run`."""
    module, variables = _check_model(model)

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        current = context.module
        if current.scope is None or context.method_name == "setup":
            return call(*args, **kwargs)
        set_float32(current, vars(current))
        is_call = context.method_name == "__call__"
        if is_call:
            record("/".join(current.path), first_array(args, kwargs), is_input=True)
        output = call(*args, **kwargs)
        if is_call:
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


def _inspect_modules(module: Any, variables: Any, batch: CallInputs | None) -> LinenStructure:
    """Return the visible structure of a model, with a batch or without."""
    structure = LinenStructure()
    if batch is not None:
        _inspect_calls(module, batch, structure)
    jax.eval_shape(lambda given: module.apply(given, method=lambda root: _walk_attributes(root, structure)), variables)
    return structure


def _sequential_chains(structure: LinenStructure) -> Iterator[list[ChainItem]]:
    """Yield the items of every visible `linen.Sequential`."""
    inside: set[tuple[str, ...]] = set()

    def items(chain: Any) -> Iterator[ChainItem]:
        inside.add(tuple(chain.path))
        for part in chain.layers:
            if not isinstance(part, linen.Module):
                yield flax_chain_item(part, "")
            elif type(part) is linen.Sequential and part.scope is not None:
                yield from items(part)
            elif part.scope is None or tuple(part.path[:-1]) != tuple(chain.path):  # a module of another place
                yield ChainItem("unknown")
            else:
                yield flax_chain_item(part, "/".join(part.path))

    for path, module in structure.modules.items():
        if type(module) is linen.Sequential and path not in inside:
            yield list(items(module))


def _note_module(structure: LinenStructure, module: Any) -> None:
    """Record a bound module."""
    structure.modules.setdefault(tuple(module.path), module)
    if isinstance(module, linen.RNN):
        structure.reverse.setdefault(tuple(module.cell.path), bool(module.reverse))


def _walk_attributes(module: Any, structure: LinenStructure) -> None:
    """Record a bound module, the modules in its attributes, and those inside them."""
    hasattr(module, "setup_is_done")  # looking up a missing name makes linen call `setup`
    _note_module(structure, module)
    if isinstance(module, linen.Bidirectional):
        for rnn, reverse in ((module.forward_rnn, False), (module.backward_rnn, True)):
            if isinstance(rnn, linen.RNN):
                structure.reverse[tuple(rnn.cell.path)] = reverse
    for name, value in vars(module).items():
        if name not in ("parent", "scope") and not name.startswith("_"):
            for child in _submodules(value):
                if child.scope is not None and tuple(child.path) not in structure.modules:
                    _walk_attributes(child, structure)


def _submodules(value: Any) -> Sequence[Any]:
    if isinstance(value, linen.Module):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [module for item in parts for module in _submodules(item)]


def _inspect_calls(module: Any, batch: CallInputs, structure: LinenStructure) -> None:
    """Record the modules that run in a call of the model, and the order of its arrays."""

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        current = context.module
        if current.scope is None or context.method_name == "setup" or not hasattr(type(current), context.method_name):
            return call(*args, **kwargs)  # functions run by lifted transformations are no methods of the class
        _note_module(structure, current)
        if isinstance(current, linen.RNN) and kwargs.get("reverse") is not None:
            structure.reverse[tuple(current.cell.path)] = bool(kwargs["reverse"])
        output = call(*args, **kwargs)
        own = structure.shapes.setdefault(tuple(current.path), {})
        for collection in current.variables.values():
            own.update({name: np.shape(value) for name, value in collection.items() if hasattr(value, "shape")})
        return output

    def make(arrays: Any) -> None:
        args, kwargs = jax.tree.unflatten(treedef, [arrays.get(number, leaf) for number, leaf in enumerate(flat)])
        args, kwargs = set_inference_arguments(module.__call__, args, kwargs, add=True)
        with linen.intercept_methods(intercept):
            variables = module.init(jax.random.key(0), *args, **kwargs)
        for collection, tree in variables.items():
            structure.order += [(collection, *path) for path in _leaf_paths(tree)]

    flat, treedef = jax.tree.flatten((batch.args, dict(batch.kwargs)))
    arrays = {number: leaf for number, leaf in enumerate(flat) if isinstance(leaf, np.ndarray | jax.Array)}
    jax.eval_shape(make, arrays)


def _leaf_paths(tree: Any) -> list[tuple[str, ...]]:
    """Return the paths of the leaves of nested mappings in the mappings' own order. JAX's functions would sort them."""
    if not isinstance(tree, Mapping):
        return [()]
    return [(str(key), *path) for key, item in tree.items() for path in _leaf_paths(item)]
