"""`KerasHarness`: Keras models with given weights, for the conformance suite, on every Keras backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from polyamp.contract.harness import DenseWeights, ObserveCallback
from polyamp.demo import digits
from polyamp.errors import UnsupportedError
from polyamp_keras.arrays import dtype_name, native_variable

Array = np.ndarray[Any, Any]


class KerasHarness:
    """The part of a `Harness` that is the same on every Keras backend.

    Attributes:
        to_numpy: copies an array of the framework to the host.
    """

    to_numpy: Callable[[Any], Array]

    def float64(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def mlp(self, layers: Sequence[DenseWeights], *, observe: ObserveCallback | None = None) -> Any:
        inputs = hidden = keras.Input((layers[0].kernel.shape[0],))
        made = [_ObservedDense(layer, name=f"dense{number}") for number, layer in enumerate(layers)]
        for dense in made[:-1]:
            hidden = keras.layers.ReLU()(dense(hidden))
        model = keras.Model(inputs, made[-1](hidden))
        for dense in made:
            dense.observe = observe
        return model

    def branches(self, layers: Sequence[DenseWeights]) -> Any:
        inputs = keras.Input((layers[0].kernel.shape[0],))
        return keras.Model(inputs, [_dense(layer, f"dense{number}")(inputs) for number, layer in enumerate(layers)])

    def normalized_mlp(self, layers: Sequence[DenseWeights]) -> Any:
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

    def dropout_mlp(self, layers: Sequence[DenseWeights]) -> tuple[Any, dict[str, Any]]:
        first, second = layers
        made = [
            keras.Input((first.kernel.shape[0],)),
            _dense(first, "dense0"),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.5),
            _dense(second, "dense1"),
        ]
        return keras.Sequential(made), {}

    def constrained_mlp(self, layers: Sequence[DenseWeights], limit: float) -> Any:
        inputs = hidden = keras.Input((layers[0].kernel.shape[0],))
        made = [_ConstrainedDense(layers[0], "dense0", limit)]
        made += [_dense(layer, f"dense{number}") for number, layer in enumerate(layers) if number]
        for dense in made[:-1]:
            hidden = keras.layers.ReLU()(dense(hidden))
        return keras.Model(inputs, made[-1](hidden))

    def digits(self, weights: Mapping[str, Array]) -> Any:
        model = KerasDigits(weights)
        model.build((None, digits.ROWS, digits.ROWS))
        return model

    def weights(self, state: Any) -> list[DenseWeights]:
        dense = [layer for layer in state.model.layers if hasattr(layer, "kernel")]
        return [
            DenseWeights(self.to_numpy(native_variable(layer.kernel)), self.to_numpy(native_variable(layer.bias)))
            for layer in dense
        ]

    def sensitive(self) -> Mapping[str, Mapping[str, Callable[[Any], Any]]]:
        families: dict[str, dict[str, Callable[[Any], Any]]] = {
            "exponentials": {"exp": keras.ops.exp},
            "logarithms": {"log": keras.ops.log},
            "powers": {"pow": lambda x: keras.ops.power(x, 3.0), "rsqrt": keras.ops.rsqrt},
            "sums": {"sum": keras.ops.sum, "mean": keras.ops.mean},
            "cumulative sums": {"cumsum": keras.ops.cumsum},
            "softmax": {
                "softmax": keras.ops.softmax,
                "log_softmax": keras.ops.log_softmax,
                "logsumexp": lambda x: keras.ops.logsumexp(x, axis=-1),
            },
            "normalisation": {
                "norm": keras.ops.norm,
                "layer_norm": lambda x: keras.ops.layer_normalization(x, epsilon=1e-5),
            },
            "losses": {"binary_crossentropy": lambda x: keras.ops.binary_crossentropy(keras.ops.ones_like(x), x / 16)},
            "linear algebra": {
                "inv": lambda x: keras.ops.inv(keras.ops.reshape(x, (-1, 4, 600))[:, :, :4]),
                "det": lambda x: keras.ops.det(keras.ops.reshape(x, (-1, 4, 600))[:, :, :4]),
            },
            "FFT": {"rfft": lambda x: keras.ops.rfft(x)[0]},
        }
        layers: dict[str, dict[str, Callable[[Any], Any]]] = {
            "exponentials": {"exponential activation": keras.layers.Activation("exponential")},
            "softmax": {
                "Softmax": keras.layers.Softmax(),
                "softmax activation": keras.layers.Activation("softmax"),
                "log_softmax activation": keras.layers.Activation("log_softmax"),
            },
            "normalisation": {
                "LayerNormalization": keras.layers.LayerNormalization(),
                "BatchNormalization": keras.layers.BatchNormalization(),
                "GroupNormalization": keras.layers.GroupNormalization(groups=4),
                "UnitNormalization": keras.layers.UnitNormalization(),
            },
        }
        return {
            family: {name: _functional(operation) for name, operation in operations.items()} | layers.get(family, {})
            for family, operations in families.items()
        }

    def saturating(self) -> Mapping[str, Callable[[Any], Any]]:
        operations: dict[str, Callable[[Any], Any]] = {
            "log(p + eps) of sigmoid": lambda x: keras.ops.log(keras.ops.sigmoid(-x) + 1e-6),
            "log(1 - p) of sigmoid": lambda x: keras.ops.log(1 - keras.ops.sigmoid(x)),
            "1 - p of sigmoid": lambda x: 1 - keras.ops.sigmoid(x),
        }
        return {name: _functional(operation) for name, operation in operations.items()}

    def inner_products(self) -> Mapping[str, Callable[[Any], Any]]:
        return {"einsum": _functional(lambda x: keras.ops.einsum("bi,bi->b", x, x))}

    def outer(self, left: Any, right: Any) -> Any:
        return keras.ops.einsum("i,j->ij", left, right)

    def gathered(self, layers: Sequence[DenseWeights], rows: Array) -> Any:
        inputs = hidden = keras.Input((layers[0].kernel.shape[0],))
        for number, layer in enumerate(layers):
            hidden = _dense(layer, f"dense{number}")(keras.ops.relu(hidden) if number else hidden)
        return keras.Model(inputs, keras.ops.take(hidden, rows, axis=0))

    def with_head(self, state: Any, head: DenseWeights) -> Any:
        *body, last = [layer for layer in state.model.layers if not isinstance(layer, keras.layers.InputLayer)]
        new = _ObservedDense(head, name=last.name)
        return keras.Model(state.model.inputs[0], new(body[-1].output))

    def with_frozen(self, state: Any, numbers: Collection[int]) -> None:
        for layer in state.model.layers:
            if layer.name.startswith("dense"):
                layer.trainable = int(layer.name.removeprefix("dense")) not in numbers

    def unusable(self, kind: str) -> Any:
        if kind == "empty":
            return keras.Sequential([keras.Input((2,)), keras.layers.ReLU()])
        if kind == "float16":
            return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, dtype="float16")])
        raise UnsupportedError(f"Keras makes no trainable parameters that are {kind}.")


def _functional(operation: Callable[[Any], Any]) -> Any:
    """Return a functional model of one operation, after a layer that casts its input to the compute dtype."""
    inputs = keras.Input((600,))
    return keras.Model(inputs, operation(keras.layers.Identity()(inputs)))


class KerasDigits(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """One-block transformer of `polyamp.demo.digits`, built from Dense and LayerNormalization layers."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        super().__init__(name="digits")
        made: dict[str, Any] = {
            name: _dense(DenseWeights(weights[f"{name}/kernel"], weights[f"{name}/bias"]), name)
            for name in digits.DENSE
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
        """Create the variables of every layer. Their shapes do not depend on the batch."""
        for name, (inputs, _) in digits.DENSE.items():
            self.blocks[name].build((None, inputs))
        for name in digits.NORMS:
            self.blocks[name].build((None, digits.ROWS, digits.WIDTH))
        self.built = True

    def call(self, x: Any) -> Any:
        """Return logits of shape (batch, 10) for images of shape (batch, 8, 8)."""
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
        # Softmax in float32 (S4); the product with the values is in the compute dtype.
        shares = keras.ops.cast(keras.ops.softmax(keras.ops.cast(scores, "float32")), value.dtype)
        mixed = keras.ops.transpose(keras.ops.matmul(shares, value), (0, 2, 1, 3))
        return self.blocks["out"](keras.ops.reshape(mixed, (-1, digits.ROWS, digits.WIDTH)))


class ComplexKernel(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Layer with one complex kernel, whose result is a function of its input and the kernel."""

    def __init__(self, kernel: Array, function: Callable[[Any, Any], Any]) -> None:
        super().__init__(autocast=False)
        self.kernel = self.add_weight(shape=kernel.shape, dtype="complex64", initializer="zeros", name="kernel")
        self.kernel.assign(kernel)
        self.function = function
        self.built = True

    def call(self, x: Any) -> Any:
        """Return the function of `x` and the kernel."""
        return self.function(x, self.kernel.value)


class _ObservedDense(keras.layers.Dense):  # type: ignore[misc]  # Keras is untyped
    """Dense layer that reports the dtype of its output, in the place of an activation: its `call` is Keras's."""

    def __init__(self, layer: DenseWeights, name: str) -> None:
        super().__init__(**_settings(layer), name=name)
        self.activation = self._report
        self.layer = layer
        self.observe: ObserveCallback | None = None

    def get_config(self) -> dict[str, Any]:
        return {"layer": self.layer, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _ObservedDense:
        return cls(config["layer"], config["name"])

    def _report(self, result: Any) -> Any:
        if self.observe is not None:
            self.observe(dtype_name(result))
        return result


class _ConstrainedDense(keras.layers.Dense):  # type: ignore[misc]  # Keras is untyped
    """Dense layer that clips its kernel before each use."""

    def __init__(self, layer: DenseWeights, name: str, limit: float) -> None:
        super().__init__(**_settings(layer), name=name)
        self.limit = limit

    def call(self, inputs: Any, training: Any = None) -> Any:
        self.kernel.assign(keras.ops.clip(self.kernel, -self.limit, self.limit))
        return super().call(inputs, training=training)


def _dense(layer: DenseWeights, name: str) -> Any:
    return keras.layers.Dense(**_settings(layer), name=name)


def _settings(layer: DenseWeights) -> dict[str, Any]:
    return {
        "units": layer.kernel.shape[1],
        "kernel_initializer": keras.initializers.Constant(layer.kernel),
        "bias_initializer": keras.initializers.Constant(layer.bias),
        **({} if layer.kernel.dtype.name == "float32" else {"dtype": layer.kernel.dtype.name}),
    }
