"""Two replicas under MirroredStrategy: an overflow on either skips on both, in loops of one's own and in `fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import BatchError, LossScaleError, PolyampError, UnsupportedError
from polyamp_tensorflow import LossScaleOptimizer
from polyamp_tensorflow import compile as compile_model
from polyamp_tensorflow.step.tensorflow_only.optimizer_patches import skip_gradient_reduction

pytestmark = pytest.mark.filterwarnings("ignore:use_ema with accumulate_steps")  # said by test_own_clip

STRATEGY: Any = None
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "AdamW": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1, use_ema=True),
    "Nadam": lambda: keras.optimizers.Nadam(1e-2),
    "Adafactor": lambda: keras.optimizers.Adafactor(1e-2),
    "spec": lambda: polyamp.adamw(1e-2),
    "MultiOptimizer": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {".*bias": keras.optimizers.Adam(0.1)})
    ),
}


@pytest.fixture(autouse=True)
def strategy(two_cpus: Any) -> None:
    global STRATEGY  # the helpers below are no fixtures
    STRATEGY = two_cpus


def make_model(*, norm: bool = False) -> Any:
    keras.utils.set_random_seed(0)
    middle = [keras.layers.BatchNormalization()] if norm else []
    head = keras.layers.Dense(1, kernel_constraint="unit_norm", kernel_regularizer="l2")
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh"), *middle, head])


def rows(count: int = 16, *, bad: int | None = None) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 4)).astype(np.float32)
    if bad is not None:
        x[bad] = np.inf
    return x, rng.normal(size=(count, 1)).astype(np.float32)


def copies(variables: Any) -> list[list[Any]]:
    """Every variable's value on each replica."""
    return [[part.numpy() for part in STRATEGY.experimental_local_results(v.value)] for v in variables]


def identical(variables: Any) -> bool:
    return all(np.array_equal(first, second) for first, second in copies(variables))


def custom_step(model: Any, optimizer: Any, strategy: Any, *, compiled: bool = True) -> Any:
    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y)) + tf.add_n(model.losses)
            scaled = optimizer.scale_loss(loss / strategy.num_replicas_in_sync)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)

    def kept_step(x: Any, y: Any) -> None:
        ours = isinstance(optimizer, LossScaleOptimizer)
        with optimizer.keep_statistics(model) if ours else contextlib.nullcontext():
            replica_step(x, y)

    def step(x: Any, y: Any) -> None:
        strategy.run(kept_step, args=(x, y))

    return tf.function(step, autograph=False) if compiled else step


def distributed(x: Any, y: Any) -> Any:
    halves = [len(x) * i // 2 for i in range(3)]
    return tuple(
        STRATEGY.experimental_distribute_values_from_function(
            lambda context, whole=whole: tf.constant(
                whole[halves[context.replica_id_in_sync_group] : halves[context.replica_id_in_sync_group + 1]]
            )
        )
        for whole in (x, y)
    )


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_two_replicas_are_one_device_with_twice_the_batch(name: str) -> None:
    clip = None if name == "SGD" else 0.5  # without a clip, so that it tells a sum over the replicas from a mean
    alone = make_model()
    single = LossScaleOptimizer(OPTIMIZERS[name](), polyamp.LossScaler(init_scale=64.0), clip_norm=clip)
    with STRATEGY.scope():
        model = make_model()
        optimizer = LossScaleOptimizer(OPTIMIZERS[name](), polyamp.LossScaler(init_scale=64.0), clip_norm=clip)
        optimizer.build(model.trainable_variables)
    one = custom_step(alone, single, tf.distribute.get_strategy(), compiled=False)
    two = custom_step(model, optimizer, STRATEGY)
    x, y = rows()
    for start in range(0, 16, 4):
        one(tf.constant(x[start : start + 4]), tf.constant(y[start : start + 4]))
        two(*distributed(x[start : start + 4], y[start : start + 4]))
    for a, b in zip(alone.weights, model.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-5, atol=1e-6)
    assert identical([*model.weights, *optimizer.variables])


@pytest.mark.parametrize(("loop", "replica"), [("custom", 0), ("custom", 1), ("fit", 1), ("fit, accumulating", 0)])
def test_an_overflow_on_either_replica_skips_on_both(loop: str, replica: int) -> None:
    accumulate = 2 if loop == "fit, accumulating" else 1
    scaler = polyamp.LossScaler(init_scale=16.0)
    with STRATEGY.scope():
        model = make_model(norm=True)
        inner = keras.optimizers.AdamW(1e-2)
        if loop == "custom":
            optimizer = LossScaleOptimizer(inner, scaler)
            optimizer.build(model.trainable_variables)
            step = custom_step(model, optimizer, STRATEGY)
        else:
            recipe = polyamp.Recipe(optimizer=inner, scaler=scaler, accumulate_steps=accumulate)
            compile_model(model, recipe, loss="mse")
            optimizer = model.optimizer

    def train(x: Any, y: Any) -> None:
        if loop == "custom":
            step(*distributed(x, y))
        else:
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0)

    train(*rows(4 * accumulate))
    kept = [*model.weights, *optimizer.inner_optimizer.variables]
    before = copies(kept)
    train(*rows(4 * accumulate, bad=4 * (accumulate - 1) + 2 * replica))
    for variable, old, new in zip(kept, before, copies(kept), strict=True):
        np.testing.assert_array_equal(new, old, err_msg=variable.path)
    assert copies([optimizer.dynamic_scale]) == [[8.0, 8.0]]
    assert (optimizer.skipped_steps, int(optimizer.iterations.numpy())) == (1, 1)
    train(*rows(4 * accumulate))
    assert identical([*model.weights, *optimizer.variables]), "running statistics too"
    assert np.isfinite(model.weights[0].numpy()).all()
    assert int(optimizer.iterations.numpy()) == 2


