"""Runs a function under the interpreter: traces it, tells parameters and scopes, and evaluates the program.

Called by `bound` for models and by `autocast` for plain functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import PolicyError
from polyamp.recipe.policy import Policy
from polyamp.rules.plan import Plan
from polyamp_jax import compat
from polyamp_jax.arrays import is_array, path_name
from polyamp_jax.precision.interpreter import control_flow
from polyamp_jax.precision.interpreter.products import default_precision
from polyamp_jax.precision.interpreter.recorder import Recorder
from polyamp_jax.precision.interpreter.staging import Staged, staged
from polyamp_jax.precision.interpreter.values import Traits
from polyamp_jax.precision.interpreter.walk import Interpreter, Settings, value_of
from polyamp_jax.precision.op_list import registered


@functools.lru_cache(maxsize=64)
def _settings(plan: Plan, strict: bool, registered: int) -> Settings:
    """The settings of a plan, kept so that what was rewritten once is not rewritten again."""
    return Settings(plan, control_flow.RULES, strict=strict)


def evaluate(
    plan: Plan,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    modules: Callable[[], Iterable[str]] | None = None,
    parameters: Any = None,
    strict: bool = False,
    recorder: Recorder | None = None,
    numbers: bool = False,
    traced: Callable[[Staged], None] | None = None,
) -> Any:
    """`function(*args, **kwargs)` with each operation in the dtype that the op lists give it.

    Args:
        plan: the policy, resolved for the model; of a plain function without paths, since its scopes are its paths and
            are known once it is traced.
        function: what to run; it is traced once.
        args: positional arguments.
        kwargs: keyword arguments.
        modules: called after the trace, the paths of the modules that it went through; None for a plain function,
            whose scopes are its paths.
        parameters: of a model, the pytree of its parameters, the first of `args`; None for a plain function.
        strict: an operation without a rule is an error.
        recorder: hears of every operation.
        numbers: Python numbers and strings that the function returns are known while tracing and stay what they are;
            else numbers become arrays, and strings are refused.
        traced: called after the trace, with the program.

    Returns:
        What the function returns, each array in the dtype of the operation that made it.

    Raises:
        TraceError: the function cannot be traced.
        PolicyError: an override of a plain function matches no scope.
    """
    args, kwargs = jax.tree.map(lambda x: jnp.asarray(x) if _numeric(x) else x, (tuple(args), dict(kwargs)))
    program = staged(function, args, kwargs, opaque=_plain if numbers else None)
    if traced is not None:
        traced(program)
    owners = _owners(parameters)
    if parameters is None and plan.policy.overrides:
        plan = _over_scopes(plan.policy, frozenset(_paths(program.jaxpr, ())))
    values = [
        value_of(array, var.aval, Traits(leaf=True, rank=jnp.ndim(array), owner=owner))
        for array, var, owner in zip(
            program.arrays,
            program.jaxpr.invars,
            owners + [None] * (len(program.arrays) - len(owners)),
            strict=True,
        )
    ]
    known = None if modules is None else frozenset(modules())
    settings = _settings(plan, strict, registered())
    out = Interpreter(settings, known, recorder, default=default_precision()).run(program.jaxpr, program.consts, values)
    return program.result([jnp.asarray(value.array()) for value in out])


def _plain(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex | str)


def _numeric(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMmV"


def _owners(parameters: Any) -> list[str | None]:
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return [path_name(path).rpartition("/")[0] for path, leaf in leaves if is_array(leaf)]


@functools.lru_cache(maxsize=256)
def _over_scopes(policy: Policy, paths: frozenset[str]) -> Plan:
    """The plan of a plain function with these scopes, made once for them.

    Raises:
        PolicyError: an override matches none of them.
    """
    advice = (
        "In a plain function, overrides name jax.named_scope(...)s: open one around the operations, or pass the model "
        "itself."
    )
    if not paths:
        raise PolicyError(f"overrides: the function has no scope at all. {advice} Received: {dict(policy.overrides)}.")
    try:
        return policy.plan({"", *paths}, backend="jax")
    except PolicyError as error:
        raise PolicyError(f"{error} {advice}") from None


def _paths(jaxpr: compat.Jaxpr, outer: tuple[str, ...]) -> Iterable[str]:
    """The scopes of a program as paths, each with those around it; a model's `init` knows its modules without."""
    for eqn in jaxpr.eqns:
        scopes = outer + compat.scopes_of(eqn)
        yield from ("/".join(scopes[: n + 1]) for n in range(len(scopes)))
        for inner in compat.programs_of(eqn):
            yield from _paths(inner, scopes)
