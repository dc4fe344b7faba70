"""Models of every kind: unbuilt, subclassed, frozen; names that last; what `loss_fn` sees; the digits transformer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow
from polyamp.conformance.problems import batch, layers, loss_fn, recipe
from polyamp.demo import digits
from polyamp.errors import ModelError, PolicyError, UnsupportedError
from polyamp_keras.models.layers import list_layers

pytestmark = pytest.mark.filterwarnings("ignore:float16 on TensorFlow's CPU")
BACKEND = polyamp_tensorflow.BACKEND


class Attentive(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """Sublayers that create their own sublayers when they are built."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = [keras.layers.Dense(4), keras.layers.MultiHeadAttention(1, 2), keras.layers.Dense(3)]
        self.norm = keras.layers.BatchNormalization()

    def call(self, x: Any) -> Any:
        hidden = self.norm(self.stages[0](x))[:, None, :]
        return self.stages[2](self.stages[1](hidden, hidden)[:, 0, :])


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_an_unbuilt_model_is_built_by_tracing_alone(policy: str) -> None:
    made = recipe(policy, optimizer=polyamp.adam(1e-2), scaler=polyamp.LossScaler(init_scale=16.0))
    model = Attentive()
    state = polyamp.init(model, made)
    assert "parameters=not built" in repr(state)
    with pytest.raises(ModelError, match="Run one step or value_and_grad first"):
        BACKEND.export_state(state)
    step = polyamp.train_step(loss_fn, made)
    _, result = step(state, batch(gain=np.inf))
    assert bool(result.skipped)
    assert np.array_equal(model.norm.moving_mean.numpy(), np.zeros(4)), "building must not run the model"
    losses = [float(step(state, batch())[1].loss) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {layer.compute_dtype for layer in model._flatten_layers()} == {"float32"}
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}


def test_an_unbuilt_model_is_checked_when_it_is_built() -> None:
    made = recipe(polyamp.Policy("mixed_bfloat16", overrides={"dence": "float32"}))
    state = polyamp.init(keras.Sequential([keras.layers.Dense(3, name="dense")]), made)
    with pytest.raises(PolicyError, match="Nearest: 'dense'"):
        polyamp.train_step(loss_fn, made)(state, batch())


def test_names_do_not_depend_on_what_the_process_built_before() -> None:
    def names() -> set[str]:
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8)(inputs)
        inner = keras.Sequential([keras.layers.Dense(8), keras.layers.Dropout(0.1)])
        model = keras.Model(inputs, keras.layers.Dense(3, name="head")(keras.layers.Dense(8)(inner(hidden))))
        return set(BACKEND.export_state(polyamp.init(model, recipe(optimizer=polyamp.sgd(0.1, momentum=0.9)))))

    first, second = names(), names()
    assert first == second
    assert {
        "model/dense/kernel",
        "model/dense_1/bias",
        "model/sequential/dense/kernel",
        "model/head/kernel",
        "rng/sequential/dropout/seed_0",
        "optimizer/sequential/dense/kernel/momentum",
        "optimizer/learning_rate",
    } <= first


def test_a_frozen_layer_stays_and_is_saved() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="a"), keras.layers.Dense(3, name="b")])
    model.layers[0].trainable = False
    before = model.layers[0].kernel.numpy()
    state = polyamp.init(model, recipe())
    _, gradients = polyamp.value_and_grad(loss_fn)(state, batch())
    assert list(gradients.values) == ["b/kernel", "b/bias"]
    assert gradients.running == {}
    polyamp.train_step(loss_fn, recipe())(state, batch())
    assert np.array_equal(model.layers[0].kernel.numpy(), before)
    assert "model/a/kernel" in BACKEND.export_state(state)


