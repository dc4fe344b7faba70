"""S4, S6: a loss that a Keras model computes by itself, in its `call`, a method, `compute_loss` or `train_step`, is
computed in float32 from what its layers give, or refused by name."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import polyamp
import polyamp_tensorflow
from polyamp.errors import LossError
from polyamp_tensorflow import LossScaleOptimizer, apply_policy

NARROW = ["mixed_float16", "mixed_bfloat16"]
X = (np.random.default_rng(0).random((16, 20, 20, 1)) > 0.7).astype(np.float32)
UNUSED = pytest.mark.filterwarnings("ignore:Gradients do not exist")
ROWS = np.random.default_rng(1).normal(size=(16, 6)).astype(np.float32)


def recipe(policy: str, **settings: Any) -> polyamp.Recipe:
    scaler = polyamp.LossScaler.static(8.0) if policy == "mixed_float16" else None
    return polyamp.Recipe(policy=polyamp.Policy(policy, **settings), optimizer=polyamp.sgd(0.01), scaler=scaler)


# keras.io, "Variational AutoEncoder".


def coders() -> tuple[Any, Any]:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((20, 20, 1))
    hidden = layers.Dense(16, activation="relu")(layers.Flatten()(inputs))
    mean, log_var = layers.Dense(2, name="z_mean")(hidden), layers.Dense(2, name="z_log_var")(hidden)
    encoder = keras.Model(inputs, [mean, log_var, mean], name="encoder")
    latent = keras.Input((2,))
    hidden = layers.Dense(400, activation="sigmoid")(layers.Dense(16, activation="relu")(latent))
    return encoder, keras.Model(latent, layers.Reshape((20, 20, 1))(hidden), name="decoder")


class VAE(keras.Model):  # type: ignore[misc]  # Keras is untyped
    def __init__(self, encoder: Any, decoder: Any, **options: Any) -> None:
        super().__init__(**options)
        self.encoder, self.decoder = encoder, decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.seen: list[Any] = []

    @property
    def metrics(self) -> Any:
        return [self.total_loss_tracker]

    def call(self, data: Any) -> Any:
        return self.decoder(self.encoder(data)[2])

    def total(self, data: Any) -> Any:
        z_mean, z_log_var, z = self.encoder(data)
        reconstruction = self.decoder(z)
        reconstruction_loss = ops.mean(ops.sum(keras.losses.binary_crossentropy(data, reconstruction), axis=(1, 2)))
        kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
        kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
        self.seen.append((reconstruction, z_mean, z_log_var, reconstruction_loss + kl_loss))
        return reconstruction_loss + kl_loss

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            total_loss = self.total(data)
            scaled = self.optimizer.scale_loss(total_loss)
        grads = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.total_loss_tracker.update_state(total_loss)
        return {"loss": self.total_loss_tracker.result()}

    def test_step(self, data: Any) -> Any:
        self.total_loss_tracker.update_state(self.total(data))
        return {"loss": self.total_loss_tracker.result()}


def vae() -> Any:
    model = VAE(*coders())
    model(X[:1])
    return model


def by_hand(reconstruction: Any, mean: Any, log_var: Any) -> float:
    """The loss in float64 of what the layers gave."""
    p, mean, log_var = (np.asarray(tf.cast(part, tf.float64)) for part in (reconstruction, mean, log_var))
    p = np.clip(p, 1e-7, 1 - 1e-7)
    cross = -(X * np.log(p) + (1 - X) * np.log(1 - p)).sum(axis=(1, 2, 3)).mean()
    return float(cross - 0.5 * (1 + log_var - mean**2 - np.exp(log_var)).sum(axis=1).mean())


@pytest.mark.parametrize("policy", NARROW)
@pytest.mark.parametrize("eager", [True, False])
def test_s04_a_loss_in_a_train_step_is_float32(policy: str, eager: bool) -> None:
    model = vae()
    polyamp_tensorflow.compile(model, recipe(policy), run_eagerly=eager, jit_compile=False)
    told = model.fit(X, batch_size=16, shuffle=False, verbose=0).history["loss"]
    again = model.evaluate(X, batch_size=16, verbose=0)
    assert all(part.dtype == tf.float32 for call in model.seen for part in call)
    if eager:
        assert told[0] == pytest.approx(by_hand(*model.seen[-2][:3]), rel=1e-6)
        assert again == pytest.approx(by_hand(*model.seen[-1][:3]), rel=1e-6)
        assert np.unique(np.asarray(model.seen[-1][1]) * 2.0**20 % 1).tolist() == [0.0], "16-bit layers gave it"
    else:
        full = vae()
        polyamp_tensorflow.compile(full, recipe("float32"), run_eagerly=True)
        assert told == pytest.approx(full.fit(X, batch_size=16, shuffle=False, verbose=0).history["loss"], rel=1e-3)


@pytest.mark.parametrize("policy", NARROW)
def test_s04_a_loss_in_a_method_is_float32_in_a_step(policy: str) -> None:
    model = vae()
    state = polyamp.init(model, recipe(policy))
    _, result = polyamp.train_step(lambda net, x: net.total(x), recipe(policy), compile=False)(state, X)
    assert [part.dtype for part in model.seen[-1]] == [tf.float32] * 4
    assert float(result.loss) == pytest.approx(by_hand(*model.seen[-1][:3]), rel=1e-6)
    model = vae()
    state = polyamp.init(model, recipe(policy))
    (loss, _), _ = polyamp.value_and_grad(lambda net, x: (net.total(x), 0.0), jit_compile=False)(state, X)
    assert [part.dtype for part in model.seen[-1]] == [tf.float32] * 4
    assert float(loss) == pytest.approx(float(result.loss), rel=1e-5)


@pytest.mark.parametrize("policy", NARROW)
def test_s04_apply_policy_and_a_train_step(policy: str) -> None:
    model = vae()
    with apply_policy(model, policy):
        model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01), "off"), run_eagerly=True)
        told = model.fit(X, batch_size=16, shuffle=False, verbose=0).history["loss"]
    assert told[0] == pytest.approx(by_hand(*model.seen[-1][:3]), rel=1e-6)


# `add_loss`.


class Adding(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """Adds its loss in its call, as Keras's guide does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(64, name="first"), layers.Dense(1, name="last")
        self.seen: list[Any] = []

    def call(self, x: Any) -> Any:
        hidden = self.first(x)
        self.seen.append(hidden)
        self.add_loss(ops.mean(ops.sum(ops.square(hidden), axis=-1)))
        return self.last(hidden)


