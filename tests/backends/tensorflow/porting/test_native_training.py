"""A compiled Keras model goes on under polyamp, and back: Keras's optimizers and `LossScaleOptimizer`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp import porting
from polyamp.errors import PortError
from polyamp.reference import MLP

OPTIMIZERS: dict[str, tuple[Any, Any, float]] = {
    "sgd": (
        lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
        polyamp.sgd(0.02, momentum=0.9, nesterov=True),
        1e-5,
    ),
    "adamw": (
        lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1, epsilon=1e-8),
        polyamp.adamw(1e-2, weight_decay=0.1),
        1e-3,
    ),
    "rmsprop": (
        lambda: keras.optimizers.RMSprop(1e-3, rho=0.99, momentum=0.5, epsilon=1e-8),
        polyamp.rmsprop(1e-3, momentum=0.5),
        1e-2,
    ),
    "adagrad": (
        lambda: keras.optimizers.Adagrad(0.02, initial_accumulator_value=0.1, epsilon=1e-10),
        polyamp.adagrad(0.02, initial_accumulator_value=0.1),
        1e-5,
    ),
    "lion": (lambda: keras.optimizers.Lion(1e-3), polyamp.lion(1e-3), 1e-5),
}
"""Name -> Keras's, polyamp's, and how far losses may part: epsilons stand in other places."""


def model(seed: int, optimizer: Any = None) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(3, activation="relu", name="dense0"), keras.layers.Dense(1, name="dense1")]
    made = keras.Sequential([keras.Input((4,)), *layers])
    if optimizer is not None:
        made.compile(keras.optimizers.LossScaleOptimizer(optimizer, 256.0, dynamic_growth_steps=4), loss="mse")
    return made


def batch(number: int) -> Any:
    x = np.random.default_rng(number).standard_normal((8, 4)).astype(np.float32)
    return x * np.float32(1e30 if number in (3, 11) else 1.0), x.sum(1, keepdims=True)


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


def own_loop(model: Any, numbers: range) -> list[tuple[float, float]]:
    """What `fit` does, in float32 and step by step: (loss, scale) of each step."""
    seen = []
    for number in numbers:
        x, y = batch(number)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            scaled = model.optimizer.scale_loss(loss)
        model.optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        seen.append((float(loss), float(model.optimizer.dynamic_scale)))
    return seen


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_model_goes_on_and_comes_back(name: str) -> None:
    make, spec, close = OPTIMIZERS[name]
    source = model(0, make())
    own_loop(source, range(8))
    recipe = polyamp.Recipe(scaler=polyamp.LossScaler.like("keras", growth_interval=4), optimizer=spec)
    state, report = polyamp.port(porting.training(source), polyamp.init(model(1), recipe))
    assert report.recipe == []
    assert int(state.step) == 7
    other = model(2, make())
    polyamp.port(state, porting.training(other))
    pairs = zip(other.optimizer.variables, source.optimizer.variables, strict=True)
    assert all(np.allclose(one.numpy(), two.numpy(), rtol=1e-6, atol=0) for one, two in pairs)
    step, seen = polyamp.train_step(loss_fn, recipe, compile=False), []
    for number in range(8, 14):
        state, result = step(state, batch(number))
        seen.append((float(result.loss), float(state.scale_state.scale)))
    straight, again = own_loop(source, range(8, 14)), own_loop(other, range(8, 14))
    assert [scale for _, scale in seen] == [scale for _, scale in straight] == [scale for _, scale in again]
    losses = [loss for number, (loss, _) in enumerate(straight) if number != 3]
    assert [loss for number, (loss, _) in enumerate(again) if number != 3] == pytest.approx(losses, rel=1e-6)
    assert [loss for number, (loss, _) in enumerate(seen) if number != 3] == pytest.approx(losses, rel=close)


def test_it_goes_on_on_another_backend() -> None:
    source = model(0, keras.optimizers.SGD(0.02, momentum=0.9))
    own_loop(source, range(8))
    recipe = polyamp.Recipe(scaler="keras", optimizer=polyamp.sgd(0.02, momentum=0.9))
    state, report = polyamp.port(porting.training(source), polyamp.init(MLP.random([4, 3, 1], seed=0), recipe))
    assert [str(change) for change in report.recipe] == ["scaler.growth_interval: 4 -> 2000"]
    momentum = porting.training_state(state).slots["momentum"]["dense0/kernel"].read()
    (held,) = [v.numpy() for v in source.optimizer.inner_optimizer.variables if v.shape == (4, 3)]
    assert momentum == pytest.approx(-held / 0.02, rel=1e-6)


def test_another_place_of_epsilon_is_said() -> None:
    source = model(0, keras.optimizers.Adam(1e-2, epsilon=1e-8))
    state = polyamp.init(model(1), polyamp.Recipe(scaler="keras", optimizer=polyamp.adam(1e-2)))
    _, report = polyamp.port(porting.training(source), state)
    assert any("adds epsilon to the root before its bias correction" in note for note in report.notes)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (keras.optimizers.Adam(amsgrad=True), r"amsgrad=True of keras\.optimizers\.Adam"),
        (keras.optimizers.Adam(use_ema=True), "use_ema=True"),
        (keras.optimizers.Adam(gradient_accumulation_steps=2), "gradient_accumulation_steps"),
        (keras.optimizers.SGD(0.1, weight_decay=0.1), "weight_decay of .*SGD, which is decoupled in Keras"),
        (
            keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10), momentum=0.9),
            "the momentum of .*SGD holds the learning rate, which follows a schedule",
        ),
        (keras.optimizers.SGD(0.0, momentum=0.9), "the momentum of .*SGD holds the learning rate, which is 0"),
        (keras.optimizers.Nadam(), r"it is trained by keras\.optimizers\.Nadam, of which polyamp knows no formula"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(optimizer: Any, message: str) -> None:
    source = model(0)
    state = polyamp.init(model(1), polyamp.Recipe(optimizer=polyamp.adam(1e-2)))
    with pytest.raises(PortError, match=message):
        polyamp.port(porting.training(source, optimizer), state)


def test_what_is_no_optimizer_is_refused() -> None:
    state = polyamp.init(model(1), polyamp.Recipe(optimizer=polyamp.adam(1e-2)))
    with pytest.raises(polyamp.ArgumentError, match="a compiled Keras model, or a model and its"):
        polyamp.port(porting.training(model(0)), state)
    source = model(0, keras.optimizers.Adam(1e-2))
    with pytest.raises(polyamp.ArgumentError, match="in Keras the loss scale is in the optimizer"):
        polyamp.port(porting.training(source, None, object()), state)
