"""S27 in TensorFlow: Keras's own names and those counted within the model, kinds by class, `fit` and saved models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow
from polyamp import Group, RecipeError, no_decay, schedules

COSINE = schedules.warmup_cosine(0.05, 2, 10)


def network(**names: str) -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, name=names.get("first")), layers.LayerNormalization(), layers.Dense(3)]
    )


def batch(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


def decayed(model: Any, *groups: Group) -> list[str]:
    state = polyamp.init(model, polyamp.Recipe(optimizer=polyamp.adamw(weight_decay=0.5, groups=groups)))
    assert state.groups is not None
    return [path for path in state.groups.numbers if state.groups.of(path).spec.weight_decay]


def test_s27_paths_are_kerass_own_and_those_of_checkpoints() -> None:
    """Whatever number Keras's automatic names have come to in this process."""
    first, _, last = network().layers
    model = network()
    assert model.layers[-1].name != last.name
    bias = [path for path in decayed(model) if path != "dense_1/bias"]
    assert len(bias) == 5
    assert decayed(model, Group("dense_1/bias", weight_decay=0.0)) == bias
    assert decayed(model, Group(f"{model.layers[-1].name}/bias", weight_decay=0.0)) == bias
    policy = polyamp.Policy("mixed_bfloat16", overrides={"dense_1": "float32"})
    assert polyamp.init(model, polyamp.Recipe(policy=policy)).plan.at(model.layers[-1].name).dtype == "float32"
    assert first.name != "dense_1"


def test_s27_a_layer_that_is_really_called_so_is_meant() -> None:
    """And not the one that is second among its siblings."""
    model = network(first="dense_1")
    assert "dense_1/kernel" in decayed(model)
    last = model.layers[-1]
    state = polyamp.init(
        model, polyamp.Recipe(optimizer=polyamp.sgd(0.1, groups=[Group("dense_1", learning_rate=0.0)]))
    )
    before = [v.numpy() for v in (model.layers[0].kernel, last.kernel)]
    polyamp.train_step(loss_fn, state.recipe)(state, batch(0))
    after = [v.numpy() for v in (model.layers[0].kernel, last.kernel)]
    assert [np.array_equal(old, new) for old, new in zip(before, after, strict=True)] == [True, False]


def test_s27_kinds_by_the_layers_class() -> None:
    inputs = keras.Input((5,), dtype="int32")
    hidden = keras.layers.LayerNormalization()(keras.layers.Embedding(7, 4)(inputs))
    hidden = keras.layers.MultiHeadAttention(2, 2)(hidden, hidden)
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.BatchNormalization()(hidden)))
    found = {kind: set(decayed(model)) - set(decayed(model, *no_decay(kind))) for kind in ("bias", "norm", "embedding")}
    norms = {"layer_normalization", "batch_normalization"}
    assert found["norm"] == {f"{name}/{leaf}" for name in norms for leaf in ("gamma", "beta")}
    assert found["embedding"] == {"embedding/embeddings"}
    attention = {f"multi_head_attention/{name}/bias" for name in ("query", "key", "value", "attention_output")}
    assert found["bias"] == {"dense/bias", *(f"{name}/beta" for name in norms), *attention}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, in save()
def test_s27_fit_trains_the_groups_and_a_saved_model_keeps_them(tmp_path: Path) -> None:
    groups = [
        *no_decay("bias", "norm"),
        Group("dense", learning_rate_scale=0.5, trainable_after=2),
        Group("dense_1", learning_rate=0.02, clip_norm=0.05),
    ]
    made = polyamp.Recipe(optimizer=polyamp.adamw(COSINE, weight_decay=0.3, groups=groups))
    x, y = batch(0)
    ends = []
    for fit in (False, True):
        model = network()
        if fit:
            polyamp_tensorflow.compile(model, made, loss="mse")
            for _ in range(3):
                model.fit(x, y, verbose=0, batch_size=8)
        else:
            state, step = polyamp.init(model, made), polyamp.train_step(loss_fn, made)
            for _ in range(3):
                state, _ = step(state, (x, y))
        ends.append(model)
    for one, other in zip(*(model.get_weights() for model in ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    ends[1].save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.inner_optimizer.groups == ends[1].optimizer.inner_optimizer.groups
    for model in (loaded, ends[1]):
        model.fit(x, y, verbose=0, batch_size=8)
    for one, other in zip(loaded.get_weights(), ends[1].get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_s27_an_optimizer_alone_knows_no_paths() -> None:
    spec = polyamp.adamw(groups=no_decay("bias"))
    with pytest.raises(RecipeError, match=r"spec has parameter groups.*polyamp_tensorflow.compile\(model, recipe"):
        polyamp_tensorflow.SpecOptimizer(spec)
    with pytest.raises(RecipeError, match="spec has parameter groups"):
        polyamp_tensorflow.LossScaleOptimizer(spec)


def test_s27_a_rate_written_into_the_optimizer_reaches_the_scaled_groups() -> None:
    groups = [Group("dense", learning_rate_scale=0.5), Group("dense_1/bias", learning_rate=0.25)]
    model = network()
    state: Any = polyamp.init(model, polyamp.Recipe(optimizer=polyamp.sgd(0.1, groups=groups)))
    state.optimizer.learning_rate.assign(1.0)
    x, y = map(tf.constant, batch(0))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    before = [v.numpy() for v in model.trainable_variables]
    gradients = tape.gradient(loss, model.trainable_variables)
    polyamp.train_step(loss_fn, state.recipe)(state, (x, y))
    for variable, old, gradient, rate in zip(
        model.trainable_variables, before, gradients, (0.5, 0.5, 1.0, 1.0, 1.0, 0.25), strict=True
    ):
        np.testing.assert_allclose(variable.numpy(), old - rate * gradient.numpy(), rtol=0, atol=1e-6)


def test_s27_a_model_that_is_not_built_yet_has_its_groups_at_the_first_step() -> None:
    model = keras.Sequential([keras.layers.Dense(3)])
    made = polyamp.Recipe(optimizer=polyamp.sgd(0.1, groups=[Group("**/bias", learning_rate=0.0)]))
    state = polyamp.init(model, made)
    assert state.groups is None
    polyamp.train_step(loss_fn, made)(state, batch(0))
    assert not np.any(model.layers[0].bias.numpy())
    wrong = polyamp.Recipe(optimizer=polyamp.sgd(0.1, groups=[Group("**/bais", learning_rate=0.0)]))
    state = polyamp.init(keras.Sequential([keras.layers.Dense(3)]), wrong)
    with pytest.raises(RecipeError, match=r"'\*\*/bais' matches no trainable parameter"):
        polyamp.train_step(loss_fn, wrong)(state, batch(0))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, in save()
def test_s27_a_saved_model_none_of_whose_parameters_is_in_a_group(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    made = polyamp.Recipe(optimizer=polyamp.adamw(0.1, groups=no_decay("norm")))
    polyamp_tensorflow.compile(model, made, loss="mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.inner_optimizer.spec == made.optimizer


def test_s27_a_weight_of_two_layers_is_what_either_makes_of_it() -> None:
    class TableEmbedding(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
        def __init__(self, table: Any) -> None:
            super().__init__()
            self.table = table

        def call(self, ids: Any) -> Any:
            return keras.ops.take(self.table, ids, 0)

    head, inputs = keras.layers.Dense(4, use_bias=False), keras.Input((4,))
    ids = keras.ops.argmax(head(inputs), -1)
    model = keras.Model(inputs, TableEmbedding(head.kernel)(ids))
    assert decayed(model) == ["dense/kernel"]
    assert decayed(model, *no_decay("embedding")) == []
