"""A block in which a Keras model may be trained; at its end every variable and setting is as before.

A subclassed Keras model has no copy that is surely the same model, so the model itself is lent. Called by `observer`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import ModelError
from polyamp_tensorflow.arrays import is_floating, raw, to_numpy
from polyamp_tensorflow.compat import LOSSES
from polyamp_tensorflow.models.layers import is_built, is_layer, modules
from polyamp_tensorflow.models.variables import variables_of
from polyamp_tensorflow.observe.streams import Streams
from polyamp_tensorflow.observe.widened import widened
from polyamp_tensorflow.porting.evaluate import refuse_beside_torch
from polyamp_tensorflow.porting.fill import assign, uninterrupted
from polyamp_tensorflow.porting.walk import found
from polyamp_tensorflow.precision.bound import TRAINING


@contextlib.contextmanager
def working(model: Any, *, wide: bool, inference: bool) -> Iterator[Any]:
    """See `Observer.working`: the model itself. Its values are kept on the host, once.

    What is put back: the values of all variables (parameters, statistics, seeds, states of stateful layers), which of
    them are trainable, every attribute of the model and of its layers, and the random streams of Keras and TensorFlow
    that belong to no model. What a layer's attributes hold is not copied: a list that the model's own code appends to
    stays longer.

    A model that was made in the scope of a strategy is lent in that scope, so that all replicas train it.

    Raises:
        ModelError: the model is not built.
        UnsupportedError: `wide`, of a model that is no Keras layer, is quantized or lies on several replicas; or a
            model with convolutions beside torch, in one process.
    """
    if not is_built(model):
        raise ModelError(
            "a model whose training is compared must be built, so that what it holds can be put back. Call it once on "
            "a batch, or model.build(shape), before."
        )
    if is_layer(model):
        refuse_beside_torch(
            found(model), "compare", "compare them in a process each: polyamp.parity.run(build={...}, data=...)"
        )
    kept = _Kept(model, wide=wide)
    try:
        with _quiet(), kept.scope(), widened(model) if wide else contextlib.nullcontext():
            mode = TRAINING.set(not inference)
            try:
                yield model
            finally:
                TRAINING.reset(mode)
    finally:
        with uninterrupted():
            kept.put_back()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what TensorFlow says of steps that are traced for each run, and of replicas that run as Python."""
    logger = tf.get_logger()
    logger.addFilter(_is_news)
    try:
        yield
    finally:
        logger.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    said = record.getMessage()
    return not ("GraphFunction" in said and "retracing" in said) and "eagerly has significant overhead" not in said


class _Kept:
    """What a model holds, on the host; without the values that rest while it is in float64."""

    def __init__(self, model: Any, *, wide: bool) -> None:
        variables = _variables(model)
        self._values = [(item, to_numpy(item)) for item in variables if not (wide and is_floating(raw(item)))]
        self._trainable = [(item, item.trainable) for item in variables if isinstance(item, keras.Variable)]
        self._strategies = {id(found): found for item in variables if (found := strategy_of(raw(item))) is not None}
        self._attributes = [(module.layer, dict(vars(module.layer))) for module in modules(model)]
        self._losses = [(layer, name, list(own[name])) for layer, own in self._attributes for name in LOSSES]
        self._streams = Streams()

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """That of the strategy in which the model was made, unless it is the present one."""
        inner = [found for found in self._strategies.values() if found is not tf.distribute.get_strategy()]
        return inner[0].scope() if inner else contextlib.nullcontext()

    def put_back(self) -> None:
        """Everything as it was; a second call does no harm."""
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
        self._streams.put_back()


def _variables(model: Any) -> list[Any]:
    """Every variable once."""
    found = {id(raw(variable)): variable for role in variables_of(model) for variable in role.values()}
    return list(found.values())


def strategy_of(variable: Any) -> Any:
    """The strategy that a variable has its copies from; None of a variable without copies."""
    return variable.distribute_strategy if isinstance(variable, tf.distribute.DistributedValues) else None
