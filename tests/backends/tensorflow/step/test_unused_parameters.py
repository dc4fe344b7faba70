"""S23: a parameter on which the loss does not depend, and the optimizer's state of it, stay bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow
from polyamp.errors import GradientError, LossError
from polyamp.reference.arrays import XP
from polyamp_tensorflow import LossScaleOptimizer, SpecOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:use_ema with accumulate_steps")  # said by test_own_clip

BACKEND = polyamp_tensorflow.BACKEND
SPECS = [
    polyamp.sgd(0.1, momentum=0.9, weight_decay=0.1),
    polyamp.adam(0.1, weight_decay=0.1),
    polyamp.adam(0.1, betas=(0.0, 0.9)),  # without a kernel
    polyamp.adamw(polyamp.schedules.warmup_cosine(0.1, warmup_steps=3, total_steps=8), weight_decay=0.1),
    polyamp.adagrad(0.1, lr_decay=0.5),
    polyamp.rmsprop(0.1, momentum=0.9),
    polyamp.lion(0.1, weight_decay=0.1),
    polyamp.nadam(0.1, weight_decay=0.1),
]
LEFT = np.linspace(-1.0, 1.0, 3, dtype=np.float32)


class Two(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Two vectors; a loss uses one of them, or both."""

    def __init__(self) -> None:
        super().__init__(name="two")
        self.left = self.add_weight(shape=(3,), initializer=keras.initializers.Constant(LEFT), name="left")
        self.right = self.add_weight(shape=(3,), initializer=keras.initializers.Constant(-LEFT), name="right")
        self.built = True

    def call(self, x: Any) -> Any:
        return x


def left(model: Any, batch: Any) -> Any:
    return keras.ops.mean(model.left * batch["x"])


def right(model: Any, batch: Any) -> Any:
    return keras.ops.mean(model.right * batch["x"])


def neither(model: Any, batch: Any) -> Any:
    return keras.ops.mean(tf.stop_gradient(model.right) * batch["x"])


def batch(number: int = 0, rows: int = 1) -> dict[str, Any]:
    return {"x": np.random.default_rng(number).standard_normal((rows, 3)).astype(np.float32)}


def exported(state: Any, part: str) -> dict[str, bytes]:
    """What belongs to one of the vectors, bit for bit."""
    return {name: v.tobytes() for name, v in BACKEND.export_state(state).items() if f"/{part}" in name}


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_s23_what_is_not_used_stays_and_its_updates_are_counted_for_itself(spec: Any) -> None:
    """Left is used in every step but the third, right in the third and the last two alone."""
    recipe = polyamp.Recipe(optimizer=spec, scaler=polyamp.LossScaler(init_scale=1024.0))
    state = polyamp.init(Two(), recipe)

    def both(model: Any, item: Any) -> Any:
        return left(model, item) + right(model, item)

    losses = [left, left, right, left, both, both]
    steps = {loss: polyamp.train_step(loss, recipe) for loss in (left, right, both)}
    values = {"left": LEFT, "right": -LEFT}
    shapes = {slot: spec.slot_shape(slot, (3,)) for slot in spec.slots}
    slots = {n: {s: np.full(shape, spec.initial(s), np.float32) for s, shape in shapes.items()} for n in values}
    taken = dict.fromkeys(values, 0)
    for number, loss in enumerate(losses):
        before = {name: exported(state, name) for name in values}
        steps[loss](state, batch(number))
        rate = spec.rate(np.float32(number), XP)
        for name, value in values.items():
            if loss not in (both, {"left": left, "right": right}[name]):
                assert exported(state, name) == before[name], (number, name)
                continue
            taken[name] += 1
            gradient = batch(number)["x"][0] / np.float32(3)
            count = np.float32(taken[name])
            values[name], slots[name] = spec.update(XP, value, gradient, slots[name], rate, count)
            np.testing.assert_allclose(getattr(state.model, name).numpy(), values[name], rtol=1e-5, atol=1e-6)
    assert int(state.step) == 6
    assert BACKEND.export_state(state)["optimizer/missed_updates"].tolist() == [1, 3]


