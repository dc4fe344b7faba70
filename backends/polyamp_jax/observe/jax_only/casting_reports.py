"""`explain`: the casting report of a loss function with its model, forward and backward; nothing is computed.

The interpreter records the model's operations with their rules. The loss around it, and the backward pass, are read
from the traced programs: JAX marks the equations of a backward pass, and keeps the scopes of the modules.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import jax

from polyamp.contract.casting_report import CastingReport, OperationCount
from polyamp.errors import UnsupportedError, describe_value
from polyamp.recipe.policy import Policy
from polyamp.rules import step_checks
from polyamp_jax import compat
from polyamp_jax.observe.jax_only.loss_trace import LossTrace, is_loss
from polyamp_jax.observe.jax_only.optimized_program import optimized_operations
from polyamp_jax.observe.op_dtypes import NO_MODULES, RECOMPUTED_SCOPE, TracedOperation, traced_operations
from polyamp_jax.precision import autocast
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.interpreter.tracing import scope_path
from polyamp_jax.precision.op_list import MOVES, STRUCTURES, operation_family
from polyamp_jax.precision.policy_module import LAYERS_CAST_ERROR, follows_layer_policy

_COMPILED_NOTE: Final = (
    "Read from the program that XLA optimized for {platform}. What it removed, or made without a name of JAX's, has no "
    "rows. Eager code compiles each operation by itself, and may be rewritten in the same way."
)


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
    if any(map(follows_layer_policy, (target, *inputs))):  # loaded with Keras alone
        from polyamp_jax.observe.jax_only.layer_casting_reports import explain_layers

        return explain_layers(backend, target, policy, inputs, options, strict=strict)
    return record_operations(backend, target, policy, inputs, strict=strict, **options).report(policy)


def record_operations(
    backend: Any, target: Any, policy: Policy, inputs: tuple[Any, ...], *, strict: bool = False, **options: Any
) -> Recorder:
    """Return the record of the operations of `target(*inputs)`; see `explain`."""
    for each in (target, *inputs):
        if follows_layer_policy(each):
            raise UnsupportedError(LAYERS_CAST_ERROR.format(call=f"{type(each).__name__} for its products in 8 bits"))
    if not is_loss(target, inputs):
        step_checks.check_options(options, (), function="explain of a function or a model alone", backend=backend.name)
        return autocast.record_operations(target, policy, *inputs, strict=strict)
    trace = LossTrace(backend, target, policy, inputs, options, strict=strict)
    recorder = Recorder()
    forward = trace.program(recorder)
    for each in traced_operations(forward.jaxpr, trace.modules):
        if not each.is_model:
            recorder.operation(each.module, each.name, *each.avals, "off")
    if trace.is_loss(forward):
        for each in traced_operations(trace.gradient_program().jaxpr, trace.modules):
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
    if not is_loss(target, inputs):
        raise UnsupportedError(
            "explain(compiled=True) in JAX takes a loss function and its model: polyamp.explain(loss_fn, policy, "
            f"model, batch, compiled=True). Received: {describe_value(target)} and {len(inputs)} inputs that are not "
            "one model and its data."
        )
    traced = explain(backend, target, policy, *inputs, strict=strict, **options).operations
    rules = {(row.module, row.name, row.direction): row.rule for row in traced}
    trace = LossTrace(backend, target, policy, inputs, options, strict=strict)
    has_loss = trace.is_loss(trace.program(Recorder()))
    run = trace.function(Recorder())
    text = jax.jit(jax.value_and_grad(run) if has_loss else run).lower(*trace.arguments).compile().as_text()
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for each in optimized_operations(text or ""):
        name = compat.canonical_primitive_name(each.name)
        module = scope_path([scope for scope in each.scopes if scope not in NO_MODULES], trace.modules)
        again = "recompute" if RECOMPUTED_SCOPE in each.scopes else "backward"
        if name not in MOVES | STRUCTURES:
            counts[module, name, each.dtype, again if each.is_backward else "forward"] += 1
    rows = [
        OperationCount(module, name, dtype, rules.get((module, name, direction), "follow"), count, direction)
        for (module, name, dtype, direction), count in counts.items()
    ]
    families = {row.name: operation_family(row.name, row.rule) for row in rows}
    return CastingReport(policy, rows, (), families, [_COMPILED_NOTE.format(platform=jax.default_backend())])


def _first_rule(recorder: Recorder, operation: TracedOperation) -> str:
    """Return the rule of a forward operation that runs again: that of its first run."""
    return recorder.rules.get((operation.module, operation.name), "follow")
