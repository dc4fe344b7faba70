"""Mode "cast": each module's dtype and the casts of parameters (S3, S5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_jax.arrays import named_leaves, path_name
from polyamp_jax.models.adapter import ModelAdapter
from polyamp_jax.precision.interpreter.interpreter import has_interpreted_operations


def compute_params(params: Any, adapter: ModelAdapter, plan: ResolvedPolicy) -> Any:
    """Return the parameters that a pass computes with: the masters in mode "autocast", their casts in mode "cast".

    So they are for a library whose layers apply the policy. A cast has the policy's dtype or that of an override of
    its module (S5). If no dtype differs, the masters themselves are returned.
    """
    if adapter.applies_policy or has_interpreted_operations(plan):
        return params

    def one(path: Any, leaf: Any) -> Any:
        dtype = module_dtype(_owner_module(path_name(path)), adapter, plan)
        return leaf if leaf.dtype == dtype else jnp.asarray(leaf, dtype)

    made = jax.tree_util.tree_map_with_path(one, params)
    same = all(a is b for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(params), strict=True))
    return params if same else made


def module_dtypes(params: Any, adapter: ModelAdapter, plan: ResolvedPolicy) -> Mapping[str, str]:
    """Return the dtype of every module that owns parameters, by path. Empty if nothing is cast.

    Every module's inputs are cast, not only the model's. Otherwise a module that promotes (a batch normalisation with
    float32 statistics, an embedding or recurrent carry with its own dtype) would leave all later layers in float32.
    """
    if not plan.overridden and plan.compute == plan.param:
        return {}
    return {path: module_dtype(path, adapter, plan) for path in map(_owner_module, named_leaves(params))}


def module_dtype(module: str, adapter: ModelAdapter, plan: ResolvedPolicy) -> str:
    """Return the dtype of the parameters and inputs of the module at a path."""
    place = plan.at(module)
    return place.dtype if place.named else (plan.param if module in adapter.pinned else plan.compute)


def _owner_module(parameter: str) -> str:
    return parameter.rpartition("/")[0]
