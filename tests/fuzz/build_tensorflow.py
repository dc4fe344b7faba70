"""A description as a Keras model, functional or subclassed. Called by the worker."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import polyamp
from tests.fuzz.grammar import CLAMP, LENGTH, SIZE, Description, walk
from tests.fuzz.problem import Weights, wide, width_of_input, widths

ops = keras.ops
ACTIVATIONS = {
    "relu": ops.relu,
    "tanh": ops.tanh,
    "gelu": lambda x: ops.gelu(x, approximate=True),
    "silu": ops.silu,
    "sigmoid": ops.sigmoid,
    "softmax": lambda x: ops.softmax(x, axis=-1),
    "hand_softmax": lambda x: ops.exp(x) / ops.sum(ops.exp(x), axis=-1, keepdims=True),
    "log_gate": lambda x: ops.log(1.0 - ops.sigmoid(x * 3.0) + 1e-3),
    "inner": lambda x: x * ops.expand_dims(ops.einsum("...d,...d->...", x, x), -1) * 0.1,
    "cumsum": lambda x: ops.cumsum(x, axis=-1) * 0.3,
    "logsumexp": lambda x: x - ops.logsumexp(x, axis=-1, keepdims=True),
    "hand_rms": lambda x: x * ops.rsqrt(ops.mean(x**2, axis=-1, keepdims=True) + 1e-3),
    "square": lambda x: ops.power(x, 2.0) * 0.3,
}


def cuts_bfloat16_off() -> bool:
    """On some processors (seen with AVX2 alone) TensorFlow's own products are cut off where others, and XLA, round."""
    row = tf.constant([[1.0, 2.0**-8 + 2.0**-9]], tf.bfloat16)  # its sum is 1 and three quarters of the last place
    return float(tf.matmul(tf.tile(row, (64, 1)), tf.ones((2, 64), tf.bfloat16))[0, 0]) == 1.0


def build(description: Description, weights: Weights) -> Any:
    """The model with these weights."""
    if wide(description):
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("float64")
        try:
            return _built(description, weights)
        finally:
            keras.config.set_dtype_policy(before)
    return _built(description, weights)


def _built(description: Description, weights: Weights) -> Any:
    net = Net(description, weights)
    if description["models"]["tensorflow"] == "subclass":
        net.build(None)
        return net
    inputs = _input(description)
    model = keras.Model(inputs, net.call(inputs))
    # what the outputs do not need is no part of a functional model until a layer tracks it
    model.spare = [net.parts[name] for name in net.unused]
    return model


def running(state: Any, description: Description, updates: int) -> Weights:
    """Running statistics by name."""
    found: Weights = {}
    for name, layer in _by_name(state.model).items():
        if isinstance(layer, keras.layers.BatchNormalization):
            found[f"{name}/mean"] = np.array(layer.moving_mean)
            found[f"{name}/variance"] = np.array(layer.moving_variance)
    return found


def parameters(state: Any, description: Description) -> Weights:
    """The parameters by the description's names, in its layout."""
    found: Weights = {}
    layers = _by_name(state.model)
    for layer in [*walk(description["layers"]), *({"op": "head", **head} for head in description["heads"])]:
        if "name" not in layer or "tied" in layer:
            continue
        name, made = layer["name"], layers[layer["name"]]
        for variable in made.trainable_variables:
            key = variable.path.rpartition(f"{name}/")[2]
            if layer["op"] == "gru":
                key = {"kernel": "input", "recurrent_kernel": "recurrent"}[key.rpartition("/")[2]]
            value = np.array(variable)
            if layer["op"] == "gru":
                value = _gates(value)
            if layer["op"] == "attention":
                key, value = key.partition("/")[0].replace("attention_output", "out"), value.reshape(8, 8)
            found[f"{name}/{_NAMES.get(key, key)}"] = value
    return found


def averages(state: Any, description: Description) -> Weights:
    """The averages of the parameters, likewise."""
    with polyamp.averaged(state):
        return {name: np.array(value) for name, value in parameters(state, description).items()}


_NAMES = {"gamma": "scale", "beta": "bias", "embeddings": "table"}


def _by_name(model: Any) -> dict[str, Any]:
    return {layer.name: layer for layer in model._flatten_layers()}


def _input(description: Description) -> Any:
    kind, width = description["kind"], width_of_input(description)
    if kind == "tokens":
        return keras.Input((LENGTH,), dtype="int32")
    places: tuple[int, ...] = {"vector": (), "mlp": (), "image": (SIZE, SIZE)}.get(kind, (LENGTH,))
    return keras.Input((*places, width))