def native_optimizers() -> list[Any]:
    return [
        keras.optimizers.Adam(0.1, weight_decay=0.1),
        keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.5),
        keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
        keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                keras.optimizers.SGD(0.1, weight_decay=0.1), {".*right": keras.optimizers.Adam(0.1, weight_decay=0.1)}
            )
        ),
    ]


@pytest.mark.parametrize("number", range(4), ids=["adam", "ema", "ema that overwrites", "multi"])
def test_s23_optimizers_of_keras_leave_it_alone_without_a_word(number: int) -> None:
    recipe = polyamp.Recipe(optimizer=native_optimizers()[number])
    state = polyamp.init(Two(), recipe)
    steps = [polyamp.train_step(loss, recipe) for loss in (left, right)]
    kept = state.model.right.numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            steps[0](state, batch(i))
    assert state.model.right.numpy().tobytes() == kept.tobytes()
    slots = [v.numpy() for v in state.optimizer.variables if "right" in v.path and "average" not in v.path]
    assert not any(slot.any() for slot in slots)
    assert not np.array_equal(state.model.left.numpy(), LEFT)
    kept = state.model.left.numpy()
    averages = [v.numpy() for v in state.optimizer.variables if "left" in v.path]
    steps[1](state, batch())
    assert state.model.left.numpy().tobytes() == kept.tobytes()
    for average, variable in zip(averages, (v for v in state.optimizer.variables if "left" in v.path), strict=True):
        assert variable.numpy().tobytes() == average.tobytes(), variable.path
    assert not np.array_equal(state.model.right.numpy(), -LEFT)
    if state.optimizer.__class__.__name__ == "SGD":  # the average of what was never used is the parameter, not 0
        state = polyamp.init(Two(), polyamp.Recipe(optimizer=native_optimizers()[number]))
        polyamp.train_step(left, state.recipe)(state, batch())
        state.optimizer.finalize_variable_values(state.model.trainable_variables)
        assert state.model.right.numpy().tobytes() == (-LEFT).tobytes()


def test_s23_the_halves_carry_none_and_take_it() -> None:
    recipe = polyamp.Recipe(optimizer=polyamp.adamw(0.1), scaler=polyamp.LossScaler(init_scale=64.0), clip_norm=0.1)
    state, whole = polyamp.init(Two(), recipe), polyamp.init(Two(), recipe)
    _, gradients = polyamp.value_and_grad(left)(state, batch())
    assert gradients.values["right"] is None
    np.testing.assert_allclose(gradients.values["left"].numpy(), batch()["x"][0] / 3, rtol=1e-6)
    _, result = polyamp.apply_gradients(state, gradients)
    assert float(result.grad_norm) == pytest.approx(np.linalg.norm(batch()["x"] / 3), rel=1e-5)
    polyamp.train_step(left, recipe)(whole, batch())
    for name, value in BACKEND.export_state(whole).items():
        np.testing.assert_allclose(BACKEND.export_state(state)[name], value, rtol=1e-6, err_msg=name)
    assert state.model.right.numpy().tobytes() == (-LEFT).tobytes()


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_s23_a_loss_that_depends_on_no_parameter_is_an_error(compile: bool, accumulate: int) -> None:  # noqa: A002
    recipe = polyamp.Recipe(optimizer=polyamp.adamw(0.1), accumulate_steps=accumulate)
    state = polyamp.init(Two(), recipe)
    before = {**exported(state, ""), "step": int(state.step)}
    with pytest.raises(LossError, match="loss_fn depends on none of the model's trainable parameters, so there is"):
        polyamp.train_step(neither, recipe, compile=compile)(state, batch(rows=2))
    with pytest.raises(LossError, match="depends on none"):
        polyamp.value_and_grad(lambda model, item: keras.ops.sum(item["x"]), compile=compile)(state, batch())
    _, gradients = polyamp.value_and_grad(left)(state, batch())
    with pytest.raises(GradientError, match="every gradient is None: loss_fn depends on none of the model's"):
        polyamp.apply_gradients(state, gradients._replace(values=dict.fromkeys(gradients.values)))
    assert {**exported(state, ""), "step": int(state.step)} == before


