"""Context managers that run a Keras model in float64 and explain its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import PolyampError, UnsupportedError
from polyamp.float_formats import FLOAT_DTYPES
from polyamp_tensorflow.arrays import dtype_name, is_floating, native_variable
from polyamp_tensorflow.compat import replace_variable, set_layer_policy, set_symbolic_dtype, symbolic_inputs
from polyamp_tensorflow.models.layers import is_layer, list_layers
from polyamp_tensorflow.models.variables import model_variables
from polyamp_tensorflow.precision.tensorflow_only.keras_policies import is_quantized, own_policy


@contextlib.contextmanager
def float64_variables(model: Any) -> Iterator[None]:
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


@contextlib.contextmanager
def explain_float64_errors(state: Any) -> Iterator[None]:
    """Context manager that explains errors of operations in float64.

    Raises:
        UnsupportedError: TensorFlow or Keras refuses an operation while the state is in float64.
    """
    try:
        yield
    except PolyampError:
        raise
    except (tf.errors.OpError, TypeError, ValueError) as error:
        if state.plan.compute != "float64":
            raise
        raise UnsupportedError(
            f"Keras: in float64 the model or loss_fn fails ({type(error).__name__}: {str(error).splitlines()[0]}), as "
            "where it mixes numbers of its own in float32 with the layers' outputs."
        ) from error