def test_loss_fn_sees_a_model_in_training_mode_with_its_attributes() -> None:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.5)),
            keras.layers.Dropout(1.0),
        ]
    )

    def regularised(model: Any, item: Any) -> Any:
        training, inference = model(item["x"]), model(item["x"], training=False)
        return tf.add_n(model.losses), {"training": training, "inference": inference}

    state = polyamp.init(model, recipe())
    kernel = model.layers[0].kernel.numpy()
    (loss, aux), _ = polyamp.value_and_grad(lambda m, b: _all_used(*regularised(m, b)))(state, batch())
    np.testing.assert_allclose(float(loss), 0.5 * np.square(kernel).sum(), rtol=1e-5)
    assert np.array_equal(aux["training"], np.zeros((8, 3)))
    assert np.any(aux["inference"] != 0)


def _all_used(loss: Any, aux: Any) -> Any:
    return loss + 0.0 * tf.reduce_mean(aux["inference"]), aux


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"callable with trainable_variables.*Received: builtins\.object"):
        polyamp.init(object(), recipe(), backend="tensorflow")


def test_a_strategy_with_replicas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BACKEND.testing().mlp(layers())
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: SimpleNamespace(num_replicas_in_sync=2))
    with pytest.raises(UnsupportedError, match=r"Received: .* with 2"):
        polyamp.init(model, recipe())


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_the_digits_transformer_learns(policy: str) -> None:
    def classify(model: Any, item: Any) -> Any:
        return polyamp.losses.softmax_cross_entropy(model(item["x"]), item["y"])

    weights = digits.initial_weights()
    made = recipe(policy, optimizer=polyamp.adam(3e-3))
    state = polyamp.init(BACKEND.testing().digits(weights), made)
    assert f"parameters={sum(value.size for value in weights.values()):,}" in repr(state)
    step = polyamp.train_step(classify, made)
    losses = [float(step(state, item)[1].loss) for item in digits.batches(digits.load(), size=64, steps=30)]
    assert losses[0] > 2.0
    assert losses[-1] < 1.0


def test_digits_equal_a_numpy_forward_pass() -> None:
    weights = digits.initial_weights(1)
    x = digits.load().test_x[:2]

    def dense(h: Any, name: str) -> Any:
        return h @ weights[f"{name}/kernel"].astype(np.float64) + weights[f"{name}/bias"]

    def norm(h: Any) -> Any:
        return (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + digits.EPSILON)

    def heads(h: Any) -> Any:
        return h.reshape(2, digits.ROWS, digits.HEADS, -1).transpose(0, 2, 1, 3)

    hidden = dense(x.astype(np.float64), "embed")
    query, key, value = (heads(dense(norm(hidden), name)) for name in ("query", "key", "value"))
    scores = np.exp(query @ key.transpose(0, 1, 3, 2) / (digits.WIDTH / digits.HEADS) ** 0.5)
    mixed = (scores / scores.sum(-1, keepdims=True)) @ value
    hidden = hidden + dense(mixed.transpose(0, 2, 1, 3).reshape(2, digits.ROWS, -1), "out")
    hidden = hidden + dense(np.maximum(dense(norm(hidden), "mlp1"), 0), "mlp2")
    want = dense(norm(hidden).reshape(2, -1), "head")
    np.testing.assert_allclose(BACKEND.testing().digits(weights)(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("native", [False, True])
def test_restore_continues_bit_for_bit(tmp_path: Path, native: bool) -> None:
    def fresh(seed: int) -> tuple[Any, Any]:
        keras.utils.set_random_seed(seed)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(3),
            ]
        )
        optimizer = keras.optimizers.Adam(1e-2) if native else polyamp.adamw(polyamp.schedules.cosine(1e-2, 20))
        made = recipe(
            "mixed_bfloat16", optimizer=optimizer, scaler=polyamp.LossScaler(init_scale=8.0, growth_interval=2)
        )
        return polyamp.init(model, made), polyamp.train_step(loss_fn, made)

    state, step = fresh(0)
    for i in range(4):
        step(state, batch(i, gain=np.inf if i == 2 else 1.0))
    polyamp.save(state, tmp_path / "checkpoint")
    other, other_step = fresh(1)
    other = polyamp.restore(other, tmp_path / "checkpoint")
    for i in range(4, 8):
        step(state, batch(i))
        other_step(other, batch(i))
    left, right = BACKEND.export_state(state), BACKEND.export_state(other)
    assert set(left) == set(right)
    assert [name for name in left if left[name].tobytes() != right[name].tobytes()] == []


