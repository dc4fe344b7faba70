"""`LossScaleOptimizer` typed as `keras.optimizers.LossScaleOptimizer` is: arguments, messages, files."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import LossScaleError, ModelError, RecipeError
from polyamp_tensorflow import LossScaleOptimizer, guard

KERAS = keras.optimizers.LossScaleOptimizer
SGD = keras.optimizers.SGD
VALUES = {"initial_scale": 2.0**30, "dynamic_growth_steps": 3, "name": "mine"}
"""A value for each parameter of Keras's signature behind the first."""

# Keras 3.15 reads its variables so when it writes them, under NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def facts(optimizer: Any) -> tuple[Any, ...]:
    optimizer.learning_rate = 0.25
    optimizer.build([keras.Variable([1.0, 2.0])])
    config = optimizer.get_config()
    return (
        optimizer.initial_scale,
        optimizer.dynamic_growth_steps,
        float(optimizer.dynamic_scale),
        int(optimizer.step_counter),
        float(optimizer.inner_optimizer.learning_rate),
        float(optimizer.learning_rate),
        int(optimizer.iterations),
        float(optimizer.scale_loss(tf.constant(2.0))),
        config["initial_scale"],
        config["dynamic_growth_steps"],
        config["inner_optimizer"]["class_name"],
    )


def test_every_parameter_of_keras_by_position_and_by_name() -> None:
    names = list(inspect.signature(KERAS).parameters)
    assert names == ["inner_optimizer", *VALUES, "kwargs"], "Keras has new parameters: take them, and add them here"
    for split in range(len(VALUES) + 1):
        given = list(VALUES.values())[:split]
        rest = list(VALUES)[split:]
        for left_out in itertools.chain.from_iterable(itertools.combinations(rest, n) for n in range(len(rest) + 1)):
            named = {name: VALUES[name] for name in rest if name not in left_out}
            ours = LossScaleOptimizer(SGD(0.1), *given, **named)
            assert facts(ours) == facts(KERAS(SGD(0.1), *given, **named))
            assert "name" in left_out or ours.name == "mine"
    assert facts(LossScaleOptimizer(inner_optimizer=SGD(0.1))) == facts(KERAS(inner_optimizer=SGD(0.1)))
    missing = {name for name in dir(KERAS(SGD(0.1))) if not hasattr(LossScaleOptimizer(SGD(0.1)), name)}
    assert not missing


def test_polyamps_arguments_stay() -> None:
    scaler = polyamp.LossScaler(init_scale=64.0, hysteresis=2)
    for made in (
        LossScaleOptimizer(SGD(), scaler, clip_norm=1.0),
        LossScaleOptimizer(SGD(), scaler=scaler, clip_norm=1.0),
        LossScaleOptimizer(optimizer=SGD(), scaler=scaler, clip_norm=1.0),
    ):
        assert (made.scaler, made.clip_norm, made.initial_scale) == (scaler, 1.0, 64.0)
        assert LossScaleOptimizer.from_config(made.get_config()).scaler == scaler
    assert LossScaleOptimizer(SGD(), "megatron").scaler == polyamp.LossScaler.like("megatron")
    assert LossScaleOptimizer(SGD()).scaler == polyamp.LossScaler()


def test_what_is_excluded_from_weight_decay_does_not_decay() -> None:
    """Keras's own wrapper keeps the names to itself, and the optimizer inside decays all the same."""
    kernel, bias = keras.Variable([1.0], name="kernel"), keras.Variable([1.0], name="bias")
    optimizer = LossScaleOptimizer(keras.optimizers.AdamW(0.0, weight_decay=0.5), "off")
    optimizer.inner_optimizer.learning_rate = 0.125
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.apply([tf.zeros(1), tf.zeros(1)], [kernel, bias])
    assert [float(kernel[0]), float(bias[0])] == [1.0 - 0.125 * 0.5, 1.0]


def test_keras_own_refusals_come_in_its_words_and_class() -> None:
    for options in (
        {"dynamic": False},
        {"clipnorm": 1.0},
        {"global_clipnorm": 1.0},
        {"clipvalue": 0.5},
        {"use_ema": True},
        {"weight_decay": 0.1},
        {"loss_scale_factor": 2.0},
        {"gradient_accumulation_steps": 4},
        {"momentum": 0.9, "nesterov": True},
    ):
        said = []
        for cls in (KERAS, LossScaleOptimizer):
            with pytest.raises(ValueError, match=r"LossScaleOptimizer (does not|no longer)") as caught:
                cls(SGD(), **options)
            said.append(str(caught.value))
        assert said[1].startswith(said[0].partition(". ")[0].rstrip("."))
    defaults = {"dynamic": True, "clipnorm": None, "use_ema": False, "ema_momentum": 0.99}
    assert LossScaleOptimizer(SGD(), **defaults).scaler == polyamp.LossScaler()