@pytest.mark.parametrize("as_list", [False, True])
def test_s23_accumulation(as_list: bool) -> None:
    recipe = polyamp.Recipe(optimizer=polyamp.adamw(0.1), scaler=polyamp.LossScaler(init_scale=64.0))
    window = polyamp.Recipe(optimizer=recipe.optimizer, scaler=recipe.scaler, accumulate_steps=4)
    once, state = polyamp.init(Two(), recipe), polyamp.init(Two(), window)
    whole = batch(rows=8)
    parts = [{"x": part} for part in np.split(whole["x"], 4)]
    polyamp.train_step(left, recipe)(once, whole)
    polyamp.train_step(left, window)(state, parts if as_list else whole)
    np.testing.assert_allclose(state.model.left.numpy(), once.model.left.numpy(), rtol=1e-6)
    assert state.model.right.numpy().tobytes() == (-LEFT).tobytes()
    assert BACKEND.export_state(state)["optimizer/missed_updates"].tolist() == [0, 1]


def test_s23_what_any_micro_batch_uses_is_used() -> None:
    """A loss_fn that uses other parameters each time it is traced, as one with Python's random numbers may."""
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(1.0), accumulate_steps=2)
    state = polyamp.init(Two(), recipe)
    turns = iter([left, right])
    x = np.ones((2, 3), np.float32)
    polyamp.train_step(lambda model, item: next(turns)(model, item), recipe)(state, {"x": x})
    np.testing.assert_allclose(state.model.left.numpy(), LEFT - np.float32(1 / 6), rtol=1e-6)
    np.testing.assert_allclose(state.model.right.numpy(), -LEFT - np.float32(1 / 6), rtol=1e-6)


