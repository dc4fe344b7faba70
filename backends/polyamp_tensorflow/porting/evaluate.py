"""One pass of a model in float32 and as in inference, forward and backward, with what every layer gives.

Called by `converter`; `polyamp.port(check=)` compares it with that of the other framework.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf

from polyamp.errors import UnsupportedError
from polyamp.porting.layouts.converter import Evaluation
from polyamp.recipe.policy import Policy
from polyamp.rules.plan import NARROW
from polyamp_tensorflow.arrays import dense, dtype_name, is_floating, raw, to_numpy
from polyamp_tensorflow.compat import forget_losses, held_policy, hold_policy, hold_value
from polyamp_tensorflow.models.layers import is_layer, modules, with_calls
from polyamp_tensorflow.models.variables import variables_of
from polyamp_tensorflow.porting.fill import assign
from polyamp_tensorflow.porting.walk import Found
from polyamp_tensorflow.precision.keras_policies import is_quantized
from polyamp_tensorflow.precision.layer_stack import Application

Array = np.ndarray[Any, Any]
_CONVOLUTIONS: Final = {"conv", "conv_transpose"}


def evaluate(
    model: Any, found: Found, batch: Any, cotangents: Callable[[Sequence[Array]], Sequence[Array]]
) -> Evaluation:
    """Outputs, gradients and the outputs of layers (see `Converter.evaluate`).

    Raises:
        UnsupportedError: convolutions beside torch, whose gradient would end the process.
    """
    refuse_beside_torch(found, "check", "port without check=")
    args, kwargs = _arguments(batch)
    weights = {name: found.variables[name] for name in _trainable(found)}
    seen: dict[str, Array] = {}
    with _as_before(model), _in_float32(model), _recording(model, found.paths, seen), _tape() as tape:
        watched = [raw(variable) for variable in weights.values()]
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
        {name: _gradient(item, weights[name]) for name, item in zip(weights, gradients, strict=True)},
        seen,
    )


def refuse_beside_torch(found: Found, call: str, instead: str) -> None:
    """TensorFlow's oneDNN kernels for the gradient of a convolution abort once torch has run its own in the process
    (seen with TensorFlow 2.21 and torch 2.13 on the CPU); without them all is well.

    Args:
        found: the model.
        call: what would run it.
        instead: what can be done without the environment variable.
    """
    kinds = {layer.forms[0].kind for layer in found.inventory.layers}
    if "torch" not in sys.modules or os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0" or not kinds & _CONVOLUTIONS:
        return
    raise UnsupportedError(
        f"{call}: the gradient of TensorFlow's convolutions can end the process once torch runs in it too: their "
        "oneDNN libraries do not agree. Set the environment variable TF_ENABLE_ONEDNN_OPTS=0 before the program "
        f"starts; or {instead}."
    )


def _tape() -> Any:
    return tf.GradientTape(watch_accessed_variables=False)


def _trainable(found: Found) -> list[str]:
    leaves = [leaf for layer in found.inventory.layers for leaf in layer.leaves.values()]
    return [leaf.name for leaf in leaves if leaf.trainable and leaf.tied is None]


def _gradient(gradient: Any, variable: Any) -> Array:
    """As float32; zeros of a parameter that the output does not depend on."""
    if gradient is None:
        return np.zeros(tuple(variable.shape), np.float32)
    return to_numpy(tf.cast(dense(gradient, variable), tf.float32))


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors = keras.tree.map_structure(_tensor, batch)
    if isinstance(tensors, Mapping):
        return (), dict(tensors)
    return (tuple(tensors), {}) if isinstance(tensors, tuple) else ((tensors,), {})


def _tensor(leaf: Any) -> Any:
    """An argument on the device, in float32 if it is floating; what is no array stays."""
    if not isinstance(leaf, np.ndarray | np.generic) and not tf.is_tensor(leaf):
        return leaf
    tensor = tf.convert_to_tensor(leaf)
    return tf.cast(tensor, tf.float32) if is_floating(tensor) else tensor


@contextlib.contextmanager
def _as_before(model: Any) -> Iterator[None]:
    """What a forward pass writes has its old values afterwards: statistics, seeds, the states of stateful layers."""
    found = variables_of(model)
    written = [*found.running.values(), *found.rng.values(), *found.rewritten.values()]
    before = [to_numpy(variable) for variable in written]
    try:
        yield
    finally:
        for variable, values in zip(written, before, strict=True):
            assign(variable, values)
        if isinstance(model, keras.Layer):
            forget_losses(model)


@contextlib.contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Every layer computes in float32, whatever policy it was given, and with float32 copies of variables in 16 bits,
    which some layers of Keras do not cast; afterwards each has its own again."""
    if not is_layer(model):
        yield
        return
    application = Application(model, Policy("float32").plan())
    held: list[tuple[Any, Any]] = []
    values: list[tuple[Any, Any]] = []
    try:
        application.put()
        for module in modules(model):
            if not is_quantized(module.layer):
                held.append((module.layer, held_policy(module.layer)))
                hold_policy(module.layer, keras.DTypePolicy("float32"))
        for variable in model.variables:
            if dtype_name(variable) in NARROW:
                wide = tf.Variable(tf.cast(raw(variable), tf.float32), trainable=variable.trainable)
                values.append((variable, hold_value(variable, wide)))
        yield
    finally:
        for variable, value in values:
            hold_value(variable, value)
        for layer, policy in held:
            hold_policy(layer, policy)
        application.restore()


def _recording(model: Any, paths: Mapping[int, str], seen: dict[str, Array]) -> contextlib.AbstractContextManager[None]:
    """Keep what each layer gives, if that is one array; of a layer that is called several times, what it gave last."""
    named = ((module.layer, paths.get(id(module.layer), module.stable_path)) for module in modules(model))
    return with_calls((layer, _watched(layer.call, path, seen)) for layer, path in named if path)


def _watched(call: Callable[..., Any], path: str, seen: dict[str, Array]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        if tf.is_tensor(output) and hasattr(output, "numpy") and not isinstance(output, tf.RaggedTensor):
            seen.pop(path, None)
            seen[path] = to_numpy(output)
        return output

    return watched
