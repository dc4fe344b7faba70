"""What was mistaken when a step ends in one of TensorFlow's or Keras's errors. Called by the backend, afterwards.

They are recognised by their class and words, in TensorFlow 2.19 to 2.21; one that is not recognised stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from polyamp.errors import ModelError, PolyampError, ReplicaError, TraceError, UnsupportedError
from polyamp.rules.replicas import called
from polyamp_tensorflow.models.layers import is_layer, modules
from polyamp_tensorflow.precision.cast_mode import is_cast
from polyamp_tensorflow.precision.mixed_dtypes import mixed_dtypes
from polyamp_tensorflow.step.distribution import USED_APART, several
from polyamp_tensorflow.step.state import TensorFlowState

_TRACED: Final = (
    "loss_fn is traced, so that its tensors have no values yet: {}. Return the tensor itself, compute with tf "
    "or keras.ops, "
    "and choose with tf.where; what is to be looked at goes into aux, (loss, aux). train_step(..., compile=False) runs "
    "loss_fn op by op, slowly."
)


def explained(error: Exception, states: Sequence[TensorFlowState]) -> PolyampError | None:
    """The error to raise in place of TensorFlow's; None if it is not known what was mistaken."""
    text = str(error)
    if isinstance(error, tf.errors.OpError) and "Collective ops is aborted by" in text:
        return _other_worker(text)
    if isinstance(error, tf.errors.OperatorNotAllowedInGraphError):
        return TraceError(_TRACED.format("Python cannot branch on one, or loop over one"))
    if isinstance(error, NotImplementedError) and "to a numpy array" in text:
        return TraceError(_TRACED.format("NumPy cannot take one"))
    if isinstance(error, AttributeError) and re.search(r"Tensor' object has no attribute 'numpy'", text):
        return TraceError(_TRACED.format("none has .numpy()"))
    if isinstance(error, TypeError) and re.search(r"argument must be .*not '\w*Tensor'", text):
        return TraceError(_TRACED.format("float() and int() cannot take one"))
    if isinstance(error, RuntimeError) and "merge_call` called while defining" in text and any(map(_windows, states)):
        return UnsupportedError(
            "on several replicas a window's micro-batches run in a loop, where TensorFlow's replicas cannot meet, and "
            "something in loss_fn or the model has them meet, such as BatchNormalization(synchronized=True), "
            "all_reduce, or a parameter that the forward pass assigns to. Received: accumulate_steps="
            f"{states[0].recipe.accumulate_steps}. Use synchronized=False, or accumulate_steps=1 with smaller batches."
        )
    if isinstance(error, AttributeError) and any(is_cast(state.model, state.plan) for state in states):
        return _assigned_cast(text, states)
    if isinstance(error, tf.errors.InvalidArgumentError) and USED_APART in text:
        named = re.search(re.escape(USED_APART) + r"[^A-Za-z0-9]*([^\]\n]*?)'?\]", text)
        return UnsupportedError(f"{USED_APART} {named[1] if named else ''}")
    if isinstance(error, TypeError | ValueError | tf.errors.InvalidArgumentError):
        return _mixed_dtypes(error, states)
    return None


def _assigned_cast(text: str, states: Sequence[TensorFlowState]) -> UnsupportedError | None:
    """For a `tf.Module` that assigns to a variable, in whose place its cast stands."""
    method = re.search(r"Tensor' object has no attribute '((?:batch_)?(?:assign|scatter)\w*)'", text)
    if method is None:
        return None
    kind = next(type(state.model).__qualname__ for state in states if is_cast(state.model, state.plan))
    return UnsupportedError(
        f"mode='cast' puts casts in the places of the variables of a model that is no Keras layer, and {method[1]}() "
        f"on a cast would be lost. Received: {kind}, whose forward pass assigns to a parameter. Assign to it between "
        "two steps, make the model a keras.Model, or train it under Policy('float32')."
    )


def _other_worker(text: str) -> ReplicaError:
    """TensorFlow's own look at its peers names the tasks that stopped sending heartbeats, or that did not answer."""
    tasks = sorted({int(number) for number in re.findall(r"/job:worker(?:/replica:\d+)?/task:(\d+)", text)})
    workers = called(tasks).replace("rank", "worker") if tasks else "another worker"
    reason = " ".join(text.partition("Collective ops is aborted by: ")[2].partition("The error could be")[0].split())
    return ReplicaError(
        f"{workers} ended, raised or was killed: a collective of this one was aborted ({reason[:300]}). Look at what "
        "it printed. Start all workers again and polyamp.restore the last checkpoint: this state is not to be used "
        "again."
    )


def _windows(state: TensorFlowState) -> bool:
    return several(state.strategy) and state.recipe.accumulate_steps > 1


def _mixed_dtypes(error: Exception, states: Sequence[TensorFlowState]) -> ModelError | None:
    """For an operation inside a layer whose operands differ in dtype, which TensorFlow does not promote."""
    layer = _layer_of(error)
    if layer is None:
        return None
    path = next((m.path for state in states for m in modules(state.model) if m.layer is layer), "")
    return mixed_dtypes(error, layer, path)


def _layer_of(error: Exception) -> Any:
    """The innermost Keras layer in whose `call` the error was raised."""
    layer, trace = None, error.__traceback__
    while trace is not None:
        own = trace.tb_frame.f_locals.get("self")
        if trace.tb_frame.f_code.co_name == "call" and is_layer(own):
            layer = own
        trace = trace.tb_next
    return layer
