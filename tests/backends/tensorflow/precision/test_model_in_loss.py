"""S29: what a method gives in `loss_fn`, and which parameters `loss_fn` reads, of Keras and of `tf.Module`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import ModelError

X = np.ones((4, 3), np.float32)


class Net(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(2)
        self.scale = self.add_weight(shape=(), initializer=keras.initializers.Constant(300.1), name="scale")

    def encode(self, x: Any) -> Any:
        return self.layer(x)

    def call(self, x: Any) -> Any:
        return self.encode(x)


class Plain(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.scale = tf.Variable(tf.ones((3, 2)), name="kernel"), tf.Variable(300.1, name="scale")

    def encode(self, x: Any) -> Any:
        return x @ self.kernel

    def __call__(self, x: Any) -> Any:
        return self.encode(x)


@pytest.mark.parametrize("kind", [Net, Plain])
def test_s29_a_method_gives_the_output_dtype_and_parameters_are_the_masters(kind: Any) -> None:
    seen = []

    def loss_fn(model: Any, x: Any) -> Any:
        own = polyamp.parameters(model)
        seen.append((model.encode(x).dtype, own["scale"].dtype, model(x).dtype))
        return tf.reduce_mean(model(x) ** 2) + polyamp.losses.sum_of_squares(own["scale"])

    policy = polyamp.Policy("mixed_float16", mode=None if kind is Net else "cast")
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.25), scaler=polyamp.LossScaler(init_scale=2.0))
    model = kind()
    model(X)
    state = polyamp.init(model, recipe, backend="tensorflow")
    _, result = polyamp.train_step(loss_fn, recipe, compile=False)(state, X)
    assert set(seen) == {(tf.float32, tf.float32, tf.float32)}
    assert float(result.loss) > 90000.0, "float16 does not reach that far"
    np.testing.assert_allclose(float(model.scale), 300.1 / 2, rtol=1e-6)


def test_s29_a_model_that_is_not_built_has_no_parameters_yet() -> None:
    with pytest.raises(ModelError, match="not built"):
        polyamp.parameters(Net())
