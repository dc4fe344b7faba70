"""The training step on two replicas: the same update as on one, one decision, and nothing moved by a skip."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import BatchError, ModelError, UnsupportedError

STRATEGY: Any = None
RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((5, 8, 4)).astype(np.float32)


@pytest.fixture(autouse=True)
def strategy(two_cpus: Any) -> None:
    global STRATEGY  # the helpers below are no fixtures
    STRATEGY = two_cpus


def model(*, norm: bool = False, dropout: float = 0.0) -> Any:
    keras.utils.set_random_seed(0)
    layers: list[Any] = [keras.Input((4,)), keras.layers.Dense(8, activation="tanh")]
    if norm:
        layers.append(keras.layers.BatchNormalization())
    return keras.Sequential([*layers, keras.layers.Dropout(dropout), keras.layers.Dense(2)])


def loss_fn(model: Any, batch: Any) -> Any:
    return tf.reduce_mean(tf.square(model(batch))), {"first": batch[:, 0]}


def recipe(**options: Any) -> polyamp.Recipe:
    return polyamp.Recipe(**{"optimizer": polyamp.adam(0.1), "scaler": polyamp.LossScaler(init_scale=16.0), **options})


def state_on_two(made: polyamp.Recipe, **options: Any) -> Any:
    with STRATEGY.scope():
        return polyamp.init(model(**options), made)


def copies(state: Any) -> list[list[Any]]:
    """Every replica's copy of everything that a checkpoint holds."""
    return [
        [np.asarray(one.numpy()) for one in STRATEGY.experimental_local_results(getattr(variable, "value", variable))]
        for variable in (*state.model.weights, *state.optimizer.variables)
    ]


def overflow(row: int) -> Any:
    rows = ROWS[0].copy()
    rows[row] = np.inf
    return rows


@pytest.mark.parametrize(
    ("native", "accumulate_steps", "clip_norm"), [(False, 1, None), (False, 2, 0.1), (True, 1, 0.1), (True, 2, None)]
)
def test_two_replicas_train_as_one(clip_norm: float | None, accumulate_steps: int, native: bool) -> None:
    """SGD, whose updates tell a factor of two, which Adam's would not."""

    def made() -> polyamp.Recipe:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9) if native else polyamp.sgd(0.1, momentum=0.9)
        return recipe(optimizer=optimizer, clip_norm=clip_norm, accumulate_steps=accumulate_steps)

    with STRATEGY.scope():
        two_recipe = made()
        two = polyamp.init(model(), two_recipe)
    one_recipe = made()
    one = polyamp.init(model(), one_recipe)
    steps = [(polyamp.train_step(loss_fn, one_recipe), one), (polyamp.train_step(loss_fn, two_recipe), two)]
    for rows in ROWS:
        results = [step(state, rows)[1] for step, state in steps]
        np.testing.assert_allclose(float(results[1].loss), float(results[0].loss), rtol=1e-6)
        np.testing.assert_allclose(float(results[1].grad_norm), float(results[0].grad_norm), rtol=1e-5)
    for mine, alone in zip(two.model.get_weights(), one.model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, alone, rtol=1e-5, atol=1e-7)
    assert all(np.array_equal(first, second) for first, second in copies(two))


@pytest.mark.parametrize(
    ("policy", "row"),
    [("float32", 0), ("float32", 7), ("mixed_bfloat16", 7), ("mixed_float16", 0)],
    ids=["float32, first replica", "float32, second replica", "bfloat16, second replica", "float16, first replica"],
)
def test_an_overflow_on_one_replica_skips_on_both(policy: str, row: int) -> None:
    made = recipe(policy=policy)
    state = state_on_two(made, norm=True)
    step = polyamp.train_step(loss_fn, made)
    step(state, ROWS[0])
    before = copies(state)
    _, result = step(state, overflow(row))
    assert (bool(result.skipped), float(result.scale), int(result.step)) == (True, 8.0, 1)
    for (first, second), (old, _) in zip(copies(state), before, strict=True):
        assert np.array_equal(first, old)
        assert np.array_equal(second, old)
    _, result = step(state, ROWS[1])
    assert (bool(result.skipped), float(result.scale), int(result.step)) == (False, 8.0, 2)
    assert all(np.array_equal(first, second) for first, second in copies(state))
    assert not any(
        np.array_equal(now[0], old[0])
        for now, old in zip(copies(state), before, strict=True)
        if old[0].size > 1 and old[0].dtype == np.float32
    )


def test_keras_own_optimizer_does_not_skip_an_overflow_of_the_second_replica() -> None:
    """The trap: it takes the flag from the first replica before the gradients are reduced."""
    with STRATEGY.scope():
        made = model()
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=16.0)
        optimizer.build(made.trainable_variables)

    def step(rows: Any) -> None:
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_mean(tf.square(made(rows, training=True))))
        optimizer.apply(tape.gradient(scaled, made.trainable_variables), made.trainable_variables)

    halves = [tf.constant(half) for half in np.split(overflow(7), 2)]
    parts = STRATEGY.experimental_distribute_values_from_function(
        lambda context: halves[context.replica_id_in_sync_group]
    )
    tf.function(lambda rows: STRATEGY.run(step, args=(rows,)))(parts)
    assert not all(np.isfinite(weights).all() for weights in made.get_weights())


