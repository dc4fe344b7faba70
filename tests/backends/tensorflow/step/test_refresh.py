"""S28 in Keras: LoRA, new heads and progressive unfreezing, beside Keras's own update with the slots kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import ModelError, StateError, UnsupportedError


def network() -> Any:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    body = keras.layers.Dense(8, "tanh", name="body")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(body))


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


def item(seed: int, outputs: int = 3) -> Any:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(8, 6)).astype("f4"), rng.normal(size=(8, outputs)).astype("f4")


def add_lora(model: Any) -> Any:
    keras.utils.set_random_seed(1)
    model.get_layer("body").enable_lora(rank=2)
    return model


def new_head(model: Any) -> Any:
    keras.utils.set_random_seed(2)
    return keras.Model(model.inputs[0], keras.layers.Dense(3, name="head")(model.get_layer("body").output))


def freeze(model: Any) -> Any:
    model.get_layer("body").trainable = False
    return model


def thaw(model: Any) -> Any:
    model.get_layer("body").trainable = True
    return model


Change = Callable[[Any], Any]
CHANGES: dict[str, list[Change]] = {
    "lora": [add_lora],
    "head of the same shape": [new_head],
    "frozen and thawed": [freeze, thaw],
}


def by_hand(changes: list[Change]) -> list[Any]:
    """SGD with momentum; the moments of every variable are kept as long as it is trained."""
    model, moments = network(), dict[int, Any]()
    for number in range(len(changes) + 1):
        for seed in (2 * number, 2 * number + 1):
            x, y = item(seed)
            variables = [v.value for v in model.trainable_variables]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y))
            now = dict(zip(map(id, variables), tape.gradient(loss, variables), strict=True))
            moments = {key: 0.9 * moments[key] + g if key in moments else g for key, g in now.items()}
            for variable in variables:
                variable.assign_sub(0.05 * moments[id(variable)])
        if number < len(changes):
            model = changes[number](model)
    return [w.numpy() for w in model.weights]


@pytest.mark.parametrize("native", [False, True], ids=["spec", "native"])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_s28_a_loop_by_hand_in_which_the_moments_are_kept(changes: list[Change], native: bool) -> None:
    wanted = by_hand(changes)
    optimizer: Any = keras.optimizers.SGD(0.05, momentum=0.9) if native else polyamp.sgd(0.05, momentum=0.9)
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, scaler=polyamp.LossScaler(init_scale=64.0))
    model = network()
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    for number in range(len(changes) + 1):
        for seed in (2 * number, 2 * number + 1):
            state, _ = step(state, item(seed))
        if number < len(changes):
            before, model = state, changes[number](model)
            if model is before.model:
                with pytest.raises(ModelError, match=r"polyamp\.refresh\(state\)"):
                    step(state, item(0))
            state = polyamp.refresh(state, model)
            with pytest.raises(StateError, match="this state was refreshed"):
                step(before, item(0))
    assert int(state.step) == 2 * len(changes) + 2
    if native:
        assert state.optimizer is optimizer
        assert int(optimizer.iterations) == int(state.step)
    for one, other in zip(wanted, model.weights, strict=True):
        np.testing.assert_allclose(other.numpy(), one, rtol=1e-5, atol=1e-6, err_msg=other.path)


def test_s28_a_native_optimizer_keeps_every_kind_of_slot_and_its_schedule() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.5)
    optimizer = keras.optimizers.AdamW(schedule, amsgrad=True, use_ema=True)
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer)
    model = network()
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    for seed in range(2):
        state, _ = step(state, item(seed))
    index = [v.path for v in optimizer._trainable_variables].index("body/kernel")
    kinds = ("_momentums", "_velocities", "_velocity_hats", "_model_variables_moving_average")
    before = {kind: getattr(optimizer, kind)[index].numpy() for kind in kinds}
    model = new_head(model)
    state = polyamp.refresh(state, model)
    assert optimizer._learning_rate is schedule
    assert float(optimizer.learning_rate) == pytest.approx(0.05 * 0.25)
    index = [v.path for v in optimizer._trainable_variables].index("body/kernel")
    for kind, value in before.items():
        assert np.array_equal(getattr(optimizer, kind)[index].numpy(), value), kind
    heads = [i for i, v in enumerate(optimizer._trainable_variables) if v.path.startswith("head")]
    for i in heads:
        assert np.array_equal(getattr(optimizer, kinds[3])[i].numpy(), optimizer._trainable_variables[i].numpy())
    assert not any(np.any(getattr(optimizer, kind)[i].numpy()) for kind in kinds[:3] for i in heads)
    state, result = step(state, item(2))
    assert (int(result.step), int(optimizer.iterations)) == (3, 3)


def test_s28_what_cannot_be_refreshed_leaves_all_as_it_was() -> None:
    optimizer = keras.optimizers.Adam(0.05)
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer)
    model = network()
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    state, _ = step(state, item(0))
    before = state.backend.export_state(state)
    unbuilt = keras.Sequential([keras.layers.Dense(3)])
    with pytest.raises(ModelError, match="refresh: the model is not built"):
        polyamp.refresh(state, unbuilt)
    half = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, dtype="float64")])
    with pytest.raises(ModelError, match="is stored as float64"):
        polyamp.refresh(state, half)
    after = state.backend.export_state(state)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    _, result = step(state, item(1))
    assert int(result.step) == 2


def test_s28_an_optimizer_that_does_not_describe_itself_is_refused() -> None:
    class Mine(keras.optimizers.SGD):  # type: ignore[misc]  # Keras is untyped
        def __init__(self, learning_rate: float = 0.1, factor: float = 5.0, **settings: Any) -> None:
            super().__init__(learning_rate, **settings)
            self.factor = factor

    model, optimizer = network(), Mine(factor=7.0)
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer)
    state = polyamp.init(model, recipe)
    with pytest.raises(UnsupportedError, match=r"get_config\(\), which leaves out factor: 7\.0 became 5\.0"):
        polyamp.refresh(state, new_head(model))
    assert optimizer.factor == 7.0
    _, result = polyamp.train_step(loss_fn, recipe)(state, item(0))
    assert int(result.step) == 1


def test_s28_several_optimizers_in_one_are_refused() -> None:
    model = network()
    parts = {"head.*": keras.optimizers.Adam(0.1)}
    both = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), parts))
    state = polyamp.init(model, polyamp.Recipe(policy="float32", optimizer=both))
    with pytest.raises(UnsupportedError, match=r"MultiOptimizer again\. .*polyamp\.Group"):
        polyamp.refresh(state, new_head(model))


def test_s28_a_layer_that_was_put_elsewhere_is_noticed() -> None:
    """The traced step would go on training the layers of `init`."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3, name="last")])
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    state, _ = step(state, item(0))
    model.pop()
    model.add(keras.layers.Dense(5, name="wider"))
    with pytest.raises(ModelError, match=r"the model has other layers than at init.*state = polyamp\.refresh\(state\)"):
        step(state, item(0))
    state = polyamp.refresh(state)
    _, result = step(state, item(1, outputs=5))
    assert int(result.step) == 2


