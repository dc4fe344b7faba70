"""Keras on JAX: loops of one's own with `stateless_apply`, and what is refused there alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import polyamp
import polyamp_keras
from polyamp.errors import UnsupportedError
from polyamp_keras.engine import ENGINE
from tests.backends.keras.test_fit import RECIPE


def test_a_jax_loop_of_ones_own_skips_whole_steps(model: Any, batches: Any) -> None:
    x, y = batches
    optimizer = polyamp_keras.LossScaleOptimizer(keras.optimizers.Adam(1e-2), polyamp.LossScaler(init_scale=64.0))
    optimizer.build(model.trainable_variables)

    def loss_fn(weights: Any, others: Any, state: Any, x: Any, y: Any) -> Any:
        output, others = model.stateless_call(weights, others, x, training=True)
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state, strict=True))):
            return optimizer.scale_loss(keras.ops.mean(keras.ops.square(output - y))), others

    @jax.jit
    def step(weights: Any, others: Any, state: Any, x: Any, y: Any) -> Any:
        grads, after = jax.grad(loss_fn, has_aux=True)(weights, others, state, x, y)
        weights, state = optimizer.stateless_apply(state, grads, weights)
        others, state = optimizer.stateless_keep_statistics(model, others, after, state)
        return weights, others, state

    state = [
        [variable.value for variable in each]
        for each in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    ]
    first = step(*state, x[:8], y[:8])
    second = step(*first, x[8:16], y[8:16])
    names = [variable.path for variable in model.non_trainable_variables]
    inner = len(optimizer.inner_optimizer.variables)
    for old, new in ((first[0], second[0]), (first[2][-inner:], second[2][-inner:])):
        assert all(map(np.array_equal, old, new))  # weights, and the inner optimizer's moments and count
    same = [np.array_equal(old, new) for old, new in zip(first[1], second[1], strict=True)]
    assert same == ["seed" not in name for name in names]
    for variable, value in zip(optimizer.variables, second[2], strict=True):
        variable.assign(value)
    assert (float(optimizer.dynamic_scale), optimizer.skipped_steps, int(optimizer.iterations)) == (32.0, 1, 1)


def test_distributions_and_nnx_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        with pytest.raises(UnsupportedError, match=r"Received: DataParallel\. Train on one device"):
            polyamp_keras.compile(model, RECIPE, loss="mse")
    finally:
        keras.distribution.set_distribution(None)
    monkeypatch.setattr(ENGINE, "is_nnx_enabled", lambda: True)
    with pytest.raises(UnsupportedError, match=r"nnx-enabled .* Unset KERAS_NNX_ENABLED"):
        polyamp_keras.compile(model, RECIPE, loss="mse")
    assert getattr(model, "optimizer", None) is None


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_s12_an_update_is_a_branch_on_a_cpu_and_a_choice_of_elements_elsewhere(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the host would wait for a branch; on a CPU a choice copies every old tensor."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    written, read = keras.Variable(np.ones(3, "float32")), keras.Variable(np.float32(2.0))

    def update(applies: Any, value: Any, factor: Any) -> Any:
        with keras.StatelessScope(state_mapping=[(written, value), (read, factor)]) as scope:
            ENGINE.update_if(applies, [written], [read], lambda: written.assign(written * read))
            return scope.get_current_value(written)

    program = str(jax.make_jaxpr(update)(True, jnp.ones(3), 5.0))
    assert ("cond[" in program) is (platform == "cpu")
    assert ("select_n" in program) is (platform == "gpu")
    for applies, wanted in ((True, 15.0), (False, 3.0)):
        after = jax.jit(update)(applies, jnp.full(3, 3.0), 5.0)
        np.testing.assert_array_equal(after, np.full(3, wanted, "float32"))
