"""S12 with `scale`, `unscale` and `update` alone: the loop of `LossScaler.unscale`'s docstring through an overflow."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp


@pytest.mark.parametrize("compiled", [False, True])
def test_s12_a_hand_written_loop_leaves_model_and_optimizer_alone_where_gradients_overflow(compiled: bool) -> None:
    scaler, policy = polyamp.LossScaler(init_scale=2.0**8), polyamp.Policy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    optimizer = keras.optimizers.AdamW(1e-2)
    optimizer.build(model.trainable_variables)
    scale_state, forward = scaler.init("tensorflow"), policy.autocast(model)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)

    def step(x: Any, scale_state: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(forward(x), tf.float32) ** 2)
            scaled = scaler.scale(loss, scale_state)
        grads, finite = scaler.unscale(tape.gradient(scaled, model.trainable_variables), scale_state)
        tf.cond(finite, lambda: optimizer.apply(grads), lambda: None)
        return finite, scaler.update(scale_state, finite)

    run = tf.function(step) if compiled else step
    seen, flags = [], []
    for batch in (x, x * np.inf, x):
        finite, scale_state = run(tf.constant(batch), scale_state)
        seen.append([np.asarray(v).tobytes() for v in (*model.variables, *optimizer.variables)])
        flags.append(bool(finite))
    assert flags == [True, False, True]
    assert seen[0] == seen[1]
    assert seen[1] != seen[2]
    assert float(scale_state.scale) == 2.0**7