MISTAKES: list[tuple[str, Any, type[Exception], str]] = [
    ("nothing", lambda: LossScaleOptimizer(), RecipeError, "needs an inner_optimizer"),
    ("two", lambda: LossScaleOptimizer(SGD(), optimizer=SGD()), RecipeError, "wraps one optimizer"),
    ("no optimizer", lambda: LossScaleOptimizer("adam"), RecipeError, r"Received: builtins\.str"),
    ("nested", lambda: LossScaleOptimizer(KERAS(SGD())), LossScaleError, "a scaler wrapped twice"),
    ("no steps", lambda: LossScaleOptimizer(SGD(), 8.0, 0), LossScaleError, "dynamic_growth_steps must be .*: 0"),
    ("half", lambda: LossScaleOptimizer(SGD(), dynamic_growth_steps=1.5), LossScaleError, "whole number.*: 1.5"),
    ("endless", lambda: LossScaleOptimizer(SGD(), 8.0, float("inf")), LossScaleError, "whole number.*: inf"),
    ("below 0", lambda: LossScaleOptimizer(SGD(), initial_scale=-1.0), LossScaleError, "positive number.*: -1.0"),
    ("NaN", lambda: LossScaleOptimizer(SGD(), initial_scale=float("nan")), LossScaleError, "positive number.*: nan"),
    ("a word", lambda: LossScaleOptimizer(SGD(), "megatrom"), LossScaleError, "'megatron'"),
    ("both", lambda: LossScaleOptimizer(SGD(), 8.0, scaler="keras"), LossScaleError, "initial_scale must be set in"),
    ("twice", lambda: LossScaleOptimizer(SGD(), "keras", scaler="keras"), LossScaleError, "the scaler is given twice"),
    ("a slip", lambda: LossScaleOptimizer(SGD(), clip_nrom=1.0), RecipeError, "Did you mean 'clip_norm'"),
    ("torch's", lambda: LossScaleOptimizer(SGD(), init_scale=8.0), RecipeError, "Did you mean 'initial_scale'"),
]


@pytest.mark.parametrize(("mistake", "error", "said"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_s20_mistakes_name_what_to_type(mistake: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        mistake()
    assert isinstance(caught.value, ValueError), "as Keras raises"


def model(optimizer: Any) -> Any:
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    made.compile(optimizer, "mse", metrics=["mae"])
    return made


def train(made: Any) -> Any:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 4)).astype(np.float32), rng.normal(size=(20, 1)).astype(np.float32)
    made.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return made


def weights(made: Any) -> list[Any]:
    return [np.array(v.numpy()) for v in [*made.weights, *made.optimizer.inner_optimizer.variables]]


def scale_of(optimizer: Any) -> tuple[float, int]:
    return float(optimizer.dynamic_scale), int(optimizer.step_counter)


def make_adam() -> Any:
    return keras.optimizers.Adam(1e-2)


def test_a_keras_file_of_keras_own_wrapper_goes_on_here(tmp_path: Path) -> None:
    theirs = train(model(KERAS(make_adam(), 8.0, 3)))
    assert scale_of(theirs.optimizer) == (16.0, 2)
    theirs.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    guard(loaded)
    ours = loaded.optimizer
    assert isinstance(ours, LossScaleOptimizer)
    assert (*scale_of(ours), ours.scaler) == (
        16.0,
        2,
        polyamp.LossScaler.like("keras", init_scale=8.0, growth_interval=3),
    )
    for one, other in zip(weights(train(loaded)), weights(train(theirs)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert scale_of(ours) == scale_of(theirs.optimizer)
    loaded.save(tmp_path / "ours.keras")
    assert scale_of(keras.models.load_model(tmp_path / "ours.keras").optimizer) == scale_of(ours)


@pytest.mark.parametrize("name", ["model.weights.h5", "model.keras"])
def test_weights_of_keras_own_wrapper_load_into_it(tmp_path: Path, name: str) -> None:
    theirs = train(model(KERAS(make_adam(), 8.0, 3)))
    (theirs.save_weights if name.endswith("h5") else theirs.save)(tmp_path / name)
    ours = model(LossScaleOptimizer(make_adam(), 8.0, 3))
    ours.optimizer.build(ours.trainable_variables)  # Keras fills no variables that are not there
    ours.load_weights(tmp_path / name)
    assert scale_of(ours.optimizer) == (16.0, 2)
    for one, other in zip(weights(train(ours)), weights(train(theirs)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_cannot_be_taken_over_is_refused() -> None:
    theirs = KERAS(SGD(), initial_scale=8.0)
    theirs.build([keras.Variable([1.0])])
    theirs.dynamic_scale.assign(0.0)
    with pytest.raises(LossScaleError, match=r"must lie between min_scale=.* Received: 0"):
        LossScaleOptimizer.from_keras(theirs)
    with pytest.raises(RecipeError, match=r"takes a keras\.optimizers\.LossScaleOptimizer. Received: .*SGD"):
        LossScaleOptimizer.from_keras(SGD())
    with pytest.raises((LossScaleError, ModelError), match="must be compiled with"):
        guard(model(SGD()))


def test_the_same_fit_with_keras_arguments() -> None:
    """Where nothing overflows, the numbers are Keras's, bit for bit."""
    ends = [
        train(model(cls(make_adam(), initial_scale=2.0**10, dynamic_growth_steps=2)))
        for cls in (KERAS, LossScaleOptimizer)
    ]
    for one, other in zip(weights(ends[0]), weights(ends[1]), strict=True):
        np.testing.assert_array_equal(one, other)
    assert scale_of(ends[0].optimizer) == scale_of(ends[1].optimizer) == (4096.0, 1)
