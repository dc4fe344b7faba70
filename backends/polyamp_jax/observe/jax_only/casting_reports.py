"""`explain`: the casting report of a loss function with its model, forward and backward; nothing is computed.

The interpreter records the model's operations with their rules. The loss around it, and the backward pass, are read
from the traced programs: JAX marks the equations of a backward pass, and keeps the scopes of the modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from polyamp.contract.casting_report import CastingReport, OperationCount
from polyamp.errors import UnsupportedError, describe_value
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
from polyamp_jax.observe.jax_only.optimized_program import optimized_operations
from polyamp_jax.precision import autocast
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.interpreter.interpreter import has_interpreted_operations
from polyamp_jax.precision.interpreter.tag_primitive import TAG_PRIMITIVE_NAME
from polyamp_jax.precision.interpreter.tracing import KEEP_SCOPE, scope_path
from polyamp_jax.precision.jax_only.policy_engine import PolicyEngine
from polyamp_jax.precision.op_list import MOVES, STRUCTURES, operation_family
from polyamp_jax.precision.policy_module import LAYERS_CAST_ERROR, follows_layer_policy, make_policy_module
from polyamp_jax.step import forward_backward
from polyamp_jax.step.state import JaxState

_MODEL_SCOPE: Final = "polyamp_model"
"""Scope around the model's calls, which tells them from the loss around them."""
_COMPILED_NOTE: Final = (
    "Read from the program that XLA optimized for {platform}. What it removed, or made without a name of JAX's, has no "
    "rows. Eager code compiles each operation by itself, and may be rewritten in the same way."
)
_RECOMPUTED_SCOPE: Final = "rematted_computation"
"""JAX's scope for the forward operations that a backward pass runs again."""
_NO_MODULES: Final = frozenset({_MODEL_SCOPE, _RECOMPUTED_SCOPE, KEEP_SCOPE, "checkpoint"})


def explain(
    backend: Any, target: Any, policy: Policy, *inputs: Any, strict: bool = False, **options: Any
) -> CastingReport:
    """Return the casting report of `target(*inputs)` (`HasCastingReports.explain`).

    With one model among the inputs of a function, the model runs under the policy as in a step. If the result is a
    scalar, it is a loss: the backward pass is listed too. Otherwise see `autocast.explain`.

    Args:
        backend: this backend.
        target: a function or a model.
        policy: the policy.
        *inputs: its arguments.
        strict: raise for an operation without a rule.
        **options: of `init`.

    Raises:
        UnsupportedError: the policy does not use autocast, or options without one model among the inputs of a
            function; or with `strict`, an operation has no rule.
    """
    return record_operations(backend, target, policy, inputs, strict=strict, **options).report(policy)


def record_operations(
    backend: Any, target: Any, policy: Policy, inputs: tuple[Any, ...], *, strict: bool = False, **options: Any
) -> Recorder:
    """Return the record of the operations of `target(*inputs)`; see `explain`."""
    for each in inputs:
        if follows_layer_policy(each):
            raise UnsupportedError(LAYERS_CAST_ERROR.format(kind=type(each).__name__))
    if not _is_loss(target, inputs):
        step_checks.check_options(options, (), function="explain of a function or a model alone", backend=backend.name)
        return autocast.record_operations(target, policy, *inputs, strict=strict)
    trace = _LossTrace(backend, target, policy, inputs, options, strict=strict)
    recorder = Recorder()
    forward = trace.program(recorder)
    for each in _operations(forward.jaxpr, trace.modules):
        if not each.is_model:
            recorder.operation(each.module, each.name, *each.avals, "off")
    if trace.is_loss(forward):
        for each in _operations(trace.program(Recorder(), jax.grad).jaxpr, trace.modules):
            if each.direction != "forward":
                rule = trace.rule(each) if each.direction == "backward" else _first_rule(recorder, each)
                recorder.operation(each.module, each.name, *each.avals, rule, each.direction)
    return recorder


