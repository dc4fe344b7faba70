"""LossScaleOptimizer on one device: polyamp's rules in loops of one's own, with every optimizer of Keras; refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import (
    GradientError,
    LossError,
    LossScaleError,
    LossScaleStuckError,
    PolyampError,
    RecipeError,
    UnsupportedError,
)
from polyamp.rules import stuck_scale
from polyamp_tensorflow import LossScaleOptimizer, SpecOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:use_ema with accumulate_steps")  # said by test_own_clip

TRACES = {
    1: [8, 8, 8, 8, 16, 8, 4, 4, 2, 2, 2, 2, 4, 4, 4, 4, 8, 4],
    2: [16, 16, 16, 16, 32, 32, 16, 16, 8, 8, 8, 8, 16, 16, 16, 16, 32, 32],
}
"""S16: hysteresis -> the scale after each step of OVERFLOWS."""
OVERFLOWS = [1, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda: keras.optimizers.Adam(0.1, use_ema=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1, centered=True, momentum=0.9),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.1, clipnorm=0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.1, clipvalue=0.1),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Lion": lambda: keras.optimizers.Lion(0.1),
    "Lamb": lambda: keras.optimizers.Lamb(0.1),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "Muon": lambda: keras.optimizers.Muon(0.1),
    "ScheduleFreeAdamW": lambda: keras.optimizers.ScheduleFreeAdamW(0.1),
    "MultiOptimizer": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {".*bias": keras.optimizers.Adam(0.1)})
    ),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
}


EAGER = ("Adam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion", "Lamb", "global_clipnorm")
"""Of one kind for a graph: variables of each parameter, and one formula over all elements."""


def make_model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(2)])


def batch(seed: int, gain: float = 1.0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tf.constant(rng.normal(size=(8, 4)) * gain, tf.float32), tf.constant(rng.normal(size=(8, 2)), tf.float32)


def make_step(model: Any, optimizer: Any, *, compiled: bool = True, jit: bool = False, autograph: bool = False) -> Any:
    """A training step as Keras's guides write it; `gain` multiplies the loss, so that infinity makes an overflow."""

    def step(x: Any, y: Any, gain: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            scaled = optimizer.scale_loss(loss * gain)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    return tf.function(step, jit_compile=jit, autograph=autograph) if compiled else step


def everything(model: Any, optimizer: Any) -> list[Any]:
    """Weights and the inner optimizer's variables."""
    inner = [v for member in getattr(optimizer.inner_optimizer, "optimizers", ()) for v in member.variables]
    return [np.array(v.numpy()) for v in [*model.weights, *optimizer.inner_optimizer.variables, *inner]]


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(a, b, equal_nan=False) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_scale_follows_the_reference_trace(hysteresis: int) -> None:
    model = make_model()
    scaler = polyamp.LossScaler(init_scale=16.0, growth_interval=4, hysteresis=hysteresis)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), scaler)
    step = make_step(model, optimizer)
    scales = []
    for number, bad in enumerate(OVERFLOWS):
        step(*batch(number), tf.constant(np.inf if bad else 1.0))
        scales.append(float(optimizer.dynamic_scale))
    assert scales == TRACES[hysteresis]
    assert optimizer.skipped_steps == sum(OVERFLOWS)
    assert int(optimizer.iterations) == len(OVERFLOWS) - sum(OVERFLOWS)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer_steps_as_without_scaling_and_a_skip_moves_nothing(name: str) -> None:
    plain, scaled = make_model(), make_model()
    alone = OPTIMIZERS[name]()
    optimizer = LossScaleOptimizer(OPTIMIZERS[name](), polyamp.LossScaler(init_scale=1024.0))
    step = make_step(scaled, optimizer, compiled=name not in EAGER)

    def plain_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(plain(x, training=True) - y))
        alone.apply(tape.gradient(loss, plain.trainable_variables), plain.trainable_variables)

    plain_function = plain_step if name in EAGER else tf.function(plain_step, autograph=False)
    for number in range(3):
        plain_function(*batch(number))
        step(*batch(number), tf.constant(1.0))
        before = everything(scaled, optimizer)
        step(*batch(number), tf.constant(np.nan))
        assert equal(everything(scaled, optimizer), before)
        assert bool(optimizer.update_was_skipped)
    for ours, theirs in zip(scaled.weights, plain.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-5, atol=1e-6)
    assert int(optimizer.iterations) == 3


