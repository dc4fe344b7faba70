"""A state that one thread steps and another exports: every export holds whole steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow

BACKEND = polyamp_tensorflow.BACKEND
RECIPE = polyamp.Recipe(optimizer=polyamp.sgd(1.0))


class Counting(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Parameters that each go down by one in a step, and a statistic that goes up by one in a forward pass."""

    def __init__(self) -> None:
        super().__init__(name="counting")
        self.parts = [self.add_weight(shape=(1,), initializer="zeros", name=f"part{n}") for n in range(30)]
        self.passes = self.add_weight(shape=(1,), initializer="zeros", trainable=False, name="passes")
        self.built = True

    def call(self, x: Any) -> Any:
        self.passes.assign_add(tf.ones(1))
        return tf.add_n([keras.ops.sum(part) for part in self.parts]) + 0.0 * keras.ops.sum(x)


def loss_fn(model: Any, batch: Any) -> Any:
    return model(batch)


def whole(arrays: dict[str, Any]) -> bool:
    steps = {-float(v[0]) for name, v in arrays.items() if "/part" in name}
    steps |= {float(v[0]) for name, v in arrays.items() if name.startswith(("running/", "model/passes"))}
    return steps == {float(arrays["step"])}


@pytest.mark.parametrize("compile", [True, False])
def test_every_export_holds_whole_steps(compile: bool, tmp_path: Path) -> None:  # noqa: A002
    state = polyamp.init(Counting(), RECIPE)
    step = polyamp.train_step(loss_fn, RECIPE, compile=compile)
    x = np.ones((1, 1), np.float32)
    step(state, x)
    end, steps = threading.Event(), [0]

    def train() -> None:
        while not end.is_set():
            step(state, x)
            steps[0] += 1

    thread = threading.Thread(target=train)
    thread.start()
    try:
        exports = []
        for number in range(20):
            exports.append(BACKEND.export_state(state))
            if number % 10 == 0:
                polyamp.save(state, tmp_path / f"{number}")
    finally:
        end.set()
        thread.join()
    assert steps[0] > 3, "the other thread did not stand still"
    torn = [{name: float(np.ravel(v)[0]) for name, v in arrays.items()} for arrays in exports if not whole(arrays)]
    assert not torn, f"{len(torn)} of {len(exports)}"
    assert len({int(arrays["step"]) for arrays in exports}) > 1
    other = polyamp.init(Counting(), RECIPE)
    polyamp.restore(other, tmp_path / "10")
    assert whole(BACKEND.export_state(other))


def test_states_that_step_together_in_any_order_do_not_wait_for_each_other() -> None:
    states = [polyamp.init(Counting(), RECIPE) for _ in range(2)]

    def both(models: Any, batch: Any) -> Any:
        return models[0](batch) + models[1](batch)

    run = polyamp.value_and_grad(both)
    x = np.ones((1, 1), np.float32)
    _, gradients = run(states, x)
    polyamp.apply_gradients(states, gradients)
    polyamp.apply_gradients(states[::-1], gradients[::-1])

    def train(order: int) -> None:
        for _ in range(30):
            polyamp.apply_gradients(states[::order], gradients[::order])

    threads = [threading.Thread(target=train, args=(order,), daemon=True) for order in (1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert [int(state.step) for state in states] == [62, 62]
