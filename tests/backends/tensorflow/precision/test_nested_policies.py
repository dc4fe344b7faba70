"""S3: of the policies around a call in `loss_fn` the innermost decides, for the call of the model too."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import PolicyError, UnsupportedError

BATCH = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}
POLICIES = {
    "float32": polyamp.Policy("float32"),
    "autocast": polyamp.Policy(compute="bfloat16"),
    "cast": polyamp.Policy(compute="bfloat16", mode="cast"),
    "inner": polyamp.Policy(compute="float16"),
}
COMPUTES = {"float32": "float32", "inner": "float16"}
SEEN: list[str] = []


class Observed(keras.layers.Dense):  # type: ignore[misc]  # Keras is untyped
    def call(self, inputs: Any, training: Any = None) -> Any:
        result = super().call(inputs)
        SEEN.append(tf.as_dtype(result.dtype).name)
        return result


class Net(keras.Model):  # type: ignore[misc]  # Keras is untyped
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Observed(8), Observed(3)
        self.norm = keras.layers.BatchNormalization()
        self.build((None, 4))

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.norm.build((None, 8))
        self.last.build((None, 8))
        self.built = True

    def encode(self, x: Any) -> Any:
        return self.norm(self.first(x))

    def call(self, x: Any, training: Any = None) -> Any:
        return self.last(tf.tanh(self.norm(self.first(x), training=training)))


WAYS: dict[str, Any] = {
    "model": lambda policy, model, x: policy.autocast(model)(x),
    "function": lambda policy, model, x: policy.autocast(lambda x: model(x))(x),
    "method": lambda policy, model, x: policy.autocast(lambda x: model.encode(x))(x),
    "part": lambda policy, model, x: policy.autocast(model.first)(x),
}


def dtypes(loss_fn: Any, outer: str) -> set[str]:
    """Dtypes of what the dense layers give in a step."""
    made = polyamp.Recipe(policy=POLICIES[outer], optimizer=polyamp.sgd(0.1))
    state = polyamp.init(Net(), made)
    SEEN.clear()
    polyamp.train_step(loss_fn, made)(state, BATCH)
    found = set(SEEN)
    assert state.model.first.compute_dtype == "float32"
    return found


PAIRS = [  # each inner policy with each outer one and in each way
    (outer, list(COMPUTES)[(row + column) % len(COMPUTES)], way)
    for row, outer in enumerate(["float32", "autocast", "cast"])
    for column, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("outer", "inner", "way"), PAIRS)
def test_s03_the_innermost_policy_holds_for_the_models_call(outer: str, inner: str, way: str) -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        out = WAYS[way](POLICIES[inner], model, batch["x"])
        assert out.dtype == POLICIES[inner].output
        return tf.reduce_mean(tf.square(tf.cast(out, tf.float32)))

    assert dtypes(loss_fn, outer) == {COMPUTES[inner]}


def test_s03_behind_the_region_the_steps_own_policy_holds_again() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        inside = POLICIES["float32"].autocast(lambda x: POLICIES["inner"].autocast(model)(x))(batch["x"])
        return tf.reduce_mean(inside) + tf.reduce_mean(model(batch["x"]))

    assert dtypes(loss_fn, "autocast") == {"float16", "bfloat16"}


def test_s05_overrides_of_an_inner_policy_name_the_models_layers() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        path = "**/" + model.last.path.rpartition("/")[2]
        return tf.reduce_mean(polyamp.Policy("mixed_float16", overrides={path: "float32"}).autocast(model)(batch["x"]))

    assert dtypes(loss_fn, "autocast") == {"float16", "float32"}

    def misspelt(model: Any, batch: Any) -> Any:
        return tf.reduce_mean(
            polyamp.Policy("mixed_float16", overrides={"lost": "float32"}).autocast(model)(batch["x"])
        )

    with pytest.raises(PolicyError, match="'lost' matches no module path"):
        dtypes(misspelt, "autocast")


def test_s03_a_module_that_is_cast_already_refuses_another_policy() -> None:
    class Plain(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(tf.ones((4, 2)))

        def __call__(self, x: Any) -> Any:
            SEEN.append((x @ self.w).dtype.name)
            return x @ self.w

    def loss_fn(model: Any, batch: Any) -> Any:
        return tf.reduce_mean(tf.cast(polyamp.Policy(compute="float16").autocast(model)(batch["x"]), tf.float32))

    made = polyamp.Recipe(policy=POLICIES["cast"], optimizer=polyamp.sgd(0.1))
    with pytest.raises(UnsupportedError, match=r"Plain is no Keras layer.*casts to bfloat16 in the places"):
        polyamp.train_step(loss_fn, made)(polyamp.init(Plain(), made), BATCH)
    made = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state = polyamp.init(Plain(), made)
    SEEN.clear()
    polyamp.train_step(loss_fn, made)(state, BATCH)
    assert set(SEEN) == {"float16"}
