"""`explain` of models whose own layers follow the policy, those of Keras: the dtype of each operation of one pass, by
layer, with the rule behind it. Nothing is computed, and the model stays as it is."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from polyamp.contract.casting_report import CastCount, CastingReport, OperationCount
from polyamp.errors import UnsupportedError
from polyamp.float_formats import FLOAT_DTYPES
from polyamp.recipe.policy import Policy
from polyamp_jax.observe.jax_only.loss_trace import LossTrace
from polyamp_jax.observe.op_dtypes import TracedOperation, traced_operations
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.op_list import operation_family, rules_for
from polyamp_jax.precision.policy_module import LAYERS_CAST_ERROR
from polyamp_keras.models.layers import list_layers
from polyamp_keras.observe.layer_products import read_pass
from polyamp_keras.observe.operation_rules import operation_rule
from polyamp_keras.porting.inventory import read_keras_model
from polyamp_keras.precision.layer_dtypes import LayerDtype, choose_layer_dtypes
from polyamp_keras.precision.policy_application import without_policies


class _OperationKind(NamedTuple):
    """A kind of operation, as in `OperationCount`; `is_model`: whether the model computes it, and not the loss."""

    module: str
    name: str
    dtype: str
    direction: str
    is_model: bool


def explain_layers(
    backend: Any, target: Any, policy: Policy, inputs: tuple[Any, ...], options: dict[str, Any], *, strict: bool
) -> CastingReport:
    """Return the casting report of `loss_fn(model, batch)`, or of `model(*inputs)` without a backward pass.

    Args:
        backend: this backend.
        target: the loss function, or a model or layer.
        policy: the policy.
        inputs: the model and the batch; or the arguments of the model.
        options: of `init`.
        strict: raise for an operation without a rule, which is refused here.

    Raises:
        UnsupportedError: other inputs, or `strict`.
    """
    given = read_pass("explain", target, inputs)
    model, alone = given.model, given.loss_fn is None
    if strict:
        raise UnsupportedError(LAYERS_CAST_ERROR.format(call=f"{type(model).__name__} with strict=True"))
    target, inputs = (_call_model, (model, *given.batch)) if alone else (given.loss_fn, (model, given.batch))
    with without_policies(model):
        trace = LossTrace(backend, target, policy, inputs, options, strict=False)
        forward = trace.program(Recorder())
        found = list(traced_operations(forward.jaxpr, trace.modules, casts=True))
        if not alone and trace.is_loss(forward):
            found += [
                each
                for each in traced_operations(trace.gradient_program().jaxpr, trace.modules)
                if each.direction != "forward"
            ]
        choices = _choices_by_path(model, trace)
    return _report(policy, found, choices)


def _call_model(model: Any, *given: Any) -> Any:
    return model(*given)


def _choices_by_path(model: Any, trace: LossTrace) -> dict[str | None, LayerDtype]:
    """Return path of a layer -> the dtype that was chosen for it."""
    paths = {id(each.layer): each.stable_path for each in list_layers(model)} | dict(read_keras_model(model).paths)
    return {paths.get(id(each.target)): each for each in choose_layer_dtypes(model, trace.plan)}


def _report(policy: Policy, found: list[TracedOperation], choices: dict[str | None, LayerDtype]) -> CastingReport:
    lists = rules_for({})
    rows: Counter[_OperationKind] = Counter()
    casts: Counter[tuple[str, str]] = Counter()
    for each in found:
        operands, results = (_float_dtypes(avals) for avals in each.avals)
        if each.is_cast:
            if each.is_model and operands and results and operands != results:
                casts[operands[0], results[0]] += 1
        elif operands or results:
            dtype = ", ".join(sorted(set(operands or results)))
            rows[_OperationKind(each.module, each.name, dtype, each.direction, each.is_model)] += 1
    made = []
    for (module, name, dtype, direction, is_model), count in rows.items():
        row = OperationCount(module, name, dtype, lists.get(name, "unknown"), count, direction)
        made.append(row._replace(rule=operation_rule(row, policy, choices.get(module)) if is_model else "off"))
    families = {row.name: operation_family(row.name, row.rule) for row in made}
    return CastingReport(policy, made, [CastCount(*key, count) for key, count in sorted(casts.items())], families)


def _float_dtypes(avals: list[Any]) -> list[str]:
    dtypes = (str(getattr(aval, "dtype", "")) for aval in avals)
    return [dtype for dtype in dtypes if dtype in FLOAT_DTYPES or dtype.startswith(("complex", "float8"))]
