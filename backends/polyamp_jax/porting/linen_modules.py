"""The modules of a linen model that can be seen: those in fields and of `setup`, and with a batch all that are called.

Called by `linen.inventory`. Everything runs under `jax.eval_shape`: no values are read or made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen

from polyamp_jax.porting.inference import quiet
from polyamp_jax.porting.library import Batch
from polyamp_jax.porting.linen_tree import Seen


def seen(module: Any, variables: Any, batch: Batch | None) -> Seen:
    """What can be seen of a model, with a batch or without."""
    found = Seen()
    if batch is not None:
        _called(module, batch, found)
    jax.eval_shape(lambda held: module.apply(held, method=lambda root: _walk(root, found)), variables)
    return found


def _meet(found: Seen, module: Any) -> None:
    """Note a bound module."""
    found.modules.setdefault(tuple(module.path), module)
    if isinstance(module, linen.RNN):
        found.reverse.setdefault(tuple(module.cell.path), bool(module.reverse))


def _walk(module: Any, found: Seen) -> None:
    """The modules that a bound one has as attributes, and those inside them."""
    hasattr(module, "setup_is_done")  # a name that is not there makes linen call `setup`
    _meet(found, module)
    if isinstance(module, linen.Bidirectional):
        for rnn, reverse in ((module.forward_rnn, False), (module.backward_rnn, True)):
            if isinstance(rnn, linen.RNN):
                found.reverse[tuple(rnn.cell.path)] = reverse
    for name, value in vars(module).items():
        if name not in ("parent", "scope") and not name.startswith("_"):
            for child in _modules(value):
                if child.scope is not None and tuple(child.path) not in found.modules:
                    _walk(child, found)


def _modules(value: Any) -> Sequence[Any]:
    if isinstance(value, linen.Module):
        return [value]
    if isinstance(value, Mapping):
        return [module for item in value.values() for module in _modules(item)]
    if isinstance(value, list | tuple):
        return [module for item in value for module in _modules(item)]
    return []


def _called(module: Any, batch: Batch, found: Seen) -> None:
    """The modules that a call of the model calls, and the order of its arrays."""

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        current = context.module
        if current.scope is None or context.method_name == "setup" or not hasattr(type(current), context.method_name):
            return call(*args, **kwargs)  # what a lifted transformation runs has no name of the class
        _meet(found, current)
        if isinstance(current, linen.RNN) and kwargs.get("reverse") is not None:
            found.reverse[tuple(current.cell.path)] = bool(kwargs["reverse"])
        output = call(*args, **kwargs)
        own = found.shapes.setdefault(tuple(current.path), {})
        for collection in current.variables.values():
            own.update({name: np.shape(value) for name, value in collection.items() if hasattr(value, "shape")})
        return output

    def make(arrays: Any) -> None:
        args, kwargs = jax.tree.unflatten(structure, [_put(leaf, arrays) for leaf in flat])
        args, kwargs = quiet(module.__call__, args, kwargs, add=True)
        with linen.intercept_methods(intercept):
            variables = module.init(jax.random.key(0), *args, **kwargs)
        for collection, tree in variables.items():
            found.order += [(collection, *path) for path in _paths(tree)]

    flat, structure = jax.tree.flatten((batch.args, dict(batch.kwargs)))
    arrays = {number: leaf for number, leaf in enumerate(flat) if isinstance(leaf, np.ndarray | jax.Array)}
    flat = [number if number in arrays else (leaf,) for number, leaf in enumerate(flat)]
    jax.eval_shape(make, arrays)


def _put(leaf: Any, arrays: Mapping[int, Any]) -> Any:
    return arrays[leaf] if isinstance(leaf, int) else leaf[0]


def _paths(tree: Any) -> list[tuple[str, ...]]:
    """Paths of the leaves of nested mappings, in the mappings' own order, which JAX's functions would sort."""
    if not isinstance(tree, Mapping):
        return [()]
    return [(str(key), *path) for key, item in tree.items() for path in _paths(item)]
