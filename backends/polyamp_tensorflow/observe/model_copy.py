"""Context managers that restore every variable and setting of a Keras model after training, and run it in float64.

A subclassed Keras model cannot be copied reliably, so `model_copy` yields the model itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import ModelError, UnsupportedError
from polyamp.float_formats import FLOAT_DTYPES
from polyamp_keras.arrays import dtype_name, is_floating, native_variable
from polyamp_keras.compat import (
    LOSS_ATTRIBUTES,
    replace_variable,
    set_layer_policy,
    set_symbolic_dtype,
    symbolic_inputs,
)
from polyamp_keras.models.layers import is_built, is_layer, list_layers
from polyamp_keras.models.variables import model_variables
from polyamp_keras.porting.evaluate import check_gradients
from polyamp_keras.porting.fill import assign, defer_interrupts
from polyamp_keras.porting.inventory import read_keras_model
from polyamp_keras.precision.keras_policies import is_quantized, own_policy
from polyamp_tensorflow.arrays import to_numpy
from polyamp_tensorflow.compat import global_seed_variable, operation_seed_source
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
        check_gradients(
            read_keras_model(model),
            "compare",
            "compare them in a process each: polyamp.parity.run(build={...}, data=...)",
        )
    kept = _ModelSnapshot(model, wide=wide)
    try:
        with _filter_tensorflow_log(), kept.scope(), _float64_variables(model) if wide else contextlib.nullcontext():
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
            if (read_keras_model := _variable_strategy(native_variable(item))) is not None
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


def _variable_strategy(variable: Any) -> Any:
    """Return the strategy of a variable that has copies on replicas; None for a variable without copies."""
    return variable.distribute_strategy if isinstance(variable, tf.distribute.DistributedValues) else None


@contextlib.contextmanager
def _float64_variables(model: Any) -> Iterator[None]:
    """Context manager that replaces a Keras model's variables by float64 ones, and sets its layers' dtypes and Keras's
    `floatx` to float64. On exit the model has its own variables again, unchanged.

    Two things stay narrower: a `keras.losses.Loss` that was created before the block casts to its own dtype, and the
    optimizer's learning rate is a float32 number.

    Raises:
        UnsupportedError: the model is not a Keras layer, is quantized, or has several replicas.
    """
    layers = [module.layer for module in list_layers(model)]
    if not is_layer(model) or any(is_quantized(layer) for layer in layers):
        raise UnsupportedError(
            "Keras: a model is run in float64 where it is a keras.Model or layer whose numbers are floating. Received: "
            f"{type(model).__qualname__}{', quantized' if layers else ''}."
        )
    variables = {
        id(native_variable(item)): item
        for role in model_variables(model)
        for item in role.values()
        if is_floating(native_variable(item))
    }
    for variable in variables.values():
        if not isinstance(variable, keras.Variable) or isinstance(
            native_variable(variable), tf.distribute.DistributedValues
        ):
            raise UnsupportedError(
                "Keras: a model is run in float64 where all its variables are Keras's, on one device. Received: "
                f"{variable.name!r}, a {type(native_variable(variable)).__name__}."
            )
    floatx, held, said = keras.config.floatx(), [], []
    try:
        keras.config.set_floatx("float64")
        for variable in variables.values():
            wide = tf.Variable(tf.cast(native_variable(variable), tf.float64), trainable=variable.trainable)
            held.append((variable, replace_variable(variable, wide)))
        for layer in layers:
            said += [
                (symbolic, set_symbolic_dtype(symbolic, "float64"))
                for symbolic in symbolic_inputs(layer)
                if _is_floating_input(symbolic)
            ]
            if own_policy(layer).compute_dtype in FLOAT_DTYPES:
                set_layer_policy(layer, keras.DTypePolicy("float64"))  # restored with the layer's attributes
        yield
    finally:
        for symbolic, dtype in reversed(said):
            set_symbolic_dtype(symbolic, dtype)
        for variable, value in held:
            replace_variable(variable, value)
        keras.config.set_floatx(floatx)


def _is_floating_input(symbolic: Any) -> bool:
    return dtype_name(symbolic) in FLOAT_DTYPES


class GlobalRandomState:
    """Snapshot of Keras's global generator and TensorFlow's operation seeds. The state of a kernel that has run is
    inside the kernel and not included."""

    def __init__(self) -> None:
        self._keras = global_seed_variable()
        self._values = None if self._keras is None else to_numpy(self._keras)
        self._seeds = operation_seed_source()
        self._place = None if self._seeds is None else self._seeds.getstate()

    def restore(self) -> None:
        """Restore the snapshot; a generator that was created since stays."""
        if self._values is not None:
            assign(self._keras, self._values)
        if self._seeds is not None and self._place is not None:
            self._seeds.setstate(self._place)
