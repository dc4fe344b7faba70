"""Inspection of a linen model's modules: those in fields and of `setup`, and with a batch all that are called.

Everything runs under `jax.eval_shape`: no values are read or made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen

from polyamp_jax.porting.jax_only.inference_flags import set_inference_arguments
from polyamp_jax.porting.libraries.library import CallInputs
from polyamp_jax.porting.libraries.linen_tree import LinenStructure


def inspect_modules(module: Any, variables: Any, batch: CallInputs | None) -> LinenStructure:
    """Return the visible structure of a model, with a batch or without."""
    structure = LinenStructure()
    if batch is not None:
        _inspect_calls(module, batch, structure)
    jax.eval_shape(lambda given: module.apply(given, method=lambda root: _walk_attributes(root, structure)), variables)
    return structure


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
    if isinstance(value, Mapping):
        return [module for item in value.values() for module in _submodules(item)]
    if isinstance(value, list | tuple):
        return [module for item in value for module in _submodules(item)]
    return []


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
        args, kwargs = jax.tree.unflatten(treedef, [_argument_value(leaf, arrays) for leaf in flat])
        args, kwargs = set_inference_arguments(module.__call__, args, kwargs, add=True)
        with linen.intercept_methods(intercept):
            variables = module.init(jax.random.key(0), *args, **kwargs)
        for collection, tree in variables.items():
            structure.order += [(collection, *path) for path in _leaf_paths(tree)]

    flat, treedef = jax.tree.flatten((batch.args, dict(batch.kwargs)))
    arrays = {number: leaf for number, leaf in enumerate(flat) if isinstance(leaf, np.ndarray | jax.Array)}
    flat = [number if number in arrays else (leaf,) for number, leaf in enumerate(flat)]
    jax.eval_shape(make, arrays)


def _argument_value(leaf: Any, arrays: Mapping[int, Any]) -> Any:
    return arrays[leaf] if isinstance(leaf, int) else leaf[0]


def _leaf_paths(tree: Any) -> list[tuple[str, ...]]:
    """Return the paths of the leaves of nested mappings in the mappings' own order. JAX's functions would sort them."""
    if not isinstance(tree, Mapping):
        return [()]
    return [(str(key), *path) for key, item in tree.items() for path in _leaf_paths(item)]
