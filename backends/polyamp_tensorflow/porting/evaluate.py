"""Float32 evaluation of a model in inference mode: outputs, gradients and the output of each layer.

`polyamp.port(check=)` compares it with the evaluation in the other framework.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf

from polyamp.errors import UnsupportedError
from polyamp.float_formats import HALF_DTYPES
from polyamp.porting.layouts.converter import Evaluation
from polyamp.recipe.policy import Policy
from polyamp_keras.arrays import dtype_name, is_floating, native_variable
from polyamp_keras.compat import clear_losses, get_layer_policy, set_layer_policy
from polyamp_keras.engines.tensorflow import to_dense
from polyamp_keras.models.layers import is_layer, list_layers, replace_calls
from polyamp_keras.models.variables import model_variables
from polyamp_keras.precision.keras_policies import is_quantized
from polyamp_keras.precision.policy_application import PolicyApplication
from polyamp_tensorflow.arrays import to_numpy
from polyamp_tensorflow.compat import replace_variable
from polyamp_tensorflow.porting.fill import assign
from polyamp_tensorflow.porting.inventory import KerasInventory, read_keras_model
from polyamp_tensorflow.precision.policy_module import native_model

Array = np.ndarray[Any, Any]
_CONVOLUTIONS: Final = {"conv", "conv_transpose"}


def evaluate(
    model: Any, batch: Any, cotangents: Callable[[Sequence[Array]], Sequence[Array]], inputs: Container[str] = ()
) -> Evaluation:
    """Return outputs, gradients and the outputs of layers (see `Converter.evaluate`).

    Raises:
        UnsupportedError: the model has convolutions and torch is loaded; their gradient could end the process.
    """
    model = native_model(model)
    found = read_keras_model(model)
    refuse_with_torch(found, "check", "port without check=")
    args, kwargs = _arguments(batch)
    weights = {name: found.variables[name] for name in _trainable_names(found)}
    seen: dict[str, Array] = {}
    taken: dict[str, Array] = {}
    with (
        _preserve_state(model),
        _force_float32(model),
        _record_calls(model, found.paths, seen, taken, inputs),
        _gradient_tape() as tape,
    ):
        watched = [native_variable(variable) for variable in weights.values()]
        tape.watch(watched)
        given = model(*args, **kwargs, training=False) if is_layer(model) else model(*args, **kwargs)
        outputs = [tf.cast(leaf, tf.float32) if is_floating(leaf) else leaf for leaf in keras.tree.flatten(given)]
        with tape.stop_recording():
            against = cotangents([to_numpy(output) for output in outputs])
        pairs = [(output, factor) for output, factor in zip(outputs, against, strict=True) if is_floating(output)]
        total = tf.add_n([tf.reduce_sum(output * tf.cast(factor, output.dtype)) for output, factor in pairs])
    gradients = tape.gradient(total, watched)
    return Evaluation(
        [to_numpy(output) for output in outputs],
        {name: _to_array(item, weights[name]) for name, item in zip(weights, gradients, strict=True)},
        seen,
        taken,
    )


def refuse_with_torch(found: KerasInventory, call: str, instead: str) -> None:
    """Raise if the model has convolutions and torch is loaded in the process.

    TensorFlow's oneDNN kernels for the gradient of a convolution abort once torch has run its own in the process. This
    was seen with TensorFlow 2.21 and torch 2.13 on the CPU. Without these kernels there is no problem.

    Args:
        found: the model.
        call: the call that would run it.
        instead: the alternative to the environment variable.
    """
    kinds = {layer.forms[0].kind for layer in found.inventory.layers}
    if "torch" not in sys.modules or os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0" or not kinds & _CONVOLUTIONS:
        return
    raise UnsupportedError(
        f"{call}: the gradient of TensorFlow's convolutions can end the process once torch runs in it too: their "
        "oneDNN libraries do not agree. Set the environment variable TF_ENABLE_ONEDNN_OPTS=0 before the program "
        f"starts; or {instead}."
    )


def _gradient_tape() -> Any:
    return tf.GradientTape(watch_accessed_variables=False)


def _trainable_names(found: KerasInventory) -> list[str]:
    leaves = [leaf for layer in found.inventory.layers for leaf in layer.leaves.values()]
    return [leaf.name for leaf in leaves if leaf.trainable and leaf.tied is None]


def _to_array(gradient: Any, variable: Any) -> Array:
    """Return a gradient in float32; zeros for a parameter that the output does not depend on."""
    if gradient is None:
        return np.zeros(tuple(variable.shape), np.float32)
    return to_numpy(tf.cast(to_dense(gradient, variable), tf.float32))


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors = keras.tree.map_structure(_to_tensor, batch)
    if isinstance(tensors, Mapping):
        return (), dict(tensors)
    return (tuple(tensors), {}) if isinstance(tensors, tuple) else ((tensors,), {})


def _to_tensor(leaf: Any) -> Any:
    """Return an argument as a tensor, in float32 if it is floating; other objects are unchanged."""
    if not isinstance(leaf, np.ndarray | np.generic) and not tf.is_tensor(leaf):
        return leaf
    tensor = tf.convert_to_tensor(leaf)
    return tf.cast(tensor, tf.float32) if is_floating(tensor) else tensor


@contextlib.contextmanager
def _preserve_state(model: Any) -> Iterator[None]:
    """Context manager that restores what a forward pass writes: statistics, seeds, states of stateful layers."""
    found = model_variables(model)
    written = [*found.running.values(), *found.rng.values(), *found.rewritten.values()]
    before = [to_numpy(variable) for variable in written]
    try:
        yield
    finally:
        for variable, values in zip(written, before, strict=True):
            assign(variable, values)
        if isinstance(model, keras.Layer):
            clear_losses(model)


@contextlib.contextmanager
def _force_float32(model: Any) -> Iterator[None]:
    """Context manager in which every layer computes in float32, whatever its policy.

    Variables in 16 bits are replaced by float32 copies, because some Keras layers do not cast them. Policies and
    variables are restored on exit.
    """
    if not is_layer(model):
        yield
        return
    application = PolicyApplication(model, Policy("float32").plan())
    held: list[tuple[Any, Any]] = []
    values: list[tuple[Any, Any]] = []
    try:
        application.put()
        for module in list_layers(model):
            if not is_quantized(module.layer):
                held.append((module.layer, get_layer_policy(module.layer)))
                set_layer_policy(module.layer, keras.DTypePolicy("float32"))
        for variable in model.variables:
            if dtype_name(variable) in HALF_DTYPES:
                wide = tf.Variable(tf.cast(native_variable(variable), tf.float32), trainable=variable.trainable)
                values.append((variable, replace_variable(variable, wide)))
        yield
    finally:
        for variable, value in values:
            replace_variable(variable, value)
        for layer, policy in held:
            set_layer_policy(layer, policy)
        application.restore()


def _record_calls(
    model: Any, paths: Mapping[int, str], seen: dict[str, Array], taken: dict[str, Array], inputs: Container[str]
) -> contextlib.AbstractContextManager[None]:
    """Record each layer's output if it is a single array. For a layer called several times, the last one is kept. Of
    the layers in `inputs`, also the first array that the first call takes."""
    named = ((module.layer, paths.get(id(module.layer), module.stable_path)) for module in list_layers(model))
    return replace_calls(
        (layer, _record_call(layer.call, path, seen, taken if path in inputs else None))
        for layer, path in named
        if path
    )


def _record_call(
    call: Callable[..., Any], path: str, seen: dict[str, Array], taken: dict[str, Array] | None
) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        if taken is not None and path not in taken:
            given = next((each for each in (*args, *kwargs.values()) if _has_values(each)), None)
            if given is not None:
                taken[path] = to_numpy(given)
        output = call(*args, **kwargs)
        if _has_values(output):
            seen.pop(path, None)
            seen[path] = to_numpy(output)
        return output

    return watched


def _has_values(value: Any) -> bool:
    """Return whether a value is one array outside of a graph."""
    return tf.is_tensor(value) and hasattr(value, "numpy") and not isinstance(value, tf.RaggedTensor)
