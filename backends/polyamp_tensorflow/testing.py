"""`TensorFlowHarness`: Keras models with given weights, for the conformance suite, the demo and the parity runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from polyamp.backend import LossFunction, StepResult
from polyamp.errors import UnsupportedError
from polyamp.recipe import Recipe
from polyamp.testing import digits
from polyamp.testing.harness import Layer, Observe
from polyamp_tensorflow.arrays import Array, dtype_name, to_numpy


class TensorFlowHarness:
    """`Harness` over Keras."""

    def array(self, value: Array) -> Any:
        return tf.convert_to_tensor(value)

    def mlp(self, layers: Sequence[Layer], *, observe: Observe | None = None) -> Any:
        inputs = hidden = keras.Input((layers[0].kernel.shape[0],))
        made = [_ObservedDense(layer, name=f"dense{number}") for number, layer in enumerate(layers)]
        for dense in made[:-1]:
            hidden = keras.layers.ReLU()(dense(hidden))
        model = keras.Model(inputs, made[-1](hidden))
        for dense in made:
            dense.observe = observe
        return model

    def normalized_mlp(self, layers: Sequence[Layer]) -> Any:
        first, second = layers
        return keras.Sequential(
            [
                keras.Input((first.kernel.shape[0],)),
                _dense(first, "dense0"),
                keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name="norm0"),
                keras.layers.ReLU(),
                _dense(second, "dense1"),
            ]
        )

    def digits(self, weights: Mapping[str, Array]) -> Any:
        model = Digits(weights)
        model.build((None, digits.ROWS, digits.ROWS))
        return model

    def weights(self, state: Any) -> list[Layer]:
        dense = [layer for layer in state.model.layers if isinstance(layer, keras.layers.Dense)]
        return [Layer(to_numpy(layer.kernel), to_numpy(layer.bias)) for layer in dense]

    def sensitive(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "exp": tf.exp,
            "log": tf.math.log,
            "pow": lambda x: tf.pow(x, 3.0),
            "rsqrt": tf.math.rsqrt,
            "sum": tf.reduce_sum,
            "mean": tf.reduce_mean,
            "cumsum": tf.cumsum,
            "softmax": tf.nn.softmax,
            "log_softmax": tf.nn.log_softmax,
            "logsumexp": lambda x: tf.reduce_logsumexp(x, axis=-1),
            "layer_norm": lambda x: keras.ops.layer_normalization(x, epsilon=1e-5),
        }

    def matmul(self, left: Any, right: Any) -> Any:
        return tf.matmul(left, right)

    def unusable(self, kind: str) -> Any:
        if kind == "empty":
            return keras.Sequential([keras.Input((2,)), keras.layers.ReLU()])
        if kind == "float16":
            return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, dtype="float16")])
        return _Linear(np.ones((2, 2), {"integer": np.int32, "complex": np.complex64}[kind]))

    def replicate(
        self, layers: Sequence[Layer], recipe: Recipe, loss_fn: LossFunction, batches: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, StepResult]]:
        raise UnsupportedError("the tensorflow backend does not train on replicas.")

    def native_optimizer(self, model: Any, learning_rate: float) -> Any:
        return keras.optimizers.SGD(learning_rate)


class Digits(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """The one-block transformer of `polyamp.testing.digits` from Dense and LayerNormalization layers."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        super().__init__(name="digits")
        made: dict[str, Any] = {
            name: _dense(Layer(weights[f"{name}/kernel"], weights[f"{name}/bias"]), name) for name in digits.DENSE
        }
        for name in digits.NORMS:
            made[name] = keras.layers.LayerNormalization(
                epsilon=digits.EPSILON,
                gamma_initializer=keras.initializers.Constant(weights[f"{name}/scale"]),
                beta_initializer=keras.initializers.Constant(weights[f"{name}/bias"]),
                name=name,
            )
        self.blocks = made

    def build(self, input_shape: Any) -> None:
        """Create every layer's variables; the shapes do not depend on the batch."""
        for name, (inputs, _) in digits.DENSE.items():
            self.blocks[name].build((None, inputs))
        for name in digits.NORMS:
            self.blocks[name].build((None, digits.ROWS, digits.WIDTH))
        self.built = True

    def call(self, x: Any) -> Any:
        """Logits, shape (batch, 10), of images, shape (batch, 8, 8)."""
        hidden = self.blocks["embed"](x)
        hidden = hidden + self._attention(self.blocks["norm1"](hidden))
        inner = keras.ops.relu(self.blocks["mlp1"](self.blocks["norm2"](hidden)))
        hidden = hidden + self.blocks["mlp2"](inner)
        normed = self.blocks["norm3"](hidden)
        return self.blocks["head"](keras.ops.reshape(normed, (-1, digits.ROWS * digits.WIDTH)))

    def _attention(self, hidden: Any) -> Any:
        heads, size = digits.HEADS, digits.WIDTH // digits.HEADS

        def split(name: str) -> Any:
            projected = keras.ops.reshape(self.blocks[name](hidden), (-1, digits.ROWS, heads, size))
            return keras.ops.transpose(projected, (0, 2, 1, 3))

        query, key, value = split("query"), split("key"), split("value")
        scores = keras.ops.matmul(query, keras.ops.transpose(key, (0, 1, 3, 2))) / size**0.5
        # Softmax in float32 as S4 asks; the product with the values runs in the compute dtype again.
        shares = keras.ops.cast(keras.ops.softmax(keras.ops.cast(scores, "float32")), value.dtype)
        mixed = keras.ops.transpose(keras.ops.matmul(shares, value), (0, 2, 1, 3))
        return self.blocks["out"](keras.ops.reshape(mixed, (-1, digits.ROWS, digits.WIDTH)))


class _ObservedDense(keras.layers.Dense):  # type: ignore[misc]  # Keras is untyped
    """A dense layer that reports the dtype of its result."""

    def __init__(self, layer: Layer, name: str) -> None:
        super().__init__(**_settings(layer), name=name)
        self.observe: Observe | None = None

    def call(self, inputs: Any, training: Any = None) -> Any:
        result = super().call(inputs, training=training)
        if self.observe is not None:
            self.observe(dtype_name(result))
        return result


class _Linear(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
    """A callable with `trainable_variables` that is no Keras layer."""

    def __init__(self, kernel: Array) -> None:
        super().__init__()
        self.kernel = tf.Variable(kernel, name="kernel")

    def __call__(self, x: Any) -> Any:
        return tf.matmul(x, self.kernel)


def _dense(layer: Layer, name: str) -> Any:
    return keras.layers.Dense(**_settings(layer), name=name)


def _settings(layer: Layer) -> dict[str, Any]:
    return {
        "units": layer.kernel.shape[1],
        "kernel_initializer": keras.initializers.Constant(layer.kernel),
        "bias_initializer": keras.initializers.Constant(layer.bias),
    }