@pytest.fixture(scope="module")
def stepped_weights() -> list[Any]:
    """What four steps of `train_step` make of the model's weights."""
    model = make_model()
    state = polyamp.init(model, polyamp.Recipe(optimizer=polyamp.adamw(0.05), clip_norm=0.5))
    train = polyamp.train_step(
        lambda model, batch: polyamp.losses.mean_squared_error(model(batch[0]), batch[1]), state.recipe
    )
    for number in range(4):
        train(state, batch(number))
    return list(model.get_weights())


@pytest.mark.parametrize("how", ["eager", "graph", "XLA"])
def test_the_same_numbers_in_every_mode(how: str, stepped_weights: list[Any]) -> None:
    model = make_model()
    optimizer = LossScaleOptimizer(polyamp.adamw(0.05), polyamp.LossScaler(init_scale=64.0), clip_norm=0.5)
    step = make_step(model, optimizer, compiled=how != "eager", jit=how == "XLA", autograph=True)
    for number in range(4):
        step(*batch(number), tf.constant(1.0))
        if number == 1:
            step(*batch(number), tf.constant(np.inf))
    for ours, theirs in zip(model.get_weights(), stepped_weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_clip_is_by_the_global_norm_of_the_unscaled_gradients() -> None:
    variables = [keras.Variable(np.zeros(1, np.float32)), keras.Variable(np.zeros(1, np.float32))]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), polyamp.LossScaler(init_scale=1024.0), clip_norm=1.0)
    optimizer.scale_loss(tf.constant(0.0))
    optimizer.apply([tf.constant([3.0 * 1024]), tf.constant([4.0 * 1024])], variables)
    assert [float(v.numpy()[0]) for v in variables] == pytest.approx([-0.6, -0.8])


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_accumulation_is_one_update_of_the_mean_and_one_decision(clip_norm: float | None) -> None:
    whole, parts = make_model(), make_model()
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.1])
    one = LossScaleOptimizer(keras.optimizers.SGD(rate), polyamp.LossScaler(init_scale=64.0), clip_norm=clip_norm)
    scaler = polyamp.LossScaler(init_scale=64.0, growth_interval=2)
    two = LossScaleOptimizer(keras.optimizers.SGD(rate), scaler, clip_norm=clip_norm, accumulate_steps=2)
    full, micro = make_step(whole, one), make_step(parts, two)
    for number in range(2):
        x, y = batch(number)
        full(x, y, tf.constant(1.0))
        before = everything(parts, two)
        micro(x[:4], y[:4], tf.constant(1.0))
        assert equal(everything(parts, two), before)
        micro(x[4:], y[4:], tf.constant(1.0))
        assert int(two.iterations) == number + 1
    for ours, theirs in zip(parts.weights, whole.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-7)
    assert float(two.dynamic_scale) == 128.0, "two windows, not four micro-batches"
    before = everything(parts, two)
    x, y = (part[:4] for part in batch(9))
    micro(x, y, tf.constant(np.inf))
    assert (float(two.dynamic_scale), two.skipped_steps) == (128.0, 0), "the scale is constant inside the window"
    micro(x, y, tf.constant(1.0))
    assert (float(two.dynamic_scale), two.skipped_steps) == (64.0, 1)
    assert equal(everything(parts, two), before)
    micro(x, y, tf.constant(1.0))
    micro(x, y, tf.constant(1.0))
    assert np.isfinite(parts.weights[0].numpy()).all()
    assert not np.array_equal(parts.weights[0].numpy(), before[0])


