"""What a matrix product or convolution asks for, and what kind of product it is (S4).

A product says its precision by itself (`precision=`, a `jax.default_matmul_precision` inside the function), or has that
of the caller's surroundings, which is a default. A program is therefore traced under no default, and each product that
says nothing gets the default when it is bound. Called by `walk`; `neutral` by `staging` and `control_flow`.
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
from polyamp_jax.precision.interpreter.values import CASTABLE, FLOAT32, Value
from polyamp_jax.precision.op_list import PRODUCTS

_LOOSE = (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT)
"""What leaves the choice to whoever runs the program."""


def default_precision() -> Any:
    """The precision that the surroundings give to products that say none, as the parameter of an equation; or None."""
    name: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # set at run time
    if name is None:
        return None
    preset = getattr(jax.lax.DotAlgorithmPreset, name, None) if name.isupper() else None
    return preset or (jax.lax.Precision(name),) * 2


def neutral() -> contextlib.AbstractContextManager[Any]:
    """The scope in which a trace shows what the program itself says of precision."""
    if default_precision() is None:  # entering the scope would make other keys in JAX's caches
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[Any] = jax.default_matmul_precision(None)
    return scope


def asks(eqn: compat.JaxprEqn) -> bool:
    """Whether the program asks for more precision than the fastest, or names an algorithm."""
    precision = eqn.params.get("precision")
    given = precision if type(precision) is tuple else (precision,)
    return any(item not in _LOOSE for item in given)


def is_inner(eqn: compat.JaxprEqn) -> bool:
    """Whether it is a sum of products: no free axes, whatever the batch axes."""
    if compat.name_of(eqn) != "dot_general":
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    pairs = zip(eqn.invars, contracted, batch, strict=True)
    return all(len(compat.shape(atom)) == len(axes) + len(others) for atom, axes, others in pairs)


def is_outer(eqn: compat.JaxprEqn) -> bool:
    """Whether it contracts nothing, or axes of length 1: a multiplication."""
    if compat.name_of(eqn) != "dot_general":
        return False
    (axes, _), _ = eqn.params["dimension_numbers"]
    shape = compat.shape(eqn.invars[0])
    return bool(math.prod(shape[axis] for axis in axes) == 1)


def may_compute(eqn: compat.JaxprEqn, operands: list[Value]) -> bool:
    """Whether a product may run in 16 bits: of float operands, and into a dtype that is no wider than float32."""
    preferred = eqn.params.get("preferred_element_type")
    floats = [v for v in operands if v.dtype is not None and jnp.issubdtype(v.dtype, np.inexact)]
    return (
        (len(floats) >= 2 or compat.name_of(eqn) not in PRODUCTS)
        and all(v.castable for v in floats)
        and (preferred is None or np.dtype(preferred) in CASTABLE)
    )


def parameters(eqn: compat.JaxprEqn, chosen: Any, arrays: Sequence[Any], default: Any) -> dict[str, Any]:
    """The parameters of an equation that runs in `chosen` on `arrays`.

    The result of a product has the dtype of its operands, unless the program asked for one that differs from theirs. A
    product that says no precision has the default one, also in a program inside the equation.
    """
    params = eqn.params
    if chosen not in ("opaque", "follow") and params.get("preferred_element_type") is not None:
        declared = functools.reduce(jnp.promote_types, [compat.dtype(v) for v in eqn.invars[:2]])
        if np.dtype(params["preferred_element_type"]) == declared:
            params = {**params, "preferred_element_type": chosen}
    return params if default is None else _completed(eqn, params, [array.dtype for array in arrays[:2]], default)


def _completed(eqn: compat.JaxprEqn, params: dict[str, Any], dtypes: Sequence[Any], default: Any) -> dict[str, Any]:
    """Parameters with the default precision where the program says none; it is meant for 32-bit operands."""
    if compat.name_of(eqn) in PRODUCTS:
        wide = any(dtype not in CASTABLE or dtype == FLOAT32 for dtype in dtypes)
        return {**params, "precision": default} if params.get("precision") is None and wide else params

    def change(inner: compat.JaxprEqn) -> dict[str, Any]:
        return _completed(inner, inner.params, [getattr(v.aval, "dtype", None) for v in inner.invars[:2]], default)

    return compat.with_programs(params, change, default)