def explain_compiled(
    backend: Any, target: Any, policy: Policy, *inputs: Any, strict: bool = False, **options: Any
) -> CastingReport:
    """Return what XLA makes of a loss with its model (`HasCompiledCastingReports.explain_compiled`).

    It is compiled for the default device. A row has the rule of the operation in the program; `casts` is empty.

    Raises:
        UnsupportedError: anything but a function with one model among its inputs; see `explain`.
    """
    if not _is_loss(target, inputs):
        raise UnsupportedError(
            "explain(compiled=True) in JAX takes a loss function and its model: polyamp.explain(loss_fn, policy, "
            f"model, batch, compiled=True). Received: {describe_value(target)} and {len(inputs)} inputs that are not "
            "one model and its data."
        )
    traced = explain(backend, target, policy, *inputs, strict=strict, **options).operations
    rules = {(row.module, row.name, row.direction): row.rule for row in traced}
    trace = _LossTrace(backend, target, policy, inputs, options, strict=strict)
    is_loss = trace.is_loss(trace.program(Recorder()))
    run = trace.function(Recorder())
    text = jax.jit(jax.value_and_grad(run) if is_loss else run).lower(*trace.arguments).compile().as_text()
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for each in optimized_operations(text or ""):
        name = compat.canonical_primitive_name(each.name)
        module = scope_path([scope for scope in each.scopes if scope not in _NO_MODULES], trace.modules)
        again = "recompute" if _RECOMPUTED_SCOPE in each.scopes else "backward"
        if name not in MOVES | STRUCTURES:
            counts[module, name, each.dtype, again if each.is_backward else "forward"] += 1
    rows = [
        OperationCount(module, name, dtype, rules.get((module, name, direction), "follow"), count, direction)
        for (module, name, dtype, direction), count in counts.items()
    ]
    families = {row.name: operation_family(row.name, row.rule) for row in rows}
    return CastingReport(policy, rows, (), families, [_COMPILED_NOTE.format(platform=jax.default_backend())])


def _is_loss(target: Any, inputs: tuple[Any, ...]) -> bool:
    return library_of(target) is None and sum(library_of(each) is not None for each in inputs) == 1


class _LossTrace:
    """Programs of a function of one model, which runs under a policy as in a step.

    Args:
        backend: this backend.
        target: the function.
        policy: the policy.
        inputs: its arguments, the model among them.
        options: of `init`.
        strict: raise for an operation without a rule.

    Attributes:
        modules: paths of the model's modules; None for a function.
        arguments: parameters and other inputs, of the functions that are traced.

    Raises:
        UnsupportedError: the policy does not use autocast.
    """

    def __init__(
        self,
        backend: Any,
        target: Any,
        policy: Policy,
        inputs: tuple[Any, ...],
        options: dict[str, Any],
        *,
        strict: bool,
    ) -> None:
        self._target, self._strict = target, strict
        self._places = [library_of(each) is not None for each in inputs]
        model = inputs[self._places.index(True)]
        recipe = Recipe(policy=policy, optimizer=sgd(0.0), scaler=LossScaler.off())
        self._state: JaxState = backend.init(model, recipe, **options)
        if not has_interpreted_operations(self._state.setup.plan):
            raise UnsupportedError(autocast.NO_AUTOCAST_MESSAGE.format(policy=policy))
        others = [None if is_model else each for each, is_model in zip(inputs, self._places, strict=True)]
        self.arguments = (self._state.params, others)
        parts = ModelParts(self._state.setup.adapter, self._state.params, self._state.running)
        self.modules = module_paths(parts) if self._state.setup.adapter.module else None

    def function(self, recorder: Recorder) -> Callable[[Any, Any], Any]:
        """Return the function of `arguments` that runs the pass, and whose model's operations are recorded."""
        state = self._state

        def run(params: Any, others: Any) -> Any:
            keys = forward_backward.pass_keys(state, state.running.draws)
            adapter, plan = state.setup.adapter, state.setup.plan
            engine = _ScopedEngine(adapter, plan, params, state.running, keys, recorder=recorder, strict=self._strict)
            model = make_policy_module(engine)
            with matmul_precision(plan):
                result = self._target(
                    *(model if is_model else each for each, is_model in zip(others, self._places, strict=True))
                )
            return step_checks.split_loss_and_aux(result)[0] if isinstance(result, tuple) else result

        return run

    def program(self, recorder: Recorder, transform: Callable[..., Any] = lambda run: run) -> compat.ClosedJaxpr:
        """Return the traced program of the pass, or of its transformation."""
        return jax.make_jaxpr(transform(self.function(recorder)))(*self.arguments)

    def is_loss(self, program: compat.ClosedJaxpr) -> bool:
        """Return whether the result of a program of the pass is a loss."""
        kinds = [(var.aval.shape, jnp.issubdtype(var.aval.dtype, jnp.floating)) for var in program.jaxpr.outvars]
        return kinds == [((), True)]

    def rule(self, operation: _TracedOperation) -> str:
        """Return the rule of an operation of the backward pass: its dtypes follow from the forward pass."""
        if not operation.is_model:
            return "off"
        plan, parts = self._state.setup.plan, operation.module.split("/")
        if any("/".join(parts[:n]) in plan.overridden for n in range(1, len(parts) + 1)):
            return "override"
        return "follow" if plan.mixes else "off"


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


def _first_rule(recorder: Recorder, operation: _TracedOperation) -> str:
    """Return the rule of a forward operation that runs again: that of its first run."""
    return recorder.rules.get((operation.module, operation.name), "follow")