def test_a_gradient_below_the_floor_of_the_scale_is_tested_after_unscaling() -> None:
    """Keras tests before: 1e38 / 2^-14 is infinite, and infinity is written into the weights."""
    variable = keras.Variable(np.zeros(1, np.float32))
    scaler = polyamp.LossScaler(init_scale=2.0**-14, on_stuck="ignore")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), scaler)
    optimizer.scale_loss(tf.constant(0.0))
    optimizer.apply([tf.constant([1e38])], [variable])
    assert (float(variable.numpy()[0]), optimizer.skipped_steps) == (0.0, 1)
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0**-14)
    theirs.apply([tf.constant([1e38])], [variable])
    assert np.isinf(variable.numpy()).all()


def test_after_many_overflows_the_scale_is_at_its_floor_and_training_goes_on() -> None:
    """Keras's scale falls to 0, and the next finite gradient gives 0 / 0."""
    ours = LossScaleOptimizer(keras.optimizers.SGD(0.1), polyamp.LossScaler(on_stuck="ignore"))
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    for optimizer, floor, finite in ((ours, 2.0**-14, True), (theirs, 0.0, False)):
        model = make_model()
        step = make_step(model, optimizer)
        for _ in range(200):
            step(*batch(0), tf.constant(np.nan))
        assert float(optimizer.dynamic_scale) == floor
        step(*batch(0), tf.constant(1.0))
        assert all(np.isfinite(weight.numpy()).all() for weight in model.weights) == finite


def test_the_scale_stops_at_its_ceiling() -> None:
    scaler = polyamp.LossScaler(init_scale=2.0**23, growth_interval=1)
    ours = LossScaleOptimizer(keras.optimizers.SGD(0.0), scaler)
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), 2.0**126, dynamic_growth_steps=1)
    for optimizer, most in ((ours, 2.0**24), (theirs, np.inf)):
        step = make_step(make_model(), optimizer)
        for _ in range(3):
            step(*batch(0), tf.constant(0.0))
        assert float(optimizer.dynamic_scale) == most


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_16_bit_loss_is_scaled_in_float32(dtype: str) -> None:
    """Keras multiplies 60000 by the scale in float16 before `build`, which is infinite."""
    loss = tf.constant(60000.0, dtype)
    with pytest.warns(UserWarning, match=rf"given a loss in {dtype}: it was computed in 16 bits.*'float32'"):
        scaled = LossScaleOptimizer(keras.optimizers.SGD(0.1)).scale_loss(loss)
    assert scaled.dtype == tf.float32
    assert float(scaled) == float(tf.cast(loss, tf.float32)) * 2.0**15
    if dtype == "float16":
        assert np.isinf(float(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)).scale_loss(loss)))


def test_a_forgotten_scale_loss_is_noticed() -> None:
    """Keras divides the gradients by the scale all the same."""
    variable = keras.Variable(np.ones(1, np.float32))
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1024.0)
    theirs.apply([tf.constant([1.0])], [variable])
    assert float(variable.numpy()[0]) == 1.0 - 1.0 / 1024
    ours = LossScaleOptimizer(keras.optimizers.SGD(1.0), polyamp.LossScaler(init_scale=1024.0))
    with pytest.raises(LossScaleError, match=r"scale_loss\(\) was not since the last update"):
        ours.apply([tf.constant([1.0])], [variable])
    ours.scale_loss(tf.constant(1.0))
    ours.apply([tf.constant([1024.0])], [variable])
    with pytest.raises(LossScaleError, match=r"scale_loss\(\) was not since the last update"):
        ours.apply([tf.constant([1024.0])], [variable])
    traced = LossScaleOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(LossScaleError, match=r"scale_loss\(\) was not in its function"):
        tf.function(lambda: traced.apply([tf.constant([1.0])], [variable]), autograph=False)()
    LossScaleOptimizer(keras.optimizers.SGD(1.0), "off").apply([tf.constant([1.0])], [variable])


