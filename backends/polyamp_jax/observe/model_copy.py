"""`model_copy`: private copies of models for a comparison, in float64 on request.

JAX arrays are immutable, and only nnx models are mutable objects: these are cloned. The float64 copy converts a
model's arrays and the `dtype` settings of flax layers, which would otherwise cast back to fewer bits. haiku, equinox
and plain functions compute in the dtype of their inputs. Casts in the user's own program remain.
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
from polyamp_jax.models.library import adapt
from polyamp_jax.porting.jax_only.library_lookup import find_library

_DTYPE_ATTRIBUTES: Final = ("dtype", "param_dtype")
"""Attributes of flax layers: the compute dtype and the parameter dtype."""


@contextlib.contextmanager
def model_copy(model: Any, *, wide: bool, inference: bool) -> Iterator[Any]:
    """Return the context manager of `Observer.working`. With `wide`, x64 is on for this thread inside the block."""
    adapt(model)  # raises if it is not a model
    with contextlib.ExitStack() as stack:
        linen = compat.loaded_module("flax.linen")
        if wide:
            stack.enter_context(compat.enable_float64())
            if linen is not None:
                stack.enter_context(linen.intercept_methods(_linen_interceptor))
        made = _float64_copy(model) if wide else _clone_model(model)
        yield find_library(made).inference_model(made, stack) if inference else made


def _float64_copy(model: Any) -> Any:
    if not _is_nnx(model):
        return jax.tree.map(_float64_leaf, model)
    nnx = compat.loaded_module("flax.nnx")
    graphdef, state = nnx.split(model)
    made = nnx.merge(graphdef, jax.tree.map(_float64_leaf, state))
    for _, module in compat.walk_nnx_modules(made):
        _set_dtypes(module)
    return made


def _clone_model(model: Any) -> Any:
    if not _is_nnx(model):
        return model
    try:
        return compat.loaded_module("flax.nnx").clone(model)
    except Exception as error:
        raise ModelError(f"the nnx model cannot be copied by nnx.clone, which says: {error}") from error


def _is_nnx(model: Any) -> bool:
    return compat.is_a(model, "flax.nnx", "Module")


def _float64_leaf(leaf: Any) -> Any:
    if not is_array(leaf) or is_key(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return np.asarray(leaf, np.float64) if isinstance(leaf, np.ndarray) else jnp.asarray(leaf, jnp.float64)


def _linen_interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Set float64 on a linen module; the module is a copy that lives for one call."""
    if context.module.scope is not None:
        _set_dtypes(context.module)
    return call(*args, **kwargs)


def _set_dtypes(module: Any) -> None:
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
