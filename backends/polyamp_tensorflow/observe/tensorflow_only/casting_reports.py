"""`explain`: the dtype of each operation of one pass of a Keras model, by layer, with the rule behind it.

TensorFlow reports the operations of the forward pass as they run: after all casts, and inside Keras's own functions.
Those of the backward pass are read from a graph, those of compiled code from the program that XLA makes of it. A Keras
policy acts on layers: a layer that is sensitive as a whole computes in float32 (S4), any other in the compute dtype.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import keras
import tensorflow as tf

from polyamp.contract.casting_report import CastCount, CastingReport, OperationCount
from polyamp.contract.optimized_program import optimized_instructions
from polyamp.errors import UnsupportedError, describe_value
from polyamp.recipe.optimizers import sgd
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.rules.step_checks import check_options
from polyamp_keras.models.layers import is_layer, list_layers
from polyamp_keras.observe.layer_products import read_pass
from polyamp_keras.observe.operation_rules import operation_rule
from polyamp_keras.porting.inventory import read_keras_model
from polyamp_keras.precision.layer_dtypes import choose_layer_dtypes
from polyamp_keras.precision.policy_application import without_policies
from polyamp_tensorflow.observe import capture
from polyamp_tensorflow.observe.model_copy import model_copy
from polyamp_tensorflow.observe.op_dtypes import OpDtypeRecorder
from polyamp_tensorflow.observe.tensorflow_only.backward_graph import (
    TracedPass,
    graph_operations,
    record_backward,
    trace_pass,
)
from polyamp_tensorflow.precision.op_list import moves_data, operation_family

_STYLE: Final = re.compile(r"\x1b\[\d*m")
"""Escape sequences with which Keras prints errors in bold."""
_REASON_LENGTH: Final = 240
_COMPILED_NOTE: Final = (
    "Read from the program that XLA optimized for {platform}. An operation has a row if XLA kept instructions of its "
    "name, with the dtypes of their results. What XLA removed, or made without a name of TensorFlow's, has none."
)


def explain(
    backend: Any, loss_fn: Any, policy: Policy, *inputs: Any, strict: bool = False, **options: Any
) -> CastingReport:
    """Return the casting report of `loss_fn(model, batch)`, or of `model(*inputs)` without a backward pass; the model
    and its random streams stay as they are.

    Args:
        backend: this backend.
        loss_fn: the loss function, or a model or layer.
        policy: the policy.
        *inputs: model and batch; or the arguments of the model.
        strict: without effect: every operation has a rule.
        **options: none, as for `init`.

    Raises:
        UnsupportedError: other inputs, such as a function without a model.
    """
    check_options(options, (), function="explain", backend=backend.name)
    recorder = OpDtypeRecorder(enabled=True)
    loss_fn, model, batch = read_pass("explain", loss_fn, inputs)
    alone = loss_fn is None
    if loss_fn is None:
        loss_fn = functools.partial(_sum_of_outputs, recorder)
    with _state_of_copy(backend, model, policy) as state:
        twin = state.model
        capture.capture_pass(state, loss_fn, batch, _ignore, recorder)
        paths = {id(each.layer): each.stable_path for each in list_layers(twin)} | dict(read_keras_model(twin).paths)
        choices = {paths.get(id(each.target)): each for each in choose_layer_dtypes(twin, state.plan)}
        notes = [] if alone else _record_backward(state, loss_fn, batch, recorder)
    rows = [row._replace(rule=operation_rule(row, policy, choices.get(row.module))) for row in recorder.rows()]
    casts = [CastCount(source, target, count) for (source, target), count in sorted(recorder.casts.items())]
    return CastingReport(policy, rows, casts, {row.name: operation_family(row.name) for row in rows}, notes)


def explain_compiled(
    backend: Any, loss_fn: Any, policy: Policy, *inputs: Any, strict: bool = False, **options: Any
) -> CastingReport:
    """Return what XLA makes of a loss with its model, as under `jit_compile`; the model stays as it is.

    It is compiled for the default device. A row has the rule of the operation in eager code; `casts` is empty.

    Raises:
        UnsupportedError: inputs other than a model and a batch, or a pass that XLA cannot compile.
    """
    check_options(options, (), function="explain", backend=backend.name)
    if is_layer(loss_fn) or len(inputs) != 2 or not is_layer(inputs[0]):
        raise UnsupportedError(
            "explain(compiled=True) of Keras models takes a loss function and its model: polyamp.explain(loss_fn, "
            f"policy, model, batch, compiled=True). Received: {describe_value(loss_fn)} and {len(inputs)} inputs."
        )
    eager = explain(backend, loss_fn, policy, *inputs).operations
    rules = {(row.module, row.name, row.direction): row.rule for row in eager}
    model, batch = inputs
    platform = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    with _state_of_copy(backend, model, policy) as state:
        try:
            traced = trace_pass(state, loss_fn, batch, jit_compile=True)
            text = traced.function.experimental_get_compiler_ir()(stage="optimized_hlo")
        except Exception as error:
            raise UnsupportedError(
                f"explain(compiled=True): TensorFlow cannot compile a pass of this model with XLA for {platform} "
                f"({_reason(error)}). model.fit(jit_compile=True) would fail in the same way; without compiled=True "
                "the report is of eager code."
            ) from error
    counts = Counter(_compiled_operations(text, traced))
    rows = [
        OperationCount(module, name, dtype, rules.get((module, name, direction), "follow"), count, direction)
        for (module, name, dtype, direction), count in counts.items()
    ]
    families = {row.name: operation_family(row.name) for row in rows}
    return CastingReport(policy, rows, (), families, [_COMPILED_NOTE.format(platform=platform)])


def _compiled_operations(text: str, traced: TracedPass) -> Iterator[tuple[str, str, str, str]]:
    """Yield module, name, dtype and direction of each operation of which a compiled program has instructions."""
    dtypes: dict[str, set[str]] = {}
    for instruction in optimized_instructions(text):
        dtypes.setdefault(instruction.op_name, set()).add(instruction.dtype)
    for operation, path, is_backward in graph_operations(traced):
        is_gradient_sum = operation.type == "AddN" and not path
        if operation.name in dtypes and not moves_data(operation.type) and not is_gradient_sum:
            found = ", ".join(sorted(dtypes[operation.name]))
            yield path, operation.type, found, "backward" if is_backward else "forward"


@contextlib.contextmanager
def _state_of_copy(backend: Any, model: Any, policy: Policy) -> Iterator[Any]:
    """Context manager with a state of a copy of a model, under a policy."""
    with without_policies(model), model_copy(model, wide=False, inference=False) as twin:
        yield backend.init(twin, Recipe(policy=policy, optimizer=sgd(0.0), scaler=LossScaler.off()))


def _sum_of_outputs(recorder: OpDtypeRecorder, model: Any, given: tuple[Any, ...]) -> Any:
    """Return a scalar of the outputs of a model that has no loss, which is not recorded."""
    output = model(*given)
    with recorder.paused():
        floating = [each for each in keras.tree.flatten(output) if tf.is_tensor(each) and each.dtype.is_floating]
        return tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32)) for each in floating])


def _record_backward(state: Any, loss_fn: Any, batch: Any, recorder: OpDtypeRecorder) -> list[str]:
    """Record the backward pass; return a note if it cannot be traced, as with a loss that reads values."""
    try:
        record_backward(state, loss_fn, batch, recorder)
    except Exception as error:  # noqa: BLE001  # whatever the user's code raises in a graph
        return [f"The backward pass is not listed: the step has no graph ({_reason(error)})."]
    return []


def _reason(error: Exception) -> str:
    text = " ".join(_STYLE.sub("", str(error)).split())[:_REASON_LENGTH]
    return f"{type(error).__name__}: {text}"


def _ignore(path: str, what: str, array: Any, dtype: str) -> None:
    """Ignore a captured array."""
