"""Explanations of TensorFlow's and Keras's errors in a step.

Errors are recognised by class and message, in TensorFlow 2.19 to 2.21. An unrecognised error is unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from polyamp.errors import ModelError, PolyampError, ReplicaError, TraceError, UnsupportedError
from polyamp.rules.rank_group import format_ranks
from polyamp_keras.models.layers import is_layer, list_layers
from polyamp_keras.precision.layer_method_wrappers import mixed_dtype_error
from polyamp_tensorflow.distributed.replicas import has_several_replicas
from polyamp_tensorflow.distributed.tensorflow_only.distributed_step import USED_PARAMETERS_DIFFER
from polyamp_tensorflow.precision.cast_mode import has_cast_variables
from polyamp_tensorflow.step.state import TensorFlowState

_TRACED_MESSAGE: Final = (
    "loss_fn is traced, so that its tensors have no values yet: {}. Return the tensor itself, compute with tf "
    "or keras.ops, "
    "and choose with tf.where; what is to be looked at goes into aux, (loss, aux). train_step(..., compile=False) runs "
    "loss_fn op by op, slowly."
)


def explain_error(error: Exception, states: Sequence[TensorFlowState]) -> PolyampError | None:
    """Return the error to raise in place of TensorFlow's; None if the error is not recognised."""
    text = str(error)
    if isinstance(error, tf.errors.OpError) and "Collective ops is aborted by" in text:
        return _worker_error(text)
    if isinstance(error, tf.errors.OperatorNotAllowedInGraphError):
        return TraceError(_TRACED_MESSAGE.format("Python cannot branch on one, or loop over one"))
    if isinstance(error, NotImplementedError) and "to a numpy array" in text:
        return TraceError(_TRACED_MESSAGE.format("NumPy cannot take one"))
    if isinstance(error, AttributeError) and re.search(r"Tensor' object has no attribute 'numpy'", text):
        return TraceError(_TRACED_MESSAGE.format("none has .numpy()"))
    if isinstance(error, TypeError) and re.search(r"argument must be .*not '\w*Tensor'", text):
        return TraceError(_TRACED_MESSAGE.format("float() and int() cannot take one"))
    if (
        isinstance(error, RuntimeError)
        and "merge_call` called while defining" in text
        and any(map(_is_accumulating, states))
    ):
        return UnsupportedError(
            "on several replicas a window's micro-batches run in a loop, where TensorFlow's replicas cannot meet, and "
            "something in loss_fn or the model has them meet, such as BatchNormalization(synchronized=True), "
            "all_reduce, or a parameter that the forward pass assigns to. Received: accumulate_steps="
            f"{states[0].recipe.accumulate_steps}. Use synchronized=False, or accumulate_steps=1 with smaller batches."
        )
    if isinstance(error, AttributeError) and any(has_cast_variables(state.model, state.plan) for state in states):
        return _cast_assignment_error(text, states)
    if isinstance(error, tf.errors.InvalidArgumentError) and USED_PARAMETERS_DIFFER in text:
        named = re.search(re.escape(USED_PARAMETERS_DIFFER) + r"[^A-Za-z0-9]*([^\]\n]*?)'?\]", text)
        return UnsupportedError(f"{USED_PARAMETERS_DIFFER} {named[1] if named else ''}")
    if isinstance(error, TypeError | ValueError | tf.errors.InvalidArgumentError):
        return _layer_dtype_error(error, states)
    return None


def _cast_assignment_error(text: str, states: Sequence[TensorFlowState]) -> UnsupportedError | None:
    """Return the error for a `tf.Module` that assigns to a variable that is replaced by its cast."""
    method = re.search(r"Tensor' object has no attribute '((?:batch_)?(?:assign|scatter)\w*)'", text)
    if method is None:
        return None
    kind = next(type(state.model).__qualname__ for state in states if has_cast_variables(state.model, state.plan))
    return UnsupportedError(
        f"mode='cast' puts casts in the places of the variables of a model that is no Keras layer, and {method[1]}() "
        f"on a cast would be lost. Received: {kind}, whose forward pass assigns to a parameter. Assign to it between "
        "two steps, make the model a keras.Model, or train it under Policy('float32')."
    )


def _worker_error(text: str) -> ReplicaError:
    """Return the error for a lost worker. TensorFlow names the tasks without heartbeats or without an answer."""
    tasks = sorted({int(number) for number in re.findall(r"/job:worker(?:/replica:\d+)?/task:(\d+)", text)})
    workers = format_ranks(tasks).replace("rank", "worker") if tasks else "another worker"
    reason = " ".join(text.partition("Collective ops is aborted by: ")[2].partition("The error could be")[0].split())
    return ReplicaError(
        f"{workers} ended, raised or was killed: a collective of this one was aborted ({reason[:300]}). Look at what "
        "it printed. Start all workers again and polyamp.restore the last checkpoint: this state is not to be used "
        "again."
    )


def _is_accumulating(state: TensorFlowState) -> bool:
    return has_several_replicas(state.strategy) and state.recipe.accumulate_steps > 1


def _layer_dtype_error(error: Exception, states: Sequence[TensorFlowState]) -> ModelError | None:
    """Return the error for an operation inside a layer with operands of different dtypes."""
    layer = _failed_layer(error)
    if layer is None:
        return None
    path = next((m.path for state in states for m in list_layers(state.model) if m.layer is layer), "")
    return mixed_dtype_error(error, layer, path)


def _failed_layer(error: Exception) -> Any:
    """Return the innermost Keras layer whose `call` raised the error."""
    layer, trace = None, error.__traceback__
    while trace is not None:
        own = trace.tb_frame.f_locals.get("self")
        if trace.tb_frame.f_code.co_name == "call" and is_layer(own):
            layer = own
        trace = trace.tb_next
    return layer
