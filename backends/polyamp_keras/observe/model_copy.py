"""Snapshot of every variable and setting of a Keras model, to be restored after a training, and variables in float64.

A subclassed Keras model cannot be copied reliably, so a comparison trains the model itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from polyamp.context_values import temporary_value
from polyamp.errors import ModelError, UnsupportedError
from polyamp.float_formats import FLOAT_DTYPES
from polyamp_keras.arrays import dtype_name, is_floating, native_variable, variable_key
from polyamp_keras.compat import (
    LOSS_ATTRIBUTES,
    float64_result_types,
    global_seed_variable,
    replace_variable,
    set_layer_policy,
    set_symbolic_dtype,
    symbolic_inputs,
)
from polyamp_keras.engine import ENGINE
from polyamp_keras.models.layers import is_built, is_layer, list_layers
from polyamp_keras.models.variables import model_variables
from polyamp_keras.porting.evaluate import check_gradients
from polyamp_keras.porting.fill import assign, defer_interrupts
from polyamp_keras.porting.inventory import read_keras_model
from polyamp_keras.precision.bound_model import TRAINING_MODE
from polyamp_keras.precision.keras_policies import is_quantized, own_policy


@contextlib.contextmanager
def train_in_place(model: Any, *, wide: bool, inference: bool) -> Iterator[Any]:
    """Context manager that yields the model itself, as in `Observer.model_copy`. Its values are stored once, on the
    host.

    On exit these are restored:

    - values of all variables: parameters, statistics, seeds, states of stateful layers;
    - which variables are trainable;
    - every attribute of the model and of its layers;
    - Keras's global random stream.

    The contents of attributes are not copied: a list to which the model's own code appends stays longer.

    Raises:
        ModelError: the model is not built.
        UnsupportedError: `wide` for a model that is not a Keras layer, is quantized or has several replicas; or the
            process cannot compute the gradients of some layers.
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
    kept = _ModelBackup(model, wide=wide)
    try:
        with contextlib.ExitStack() as stack:
            if wide:
                stack.enter_context(float64_variables(model))
                stack.enter_context(float64_result_types())
            stack.enter_context(temporary_value(TRAINING_MODE, not inference))
            yield model
    finally:
        with defer_interrupts():
            kept.restore()


class _ModelBackup:
    """Values and attributes of a model on the host, without the variables that float64 replaces meanwhile.

    Args:
        model: a built model.
        wide: whether `float64_variables` replaces the floating variables meanwhile.
    """

    def __init__(self, model: Any, *, wide: bool) -> None:
        variables = list_variables(model)
        self._values = [
            (item, np.array(ENGINE.host_values(item)))
            for item in variables
            if not (wide and is_floating(native_variable(item)))
        ]
        self._trainable = [(item, item.trainable) for item in variables if isinstance(item, keras.Variable)]
        self._attributes = [(module.layer, dict(vars(module.layer))) for module in list_layers(model)]
        self._losses = [(layer, name, list(own[name])) for layer, own in self._attributes for name in LOSS_ATTRIBUTES]
        self._stream = GlobalStream()

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
        self._stream.restore()


class GlobalStream:
    """Snapshot of Keras's global generator, which layers and functions without one draw from."""

    def __init__(self) -> None:
        self._variable = global_seed_variable()
        self._values = None if self._variable is None else np.array(ENGINE.host_values(self._variable))

    def restore(self) -> None:
        """Restore the snapshot; a generator that was created since stays."""
        if self._values is not None:
            assign(self._variable, self._values)


def list_variables(model: Any) -> list[Any]:
    """Return every variable once."""
    found = {variable_key(variable): variable for role in model_variables(model) for variable in role.values()}
    return list(found.values())


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
        variable_key(item): item
        for role in model_variables(model)
        for item in role.values()
        if is_floating(native_variable(item))
    }
    for variable in variables.values():
        if not isinstance(variable, keras.Variable) or hasattr(native_variable(variable), "distribute_strategy"):
            raise UnsupportedError(
                "Keras: a model is run in float64 where all its variables are Keras's, on one device. Received: "
                f"{variable.name!r}, a {type(native_variable(variable)).__name__}."
            )
    floatx, held, said = keras.config.floatx(), [], []
    try:
        keras.config.set_floatx("float64")
        for variable in variables.values():
            wide = ENGINE.cast_variable(variable, "float64")
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
