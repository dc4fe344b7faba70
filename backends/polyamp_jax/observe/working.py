"""`working`: a model that belongs to a comparison alone, in float64 if that is asked for. Called by `observer`.

JAX's arrays do not change, and of all its libraries only nnx's models do: these are cloned. In float64 are a model's
arrays, and what would bring its numbers back to fewer bits, the `dtype` of flax's layers. haiku, equinox and functions
compute in the dtype of what they are given. A cast that the program itself makes stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import ModelError
from polyamp_jax import compat
from polyamp_jax.arrays import is_array, is_key
from polyamp_jax.models.adapt import adapt
from polyamp_jax.observe.inferring import inferring

_DTYPES: Final = ("dtype", "param_dtype")
"""Settings of flax's layers: what they compute in, and what they make parameters of."""


@contextlib.contextmanager
def working(model: Any, *, wide: bool, inference: bool) -> Iterator[Any]:
    """See `Observer.working`. JAX computes in float64 in all of a wide block, in this thread."""
    adapt(model)  # which says what is no model
    with contextlib.ExitStack() as stack:
        linen = compat.loaded("flax.linen")
        if wide:
            stack.enter_context(compat.float64())
            if linen is not None:
                stack.enter_context(linen.intercept_methods(_linen))
        made = _widened(model) if wide else _clone(model)
        yield inferring(made, stack) if inference else made


def _widened(model: Any) -> Any:
    if not _is_nnx(model):
        return jax.tree.map(_wide, model)
    nnx = compat.loaded("flax.nnx")
    graphdef, state = nnx.split(model)
    made = nnx.merge(graphdef, jax.tree.map(_wide, state))
    for _, module in compat.nnx_modules(made):
        _set_dtypes(module)
    return made


def _clone(model: Any) -> Any:
    if not _is_nnx(model):
        return model
    try:
        return compat.loaded("flax.nnx").clone(model)
    except Exception as error:
        raise ModelError(f"the nnx model cannot be copied by nnx.clone, which says: {error}") from error


def _is_nnx(model: Any) -> bool:
    return compat.is_a(model, "flax.nnx", "Module")


def _wide(leaf: Any) -> Any:
    if not is_array(leaf) or is_key(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return np.asarray(leaf, np.float64) if isinstance(leaf, np.ndarray) else jnp.asarray(leaf, jnp.float64)


def _linen(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """A module of linen, which is a copy that lives for one call."""
    if context.module.scope is not None:
        _set_dtypes(context.module)
    return call(*args, **kwargs)


def _set_dtypes(module: Any) -> None:
    """A module's dtypes as float64, where they are floating."""
    for name in _DTYPES:
        value = getattr(module, name, None)
        if value is not None and not callable(getattr(value, "astype", None)) and _floating(value):
            object.__setattr__(module, name, jnp.float64)


def _floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(dtype, jnp.floating))
    except TypeError:  # a setting of the user's own of that name
        return False