def test_s23_several_states() -> None:
    """A generator's step passes through a discriminator, whose own half is not used."""
    recipe = polyamp.Recipe(optimizer=polyamp.adamw(0.1), scaler=polyamp.LossScaler(init_scale=64.0))
    states = [polyamp.init(Two(), recipe) for _ in range(2)]

    def loss(models: Any, item: Any) -> Any:
        return keras.ops.mean(models[0].left * models[1].right * item["x"])

    before = [exported(states[0], "right"), exported(states[1], "left")]
    _, gradients = polyamp.value_and_grad(loss)(states, batch())
    _, results = polyamp.apply_gradients(states, gradients, skip="each")
    assert [exported(states[0], "right"), exported(states[1], "left")] == before
    assert not np.array_equal(states[0].model.left.numpy(), LEFT)
    assert [int(result.step) for result in results] == [1, 1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_s23_replicas(two_cpus: Any, accumulate: int) -> None:
    spec, native = polyamp.adamw, lambda: keras.optimizers.SGD(0.1, weight_decay=0.1, use_ema=True)
    for optimizer in (lambda: spec(0.1), native):
        with two_cpus.scope():
            recipe = polyamp.Recipe(optimizer=optimizer(), accumulate_steps=accumulate)
            state = polyamp.init(Two(), recipe)
        step = polyamp.train_step(left, recipe)
        for number in range(2):
            step(state, batch(number, rows=4))
        copies = two_cpus.experimental_local_results(state.model.right.value)
        assert [copy.numpy().tobytes() for copy in copies] == [(-LEFT).tobytes()] * 2
        one, other = (copy.numpy() for copy in two_cpus.experimental_local_results(state.model.left.value))
        assert np.array_equal(one, other)
        assert not np.array_equal(one, LEFT)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("graph", [True, False])
def test_s23_a_window_of_the_wrapped_optimizer_leaves_alone_what_none_of_its_calls_used(graph: bool) -> None:
    first, second = (keras.Variable(np.ones(1, np.float32)) for _ in range(2))
    inner = keras.optimizers.AdamW(0.1, weight_decay=0.1)
    optimizer = LossScaleOptimizer(inner, polyamp.LossScaler.off(), accumulate_steps=2)
    optimizer.build([first, second])

    def apply(one: bool, two: bool) -> None:
        optimizer.apply([tf.ones(1) if used else None for used in (one, two)], [first, second])

    run = tf.function(apply) if graph else apply
    run(True, False)
    run(True, False)
    assert second.numpy().tolist() == [1.0], "no decay"
    assert first.numpy()[0] < 0.95
    assert not any(v.numpy().any() for v in inner.variables if second.path.replace("/", "_") in v.path)
    run(False, True)
    run(True, False)
    assert second.numpy()[0] < 0.95, "the first call of the window used it"
    before = second.numpy()
    run(True, False)
    run(True, False)
    assert second.numpy().tobytes() == before.tobytes(), "that window is over"


def test_s23_fit_leaves_it_alone_and_keras_warns() -> None:
    class Named(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = keras.layers.Dense(1, name="used"), keras.layers.Dense(1, name="spare")

        def call(self, x: Any) -> Any:
            self.spare(x)
            return self.used(x)

    for optimizer in (polyamp.adamw(0.1), keras.optimizers.AdamW(0.1, weight_decay=0.1)):
        model = Named()
        model(np.ones((1, 2), np.float32))
        polyamp_tensorflow.compile(model, polyamp.Recipe(optimizer=optimizer, policy="mixed_bfloat16"), loss="mse")
        kept, used = model.spare.get_weights(), model.used.kernel.numpy()
        x, y = np.ones((8, 2), np.float32), np.zeros((8, 1), np.float32)
        with pytest.warns(UserWarning, match="Gradients do not exist for variables .*spare/kernel"):
            model.fit(x, y, batch_size=4, verbose=0)
        assert all(np.array_equal(one, other) for one, other in zip(kept, model.spare.get_weights(), strict=True))
        assert not np.array_equal(used, model.used.kernel.numpy())


def test_s23_the_counts_are_saved_and_restored(tmp_path: Path) -> None:
    recipe = polyamp.Recipe(optimizer=polyamp.adam(0.1))
    state, other = polyamp.init(Two(), recipe), polyamp.init(Two(), recipe)
    steps = {loss: polyamp.train_step(loss, recipe) for loss in (left, right)}
    for number in range(3):
        steps[left](state, batch(number))
    polyamp.save(state, tmp_path / "state")
    polyamp.restore(other, tmp_path / "state")
    for one in (state, other):
        steps[right](one, batch(4))
    assert state.model.right.numpy().tobytes() == other.model.right.numpy().tobytes()
    assert abs(state.model.right.numpy() + LEFT).max() == pytest.approx(0.1, rel=1e-3), "Adam's first step is its rate"


def test_s23_optimizers_that_were_saved_before_misses_were_counted_load(tmp_path: Path) -> None:
    variable = keras.Variable(LEFT)

    def built(*, wrap: bool) -> Any:
        optimizer: Any = SpecOptimizer(polyamp.adam(0.1))
        optimizer = LossScaleOptimizer(optimizer, "dynamic", accumulate_steps=2) if wrap else optimizer
        optimizer.build([variable])
        return optimizer

    all_three = ["used_in_window", "window_rows", "missed_updates"]
    for wrap, newer, filled in (
        (False, ["missed_updates"], [[0]]),
        (True, all_three, [[1], [0, 0], [0]]),
        (True, ["window_rows"], [[0, 0]]),  # which came later (S8)
    ):
        whole = {str(i): np.full(v.shape, i + 1.0) for i, v in enumerate(built(wrap=wrap).variables)}
        names = [v.name for v in built(wrap=wrap).variables]
        older = [whole[str(i)] for i, name in enumerate(names) if name not in newer]
        loaded = built(wrap=wrap)
        loaded.load_own_variables({str(i): value for i, value in enumerate(older)})
        found = {v.name: v.numpy() for v in loaded.variables}
        assert [found[name].tolist() for name in newer] == filled
        kept = [v.numpy() for v in loaded.variables if v.name not in newer]
        assert all(np.array_equal(one, other) for one, other in zip(kept, older, strict=True))
        loaded.load_own_variables(whole)
        assert all(np.array_equal(v.numpy(), whole[str(i)]) for i, v in enumerate(loaded.variables))
