"""A convolutional net of the kind of EfficientNet and ConvNeXt, in Keras."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

WIDTH, CHANNELS, CLASSES, SIDE = 8, 3, 5, 8


class Gamma(layers.Layer):
    def build(self, shape: Any) -> None:
        self.gamma = self.add_weight(shape=(shape[-1],), initializer="ones", name="gamma")

    def call(self, x: Any) -> Any:
        return x * ops.cast(self.gamma, x.dtype)


def make() -> Any:
    images = keras.Input((SIDE, SIDE, CHANNELS))
    x = layers.Conv2D(WIDTH, 2, strides=2, name="stem")(images)
    h = layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="mbconv_depthwise")(x)
    h = layers.BatchNormalization(momentum=0.9, epsilon=1e-3, name="mbconv_norm1")(h)
    h = layers.Activation("silu", name="mbconv_silu")(h)
    s = layers.GlobalAveragePooling2D(name="mbconv_pool")(h)
    s = layers.Dense(4, activation="silu", name="mbconv_squeeze_reduce")(s)
    s = layers.Dense(WIDTH, activation="sigmoid", name="mbconv_squeeze_expand")(s)
    h = h * layers.Reshape((1, 1, WIDTH), name="mbconv_gates")(s)
    h = layers.Conv2D(WIDTH, 1, use_bias=False, name="mbconv_project")(h)
    h = layers.BatchNormalization(momentum=0.9, epsilon=1e-3, name="mbconv_norm2")(h)
    x = x + h
    h = layers.DepthwiseConv2D(5, padding="same", name="next_depthwise")(x)
    h = layers.LayerNormalization(epsilon=1e-6, name="next_norm")(h)
    h = layers.Dense(4 * WIDTH, activation="gelu", name="next_up")(h)
    h = layers.Dense(WIDTH, name="next_down")(h)
    x = x + Gamma(name="next")(h)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    return keras.Model(images, layers.Dense(CLASSES, name="head")(x))


def loss_fn(model: Any, batch: Any) -> Any:
    logits = tf.cast(model(batch["images"]), tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch["labels"], logits=logits)
    return tf.reduce_mean(losses)