def test_keras_own_scaler_takes_the_first_replicas_flag() -> None:
    with STRATEGY.scope():
        model = make_model()
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
    custom_step(model, optimizer, STRATEGY)(*distributed(*rows(4, bad=2)))
    assert not any(np.isfinite(part).all() for part in copies([model.weights[0]])[0])


def test_float16_on_two_replicas_stays_outside_of_xla() -> None:
    with STRATEGY.scope():
        model = make_model()
    compile_model(model, polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1)), loss="mse")
    assert model.jit_compile is False
    model.fit(*rows(4), verbose=0)
    assert identical(model.weights)


def outside_of_the_replicas() -> None:
    with STRATEGY.scope():
        variable = keras.Variable(np.ones(1, np.float32))
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build([variable])
        optimizer.apply([tf.constant([1.0])], [variable])


def made_outside_of_the_scope() -> None:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with STRATEGY.scope():
        optimizer.build([keras.Variable(np.ones(1, np.float32))])


def average_overwritten() -> None:
    with STRATEGY.scope():
        inner = keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)
        LossScaleOptimizer(inner).build([keras.Variable(np.ones(1, np.float32))])


def a_strategy_that_is_not_known() -> None:
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    with strategy.scope():
        variable = keras.Variable(np.ones(1, np.float32))
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), "off")
        optimizer.build([variable])
    strategy.run(lambda: optimizer.apply([tf.constant([1.0])], [variable]))


def jit_on_replicas() -> None:
    with STRATEGY.scope():
        model = make_model()
    compile_model(model, polyamp.Recipe(), loss="mse", jit_compile=True)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (outside_of_the_replicas, LossScaleError, r"inside strategy\.run"),
        (made_outside_of_the_scope, LossScaleError, r"created outside of strategy\.scope"),
        (average_overwritten, UnsupportedError, "ema_overwrite_frequency"),
        (
            a_strategy_that_is_not_known,
            UnsupportedError,
            "OneDeviceStrategy, .*Received: CentralStorageStrategy with 2",
        ),
        (jit_on_replicas, UnsupportedError, "a strategy with 2 replicas"),
    ],
)
def test_what_is_refused(make: Callable[[], Any], kind: type[PolyampError], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_one_device_is_a_strategy_as_good_as_none() -> None:
    """With the step and with an optimizer in a loop of one's own."""
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    made = polyamp.Recipe(optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler(init_scale=16.0))
    with strategy.scope():
        model, stepped = make_model(), make_model()
        optimizer = LossScaleOptimizer(polyamp.sgd(0.1), made.loss_scaler)
        state = polyamp.init(stepped, made)
    x, y = rows(4)
    custom_step(model, optimizer, strategy)(tf.constant(x), tf.constant(y))
    step = polyamp.train_step(lambda m, b: tf.reduce_mean(tf.square(m(b[0]) - b[1])) + tf.add_n(m.losses), made)
    step(state, (x, y))
    for one, other in zip(model.weights, stepped.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6)


@pytest.mark.parametrize("error", [False, True])
def test_the_optimizer_inside_reduces_gradients_again_afterwards(error: bool) -> None:
    inner = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {}))
    parts = [inner, *inner.optimizers]
    with pytest.raises(KeyError, match="boom") if error else contextlib.nullcontext(), skip_gradient_reduction(inner):
        assert all(part._all_reduce_sum_gradients([1]) == [1] for part in parts)
        if error:
            raise KeyError("boom")
    assert not any("_all_reduce_sum_gradients" in vars(part) for part in parts)


@pytest.mark.filterwarnings("ignore:loss_fn leaves out")
def test_leaves_that_have_no_part_for_each_replica() -> None:
    """A scalar in the batch is refused; None passes through batch and aux."""
    made = polyamp.Recipe(optimizer=polyamp.sgd(0.1))
    with STRATEGY.scope():
        state = polyamp.init(make_model(), made)
    x, _ = rows(4)
    step = polyamp.train_step(lambda model, batch: (tf.reduce_mean(model(batch["x"])), {"absent": batch["no"]}), made)
    _, result = step(state, {"x": x, "no": None})
    assert result.aux == {"absent": None}
    with pytest.raises(BatchError, match=r"a multiple of 2. Received: .*weight.* of shape \(\)"):
        step(state, {"x": x, "no": None, "weight": 1.0})