def test_a_skipped_step_leaves_the_states_of_a_stateful_rnn() -> None:
    inputs = keras.Input(batch_shape=(8, 6, 4))
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.LSTM(4, stateful=True)(inputs)))
    recipe = polyamp.Recipe(scaler=polyamp.LossScaler(init_scale=4.0), optimizer=polyamp.sgd(0.1))
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(lambda m, b: polyamp.losses.mean_squared_error(m(b["x"]), b["y"]), recipe)
    good = {"x": np.ones((8, 6, 4), np.float32), "y": np.ones((8, 3), np.float32)}
    state, _ = step(state, good)
    before = state.export()
    assert np.abs(before["running/lstm/state_0"]).max() > 0.0
    state, result = step(state, {**good, "x": good["x"] * np.nan})
    assert bool(result.skipped)
    assert np.array_equal(before["running/lstm/state_0"], state.export()["running/lstm/state_0"])
    state, result = step(state, good)
    assert np.isfinite(float(result.loss))


def test_layers_and_methods_of_the_bound_model_are_in_training_mode() -> None:
    class Model(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(4)
            self.drop = keras.layers.Dropout(0.9)

        def encode(self, x: Any, training: bool = False) -> Any:
            return self.drop(self.dense(x), training=training)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.encode(x, training=training)

    model = Model()
    model(np.ones((1, 3), np.float32))
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.0))
    state = polyamp.init(model, recipe)

    def loss_fn(model: Any, batch: Any) -> Any:
        aux = [model.encode(batch), model.drop(model.dense(batch))]
        return polyamp.losses.mean_squared_error(aux[0], aux[1]), aux

    _, result = polyamp.train_step(loss_fn, recipe)(state, np.ones((64, 3), np.float32))
    for part in result.aux:
        assert 0.6 < float(np.mean(np.asarray(part) == 0.0)) < 1.0


def test_unnamed_weights_have_names_of_their_own_layer() -> None:
    class Unnamed(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
        def build(self, shape: Any) -> None:
            self.a = self.add_weight(shape=(shape[-1], 3))
            self.b = self.add_weight(shape=(3,))

        def call(self, x: Any) -> Any:
            return x @ self.a + self.b

    recipe = polyamp.Recipe()
    names = []
    for _ in range(2):
        model = keras.Sequential([keras.Input((4,)), Unnamed()])
        names.append(set(polyamp.init(model, recipe).export()))
    assert names[0] == names[1]


def test_a_shared_layer_has_one_name_and_every_path() -> None:
    shared = keras.layers.Dense(4)
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), shared, keras.layers.Dense(4)], name="inner")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Identity(name="first"), inner], name="outer")
    other = keras.Sequential([keras.Input((4,)), shared, keras.layers.Dense(4)], name="other")
    both = keras.Model(model.inputs, keras.layers.Add()([model.outputs[0], other(model.outputs[0])]))
    found = {module.layer: module for module in list_layers(both)}
    paths = (found[shared].path, *found[shared].other_paths)
    assert paths == (f"inner/{shared.name}", f"other/{shared.name}")
    assert (found[shared].parent, found[inner].parent, found[both].parent) == (inner, both, None)
    assert [found[layer].stable_path for layer in inner.layers] == ["inner/dense", "inner/dense_1", "inner/dense_2"]
    assert found[other.layers[1]].stable_path == "other/dense"
