"""Context managers that restore every variable and setting of a Keras model after training, and run it in float64.

A subclassed Keras model cannot be copied reliably, so `model_copy` yields the model itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from polyamp_keras.arrays import native_variable
from polyamp_keras.observe.model_copy import GlobalStream, list_variables, train_in_place
from polyamp_tensorflow.compat import operation_seed_source


@contextlib.contextmanager
def model_copy(model: Any, *, wide: bool, inference: bool) -> Iterator[Any]:
    """Yield the model itself (`train_in_place`), and restore TensorFlow's random streams too.

    A model that was created in a strategy's scope is yielded in that scope, so that all replicas train it.

    Raises:
        ModelError, UnsupportedError: as `train_in_place`.
    """
    seeds = _OperationSeeds()
    try:
        with (
            _filter_tensorflow_log(),
            train_in_place(model, wide=wide, inference=inference) as trained,
            _creation_scope(model),
        ):
            yield trained
    finally:
        seeds.restore()


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


def _creation_scope(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the scope of the strategy in which the model was created, unless it is the current one."""
    found = {
        id(strategy): strategy
        for item in list_variables(model)
        if (strategy := _variable_strategy(native_variable(item))) is not None
    }
    inner = [strategy for strategy in found.values() if strategy is not tf.distribute.get_strategy()]
    return inner[0].scope() if inner else contextlib.nullcontext()


def _variable_strategy(variable: Any) -> Any:
    """Return the strategy of a variable that has copies on replicas; None for a variable without copies."""
    return variable.distribute_strategy if isinstance(variable, tf.distribute.DistributedValues) else None


class _OperationSeeds:
    """Snapshot of TensorFlow's operation seeds."""

    def __init__(self) -> None:
        self._seeds = operation_seed_source()
        self._place = None if self._seeds is None else self._seeds.getstate()

    def restore(self) -> None:
        """Restore the snapshot."""
        if self._seeds is not None and self._place is not None:
            self._seeds.setstate(self._place)


class GlobalRandomState:
    """Snapshot of Keras's global generator and TensorFlow's operation seeds. The state of a kernel that has run is
    inside the kernel and not included."""

    def __init__(self) -> None:
        self._stream, self._seeds = GlobalStream(), _OperationSeeds()

    def restore(self) -> None:
        """Restore the snapshot; a generator that was created since stays."""
        self._stream.restore()
        self._seeds.restore()
