"""A LossScaleOptimizer and its SpecOptimizer in `.keras` files, weights files and TensorFlow's checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import RecipeError
from polyamp.recipe.optimizers import SPECS
from polyamp_tensorflow import LossScaleOptimizer, SpecOptimizer, guard
from polyamp_tensorflow import compile as compile_model

# Keras 3.15 reads its variables so when it writes them, under NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
RECIPE = polyamp.Recipe(
    optimizer=polyamp.adamw(polyamp.schedules.warmup_cosine(1e-2, warmup_steps=2, total_steps=20), weight_decay=0.1),
    scaler=polyamp.LossScaler(init_scale=16.0, growth_interval=3, hysteresis=2),
    clip_norm=1.0,
    accumulate_steps=2,
)


def make_model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )


def data(*, bad: int | None = None) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 4)).astype(np.float32)
    if bad is not None:
        x[bad] = np.inf
    return x, rng.normal(size=(20, 1)).astype(np.float32)


def train(model: Any, *, bad: int | None = None) -> None:
    x, y = data(bad=bad)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)  # five micro-batches: a window stays open


def trained() -> Any:
    model = make_model()
    compile_model(model, RECIPE, loss="mse", jit_compile=False)
    train(model, bad=5)
    return model


def state(model: Any) -> list[Any]:
    return [np.array(variable.numpy()) for variable in [*model.variables, *model.optimizer.variables]]


def assert_equal(one: Any, other: Any) -> None:
    for a, b in zip(state(one), state(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_keras_file_brings_everything_back_and_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model = trained()
    assert (model.optimizer.skipped_steps, int(model.optimizer.iterations)) == (1, 1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, LossScaleOptimizer)
    assert loaded.optimizer.scaler == RECIPE.scaler
    assert loaded.optimizer.inner_optimizer.spec == RECIPE.optimizer
    assert (loaded.optimizer.clip_norm, loaded.optimizer.accumulate_steps) == (1.0, 2)
    assert_equal(loaded, model)
    guard(loaded)
    for each in (model, loaded):
        train(each, bad=9)
    assert_equal(loaded, model)
    assert model.optimizer.skipped_steps == 2


def test_a_weights_file_holds_the_optimizer(tmp_path: Path) -> None:
    model = trained()
    model.save_weights(tmp_path / "model.weights.h5")
    other = make_model()
    compile_model(other, RECIPE, loss="mse")
    other.load_weights(tmp_path / "model.weights.h5")
    assert_equal(other, model)


def test_a_tensorflow_checkpoint_holds_the_optimizer(tmp_path: Path) -> None:
    model = trained()
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "checkpoint"))
    other = make_model()
    compile_model(other, RECIPE, loss="mse")
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
    assert_equal(other, model)


@pytest.mark.parametrize(
    "spec", [spec() for spec in SPECS if not spec.depends_on_parameter], ids=lambda spec: type(spec).__name__
)
def test_every_spec_survives_a_config_in_json(spec: Any) -> None:
    for optimizer in (SpecOptimizer(spec, name="mine"), LossScaleOptimizer(spec, "megatron")):
        config = json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
        again = keras.saving.deserialize_keras_object(config)
        inner = again.inner_optimizer if isinstance(again, LossScaleOptimizer) else again
        assert inner.spec == spec
        assert again.name == optimizer.name
    assert again.scaler == polyamp.LossScaler.like("megatron")


def test_a_config_that_is_no_spec_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"the config of a SpecOptimizer: .*learning_rte"):
        SpecOptimizer.from_config({"spec": {"type": "adam", "learning_rte": 0.1}})
    with pytest.raises(RecipeError, match=r"spec must be one of polyamp's specs \(sgd, adam"):
        SpecOptimizer("adam")


def test_a_spec_alone_in_model_compile(tmp_path: Path) -> None:
    """And by itself, without a loss scale: torch's formula in plain Keras."""
    model = make_model()
    model.compile(SpecOptimizer(polyamp.adam(1e-2, eps=1e-3)), loss="mse", jit_compile=False)
    train(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is SpecOptimizer
    for each in (model, loaded):
        train(each)
    assert_equal(loaded, model)
    assert int(loaded.optimizer.iterations) == 10


def test_s15_the_scale_grows_beyond_a_smaller_growth_interval() -> None:
    """A count of good steps that was saved under a longer interval."""
    scaler = polyamp.LossScaler(init_scale=16.0, growth_interval=4)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), scaler)
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    optimizer.step_counter.assign(1500)
    optimizer.scale_loss(tf.constant(1.0))
    optimizer.apply([tf.constant([16.0])], [variable])
    assert [float(optimizer.scale_state.scale), int(optimizer.scale_state.good_steps)] == [32.0, 0]
