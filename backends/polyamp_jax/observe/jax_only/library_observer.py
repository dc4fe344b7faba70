"""`LibraryObserver`, base class of what a comparison needs of one library's models: dropout off, tags, float64 copies.

linen and nnx share the settings of flax's modules and attention functions.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.parity.trace.observer import DropoutCount, UniformSource
from polyamp_jax import compat
from polyamp_jax.arrays import is_array, is_key
from polyamp_jax.models.libraries import LIBRARIES, require_library
from polyamp_jax.porting.libraries.porting_library import find_library

_DTYPE_ATTRIBUTES: Final = ("dtype", "param_dtype")
"""Attributes of flax layers: the compute dtype and the parameter dtype."""


class LibraryObserver:
    """Observer of one library, in its file in `library_observers`. Its defaults are for models that are only arrays."""

    def disable_dropout(self, stack: contextlib.ExitStack, count: DropoutCount) -> None:
        """Turn the library's dropout off until `stack` closes, and count the calls that would have dropped."""

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

    def open_copy(self, model: Any, stack: contextlib.ExitStack, *, wide: bool, inference: bool) -> Any:
        """Return a private copy of a model, in float64 if `wide`, in inference mode if `inference`, until `stack`
        closes.

        Raises:
            ModelError: the model cannot be copied.
        """
        made = self.copy_model(model, wide=wide)
        return find_library(made).inference_model(made, stack) if inference else made

    def arrays(self, model: Any) -> Mapping[str, Any]:
        """Return name -> array of everything that a model contains."""
        return find_library(model).arrays(model)

    def tag_layers(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context manager around a pass in which the layers of a model that cast by themselves tag inputs and
        outputs, by the paths of `polyamp.port`."""
        return contextlib.nullcontext()

    def tag_figures(self, model: Any, *, outputs: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context manager around a pass in which the layers of a model that cast by themselves tag what a
        monitor measures: the figures of their products in 8 bits, and with `outputs` their outputs."""
        return contextlib.nullcontext()

    def disable_model_dropout(
        self, model: Any, draws: UniformSource | None, others: contextlib.AbstractContextManager[DropoutCount]
    ) -> contextlib.AbstractContextManager[DropoutCount]:
        """Return the context manager of `Observer.disable_dropout` for a model; `others` is that of all libraries."""
        return others

    def without_policies(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which a model has none of the policies that were applied to it."""
        return contextlib.nullcontext()


def observer_of(model: Any) -> LibraryObserver:
    """Return the observer of a model's library.

    Raises:
        ModelError: the object is no model, or only a part of one.
    """
    found: LibraryObserver = require_library(model).file_in("observe.library_observers").OBSERVER
    return found


def loaded_observers() -> list[LibraryObserver]:
    """Return the observers of the libraries that the program has imported, but of Keras, which acts on one model."""
    loaded = [lib for lib in LIBRARIES if not lib.applies_policy and compat.loaded_module(lib.module) is not None]
    return [library.file_in("observe.library_observers").OBSERVER for library in loaded]


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


def identity_call(rate: str, off: str, count: DropoutCount) -> Callable[..., Any]:
    """Return what stands in for the `__call__` of a dropout module: a function that returns the inputs.

    Args:
        rate: name of the module's rate.
        off: name of the module's attribute, and of the call's argument, that turns it off.
        count: counts the calls that would have dropped something.
    """

    def call(self: Any, inputs: Any, *_: Any, **options: Any) -> Any:
        given = options.get(off)
        is_off = getattr(self, off, None) if given is None else given
        count.add(bool(getattr(self, rate) and not is_off))
        return inputs

    return call


def replace_attention(stack: contextlib.ExitStack, modules: Sequence[str], count: DropoutCount) -> None:
    """Run flax's attention functions without dropout until `stack` closes.

    Args:
        stack: restores the functions.
        modules: the modules that define or export them.
        count: counts the calls that would have dropped something.
    """
    for name in modules:
        for function in ("dot_product_attention", "dot_product_attention_weights"):
            module = compat.loaded_module(name)
            if hasattr(module, function):
                replace_attribute(stack, module, function, force_deterministic(getattr(module, function), count))


def force_deterministic(function: Callable[..., Any], count: DropoutCount) -> Callable[..., Any]:
    """Return a function of flax, or a method of a module of its, that is called with `deterministic=True`."""
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "deterministic" in names and list(names).index("deterministic") < len(args):
            return function(*args, **kwargs)  # passed by position, which flax itself never does
        own = args[0] if args else None
        given = kwargs.get("deterministic")
        is_off = getattr(own, "deterministic", None) if given is None else given
        count.add(bool(kwargs.get("dropout_rate", getattr(own, "dropout_rate", 0.0)) and not is_off))
        return function(*args, **{**kwargs, "deterministic": True})

    return call


def set_float64(module: Any) -> None:
    """Set a module's floating dtype attributes to float64."""
    for name in _DTYPE_ATTRIBUTES:
        value = getattr(module, name, None)
        if value is not None and not callable(getattr(value, "astype", None)) and _is_floating(value):
            object.__setattr__(module, name, jnp.float64)


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(dtype, jnp.floating))
    except TypeError:  # a user attribute with the same name
        return False
