"""`Gradients`: the gradients of a pass by the names that a model's inventory gives its leaves. Called by `observer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp_jax.porting.converter import library
from polyamp_jax.porting.stacks import slice_of
from polyamp_jax.step.state import JaxState

Array = np.ndarray[Any, Any]


class Gradients(Mapping[str, "Array | None"]):
    """Name of a trainable leaf -> its gradient on the host, None where the loss does not depend on it.

    It lists the arrays that a model has; a layer of a stack ("blocks/Dense_0/kernel[3]") is found too, as a slice.

    Args:
        state: the state.
        values: gradients by the leaves of its parameters, or None.
    """

    def __init__(self, state: JaxState, values: Sequence[Any]) -> None:
        leaves, structure = jax.tree.flatten(state.params)
        shapes = [_shape(leaf) for leaf in leaves]
        # a shape stands for what has no gradient, and, where all are shapes, for what is trained at all
        made = [shape if value is None else value for value, shape in zip(values, shapes, strict=True)]
        held = _arrays(state, jax.tree.unflatten(structure, made))
        trained = _arrays(state, jax.tree.unflatten(structure, shapes))
        self._held = {name: held[name] for name, leaf in trained.items() if isinstance(leaf, jax.ShapeDtypeStruct)}

    def __getitem__(self, name: str) -> Array | None:
        part = None if name in self._held else slice_of(name)
        value = self._held[name if part is None else part[0]]
        if isinstance(value, jax.ShapeDtypeStruct):
            return None
        return host(value) if part is None else host(value)[part[1]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def host(array: Any) -> Array:
    """An array on the host, float32 unless it is float64."""
    held = np.asarray(array)
    return held if held.dtype in (np.float32, np.float64) else held.astype(np.float32)


def _arrays(state: JaxState, params: Any) -> Mapping[str, Any]:
    model = state.setup.adapter.join(params, state.running)
    return library(model).arrays(model)


def _shape(leaf: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(jnp.shape(leaf), leaf.dtype)