def test_s17_a_stuck_scale_names_the_parameters() -> None:
    model = make_model()
    scaler = polyamp.LossScaler(init_scale=2.0**-13, patience=3)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), scaler)
    step = make_step(model, optimizer, compiled=False)
    head = model.layers[1]

    def spoil() -> None:
        optimizer.scale_loss(tf.constant(0.0))
        gradients = [tf.fill(v.shape, np.nan if v.path == head.kernel.path else 0.0) for v in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)

    step(*batch(0), tf.constant(1.0))
    for _ in range(4):
        spoil()
    with pytest.raises(LossScaleStuckError, match="5 steps in a row") as error:
        spoil()
    said = stuck_scale.stuck_message(5, scaler, [head.kernel.path], where="the model or the loss")
    assert str(error.value) == said, "the sentence of every way in (S17)"
    assert optimizer.not_finite() == [head.kernel.path]


def test_off_neither_scales_nor_checks() -> None:
    variable = keras.Variable(np.zeros(1, np.float32))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), "off")
    assert float(optimizer.scale_loss(tf.constant(3.0))) == 3.0
    optimizer.apply([tf.constant([np.inf])], [variable])
    assert np.isinf(variable.numpy()).all()
    checked = LossScaleOptimizer(keras.optimizers.SGD(1.0), polyamp.LossScaler.off(check_finite=True))
    variable.assign([0.0])
    checked.apply([tf.constant([np.inf])], [variable])
    assert float(variable.numpy()[0]) == 0.0


def test_statistics_of_a_skipped_step_are_taken_back() -> None:
    layer = keras.layers.BatchNormalization()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(2)])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), polyamp.LossScaler(init_scale=16.0))

    def train(x: Any, y: Any, gain: Any) -> None:
        with optimizer.keep_statistics(model):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y)) * gain
                scaled = optimizer.scale_loss(loss)
            optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)

    step = tf.function(train)
    step(*batch(0), tf.constant(1.0))
    before = layer.moving_mean.numpy()
    assert not np.array_equal(before, np.zeros(4))
    step(*batch(1), tf.constant(np.inf))
    assert np.array_equal(layer.moving_mean.numpy(), before)
    step(*batch(1), tf.constant(1.0))
    assert not np.array_equal(layer.moving_mean.numpy(), before)


def test_sparse_and_missing_gradients() -> None:
    keras.utils.set_random_seed(0)
    table = keras.Variable(np.zeros((3, 2), np.float32))
    unused = keras.Variable(np.ones(1, np.float32))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), polyamp.LossScaler(init_scale=4.0))
    rows = tf.IndexedSlices(tf.constant([[4.0, 0.0], [8.0, 0.0]]), tf.constant([1, 1]), tf.constant([3, 2]))
    optimizer.scale_loss(tf.constant(0.0))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([rows, None], [table, unused])
    assert table.numpy().tolist() == [[0.0, 0.0], [-3.0, 0.0], [0.0, 0.0]]
    assert unused.numpy().tolist() == [1.0]


