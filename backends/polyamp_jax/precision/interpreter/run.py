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

from polyamp.errors import PolicyError, nearest
from polyamp.recipe.policy import Policy
from polyamp.rules.overrides import covers
from polyamp_jax import compat
from polyamp_jax.arrays import is_array, path_name
from polyamp_jax.precision.interpreter import control_flow
from polyamp_jax.precision.interpreter.products import default_precision
from polyamp_jax.precision.interpreter.recorder import Recorder
from polyamp_jax.precision.interpreter.staging import staged
from polyamp_jax.precision.interpreter.values import Traits
from polyamp_jax.precision.interpreter.walk import Interpreter, Settings, value_of
from polyamp_jax.precision.op_list import registered


def settings_for(policy: Policy, strict: bool = False) -> Settings:
    """The settings of a policy, kept so that what was rewritten once is not rewritten again."""
    return _settings(policy, strict, registered())


@functools.lru_cache(maxsize=64)
def _settings(policy: Policy, strict: bool, registered: int) -> Settings:
    return Settings(policy, control_flow.RULES, strict=strict)


def evaluate(
    settings: Settings,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    modules: Callable[[], Iterable[str]] | None = None,
    parameters: Any = None,
    recorder: Recorder | None = None,
) -> Any:
    """`function(*args, **kwargs)` with each operation in the dtype that the op lists give it.

    Args:
        settings: the policy.
        function: what to run; it is traced once.
        args: positional arguments.
        kwargs: keyword arguments.
        modules: called after the trace, the paths of the modules that it went through; None for a plain function,
            whose scopes are its paths.
        parameters: of a model, the pytree of its parameters, the first of `args`.
        recorder: hears of every operation.

    Returns:
        What the function returns, each array in the dtype of the operation that made it.

    Raises:
        TraceError: the function cannot be traced.
        PolicyError: an override of a plain function matches no scope.
    """
    args, kwargs = jax.tree.map(lambda x: jnp.asarray(x) if _numeric(x) else x, (tuple(args), dict(kwargs)))
    program = staged(function, args, kwargs)
    owners = _owners(parameters)
    if modules is None:
        _check_scopes(program.jaxpr, settings.policy, owners)
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
    out = Interpreter(settings, known, recorder, default=default_precision()).run(program.jaxpr, program.consts, values)
    return program.result([jnp.asarray(value.array()) for value in out])


def _numeric(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMmV"


def _owners(parameters: Any) -> list[str | None]:
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return [path_name(path).rpartition("/")[0] for path, leaf in leaves if is_array(leaf)]


def _check_scopes(jaxpr: compat.Jaxpr, policy: Policy, owners: Sequence[str | None]) -> None:
    """Refuse an override that matches neither a scope nor a parameter of a plain function. Raises `PolicyError`."""
    if not policy.overrides:
        return
    found = {"/".join(scopes[: n + 1]) for scopes in _scopes(jaxpr, ()) for n in range(len(scopes))}
    paths = sorted(found | {owner for owner in owners if owner})
    for glob in policy.overrides:
        if not any(covers(glob, path) for path in paths):
            close = nearest(glob, paths) or paths[:5]
            known = f"Nearest: {', '.join(map(repr, close))}." if paths else "The function has no scope at all."
            raise PolicyError(
                f"overrides: the glob {glob!r} matches no scope of the function. {known} In a plain function, "
                "overrides name jax.named_scope(...)s: open one around the operations, or pass the model itself."
            )


def _scopes(jaxpr: compat.Jaxpr, outer: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    for eqn in jaxpr.eqns:
        scopes = outer + compat.scopes_of(eqn)
        yield scopes
        for inner in compat.programs_of(eqn):
            yield from _scopes(inner, scopes)
