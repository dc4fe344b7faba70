"""`explain`: the casting report of a loss function with its model, forward and backward; nothing is computed.

The interpreter records the model's operations with their rules. The loss around it, and the backward pass, are read
from the traced programs: JAX marks the equations of a backward pass, and keeps the scopes of the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from polyamp.contract.casting_report import CastingReport
from polyamp.errors import UnsupportedError
from polyamp.recipe.optimizers import sgd
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.rules import step_checks
from polyamp_jax import compat
from polyamp_jax.arrays import matmul_precision
from polyamp_jax.models.adapter import ModelParts, module_paths
from polyamp_jax.models.libraries import library_of
from polyamp_jax.models.module_path import ModulePath
from polyamp_jax.precision import autocast
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.interpreter.interpreter import has_interpreted_operations
from polyamp_jax.precision.interpreter.tag_primitive import TAG_PRIMITIVE_NAME
from polyamp_jax.precision.interpreter.tracing import KEEP_SCOPE, scope_path
from polyamp_jax.precision.jax_only.policy_engine import PolicyEngine
from polyamp_jax.precision.op_list import MOVES, STRUCTURES
from polyamp_jax.precision.policy_module import make_policy_module
from polyamp_jax.step import forward_backward
from polyamp_jax.step.state import JaxState

_MODEL_SCOPE: Final = "polyamp_model"
"""Scope around the model's calls, which tells them from the loss around them."""
_RECOMPUTED_SCOPE: Final = "rematted_computation"
"""JAX's scope for the forward operations that a backward pass runs again."""
_NO_MODULES: Final = frozenset({_MODEL_SCOPE, _RECOMPUTED_SCOPE, KEEP_SCOPE, "checkpoint"})


def explain(backend: Any, target: Any, policy: Policy, *inputs: Any, strict: bool = False) -> CastingReport:
    """Return the casting report of `target(*inputs)` (`HasCastingReports.explain`).

    With one model among the inputs of a function, the model runs under the policy as in a step. If the result is a
    scalar, it is a loss: the backward pass is listed too. Otherwise see `autocast.explain`.

    Args:
        backend: this backend.
        target: a function or a model.
        policy: the policy.
        *inputs: its arguments.
        strict: raise for an operation without a rule.

    Raises:
        UnsupportedError: the policy does not use autocast, or with `strict`, an operation has no rule.
    """
    models = [each for each in inputs if library_of(each) is not None]
    if len(models) != 1 or library_of(target) is not None:
        return autocast.explain(target, policy, *inputs, strict=strict)
    recipe = Recipe(policy=policy, optimizer=sgd(0.0), scaler=LossScaler.off())
    state: JaxState = backend.init(models[0], recipe)
    if not has_interpreted_operations(state.setup.plan):
        raise UnsupportedError(autocast.NO_AUTOCAST_MESSAGE.format(policy=policy))
    others = [None if each is models[0] else each for each in inputs]

    def loss_of(recorder: Recorder) -> Callable[[Any, Any], Any]:
        def run(params: Any, others: Any) -> Any:
            keys = forward_backward.pass_keys(state, state.running.draws)
            adapter, plan = state.setup.adapter, state.setup.plan
            engine = _ScopedEngine(adapter, plan, params, state.running, keys, recorder=recorder, strict=strict)
            model = make_policy_module(engine)
            given = [model if each is models[0] else other for each, other in zip(inputs, others, strict=True)]
            with matmul_precision(plan):
                result = target(*given)
            return step_checks.split_loss_and_aux(result)[0] if isinstance(result, tuple) else result

        return run

    recorder = Recorder()
    forward = jax.make_jaxpr(loss_of(recorder))(state.params, others)
    parts = ModelParts(state.setup.adapter, state.params, state.running)
    modules = module_paths(parts) if state.setup.adapter.module else None
    for each in _operations(forward.jaxpr, modules):
        if not each.is_model:
            recorder.operation(each.module, each.name, *each.avals, "off")
    if [(var.aval.shape, jnp.issubdtype(var.aval.dtype, jnp.floating)) for var in forward.jaxpr.outvars] == [
        ((), True)
    ]:
        both = jax.make_jaxpr(jax.grad(loss_of(Recorder())))(state.params, others)
        for each in _operations(both.jaxpr, modules):
            if each.direction != "forward":
                rule = _backward_rule(state, each) if each.direction == "backward" else _recomputed_rule(recorder, each)
                recorder.operation(each.module, each.name, *each.avals, rule, each.direction)
    return recorder.report(policy)


class _ScopedEngine(PolicyEngine):
    """Policy engine whose calls of the model have a scope of their own."""

    def call(self, route: ModulePath, args: Any, kwargs: Any, part: Any = None) -> Any:
        with jax.named_scope(_MODEL_SCOPE):
            return super().call(route, args, kwargs, part)


class _TracedOperation(NamedTuple):
    """An equation that computes.

    Attributes:
        module: path of its module.
        name: its canonical name.
        avals: of its operands and of its results.
        direction: as in `OperationCount`.
        is_model: whether the model computes it, and not the loss around it.
    """

    module: str
    name: str
    avals: tuple[list[Any], list[Any]]
    direction: str
    is_model: bool


def _operations(
    jaxpr: compat.Jaxpr,
    modules: Container[str] | None,
    outer: tuple[str, ...] = (),
    *,
    is_backward: bool = False,
) -> Iterator[_TracedOperation]:
    """Yield the operations of a program that compute, those of nested programs included."""
    for eqn in jaxpr.eqns:
        scopes = outer + compat.named_scopes(eqn)
        backward = is_backward or "transpose" in compat.transforms(eqn)
        name, whole = compat.primitive_name(eqn), compat.linear_algebra_name(eqn)
        if whole is None and name in STRUCTURES and name != "convert_element_type":
            for inner in compat.inner_programs(eqn):
                yield from _operations(inner, modules, scopes, is_backward=backward)
        elif name not in MOVES | {"convert_element_type", TAG_PRIMITIVE_NAME}:
            direction = "forward" if not backward else "recompute" if _RECOMPUTED_SCOPE in scopes else "backward"
            path = scope_path([scope for scope in scopes if scope not in _NO_MODULES], modules)
            avals = [var.aval for var in eqn.invars], [var.aval for var in eqn.outvars]
            yield _TracedOperation(path, whole or name, avals, direction, _MODEL_SCOPE in scopes)


def _backward_rule(state: JaxState, operation: _TracedOperation) -> str:
    """Return the rule of an operation of the backward pass: its dtypes follow from the forward pass."""
    if not operation.is_model:
        return "off"
    plan, parts = state.setup.plan, operation.module.split("/")
    if any("/".join(parts[:n]) in plan.overridden for n in range(1, len(parts) + 1)):
        return "override"
    return "follow" if plan.mixes else "off"


def _recomputed_rule(recorder: Recorder, operation: _TracedOperation) -> str:
    """Return the rule of a forward operation that runs again: that of its first run."""
    return recorder.rules.get((operation.module, operation.name), "follow")
