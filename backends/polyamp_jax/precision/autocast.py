"""Autocast for JAX programs: functions and models under a policy, `keep_precision`, and the casting report.

Called by `backend`, and by users as `polyamp_jax.autocast` and `polyamp_jax.keep_precision`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from polyamp.contract.report import CastingReport
from polyamp.errors import ModelError, PolicyError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp_jax.arrays import cast_arguments, matmul_precision
from polyamp_jax.models.adapt import ACCEPTED, is_model
from polyamp_jax.precision.cast_mode import cast_function
from polyamp_jax.precision.interpreter.recorder import Recorder
from polyamp_jax.precision.interpreter.run import evaluate
from polyamp_jax.precision.interpreter.staging import KEEP, settled
from polyamp_jax.precision.interpreter.walk import interprets
from polyamp_jax.precision.op_list import check_policy
from polyamp_jax.precision.reading import BoundModel, autocast_model, engine_of, is_bound
from polyamp_jax.precision.regions import region


def keep_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one whose operations run in the dtypes that the program declares, also under autocast.

    What it is given is cast to what it was written for (float32, where nothing else is said), and its matrix products
    stay there; derivatives follow. Without autocast it changes nothing.

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
        with jax.named_scope(KEEP), region(None):
            return function(*args, **kwargs)

    return call


def autocast(target: Any, policy: Policy | str, *, strict: bool = False) -> Callable[..., Any]:
    """A function or a model as a callable that runs under the policy.

    Args:
        target: a function of arrays (any number of pytrees, nested calls of `jax.jit`, `jax.grad`, `jax.lax.scan` and
            so on inside it), or a model as `polyamp.init` takes it.
        policy: the policy, or its spelling. In mode "autocast", the default, each operation picks its dtype from the op
            lists (`polyamp_jax.precision.op_list`); in mode "cast" floating arguments are cast to `compute`.
        strict: raise at an operation that no op list names, in place of leaving it in the dtypes that the program
            declares.

    Returns:
        A callable with the target's arguments. Its floating results have the policy's output dtype. The function is
        traced at every call, as under `jax.jit`; wrap the result in `jax.jit` to do that once.

    Raises:
        ModelError: the target is neither a function nor a model.
        TraceError: when called: the target decides in Python on an array's value, or has side effects.
        PolicyError: an override matches nothing, or `op_rules` names an operation that does not exist.
        UnsupportedError: with `strict`, an operation without a rule.

    Example:
        >>> import jax, jax.numpy as jnp, polyamp
        >>> run = autocast(lambda w, x: jnp.exp(x @ w), polyamp.Policy(compute="float16", output="float32"))
        >>> jaxpr = jax.make_jaxpr(run)(jnp.ones((2, 2)), jnp.ones((2, 2)))
        >>> [(e.primitive.name, str(e.outvars[0].aval.dtype)) for e in jaxpr.eqns[2:]]
        [('dot_general', 'float16'), ('convert_element_type', 'float32'), ('exp', 'float32')]
    """
    return _under(target, Policy.of(policy), strict=strict, recorder=None)


def explain(target: Any, policy: Policy | str, *inputs: Any, strict: bool = False) -> CastingReport:
    """The casting report of `target(*inputs)`; it is traced, never run. Inputs may be `jax.ShapeDtypeStruct`s."""
    recorder = Recorder()
    policy = Policy.of(policy)
    if not _acts(policy):
        raise UnsupportedError(
            "explain reports what autocast does, and this policy does not use it: it has mode='cast', or computes in "
            f"the dtype that parameters have. Received: {policy}."
        )
    # an abstract call: shapes go in, nothing is computed
    jax.eval_shape(_under(target, policy, strict=strict, recorder=recorder), *inputs)
    return recorder.report(policy)


def _under(target: Any, policy: Policy, *, strict: bool, recorder: Recorder | None) -> Callable[..., Any]:
    check_policy(policy)
    if isinstance(target, BoundModel):  # of a step, whose policy is another one
        return target._polyamp_under(policy)
    if is_bound(target):
        engine_of(target)[0].under(policy)  # which refuses overrides that match nothing
        return ModuleUnderPolicy(target, policy)
    if is_model(target):
        bound: Callable[..., Any] = autocast_model(target, policy, strict=strict, recorder=recorder)
        return bound
    if not callable(target):
        raise ModelError(
            f"autocast takes a function of arrays, or a model: {ACCEPTED}. Received: {type(target).__name__}."
        )
    plan = policy.plan()
    if not _acts(policy):
        if policy.overrides:
            raise PolicyError(
                "in mode='cast' overrides name modules, and a plain function has none. Pass the model to "
                f"policy.autocast, or leave the mode out. Received: overrides={dict(policy.overrides)}."
            )
        return cast_function(_inside(target, policy), plan)

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        with matmul_precision(plan), settled():
            if not plan.root.mixes:
                args, kwargs = cast_arguments((args, kwargs), plan.compute, float64=plan.float64)
            out = evaluate(plan, _inside(target, policy), args, kwargs, strict=strict, recorder=recorder)
            return cast_arguments(out, plan.output, float64=plan.float64)

    return call


class ModuleUnderPolicy:
    """A bound nnx or equinox module of a step, or what is in it, under another policy (S3)."""

    def __init__(self, target: Any, policy: Policy) -> None:
        self._target = target
        self._policy = policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the target gives under the policy."""
        with region(self._policy):
            return self._target(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._under(getattr(self._target, name))

    def __getitem__(self, key: Any) -> Any:
        return self._under(self._target[key])

    def _under(self, found: Any) -> Any:
        return ModuleUnderPolicy(found, self._policy) if callable(found) or is_bound(found) else found


def _inside(function: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """A function whose calls of a step's model run under the policy (S3)."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with region(policy):
            return function(*args, **kwargs)

    return call


def _acts(policy: Policy) -> bool:
    """Whether the interpreter runs a function under the policy; its overrides are resolved when it is traced."""
    plan = policy.plan()
    return interprets(plan) or (bool(policy.overrides) and not plan.cast)