class Penalty(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """A layer that adds a loss of its input; decorated, in a method beside `call`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[Any] = []

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def penalize(self, x: Any) -> None:
        self.add_loss(ops.mean(ops.sum(ops.square(x), axis=-1)))

    def call(self, x: Any) -> Any:
        self.seen.append(x)
        self.penalize(x)
        return x


def through(own: Any) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((6,)), layers.Dense(64, name="first"), own, layers.Dense(1, name="last")])


def whole(model: Any) -> Any:
    model(ROWS)
    return model


@UNUSED
@pytest.mark.parametrize("policy", NARROW)
@pytest.mark.parametrize("kind", ["model", "layer"])
def test_s04_what_add_loss_gets_is_computed_in_float32(policy: str, kind: str) -> None:
    keras.utils.set_random_seed(0)
    own: Any = whole(Adding()) if kind == "model" else Penalty(name="penalty")
    model = own if kind == "model" else through(own)
    polyamp_tensorflow.compile(model, recipe(policy), loss=None, run_eagerly=True)
    told = model.fit(ROWS, batch_size=16, shuffle=False, verbose=0).history["loss"][0]
    hidden = np.asarray(tf.cast(own.seen[-1], tf.float64))
    assert own.seen[-1].dtype == tf.float32
    assert told == pytest.approx(float((hidden**2).sum(axis=-1).mean()), rel=1e-6)
    narrow = tf.float16 if policy == "mixed_float16" else tf.bfloat16
    np.testing.assert_array_equal(hidden, tf.cast(tf.cast(hidden, narrow), tf.float64), "of 16-bit products")
    assert model.get_layer("first").compute_dtype == narrow.name
    state = polyamp.init(model, recipe(policy))
    step = polyamp.train_step(
        lambda net, x: 0.0 * tf.reduce_sum(net(x)) + polyamp.losses.regularization(net), recipe(policy), compile=False
    )
    _, result = step(state, ROWS)
    hidden = np.asarray(tf.cast(own.seen[-1], tf.float64))
    assert float(result.loss) == pytest.approx(float((hidden**2).sum(axis=-1).mean()), rel=1e-6)


def add(layer: Any, loss: Any) -> None:
    """Where no code of a layer's says `add_loss`."""
    layer.add_loss(loss)


class Elsewhere(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    def call(self, x: Any) -> Any:
        add(self, ops.mean(ops.square(x)))
        return x


class Scalar(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, x: Any) -> Any:
        return ops.mean(ops.square(self.dense(x)))


@UNUSED
def test_s04_a_loss_in_16_bits_is_refused_with_the_line_to_write() -> None:
    model = through(Elsewhere(name="elsewhere"))
    polyamp_tensorflow.compile(model, recipe("mixed_bfloat16"), loss=None, jit_compile=False)
    message = r"layer 'elsewhere' \(Elsewhere\) adds a loss in bfloat16.*cast\(x, 'float32'\).*\{'elsewhere': 'float32'"
    with pytest.raises(LossError, match=message):
        model.fit(ROWS, verbose=0)
    kept = recipe("mixed_bfloat16", overrides={"elsewhere": "float32"})
    polyamp_tensorflow.compile(model, kept, loss=None, jit_compile=False)
    assert np.isfinite(model.fit(ROWS, verbose=0).history["loss"][0])
    asked = recipe("mixed_bfloat16", overrides={"elsewhere": "bfloat16"})  # 16 bits that somebody asked for
    polyamp_tensorflow.compile(model, asked, loss=None, jit_compile=False)
    assert np.isfinite(model.fit(ROWS, verbose=0).history["loss"][0])

    scalar = whole(Scalar())
    state = polyamp.init(scalar, recipe("mixed_float16"))
    with pytest.raises(LossError, match=r"\(Scalar\) returns a scalar in float16.*cast\(x, 'float32'\)"):
        polyamp.train_step(lambda net, x: net(x), recipe("mixed_float16"), jit_compile=False)(state, ROWS)


# `compute_loss`, and parts of the model in a loss.


class Parts(keras.Model):  # type: ignore[misc]  # Keras is untyped
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(64, name="first"), layers.Dense(1, name="last")
        self.seen: list[Any] = []

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *more: Any, **named: Any) -> Any:
        hidden = self.first(x)
        self.seen += [hidden, y_pred]
        return keras.losses.mean_squared_error(ops.zeros_like(hidden), hidden)[0] + ops.mean(ops.square(y_pred))


@pytest.mark.parametrize("policy", NARROW)
def test_s04_compute_loss_gets_float32_and_so_do_its_layers(policy: str) -> None:
    model = whole(Parts())
    polyamp_tensorflow.compile(model, recipe(policy), run_eagerly=True)
    told = model.fit(ROWS, ROWS[:, :1], batch_size=16, shuffle=False, verbose=0).history["loss"][0]
    hidden, out = (np.asarray(tf.cast(part, tf.float64)) for part in model.seen[-2:])
    assert [part.dtype for part in model.seen[-2:]] == [tf.float32] * 2
    assert told == pytest.approx(float((hidden[0] ** 2).mean() + (out**2).mean()), rel=1e-6)


@pytest.mark.parametrize("policy", NARROW)
def test_s29_a_layer_that_loss_fn_calls_gives_the_output_dtype(policy: str) -> None:
    model = through(layers.Activation("relu"))
    seen: list[Any] = []

    def loss_fn(net: Any, x: Any) -> Any:
        seen.append((net.layers[0](x), net.get_layer("first")(x)))
        return tf.reduce_mean(tf.square(seen[-1][0])) + tf.reduce_mean(net(x))

    state = polyamp.init(model, recipe(policy))
    polyamp.train_step(loss_fn, recipe(policy), compile=False)(state, ROWS)
    assert {part.dtype for part in seen[-1]} == {tf.float32}
    with apply_policy(model, policy):  # outside of a loss it is the user's own layer
        assert model.layers[0](ROWS).dtype.name == policy[6:]


@pytest.mark.parametrize("half", ["train_step", "value_and_grad"])
def test_s06_a_loss_that_loss_fn_computes_in_16_bits_is_refused(half: str) -> None:
    model = through(layers.Activation("relu"))

    def loss_fn(net: Any, x: Any) -> Any:
        return tf.reduce_mean(tf.square(tf.cast(net(x), tf.bfloat16)))

    made = recipe("mixed_bfloat16")
    step: Any = polyamp.train_step(loss_fn, made) if half == "train_step" else polyamp.value_and_grad(loss_fn)
    with pytest.raises(LossError, match=r"loss_fn returned a loss in bfloat16.*outputs are float32.*polyamp\.losses"):
        step(polyamp.init(model, made), ROWS)
    narrow = made.replace(policy=made.policy.replace(output="bfloat16"))  # 16 bits that somebody asked for
    again: Any = polyamp.train_step(loss_fn, narrow) if half == "train_step" else polyamp.value_and_grad(loss_fn)
    again(polyamp.init(model, narrow), ROWS)