class Net(keras.Model):
    """Layers by name; `call` follows the description. Of a functional model only the layers are used."""

    def __init__(self, description: Description, weights: Weights) -> None:
        super().__init__(name="net")
        self.description = description
        self.parts: dict[str, Any] = {}
        self.unused: list[str] = []
        self.pools: dict[str, Any] = {}
        given = widths(description)
        regions = [layer for layer in walk(description["layers"]) if layer["op"] == "region"]
        single = {layer.get("name") for region in regions for layer in walk(region["layers"])}
        for layer in [*walk(description["layers"]), *({"op": "dense", **head} for head in description["heads"])]:
            if "name" in layer and "tied" not in layer:
                name = layer["name"]
                own = {k.partition("/")[2]: v for k, v in weights.items() if k.startswith(f"{name}/")}
                self.parts[name] = _made(layer, own, given[name], "float32" if name in single else None)
                if layer["op"] == "unused":
                    self.unused.append(name)
                    self.parts[name].build((None, given[name]))
        average = keras.layers.GlobalAveragePooling2D if description["kind"] == "image" else None
        for head in description["heads"]:
            if head["pool"] == "mean":
                self.pools[head["name"]] = (average or keras.layers.GlobalAveragePooling1D)()
            elif head["pool"] == "flatten":
                self.pools[head["name"]] = keras.layers.Flatten()

    def build(self, input_shape: Any) -> None:
        """Every layer's variables, by a symbolic call."""
        self.call(_input(self.description))
        self.built = True

    def call(self, x: Any) -> Any:
        """One output per head."""
        h = self._through(self.description["layers"], x)
        return [self._head(head, h) for head in self.description["heads"]]

    def _through(self, layers: list[Any], h: Any) -> Any:
        for layer in layers:
            op = layer["op"]
            if op in ACTIVATIONS:
                h = ACTIVATIONS[op](h)
            elif op == "residual":
                h = h + self._through(layer["layers"], h)
            elif op == "region":
                h = self._through(layer["layers"], ops.cast(h, "float32"))
            elif op == "tied":
                h = self.parts[layer["of"]](h)
            elif op == "detached":
                h = h + ops.stop_gradient(self.parts[layer["name"]](h))
            elif op == "zeroed":
                h = h + self.parts[layer["name"]](h) * 0.0
            elif op != "unused":
                h = self.parts[layer["name"]](h)
        return h

    def _head(self, head: dict[str, Any], h: Any) -> Any:
        if head["name"] in self.pools:
            h = self.pools[head["name"]](h)
        elif head["pool"] == "last":
            h = h[:, -1]
        if "tied" in head:
            return self.parts[head["tied"]](h, reverse=True)
        return self.parts[head["name"]](h)


class Clamped(keras.layers.Dense):
    """Writes its kernel within bounds before it uses it."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        """The product with the kernel that was written."""
        raw = self._kernel._value  # the master, not its cast
        raw.assign(tf.clip_by_value(raw, -CLAMP, CLAMP))
        return super().call(inputs, training=training)


class Positions(keras.layers.Layer):
    """Adds a learned table."""

    def __init__(self, table: Any, **options: Any) -> None:
        super().__init__(**options)
        self.given = table

    def build(self, shape: Any) -> None:
        """Create the table."""
        self.table = self.add_weight(name="table", shape=self.given.shape, initializer=_constant(self.given))

    def compute_output_shape(self, shape: Any) -> Any:
        """The input's shape."""
        return shape

    def call(self, x: Any) -> Any:
        """x + table."""
        return x + self.table


class Scale(keras.layers.Layer):
    """Multiplies by a learned vector."""

    def __init__(self, scale: Any, **options: Any) -> None:
        super().__init__(**options)
        self.given = scale

    def build(self, shape: Any) -> None:
        """Create the vector."""
        self.scale = self.add_weight(name="scale", shape=self.given.shape, initializer=_constant(self.given))

    def compute_output_shape(self, shape: Any) -> Any:
        """The input's shape."""
        return shape

    def call(self, x: Any) -> Any:
        """x * scale."""
        return x * self.scale


