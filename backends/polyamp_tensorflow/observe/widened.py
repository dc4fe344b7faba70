"""A Keras model in float64 for a while. Called by `working` and `watching`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import PolyampError, UnsupportedError
from polyamp.rules.refusals import FLOATING
from polyamp_tensorflow.arrays import dtype_name, is_floating, raw
from polyamp_tensorflow.compat import hold_dtype, hold_policy, hold_value, symbolic_inputs
from polyamp_tensorflow.models.layers import is_layer, modules
from polyamp_tensorflow.models.variables import variables_of
from polyamp_tensorflow.precision.keras_policies import is_quantized, own_policy


@contextlib.contextmanager
def widened(model: Any) -> Iterator[None]:
    """A block in which a Keras model's variables are float64, in their own places, and so are its layers' dtypes and
    Keras's `floatx`. The model's own variables rest, and are its again afterwards.

    What remains narrower: a `keras.losses.Loss` that was made before the block casts to the dtype of its making, and
    the optimizer's rate is a float32 number.

    Raises:
        UnsupportedError: a model that is no Keras layer, is quantized, or lies on several replicas.
    """
    layers = [module.layer for module in modules(model)]
    if not is_layer(model) or any(is_quantized(layer) for layer in layers):
        raise UnsupportedError(
            "Keras: a model is run in float64 where it is a keras.Model or layer whose numbers are floating. Received: "
            f"{type(model).__qualname__}{', quantized' if layers else ''}."
        )
    variables = {
        id(raw(item)): item for role in variables_of(model) for item in role.values() if is_floating(raw(item))
    }
    for variable in variables.values():
        if not isinstance(variable, keras.Variable) or isinstance(raw(variable), tf.distribute.DistributedValues):
            raise UnsupportedError(
                "Keras: a model is run in float64 where all its variables are Keras's, on one device. Received: "
                f"{variable.name!r}, a {type(raw(variable)).__name__}."
            )
    floatx, held, said = keras.config.floatx(), [], []
    try:
        keras.config.set_floatx("float64")
        for variable in variables.values():
            wide = tf.Variable(tf.cast(raw(variable), tf.float64), trainable=variable.trainable)
            held.append((variable, hold_value(variable, wide)))
        for layer in layers:
            said += [
                (symbolic, hold_dtype(symbolic, "float64")) for symbolic in symbolic_inputs(layer) if _real(symbolic)
            ]
            if own_policy(layer).compute_dtype in FLOATING:
                hold_policy(layer, keras.DTypePolicy("float64"))  # put back with the layer's attributes
        yield
    finally:
        for symbolic, dtype in reversed(said):
            hold_dtype(symbolic, dtype)
        for variable, value in held:
            hold_value(variable, value)
        keras.config.set_floatx(floatx)


def _real(symbolic: Any) -> bool:
    return dtype_name(symbolic) in FLOATING


@contextlib.contextmanager
def not_in_float64(state: Any) -> Iterator[None]:
    """A block in which a state's own programs run; what they cannot do in float64 is said.

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
