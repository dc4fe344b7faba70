"""`evaluate`: traces a function, finds its parameters and scopes, and runs it under the interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import PolicyError
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_jax import compat
from polyamp_jax.arrays import is_array, path_name
from polyamp_jax.precision.interpreter import control_flow
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.interpreter.interpreter import Interpreter, InterpreterSettings, program_value
from polyamp_jax.precision.interpreter.matrix_products import default_precision
from polyamp_jax.precision.interpreter.program_value import ValueTraits
from polyamp_jax.precision.interpreter.tracing import KEEP_SCOPE, FunctionTrace, trace_function
from polyamp_jax.precision.op_list import registered_count


@functools.lru_cache(maxsize=64)
def _interpreter_settings(plan: ResolvedPolicy, strict: bool, registered: int) -> InterpreterSettings:
    """Return a plan's settings, cached so that inner programs are rewritten only once."""
    return InterpreterSettings(plan, control_flow.STRUCTURE_RULES, strict=strict)


def evaluate(
    plan: ResolvedPolicy,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    modules: Callable[[], Iterable[str]] | None = None,
    parameters: Any = None,
    strict: bool = False,
    recorder: Recorder | None = None,
    numbers: bool = False,
    traced: Callable[[FunctionTrace], None] | None = None,
) -> Any:
    """Run `function(*args, **kwargs)` with each operation in its op-list dtype.

    Args:
        plan: the policy, resolved for the model. For a plain function it has no paths: its scopes are its paths and
            are known once it is traced.
        function: the function to run. It is traced once.
        args: positional arguments.
        kwargs: keyword arguments.
        modules: called after the trace, returns the paths of the traced modules. None for a plain function, whose
            scopes are its paths.
        parameters: for a model, the pytree of its parameters, the first of `args`. None for a plain function.
        strict: raise for an operation without a rule.
        recorder: records every operation.
        numbers: return Python numbers and strings unchanged. If False, numbers become arrays, and strings raise.
        traced: called with the program after the trace.

    Returns:
        The function's result, with each array in the dtype of the operation that computed it.

    Raises:
        TraceError: the function cannot be traced.
        PolicyError: an override of a plain function matches no scope.
    """
    args, kwargs = jax.tree.map(lambda x: jnp.asarray(x) if _is_numeric(x) else x, (tuple(args), dict(kwargs)))
    program = trace_function(function, args, kwargs, opaque=_is_plain if numbers else None)
    if traced is not None:
        traced(program)
    owners = _leaf_owners(parameters)
    if parameters is None and plan.policy.overrides:
        plan = _scope_policy(plan.policy, frozenset(_scope_paths(program.jaxpr, ())))
    values = [
        program_value(array, var.aval, ValueTraits(leaf=True, rank=jnp.ndim(array), owner=owner))
        for array, var, owner in zip(
            program.arrays,
            program.jaxpr.invars,
            owners + [None] * (len(program.arrays) - len(owners)),
            strict=True,
        )
    ]
    known = None if modules is None else frozenset(modules())
    settings = _interpreter_settings(plan, strict, registered_count())
    out = Interpreter(settings, known, recorder, default=default_precision()).run(program.jaxpr, program.consts, values)
    return program.result([jnp.asarray(value.array()) for value in out])


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex | str)


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMmV"


def _leaf_owners(parameters: Any) -> list[str | None]:
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return [path_name(path).rpartition("/")[0] for path, leaf in leaves if is_array(leaf)]


@functools.lru_cache(maxsize=256)
def _scope_policy(policy: Policy, paths: frozenset[str]) -> ResolvedPolicy:
    """Return the plan of a plain function with these scopes. It is cached.

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


def _scope_paths(jaxpr: compat.Jaxpr, outer: tuple[str, ...]) -> Iterable[str]:
    """Yield a program's scopes as paths, each with its parents. Models do not need this: `init` knows their modules."""
    for eqn in jaxpr.eqns:
        scopes = outer + tuple(scope for scope in compat.named_scopes(eqn) if scope != KEEP_SCOPE)
        yield from ("/".join(scopes[: n + 1]) for n in range(len(scopes)))
        for inner in compat.inner_programs(eqn):
            yield from _scope_paths(inner, scopes)