class Attention(keras.layers.Layer):
    """Self-attention without biases, written out; its softmax is a layer, which S4 keeps in float32."""

    def __init__(self, layer: dict[str, Any], own: Weights, **options: Any) -> None:
        super().__init__(**options)
        self.layer = layer
        self.parts = {part: _dense({"kernel": kernel}, part) for part, kernel in own.items()}
        self.softmax = keras.layers.Softmax()

    def build(self, shape: Any) -> None:
        """Build the four projections."""
        for part in self.parts.values():
            part.build(shape)

    def compute_output_shape(self, shape: Any) -> Any:
        """The input's shape."""
        return shape

    def call(self, x: Any) -> Any:
        """(batch, length, width) in and out."""
        heads = self.layer["heads"]

        def split(part: str) -> Any:
            return ops.transpose(ops.reshape(self.parts[part](x), (-1, LENGTH, heads, 8 // heads)), (0, 2, 1, 3))

        q, k, v = split("query"), split("key"), split("value")
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) / (8 // heads) ** 0.5
        if self.layer["causal"]:
            visible = np.tril(np.ones((LENGTH, LENGTH), bool))
            scores = ops.where(visible, scores, ops.cast(-1e4, scores.dtype))
        mixed = ops.transpose(ops.matmul(ops.cast(self.softmax(scores), v.dtype), v), (0, 2, 1, 3))
        return self.parts["out"](ops.reshape(mixed, (-1, LENGTH, 8)))


class NativeAttention(keras.layers.MultiHeadAttention):
    """Keras's own self-attention, called with one argument."""

    def __init__(self, layer: dict[str, Any], own: Weights, **options: Any) -> None:
        super().__init__(layer["heads"], 8 // layer["heads"], use_bias=False, **options)
        self.causal = layer["causal"]
        self.own = own

    def call(self, x: Any, training: Any = None) -> Any:
        """(batch, length, width) in and out."""
        return super().call(x, x, use_causal_mask=self.causal, training=training)

    def build(self, shape: Any) -> None:
        """Create the four projections with their weights."""
        super().build(shape, shape, shape)
        for part, layer in zip(
            ("query", "key", "value", "out"),
            (self._query_dense, self._key_dense, self._value_dense, self._output_dense),
            strict=True,
        ):
            layer.kernel.assign(self.own[part].reshape(layer.kernel.shape))

    def compute_output_shape(self, shape: Any) -> Any:
        """The input's shape."""
        return shape

    def compute_output_spec(self, x: Any, training: Any = None) -> Any:
        """The input's shape in the layer's dtype."""
        return keras.KerasTensor(x.shape, dtype=self.compute_dtype)


class Rnn(keras.layers.Layer):
    """h <- tanh(x @ input + h @ recurrent + bias), written out."""

    def __init__(self, own: Weights, **options: Any) -> None:
        super().__init__(**options)
        self.own = own

    def build(self, shape: Any) -> None:
        """Create the three arrays."""
        for name, value in self.own.items():
            setattr(self, f"{name}_weight", self.add_weight(name=name, shape=value.shape, initializer=_constant(value)))

    def compute_output_shape(self, shape: Any) -> Any:
        """The input's shape with the layer's width."""
        return (*shape[:-1], self.own["bias"].shape[0])

    def call(self, x: Any) -> Any:
        """(batch, length, width) in and out."""
        h = ops.zeros_like(x[:, 0] @ self.input_weight)
        found = []
        for step in range(LENGTH):
            h = ops.tanh(x[:, step] @ self.input_weight + h @ self.recurrent_weight + self.bias_weight)
            found.append(h)
        return ops.stack(found, axis=1)


def _constant(value: Any) -> Any:
    return keras.initializers.Constant(value)


def _dense(own: Weights, name: str, *, clamp: bool = False, dtype: str | None = None) -> Any:
    settings = {"bias_initializer": _constant(own["bias"])} if "bias" in own else {"use_bias": False}
    return (Clamped if clamp else keras.layers.Dense)(
        own["kernel"].shape[1], kernel_initializer=_constant(own["kernel"]), name=name, dtype=dtype, **settings
    )


def _gates(value: Any) -> Any:
    """r, z, n to Keras's z, r, n, and back."""
    first, second, third = np.split(value, 3, axis=-1)
    return np.concatenate([second, first, third], axis=-1)


def _made(layer: dict[str, Any], own: Weights, n: int, dtype: str | None = None) -> Any:
    """The layer; `dtype` is its own where it stands in a region."""
    op, name = layer["op"], layer["name"]
    if op in ("dense", "unused", "detached", "zeroed"):
        return _dense(own, name, clamp=layer.get("clamp", False), dtype=dtype)
    if op == "conv":
        settings = {"bias_initializer": _constant(own["bias"])} if "bias" in own else {"use_bias": False}
        return keras.layers.Conv2D(
            layer["width"], 3, padding="same", kernel_initializer=_constant(own["kernel"]), name=name, **settings
        )
    if op == "embedding":
        return keras.layers.ReversibleEmbedding(
            *own["table"].shape, embeddings_initializer=_constant(own["table"]), name=name
        )
    if op == "rms_norm":
        made = keras.layers.RMSNormalization(epsilon=1e-5, name=name, dtype=dtype)
        made.build((None, n))
        made.scale.assign(own["scale"])
        return made
    if op in ("layer_norm", "group_norm", "batch_norm"):
        settings: dict[str, Any] = {
            "gamma_initializer": _constant(own["scale"]),
            "beta_initializer": _constant(own["bias"]),
        }
        settings["dtype"] = dtype
        if op == "layer_norm":
            return keras.layers.LayerNormalization(epsilon=1e-5, name=name, **settings)
        if op == "group_norm":
            return keras.layers.GroupNormalization(2, epsilon=1e-5, name=name, **settings)
        return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name, **settings)
    if op == "gru":
        return keras.layers.GRU(
            layer["width"], use_bias=False, reset_after=True, return_sequences=True, name=name,
            kernel_initializer=_constant(_gates(own["input"])),
            recurrent_initializer=_constant(_gates(own["recurrent"])),
        )  # fmt: skip
    if op == "attention":
        return (NativeAttention if layer["native"] else Attention)(layer, own, name=name)
    if op == "rnn":
        return Rnn(own, name=name)
    return Positions(own["table"], name=name) if op == "positions" else Scale(own["scale"], name=name, dtype=dtype)
