"""Context manager that restores every variable and setting of a Keras model after training.

A subclassed Keras model cannot be copied reliably, so the context manager yields the model itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import ModelError
from polyamp_tensorflow.arrays import is_floating, native_variable, to_numpy
from polyamp_tensorflow.compat import LOSS_ATTRIBUTES
from polyamp_tensorflow.models.layers import is_built, is_layer, list_layers
from polyamp_tensorflow.models.variables import model_variables
from polyamp_tensorflow.observe.tensorflow_only.float64_model import float64_variables
from polyamp_tensorflow.observe.tensorflow_only.global_random_state import GlobalRandomState
from polyamp_tensorflow.porting.evaluate import refuse_with_torch
from polyamp_tensorflow.porting.fill import assign, defer_interrupts
from polyamp_tensorflow.porting.inventory import read_keras_model
from polyamp_tensorflow.precision.policy_module import TRAINING_MODE


@contextlib.contextmanager
def model_copy(model: Any, *, wide: bool, inference: bool) -> Iterator[Any]:
    """Yield the model itself, as in `Observer.model_copy`. Its values are stored once, on the host.

    On exit these are restored:

    - values of all variables: parameters, statistics, seeds, states of stateful layers;
    - which variables are trainable;
    - every attribute of the model and of its layers;
    - the global random streams of Keras and TensorFlow.

    The contents of attributes are not copied: a list to which the model's own code appends stays longer.

    A model that was created in a strategy's scope is yielded in that scope, so that all replicas train it.

    Raises:
        ModelError: the model is not built.
        UnsupportedError: `wide` for a model that is not a Keras layer, is quantized or has several replicas; or a
            model with convolutions in one process with torch.
    """
    if not is_built(model):
        raise ModelError(
            "a model whose training is compared must be built, so that what it holds can be put back. Call it once on "
            "a batch, or model.build(shape), before."
        )
    if is_layer(model):
        refuse_with_torch(
            read_keras_model(model),
            "compare",
            "compare them in a process each: polyamp.parity.run(build={...}, data=...)",
        )
    kept = _ModelSnapshot(model, wide=wide)
    try:
        with _filter_tensorflow_log(), kept.scope(), float64_variables(model) if wide else contextlib.nullcontext():
            mode = TRAINING_MODE.set(not inference)
            try:
                yield model
            finally:
                TRAINING_MODE.reset(mode)
    finally:
        with defer_interrupts():
            kept.restore()


@contextlib.contextmanager
def _filter_tensorflow_log() -> Iterator[None]:
    """Context manager that hides TensorFlow's log messages about retracing and about replicas that run as Python."""
    logger = tf.get_logger()
    logger.addFilter(_is_relevant_record)
    try:
        yield
    finally:
        logger.removeFilter(_is_relevant_record)


def _is_relevant_record(record: logging.LogRecord) -> bool:
    said = record.getMessage()
    return not ("GraphFunction" in said and "retracing" in said) and "eagerly has significant overhead" not in said


class _ModelSnapshot:
    """Values and attributes of a model on the host, without the variables that float64 replaces meanwhile."""

    def __init__(self, model: Any, *, wide: bool) -> None:
        variables = _variables(model)
        self._values = [
            (item, to_numpy(item)) for item in variables if not (wide and is_floating(native_variable(item)))
        ]
        self._trainable = [(item, item.trainable) for item in variables if isinstance(item, keras.Variable)]
        self._strategies = {
            id(read_keras_model): read_keras_model
            for item in variables
            if (read_keras_model := variable_strategy(native_variable(item))) is not None
        }
        self._attributes = [(module.layer, dict(vars(module.layer))) for module in list_layers(model)]
        self._losses = [(layer, name, list(own[name])) for layer, own in self._attributes for name in LOSS_ATTRIBUTES]
        self._streams = GlobalRandomState()

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the scope of the strategy in which the model was created, unless it is the current one."""
        inner = [found for found in self._strategies.values() if found is not tf.distribute.get_strategy()]
        return inner[0].scope() if inner else contextlib.nullcontext()

    def restore(self) -> None:
        """Restore everything; a second call has no further effect."""
        for layer, before in self._attributes:
            now = vars(layer)
            for name in [name for name in now if name not in before]:
                del now[name]
            now.update({name: value for name, value in before.items() if now.get(name, now) is not value})
        for layer, name, items in self._losses:
            vars(layer)[name][:] = items
        for variable, trainable in self._trainable:
            if variable.trainable is not trainable:
                variable.trainable = trainable
        for variable, values in self._values:
            assign(variable, values)
        self._streams.restore()


def _variables(model: Any) -> list[Any]:
    """Return every variable once."""
    found = {id(native_variable(variable)): variable for role in model_variables(model) for variable in role.values()}
    return list(found.values())


def variable_strategy(variable: Any) -> Any:
    """Return the strategy of a variable that has copies on replicas; None for a variable without copies."""
    return variable.distribute_strategy if isinstance(variable, tf.distribute.DistributedValues) else None
