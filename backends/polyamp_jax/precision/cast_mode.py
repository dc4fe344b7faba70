"""Mode "cast": each module's dtype, parameters cast once, functions with arguments and results cast (S3, S5).

Called by `bound`, `autocast` and `differentiate`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.rules.plan import Plan
from polyamp_jax.arrays import cast_arguments, matmul_precision, named_leaves, path_name
from polyamp_jax.models.parts import Adapter
from polyamp_jax.precision.interpreter.staging import settled
from polyamp_jax.precision.interpreter.walk import interprets


def compute_params(params: Any, adapter: Adapter, plan: Plan) -> Any:
    """The parameters that a pass works on: the masters in mode "autocast"; in mode "cast" in the dtypes that they
    compute in, the policy's, or that of an override of their module (S5). The very masters where no dtype differs."""
    if interprets(plan):
        return params

    def one(path: Any, leaf: Any) -> Any:
        dtype = dtype_of(_module(path_name(path)), adapter, plan)
        return leaf if leaf.dtype == dtype else jnp.asarray(leaf, dtype)

    made = jax.tree_util.tree_map_with_path(one, params)
    same = all(a is b for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(params), strict=True))
    return params if same else made


def module_dtypes(params: Any, adapter: Adapter, plan: Plan) -> Mapping[str, str]:
    """Path of every module that owns parameters -> its dtype; empty where nothing is cast.

    Every module's inputs are cast, not only the model's: one that promotes (a batch normalisation with float32
    statistics, an embedding or a recurrent carry with a dtype of its own) would else leave all that follows in float32.
    """
    if not plan.overridden and plan.compute == plan.param:
        return {}
    return {path: dtype_of(path, adapter, plan) for path in map(_module, named_leaves(params))}


def cast_function(function: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """A function with its floating array arguments in `compute` and its floating results in `output` dtype."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with matmul_precision(plan), settled():
            args, kwargs = cast_arguments((args, kwargs), plan.compute, float64=plan.float64)
            return cast_arguments(function(*args, **kwargs), plan.output, float64=plan.float64)

    return call


def dtype_of(module: str, adapter: Adapter, plan: Plan) -> str:
    """The dtype of the parameters and inputs of the module at a path."""
    return plan.at(module).named or (plan.param if module in adapter.pinned else plan.compute)


def _module(parameter: str) -> str:
    return parameter.rpartition("/")[0]
