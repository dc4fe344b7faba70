"""Policies that `loss_fn` opens by itself: of those around a call the innermost decides (S3)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from polyamp.errors import PolicyError
from polyamp.recipe.policy import Policy
from polyamp.rules.plan import Plan

_opened: ContextVar[tuple[Policy | None, ...]] = ContextVar("polyamp_opened", default=())


@contextlib.contextmanager
def region(policy: Policy | None) -> Iterator[None]:
    """A block in which models of a step run under this policy; None: in the dtypes that the program declares."""
    token = _opened.set((*_opened.get(), policy))
    try:
        yield
    finally:
        _opened.reset(token)


def regions() -> tuple[Policy | None, ...]:
    """Those that are open, the innermost last."""
    return _opened.get()


def plan_of(policy: Policy | None, outer: Plan, paths: frozenset[str]) -> Plan:
    """The plan of a model under a region's policy.

    Args:
        policy: the region's.
        outer: the model's own plan.
        paths: the model's modules. Overrides of a function name its scopes too, so that one which matches no module is
            left to these.
    """
    if policy is None:
        return Policy(outer.param).plan(paths, backend="jax")
    try:
        return policy.plan(paths, backend="jax")
    except PolicyError:
        return policy.replace(overrides=_matching(policy, paths)).plan(paths, backend="jax")


def _matching(policy: Policy, paths: frozenset[str]) -> dict[str, str]:
    found = {}
    for glob, dtype in policy.overrides.items():
        with contextlib.suppress(PolicyError):
            policy.replace(overrides={glob: dtype}).plan(paths, backend="jax")
            found[glob] = dtype
    return found