def test_the_statistics_of_an_applied_step_are_the_mean_over_the_replicas() -> None:
    made = recipe()
    state = state_on_two(made, norm=True)
    polyamp.train_step(loss_fn, made)(state, ROWS[0])
    keras.utils.set_random_seed(0)
    fresh = model(norm=True)
    hidden = [np.asarray(fresh.layers[0](half)) for half in np.split(ROWS[0], 2)]
    moving_mean = 0.01 * np.mean([half.mean(0) for half in hidden], axis=0)  # momentum 0.99, from 0
    np.testing.assert_allclose(state.model.layers[1].moving_mean.numpy(), moving_mean, rtol=1e-5, atol=1e-8)


def test_aux_has_a_leading_axis_of_replicas() -> None:
    made = recipe()
    _, result = polyamp.train_step(loss_fn, made)(state_on_two(made), ROWS[0])
    np.testing.assert_array_equal(result.aux["first"].numpy(), ROWS[0][:, 0].reshape(2, 4))
    made = recipe(accumulate_steps=2)
    _, result = polyamp.train_step(loss_fn, made)(state_on_two(made), ROWS[0])
    np.testing.assert_array_equal(result.aux["first"].numpy(), ROWS[0][:, 0].reshape(2, 2, 2))


def test_a_distributed_dataset_reaches_each_replica_as_its_own() -> None:
    made = recipe(optimizer=polyamp.sgd(0.1))
    state, whole = state_on_two(made), state_on_two(made)
    step = polyamp.train_step(loss_fn, made)
    data = tf.data.Dataset.from_tensor_slices(ROWS.reshape(-1, 4)).batch(8)
    for batch, rows in zip(STRATEGY.experimental_distribute_dataset(data), ROWS, strict=True):
        _, result = step(state, batch)
        _, wanted = step(whole, rows)
        assert float(result.loss) == float(wanted.loss)
    assert all(np.array_equal(a, b) for a, b in zip(state.model.get_weights(), whole.model.get_weights(), strict=True))


def test_the_two_halves_of_the_step() -> None:
    made = recipe(clip_norm=0.5)
    state, whole = state_on_two(made), state_on_two(made)
    step, value_and_grad = polyamp.train_step(loss_fn, made), polyamp.value_and_grad(loss_fn)
    for rows in (ROWS[0], overflow(7), ROWS[1]):
        (loss, _), grads = value_and_grad(state, rows)
        _, result = polyamp.apply_gradients(state, grads)
        _, wanted = step(whole, rows)
        np.testing.assert_array_equal(float(loss), float(wanted.loss))
        assert (bool(result.skipped), float(result.scale)) == (bool(wanted.skipped), float(wanted.scale))
    for mine, other in zip(state.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)
    assert all(np.array_equal(first, second) for first, second in copies(state))


def test_checkpoints_go_from_two_replicas_to_one(tmp_path: Any) -> None:
    made = recipe()
    state = state_on_two(made, norm=True)
    step = polyamp.train_step(loss_fn, made)
    step(state, ROWS[0])
    polyamp.save(state, tmp_path / "two")
    alone = polyamp.restore(polyamp.init(model(norm=True), made), tmp_path / "two")
    again = polyamp.restore(state_on_two(made, norm=True), tmp_path / "two")
    for mine, other in zip(alone.model.get_weights(), state.model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    step(state, ROWS[1])
    step(again, ROWS[1])
    for (first, second), (wanted, _) in zip(copies(again), copies(state), strict=True):
        np.testing.assert_array_equal(first, wanted)
        np.testing.assert_array_equal(second, wanted)


def test_what_replicas_cannot_do_is_refused() -> None:
    made = recipe()
    outside = model()
    with STRATEGY.scope(), pytest.raises(ModelError, match=r"created outside of strategy\.scope\(\)"):
        polyamp.init(outside, made)
    with STRATEGY.scope(), pytest.raises(ModelError, match="on several replicas it must be built"):
        polyamp.init(keras.Sequential([keras.layers.Dense(2)]), made)
    state = state_on_two(made)
    with pytest.raises(ModelError, match=r"one strategy\. Received: _DefaultDistributionStrategy, MirroredStrategy"):
        polyamp.value_and_grad(lambda models, batch: loss_fn(models[0], batch))(
            [polyamp.init(model(), made), state], ROWS[0]
        )
    with pytest.raises(BatchError, match=r"must be a multiple of 2\. Received: .* of shape \(7, 4\)"):
        polyamp.train_step(loss_fn, made)(state, ROWS[0][:7])
    with pytest.raises(UnsupportedError, match="Received: a state on a strategy with 2 replicas"):
        polyamp.train_step(loss_fn, made, jit_compile=True)(state, ROWS[0])
    with tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0").scope():
        central = model()
        with pytest.raises(UnsupportedError, match="CentralStorageStrategy"):
            polyamp.init(central, made)


def test_an_error_of_loss_fn_arrives_from_the_replicas_and_nothing_hangs() -> None:
    made = recipe()
    state = state_on_two(made, norm=True)
    before = copies(state)

    def fails(model: Any, batch: Any) -> Any:
        model(batch)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        polyamp.train_step(fails, made)(state, ROWS[0])
    for now, old in zip(copies(state), before, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(now, old, strict=True))
    assert int(polyamp.train_step(loss_fn, made)(state, ROWS[0])[1].step) == 1