def test_s28_what_a_native_optimizer_does_not_decay_stays_so() -> None:
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer)
    model = network()
    state = polyamp.init(model, recipe)
    state = polyamp.refresh(state, new_head(model))
    assert not optimizer._use_weight_decay(model.get_layer("body").bias)
    assert not optimizer._use_weight_decay(state.model.get_layer("head").bias)
    assert optimizer._use_weight_decay(model.get_layer("body").kernel)
    _, result = polyamp.train_step(loss_fn, recipe)(state, item(0))
    assert int(result.step) == 1


@pytest.mark.parametrize("now", [["body"], []], ids=["Adam from now on", "Muon from now on"])
def test_s28_a_slot_that_a_parameter_has_only_before_or_only_afterwards(now: list[str]) -> None:
    """Muon keeps second moments for what it trains as Adam does: here for the body before, or from then on."""
    optimizer = keras.optimizers.Muon(0.01, exclude_layers=[] if now else ["body"])
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer)
    model = network()
    state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe)
    for seed in range(2):
        state, _ = step(state, item(seed))

    def slots(kind: str) -> dict[str, Any]:
        found = zip(optimizer._trainable_variables, getattr(optimizer, kind), strict=True)
        return {v.path: None if slot is None else slot.numpy() for v, slot in found}

    momentum, before = slots("momentums"), slots("adam_velocities")
    optimizer.exclude_layers[:] = now
    state = polyamp.refresh(state, new_head(model))
    after = slots("adam_velocities")
    assert [velocity["body/kernel"] is None for velocity in (before, after)] == [bool(now), not now]
    if now:
        assert not after["body/kernel"].any()
    assert before["body/bias"].any()
    np.testing.assert_array_equal(after["body/bias"], before["body/bias"])
    np.testing.assert_array_equal(slots("momentums")["body/kernel"], momentum["body/kernel"])
    _, result = step(state, item(2))
    assert int(result.step) == 3


def test_the_guide_runs() -> None:
    guide = (Path(__file__).parents[4] / "docs" / "guides" / "growing_models.md").read_text(encoding="utf-8")
    section = guide.split("\n## Keras\n")[1].split("\n## ")[0]
    exec(compile(section.split("```python\n")[1].split("```")[0], "docs/guides/growing_models.md", "exec"), {})
