"""A variational autoencoder, in Keras."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

PIXELS, HIDDEN, CODE = 20, 16, 4


def make() -> Any:
    pixels, noise = keras.Input((PIXELS,), name="x"), keras.Input((CODE,), name="noise")
    h = layers.Dense(HIDDEN, name="encoder")(pixels)
    h = layers.LayerNormalization(epsilon=1e-5, name="norm")(h)
    h = layers.Activation("tanh", name="tanh")(h)
    mean = layers.Dense(CODE, name="mean")(h)
    log_variance = layers.Dense(CODE, name="log_variance")(h)
    code = mean + ops.exp(0.5 * log_variance) * noise
    h = layers.Dense(HIDDEN, activation="elu", name="decoder1")(code)
    return keras.Model([pixels, noise], [layers.Dense(PIXELS, name="decoder2")(h), mean, log_variance])


def loss_fn(model: Any, batch: Any) -> Any:
    logits, mean, log_variance = (tf.cast(each, tf.float32) for each in model([batch["x"], batch["noise"]]))
    bits = tf.nn.sigmoid_cross_entropy_with_logits(labels=batch["x"], logits=logits)
    divergence = -0.5 * (1.0 + log_variance - tf.square(mean) - tf.exp(log_variance))
    return tf.reduce_mean(tf.reduce_sum(bits, -1)) + tf.reduce_mean(tf.reduce_sum(divergence, -1))
