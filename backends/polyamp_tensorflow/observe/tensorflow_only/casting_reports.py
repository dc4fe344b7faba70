"""`explain`: the dtype of each operation of one pass of a Keras model, by layer, with the rule behind it.

TensorFlow reports the operations of the forward pass as they run: after all casts, and inside Keras's own functions.
Those of the backward pass are read from a graph. A Keras policy acts on
layers: a layer that is sensitive as a whole computes in float32 (S4), any other in the compute dtype.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final

import keras
import tensorflow as tf

from polyamp.contract.casting_report import CastCount, CastingReport, OperationCount
from polyamp.errors import UnsupportedError, describe_value
from polyamp.float_formats import HALF_DTYPES
from polyamp.recipe.optimizers import sgd
from polyamp.recipe.overrides import deciding_glob
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp_keras.models.layers import is_layer, list_layers
from polyamp_keras.precision.float8_layers import PRODUCT_REASONS
from polyamp_keras.precision.layer_dtypes import LayerDtype, choose_layer_dtypes
from polyamp_keras.precision.policy_application import without_policies
from polyamp_tensorflow.observe import capture
from polyamp_tensorflow.observe.model_copy import model_copy
from polyamp_tensorflow.observe.op_dtypes import OpDtypeRecorder, operation_family
from polyamp_tensorflow.observe.tensorflow_only.backward_graph import record_backward
from polyamp_tensorflow.porting.inventory import read_keras_model

_STYLE: Final = re.compile(r"\x1b\[\d*m")
"""Escape sequences with which Keras prints errors in bold."""
_REASON_LENGTH: Final = 240


def explain(backend: Any, loss_fn: Any, policy: Policy, inputs: tuple[Any, ...]) -> CastingReport:
    """Return the casting report of `loss_fn(model, batch)`, or of `model(*inputs)` without a backward pass; the model
    and its random streams stay as they are.

    Args:
        backend: this backend.
        loss_fn: the loss function, or a model or layer.
        policy: the policy.
        inputs: model and batch; or the arguments of the model.

    Raises:
        UnsupportedError: other inputs, such as a function without a model.
    """
    recorder, alone = OpDtypeRecorder(enabled=True), is_layer(loss_fn)
    if alone and inputs:
        model, batch, loss_fn = loss_fn, inputs, functools.partial(_sum_of_outputs, recorder)
    elif not alone and len(inputs) == 2 and is_layer(inputs[0]):
        model, batch = inputs
    else:
        raise UnsupportedError(
            "explain of Keras models takes a loss function, a policy, a model and a batch: polyamp.explain(loss_fn, "
            "policy, model, batch), or a model or layer and its inputs: polyamp.explain(model, policy, x). Received: "
            f"{describe_value(loss_fn)} and {len(inputs)} inputs."
        )
    with without_policies(model), model_copy(model, wide=False, inference=False) as twin:
        recipe = Recipe(policy=policy, optimizer=sgd(0.0), scaler=LossScaler.off())
        state = backend.init(twin, recipe)
        capture.capture_pass(state, loss_fn, batch, _ignore, recorder)
        paths = {id(each.layer): each.stable_path for each in list_layers(twin)} | dict(read_keras_model(twin).paths)
        choices = {paths.get(id(each.target)): each for each in choose_layer_dtypes(twin, state.plan)}
        notes = [] if alone else _record_backward(state, loss_fn, batch, recorder)
    rows = [row._replace(rule=_rule(row, policy, choices.get(row.module))) for row in recorder.rows()]
    casts = [CastCount(source, target, count) for (source, target), count in sorted(recorder.casts.items())]
    return CastingReport(policy, rows, casts, {row.name: operation_family(row.name) for row in rows}, notes)


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
        reason = " ".join(_STYLE.sub("", str(error)).split())[:_REASON_LENGTH]
        return [f"The backward pass is not listed: the step has no graph ({type(error).__name__}: {reason})."]
    return []


def _rule(row: OperationCount, policy: Policy, choice: LayerDtype | None) -> str:
    """Return the rule of a row in the words of `OperationCount`; `choice` is that of the layer, if it has one."""
    why = "" if choice is None else choice.why
    if row.rule == "compute" and why.startswith(PRODUCT_REASONS):
        return why
    if row.module and deciding_glob(policy.overrides, row.module) is not None:
        return "override"
    if policy.compute not in HALF_DTYPES:
        return "off"
    if row.direction == "backward":
        return "follow"
    if choice is not None and why == "op_rules":
        return f"{'float32' if choice.dtype == 'float32' else 'compute'} (op_rules)"
    if row.rule == "compute":
        return "compute" if row.dtype == policy.compute else "compute (uncast)"
    if row.rule == "follow":
        return "follow"
    return "float32" if row.dtype == "float32" else "float32 (uncast)"


def _ignore(path: str, what: str, array: Any, dtype: str) -> None:
    """Ignore a captured array."""
