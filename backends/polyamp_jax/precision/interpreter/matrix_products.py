"""Precision and kind of matrix products and convolutions (S4).

A product's precision is set by the program (`precision=`, a `jax.default_matmul_precision` inside the function), or it
is the caller's default. Therefore a program is traced without a default. Each product without its own precision gets
the default when it is bound.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp_jax import compat
from polyamp_jax.precision.interpreter.program_value import CASTABLE_DTYPES, FLOAT32, ProgramValue
from polyamp_jax.precision.op_list import PRODUCTS

_DEFAULT_PRECISIONS = (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT)
"""Precision values that leave the choice to the caller."""


def default_precision() -> Any:
    """Return the caller's default precision of products, as an equation parameter, or None."""
    name: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # set at run time
    if name is None:
        return None
    preset = getattr(jax.lax.DotAlgorithmPreset, name, None) if name.isupper() else None
    return preset or (jax.lax.Precision(name),) * 2


def neutral_precision() -> contextlib.AbstractContextManager[Any]:
    """Return a context without a default precision, in which a trace shows the program's own precision settings."""
    if default_precision() is None:  # entering the scope would change the keys of JAX's caches
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[Any] = jax.default_matmul_precision(None)
    return scope


def has_explicit_precision(eqn: compat.JaxprEqn) -> bool:
    """Return whether the program requests more than the fastest precision, or names an algorithm."""
    precision = eqn.params.get("precision")
    given = precision if type(precision) is tuple else (precision,)
    return any(item not in _DEFAULT_PRECISIONS for item in given)


def is_inner_product(eqn: compat.JaxprEqn) -> bool:
    """Return whether a product is a sum of products: it has no free axes, only contracted and batch axes."""
    if compat.primitive_name(eqn) != "dot_general":
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    pairs = zip(eqn.invars, contracted, batch, strict=True)
    return all(len(compat.atom_shape(atom)) == len(axes) + len(others) for atom, axes, others in pairs)


def is_multiplication(eqn: compat.JaxprEqn) -> bool:
    """Return whether a product is a multiplication: it contracts no axes, or only axes of length 1."""
    if compat.primitive_name(eqn) != "dot_general":
        return False
    (axes, _), _ = eqn.params["dimension_numbers"]
    shape = compat.atom_shape(eqn.invars[0])
    return bool(math.prod(shape[axis] for axis in axes) == 1)


def can_run_narrow(eqn: compat.JaxprEqn, operands: list[ProgramValue]) -> bool:
    """Return whether a product may run in 16 bits: its operands are floats and its result is at most float32."""
    preferred = eqn.params.get("preferred_element_type")
    floats = [v for v in operands if v.dtype is not None and jnp.issubdtype(v.dtype, np.inexact)]
    return (
        (len(floats) >= 2 or compat.primitive_name(eqn) not in PRODUCTS)
        and all(v.castable for v in floats)
        and (preferred is None or np.dtype(preferred) in CASTABLE_DTYPES)
    )


def equation_parameters(eqn: compat.JaxprEqn, chosen: Any, arrays: Sequence[Any], default: Any) -> dict[str, Any]:
    """Return the parameters of an equation that runs in `chosen` on `arrays`.

    A product's result has the dtype of its operands, unless the program requested a different one. A product without
    its own precision gets the default, also in a program inside the equation.
    """
    params = eqn.params
    if chosen not in ("opaque", "follow") and params.get("preferred_element_type") is not None:
        declared = functools.reduce(jnp.promote_types, [compat.atom_dtype(v) for v in eqn.invars[:2]])
        if np.dtype(params["preferred_element_type"]) == declared:
            params = {**params, "preferred_element_type": chosen}
    return (
        params if default is None else _complete_precision(eqn, params, [array.dtype for array in arrays[:2]], default)
    )


def _complete_precision(
    eqn: compat.JaxprEqn, params: dict[str, Any], dtypes: Sequence[Any], default: Any
) -> dict[str, Any]:
    """Fill in the default precision where the program specifies none. It applies to 32-bit operands."""
    if compat.primitive_name(eqn) in PRODUCTS:
        wide = any(dtype not in CASTABLE_DTYPES or dtype == FLOAT32 for dtype in dtypes)
        return {**params, "precision": default} if params.get("precision") is None and wide else params

    def change(inner: compat.JaxprEqn) -> dict[str, Any]:
        return _complete_precision(
            inner, inner.params, [getattr(v.aval, "dtype", None) for v in inner.invars[:2]], default
        )

    return compat.map_inner_equations(params, change, default)