def test_rows_that_occur_twice_are_added_up_before_adam_squares_them() -> None:
    """Keras's Adam squares each on its own."""
    rows = tf.IndexedSlices(tf.constant([[1.0], [3.0]]), tf.constant([1, 1]), tf.constant([3, 1]))

    def trained(gradient: Any, wrap: bool) -> Any:
        optimizer: Any = keras.optimizers.Adam(0.1, epsilon=1.0)
        optimizer = LossScaleOptimizer(optimizer, polyamp.LossScaler.off(check_finite=True)) if wrap else optimizer
        table = keras.Variable(np.zeros((3, 1), np.float32))
        optimizer.apply([gradient], [table])
        return table.numpy()

    right = trained(tf.constant([[0.0], [4.0], [0.0]]), wrap=False)
    np.testing.assert_array_equal(trained(rows, wrap=True), right)
    assert not np.allclose(trained(rows, wrap=False), right, rtol=1e-3)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: LossScaleOptimizer(LossScaleOptimizer(keras.optimizers.SGD(0.1))),
            LossScaleError,
            "a scaler wrapped twice",
        ),
        (
            lambda: LossScaleOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))),
            LossScaleError,
            "a scaler wrapped twice",
        ),
        (
            lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1, loss_scale_factor=8.0)),
            LossScaleError,
            r"SGD\(loss_scale_factor=8.0\).*LossScaler.static",
        ),
        (
            lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
            RecipeError,
            r"gradient_accumulation_steps=2\).*accumulate_steps=",
        ),
        (
            lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1, global_clipnorm=2.0), clip_norm=1.0),
            RecipeError,
            "both clip by the global norm",
        ),
        (lambda: LossScaleOptimizer(object()), RecipeError, r"Received: builtins\.object"),
        (lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1), clip_norm=0.0), RecipeError, "clip_norm must be"),
        (lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1), accumulate_steps=0), RecipeError, "accumulate_steps"),
        (lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1), "kears"), LossScaleError, "'keras'"),
        (
            lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1)).build([keras.Variable(np.ones(1), dtype="float16")]),
            LossScaleError,
            "float32 master weights",
        ),
        (
            lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1)).scale_loss(tf.constant([1, 2])),
            LossError,
            "floating loss",
        ),
        (lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1)).apply([tf.constant(1.0)]), GradientError, "build"),
        (
            lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1)).stateless_apply([], [], []),
            UnsupportedError,
            "Keras on JAX",
        ),
        (
            lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1), "off").apply([None], [keras.Variable(1.0)]),
            GradientError,
            "no gradients",
        ),
        (
            lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1), "off").apply([tf.constant(1)], [keras.Variable(1.0)]),
            GradientError,
            "must be floating",
        ),
    ],
)
def test_what_is_refused(make: Callable[[], Any], kind: type[PolyampError], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_a_spec_becomes_an_optimizer_with_its_formula() -> None:
    optimizer = LossScaleOptimizer(polyamp.adam(1e-3, eps=1e-3))
    assert isinstance(optimizer.inner_optimizer, SpecOptimizer)
    optimizer.learning_rate = 0.5
    assert float(optimizer.inner_optimizer.learning_rate) == 0.5


def test_a_kernel_that_the_forward_pass_rewrites_is_taken_back() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.SpectralNormalization(keras.layers.Dense(2))])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), polyamp.LossScaler(init_scale=16.0))
    x, y = batch(0)
    before = model.get_weights()
    with optimizer.keep_statistics(model):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_mean(tf.square(model(x, training=True) - y)) * np.inf)
        moved = model.get_weights()
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
    assert bool(optimizer.update_was_skipped)
    assert not all(np.array_equal(one, other) for one, other in zip(before, moved, strict=True))
    assert all(np.array_equal(one, other) for one, other in zip(before, model.get_weights(), strict=True))


def test_a_gradient_from_early_in_the_window_is_not_lost_when_the_last_call_has_none() -> None:
    first, second = (keras.Variable(np.zeros(1, np.float32)) for _ in range(2))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), polyamp.LossScaler.off(), accumulate_steps=2)
    optimizer.apply([tf.ones(1), None], [first, second])
    optimizer.apply([None, tf.ones(1)], [first, second])
    assert (float(first.numpy()[0]), float(second.numpy()[0])) == (-0.5, -0.5)


def test_an_error_inside_the_block_takes_statistics_back() -> None:
    layer = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(2)])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    before = layer.moving_mean.numpy()

    def fails() -> None:
        with optimizer.keep_statistics(model):
            model(batch(0)[0], training=True)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fails()
    assert np.array_equal(layer.moving_mean.numpy(), before)


def test_what_is_not_finite_is_named_for_tf_variables_too() -> None:
    variable = tf.Variable([1.0], name="weight")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), polyamp.LossScaler(init_scale=4.0))
    optimizer.scale_loss(tf.constant(0.0))
    optimizer.apply([tf.constant([np.inf])], [variable])
    assert optimizer.not_finite() == ["weight:0"]
