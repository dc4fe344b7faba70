"""Autocast regions that `loss_fn` opens. The innermost region around a call determines its policy (S3)."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar

from polyamp.context_values import temporary_value
from polyamp.errors import PolicyError
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy

_open_regions: ContextVar[tuple[Policy | None, ...]] = ContextVar("polyamp_opened", default=())


def open_region(policy: Policy | None) -> contextlib.AbstractContextManager[None]:
    """Run a step's models under this policy inside the context. None: in the dtypes that the program declares."""
    return temporary_value(_open_regions, (*_open_regions.get(), policy))


def open_regions() -> tuple[Policy | None, ...]:
    """Return the policies of the open regions, innermost last."""
    return _open_regions.get()


def region_plan(policy: Policy | None, outer: ResolvedPolicy, paths: frozenset[str]) -> ResolvedPolicy:
    """Return the plan of a model under a region's policy.

    Args:
        policy: the region's policy.
        outer: the model's own plan.
        paths: the model's modules. Overrides of a function may also name its scopes, so one that matches no module is
            ignored here.
    """
    if policy is None:
        return Policy(outer.param).plan(paths, backend="jax")
    try:
        return policy.plan(paths, backend="jax")
    except PolicyError:
        return policy.replace(overrides=_matching_overrides(policy, paths)).plan(paths, backend="jax")


def _matching_overrides(policy: Policy, paths: frozenset[str]) -> dict[str, str]:
    found = {}
    for glob, dtype in policy.overrides.items():
        with contextlib.suppress(PolicyError):
            policy.replace(overrides={glob: dtype}).plan(paths, backend="jax")
            found[glob] = dtype
    return found
