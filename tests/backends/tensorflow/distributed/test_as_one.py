"""S9 on two and four replicas: the numbers of one, one decision, everything alike on all of them, nothing more sent."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import BatchError, UnsupportedError
from polyamp_keras.arrays import native_variable

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((25, 16, 4)).astype(np.float32)


def model(*, norm: bool = False) -> Any:
    keras.utils.set_random_seed(0)
    middle = [keras.layers.BatchNormalization(name="norm")] if norm else []
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "tanh", name="hidden"), *middle, keras.layers.Dense(2, name="head")]
    )


def loss_fn(model: Any, batch: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.cast(model(batch), tf.float32) - batch[:, :2]))


def made(**options: Any) -> polyamp.Recipe:
    scaler = polyamp.LossScaler(init_scale=1024.0)
    return polyamp.Recipe(**{"optimizer": polyamp.adamw(1e-2), "scaler": scaler, **options})


def on(strategy: Any, recipe: polyamp.Recipe, **options: Any) -> Any:
    with strategy.scope():
        return polyamp.init(model(**options), recipe)


def copies(strategy: Any, state: Any) -> list[Any]:
    """Each variable's copies on all replicas, in one array: what a checkpoint holds but for random-number streams."""
    every = [*state.model.weights, *state.optimizer.variables, state._step, *state._scale]
    values = [strategy.experimental_local_results(native_variable(variable)) for variable in every]
    assert all(len(parts) == strategy.num_replicas_in_sync for parts in values)
    return [np.stack([part.numpy() for part in parts]) for parts in values]


def assert_alike(found: list[Any]) -> None:
    for parts in found:
        assert all(np.array_equal(part, parts[0]) for part in parts[1:])


RATE = polyamp.schedules.warmup_cosine(1e-2, warmup_steps=5, total_steps=40)
GROUPS = [polyamp.Group("**/bias", weight_decay=0.0, clip_norm=0.01), polyamp.Group("hidden/**", trainable_after=2)]
RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": polyamp.sgd(0.1, momentum=0.9), "accumulate_steps": 2},
    "adamw": {"optimizer": polyamp.adamw(RATE, groups=GROUPS), "clip_norm": 0.1, "accumulate_steps": 3},
    "lion": {"optimizer": polyamp.lion(1e-3, weight_decay=0.1, groups=GROUPS), "clip_norm": 0.5},
    "muon": {"optimizer": polyamp.muon(1e-2, eps=1e-3, groups=GROUPS), "clip_norm": 0.5},
    "adafactor": {"optimizer": polyamp.adafactor(1e-2)},
}


