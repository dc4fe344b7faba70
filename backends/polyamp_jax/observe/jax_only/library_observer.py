"""`LibraryObserver`, base class of what a comparison needs of one library's models."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp_jax import compat
from polyamp_jax.arrays import is_array, is_key
from polyamp_jax.models.library import LIBRARIES, library_of


class LibraryObserver:
    """Observer of one library, in its file in `libraries`. The defaults are those of models that are only arrays."""

    def disable_dropout(self, stack: contextlib.ExitStack) -> None:
        """Turn the library's dropout off until `stack` closes."""

    def tag_outputs(self, stack: contextlib.ExitStack) -> None:
        """Tag the inputs and outputs of the library's modules until `stack` closes, if it has an interceptor."""

    def use_float64(self, stack: contextlib.ExitStack) -> None:
        """Set the library's modules to float64 until `stack` closes, if it has an interceptor."""

    def copy_model(self, model: Any, *, wide: bool) -> Any:
        """Return a private copy of a model, in float64 if `wide`.

        Raises:
            ModelError: the model cannot be copied.
        """
        return jax.tree.map(float64_leaf, model) if wide else model


def observer_of(model: Any) -> LibraryObserver:
    """Return the observer of a model's library."""
    library: Any = library_of(model)
    found: LibraryObserver = library.file_in("observe.libraries").OBSERVER
    return found


def loaded_observers() -> list[LibraryObserver]:
    """Return the observers of the libraries that the program has imported."""
    loaded = [library for library in LIBRARIES if compat.loaded_module(library.module) is not None]
    return [library.file_in("observe.libraries").OBSERVER for library in loaded]


def float64_leaf(leaf: Any) -> Any:
    """Return a floating array in float64, and any other leaf unchanged."""
    if not is_array(leaf) or is_key(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return np.asarray(leaf, np.float64) if isinstance(leaf, np.ndarray) else jnp.asarray(leaf, jnp.float64)


def replace_attribute(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack closes."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, before)


def identity_call(self: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    """Return the inputs, in place of the `__call__` of a dropout module."""
    return inputs
