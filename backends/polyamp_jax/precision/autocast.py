"""Autocast for JAX functions and models, `keep_precision`, and the casting report."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import jax

from polyamp.contract.casting_report import CastingReport
from polyamp.errors import ModelError, PolicyError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp_jax.arrays import cast_arguments, matmul_precision
from polyamp_jax.models.libraries import ACCEPTED_MODELS, is_model
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.interpreter.evaluation import evaluate
from polyamp_jax.precision.interpreter.interpreter import has_interpreted_operations
from polyamp_jax.precision.interpreter.tracing import KEEP_SCOPE, innermost_policy_scope
from polyamp_jax.precision.jax_only.autocast_regions import open_region
from polyamp_jax.precision.op_list import check_policy
from polyamp_jax.precision.policy_module import (
    PolicyModule,
    autocast_model,
    engine_and_path,
    follows_layer_policy,
    is_policy_module,
)

NO_AUTOCAST_MESSAGE: Final = (
    "explain reports what autocast does, and this policy does not use it: it has mode='cast', or computes in the dtype "
    "that parameters have. Received: {policy}."
)


def keep_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exempt a function from autocast: its operations run in the dtypes that the program declares.

    Its arguments are cast to the declared dtypes (float32 by default), and its matrix products run in them. The same
    holds for derivatives. Without autocast the function is unchanged.

    Args:
        function: any function of arrays; also a decorator.

    Example:
        >>> import jax.numpy as jnp, polyamp
        >>> policy = polyamp.Policy(compute="bfloat16", output="float32")
        >>> square = lambda x: x @ x
        >>> x = jnp.full((2, 2), 1.001)
        >>> float(policy.autocast(square)(x)[0, 0]), round(float(policy.autocast(keep_precision(square))(x)[0, 0]), 4)
        (2.0, 2.004)
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(KEEP_SCOPE), open_region(None):
            return function(*args, **kwargs)

    return call


def autocast(target: Any, policy: Policy | str, *, strict: bool = False) -> Callable[..., Any]:
    """Return a callable that runs a function or a model under the policy.

    Args:
        target: a function of arrays (any number of pytrees, nested calls of `jax.jit`, `jax.grad`, `jax.lax.scan` and
            so on inside it), or a model that `polyamp.init` accepts.
        policy: a policy or its spelling. In mode "autocast", the default, the op lists set each operation's dtype
            (`polyamp_jax.precision.op_list`). In mode "cast" floating arguments are cast to `compute`.
        strict: raise for an operation in no op list, instead of running it in the dtypes that the program declares.

    Returns:
        A callable with the target's arguments. Its floating results have the policy's output dtype. The function is
        traced at every call, as under `jax.jit`. Wrap the result in `jax.jit` to trace it once.

    Raises:
        ModelError: the target is neither a function nor a model.
        TraceError: when called: the target branches in Python on an array's value, or has side effects.
        PolicyError: an override matches nothing, or `op_rules` names an operation that does not exist.
        UnsupportedError: with `strict`, an operation without a rule.

    Example:
        >>> import jax, jax.numpy as jnp, polyamp
        >>> run = autocast(lambda w, x: jnp.exp(x @ w), polyamp.Policy(compute="float16", output="float32"))
        >>> jaxpr = jax.make_jaxpr(run)(jnp.ones((2, 2)), jnp.ones((2, 2)))
        >>> [(e.primitive.name, str(e.outvars[0].aval.dtype)) for e in jaxpr.eqns[2:]]
        [('dot_general', 'float16'), ('convert_element_type', 'float32'), ('exp', 'float32')]
    """
    return _wrap_target(target, Policy.of(policy), strict=strict, recorder=None)


def explain(target: Any, policy: Policy | str, *inputs: Any, strict: bool = False) -> CastingReport:
    """Return the casting report of `target(*inputs)` without running it. Inputs may be `jax.ShapeDtypeStruct`s."""
    policy = Policy.of(policy)
    return record_operations(target, policy, *inputs, strict=strict).report(policy)


def record_operations(target: Any, policy: Policy, *inputs: Any, strict: bool = False) -> Recorder:
    """Return the record of the operations of `target(*inputs)`, which is not run."""
    recorder = Recorder()
    if not _needs_interpreter(policy):
        raise UnsupportedError(NO_AUTOCAST_MESSAGE.format(policy=policy))
    # abstract evaluation: shapes only, nothing is computed
    jax.eval_shape(_wrap_target(target, policy, strict=strict, recorder=recorder), *inputs)
    return recorder


def _wrap_target(target: Any, policy: Policy, *, strict: bool, recorder: Recorder | None) -> Callable[..., Any]:
    if not follows_layer_policy(target):
        check_policy(policy)
    if isinstance(target, PolicyModule):  # belongs to a step with another policy
        return target._polyamp_with_policy(policy)
    if is_policy_module(target):
        engine_and_path(target)[0].resolve_policy(policy)  # raises for overrides that match nothing
        return NestedPolicyModule(target, policy)
    if is_model(target):
        bound: Callable[..., Any] = autocast_model(target, policy, strict=strict, recorder=recorder)
        return bound
    if not callable(target):
        raise ModelError(
            f"autocast takes a function of arrays, or a model: {ACCEPTED_MODELS}. Received: {type(target).__name__}."
        )
    if policy.float8 is not None:
        raise UnsupportedError(
            "float8 covers products with the parameters of a model (S36), and a plain function has none. Pass the "
            "model to policy.autocast, or use Policy('mixed_bfloat16') here."
        )
    plan, interpreted = policy.plan(), _needs_interpreter(policy)
    if not interpreted and policy.overrides:
        raise PolicyError(
            "in mode='cast' overrides name modules, and a plain function has none. Pass the model to "
            f"policy.autocast, or leave the mode out. Received: overrides={dict(policy.overrides)}."
        )
    run = _wrap_function(target, policy)

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        with matmul_precision(plan), innermost_policy_scope():
            if not interpreted or not plan.root.mixes:
                args, kwargs = cast_arguments((args, kwargs), plan.compute, float64=plan.float64)
            if interpreted:
                out = evaluate(plan, run, args, kwargs, strict=strict, recorder=recorder)
            else:
                out = run(*args, **kwargs)
            return cast_arguments(out, plan.output, float64=plan.float64)

    return call


class NestedPolicyModule:
    """A step's proxy of an nnx or equinox module, or an attribute of it, under another policy (S3)."""

    def __init__(self, target: Any, policy: Policy) -> None:
        self._target = target
        self._policy = policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the target's output under the policy."""
        with open_region(self._policy):
            return self._target(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._under(getattr(self._target, name))

    def __getitem__(self, key: Any) -> Any:
        return self._under(self._target[key])

    def _under(self, found: Any) -> Any:
        return NestedPolicyModule(found, self._policy) if callable(found) or is_policy_module(found) else found


def _wrap_function(function: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Wrap a function so that its calls of a step's model run under the policy (S3)."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with open_region(policy):
            return function(*args, **kwargs)

    return call


def _needs_interpreter(policy: Policy) -> bool:
    """Return whether the policy requires the interpreter for a function. Overrides are resolved at trace time."""
    plan = policy.plan()
    return has_interpreted_operations(plan) or (bool(policy.overrides) and not plan.cast)