@pytest.mark.parametrize(("name", "count"), [("sgd", 2), ("adamw", 4), ("lion", 2), ("muon", 2), ("adafactor", 2)])
def test_s09_several_replicas_train_as_one(name: str, count: int, request: Any) -> None:
    recipe = made(**RECIPES[name])
    strategy = request.getfixturevalue("four_cpus" if count == 4 else "two_cpus")
    several, one = on(strategy, recipe), polyamp.init(model(), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    for rows in ROWS[:20]:
        _, ours = step(several, rows)
        _, theirs = step(one, rows)
    np.testing.assert_allclose([ours.loss, ours.grad_norm], [theirs.loss, theirs.grad_norm], rtol=2e-6)
    assert_alike(copies(strategy, several))
    ours, theirs = (np.concatenate([w.ravel() for w in s.model.get_weights()]) for s in (several, one))
    assert np.linalg.norm(ours - theirs) <= 1e-6 * np.linalg.norm(theirs)


def test_s09_a_mixed_policy_on_two_replicas_is_as_far_from_float32_as_on_one(two_cpus: Any) -> None:
    """S21's measure."""
    found = []
    for policy, strategy in [("float32", None), ("mixed_bfloat16", None), ("mixed_bfloat16", two_cpus)]:
        recipe = made(policy=policy, optimizer=polyamp.adamw(1e-2))
        state = on(strategy or tf.distribute.get_strategy(), recipe)
        step = polyamp.train_step(loss_fn, recipe)
        losses = [float(step(state, rows)[1].loss) for rows in ROWS[:25]]
        found.append(np.concatenate([losses, *(weights.ravel() for weights in state.model.get_weights())]))
    wide, one, two = found
    assert 0 < np.linalg.norm(one - two) <= 2 * max(np.linalg.norm(one - wide), np.linalg.norm(two - wide))


def whole_step(recipe: polyamp.Recipe) -> Callable[[Any, Any], Any]:
    step = polyamp.train_step(loss_fn, recipe)
    return lambda state, rows: step(state, rows)[1]


def halves(_: polyamp.Recipe) -> Callable[[Any, Any], Any]:
    differentiate = polyamp.value_and_grad(loss_fn)
    return lambda state, rows: polyamp.apply_gradients(state, differentiate(state, rows)[1])[1]


@pytest.mark.parametrize(("steps", "count", "trials"), [(whole_step, 4, 8), (halves, 2, 4)])
def test_s09_s12_an_overflow_on_each_replica_in_turn_leaves_all_alike(
    steps: Callable[[polyamp.Recipe], Any], count: int, trials: int, request: Any
) -> None:
    strategy = request.getfixturevalue("four_cpus" if count == 4 else "two_cpus")
    recipe = made(clip_norm=0.5, scaler=polyamp.LossScaler(init_scale=1024.0, growth_interval=2))
    state = on(strategy, recipe, norm=True)
    step = steps(recipe)
    fresh = np.asarray(state.model.get_layer("norm").moving_mean)
    for trial in range(trials):
        rows = ROWS[trial].copy()
        rows[16 // count * (trial % count)] = (np.inf, np.nan)[trial % 2]
        before = copies(strategy, state)
        result = step(state, rows)
        now = copies(strategy, state)
        assert (bool(result.skipped), int(result.step)) == (True, trial)
        assert_alike(now)
        for old, new in zip(before[:-6], now[:-6], strict=True):  # not the counters
            np.testing.assert_array_equal(new, old)
        assert not bool(step(state, ROWS[trial]).skipped)
        assert_alike(copies(strategy, state))
    assert int(state.scale_state.skipped) == trials
    assert not np.array_equal(state.model.get_layer("norm").moving_mean, fresh)


def collectives(function: Any) -> collections.Counter[str]:
    """By kind, in the graph and in all functions that it calls."""
    graph = function.get_concrete_function(tf.TensorSpec((16, 4))).graph.as_graph_def()
    nodes = [*graph.node, *(node for own in graph.library.function for node in own.node_def)]
    return collections.Counter(node.op for node in nodes if "Collective" in node.op or "Nccl" in node.op)


@pytest.mark.parametrize("accumulate_steps", [1, 3])
def test_s09_the_step_sends_what_the_loop_by_hand_sends(accumulate_steps: int, two_cpus: Any) -> None:
    """Loss, gradients and running statistics go together, where a loop by hand sends the gradients."""
    recipe = made(clip_norm=0.5, accumulate_steps=accumulate_steps)
    state = on(two_cpus, recipe, norm=True)
    step = polyamp.train_step(lambda m, b: (loss_fn(m, b), {"first": b[:, 0]}), recipe)
    step(state, ROWS[0])
    (ours,) = [program.function for programs in state.programs.values() for program in programs.values()]

    with two_cpus.scope():
        own = model(norm=True)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(1e-2))
        optimizer.build(own.trainable_variables)

    def replica_step(rows: Any) -> None:
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(loss_fn(own, rows))
        optimizer.apply(tape.gradient(scaled, own.trainable_variables), own.trainable_variables)

    by_hand = tf.function(lambda rows: two_cpus.run(replica_step, args=(rows,)))
    assert collectives(ours) == collectives(by_hand) == {"CollectiveReduceV2": 2}  # one for each replica


def test_s23_what_no_replica_uses_stays_and_what_one_uses_moves(two_cpus: Any) -> None:
    recipe = made(optimizer=polyamp.adamw(0.1, weight_decay=0.5))
    with two_cpus.scope():
        x = keras.Input((4,))
        heads = [keras.layers.Dense(2, name=name)(x) for name in ("first", "second", "neither")]
        state = polyamp.init(keras.Model(x, heads), recipe)

    def one_head_each(model: Any, batch: Any) -> Any:
        return tf.reduce_mean(tf.square(model(batch)[batch.shape[0] - 2]))

    (batch,) = distributed(two_cpus, ROWS[0][:5])  # three rows for the one, two for the other
    before = copies(two_cpus, state)
    for _ in range(2):
        polyamp.train_step(one_head_each, recipe)(state, batch)
    now = copies(two_cpus, state)
    assert_alike(now)
    moved = [not np.array_equal(old, new) for old, new in zip(before, now, strict=True)]
    assert moved[:6] == [True, True, True, True, False, False]
    assert all(np.isfinite(parts).all() for parts in now)


def distributed(strategy: Any, rows: Any) -> list[Any]:
    data = tf.data.Dataset.from_tensor_slices(rows).batch(8)
    return list(strategy.experimental_distribute_dataset(data))


def test_s09_the_uneven_end_of_a_distributed_dataset(two_cpus: Any) -> None:
    """Each replica counts by its rows, aux is put together, and one that gets no row is refused."""
    recipe = made(optimizer=polyamp.sgd(0.1), accumulate_steps=2)
    state = on(two_cpus, recipe, norm=True)
    step = polyamp.train_step(lambda m, b: (loss_fn(m, b), {"first": b[:, 0]}), recipe)
    whole, uneven = distributed(two_cpus, ROWS[:1].reshape(-1, 4)[:13])
    step(state, whole)
    parts = [part.numpy() for part in two_cpus.experimental_local_results(uneven)]
    assert [len(part) for part in parts] == [3, 2]
    fresh = model(norm=True)
    fresh.set_weights(state.model.get_weights())
    runs = [np.split(part, [(len(part) + 1) // 2]) for part in parts]  # windows of 2 and 1, and of 1 and 1 rows (S8)
    losses = [[float(loss_fn(lambda x: fresh(x, training=True), run)) for run in own] for own in runs]
    means = [np.average(own, weights=[len(run) for run in window]) for own, window in zip(losses, runs, strict=True)]
    _, result = step(state, uneven)
    np.testing.assert_array_equal(result.aux["first"], np.concatenate(parts)[:, 0])
    mean = np.average(means, weights=[len(part) for part in parts])
    np.testing.assert_allclose(float(result.loss), mean, rtol=1e-6)
    assert_alike(copies(two_cpus, state))
    before = copies(two_cpus, state)
    (empty,) = distributed(two_cpus, ROWS[0][:1])
    with pytest.raises(BatchError, match=r"no rows|empty"):
        step(state, empty)
    for old, new in zip(before, copies(two_cpus, state), strict=True):
        np.testing.assert_array_equal(new, old)
    assert int(step(state, whole)[1].step) == 3


def test_s20_where_replicas_cannot_meet_and_where_they_do_already(two_cpus: Any) -> None:
    with two_cpus.scope():
        x = keras.Input((4,))
        synchronized = keras.layers.BatchNormalization(synchronized=True)
        state = polyamp.init(keras.Model(x, keras.layers.Dense(2)(synchronized(x))), made(accumulate_steps=2))
    before = copies(two_cpus, state)
    step = polyamp.train_step(loss_fn, state.recipe)
    with pytest.raises(UnsupportedError, match=r"synchronized=True.* Received: accumulate_steps=2. Use"):
        step(state, ROWS[0])
    with pytest.raises(UnsupportedError, match=r"Received: a call inside strategy\.run"):
        two_cpus.run(lambda: step(state, ROWS[0]))
    for old, new in zip(before, copies(two_cpus, state), strict=True):
        np.testing.assert_array_equal(new, old)
