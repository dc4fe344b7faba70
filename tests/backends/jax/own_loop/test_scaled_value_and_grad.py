"""JAX: `scaled_value_and_grad` and `LossScaler.native("jax")`, for training loops of one's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyamp
from polyamp.errors import LossError, LossScaleError, LossScaleStuckError, UnsupportedError
from polyamp_jax import scaled_value_and_grad

SCALER = polyamp.LossScaler(init_scale=2.0**10, growth_interval=4)
POLICY = polyamp.Policy("mixed_float16")
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
Y = X.sum(-1, keepdims=True)
WEIGHTS = {"kernel": jnp.full((3, 1), 0.5), "bias": jnp.zeros(1)}


@POLICY.autocast
def loss_fn(params, x, y):
    return jnp.mean((x @ params["kernel"] + params["bias"] - y) ** 2)


def by_hand(params, x, y):
    half = {name: leaf.astype(jnp.float16) for name, leaf in params.items()}
    product = x.astype(jnp.float16) @ half["kernel"] + half["bias"]
    return jnp.mean((product.astype(jnp.float32) - y) ** 2)


def test_values_and_gradients_are_those_of_the_unscaled_loss():
    loss, grads, finite = scaled_value_and_grad(loss_fn, SCALER)(SCALER.init("jax"), WEIGHTS, X, Y)
    expected, expected_grads = jax.value_and_grad(by_hand)(WEIGHTS, X, Y)
    assert (loss.dtype, grads["kernel"].dtype) == ("float32", "float32")
    assert bool(finite)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for name in WEIGHTS:
        np.testing.assert_allclose(grads[name], expected_grads[name], rtol=2e-3)


def test_a_loop_of_ones_own_trains_and_skips_what_overflows():
    graded = SCALER.native("jax")(loss_fn)
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(params, opt_state, scale_state, x, y):
        loss, grads, finite = graded(scale_state, params, x, y)
        updates, new_opt = optimizer.update(grads, opt_state)
        new = (optax.apply_updates(params, updates), new_opt)
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, opt_state))
        return params, opt_state, SCALER.update(scale_state, finite), loss

    params, opt_state, scale_state = WEIGHTS, optimizer.init(WEIGHTS), SCALER.init("jax")
    losses, scales = [], []
    for number in range(20):
        x = X.at[0, 0].set(jnp.inf) if number == 5 else X
        before = params
        params, opt_state, scale_state, loss = step(params, opt_state, scale_state, x, Y)
        scales.append(float(scale_state.scale))
        losses.append(float(loss))
        if number == 5:
            jax.tree.map(np.testing.assert_array_equal, params, before)
    assert losses[-1] < 0.2 * losses[0]
    assert scales[3:7] == [2.0**11, 2.0**11, 2.0**10, 2.0**10]
    assert int(scale_state.skipped) == 1


def test_argnums_and_aux_are_those_of_value_and_grad():
    def fun(w, b, x):
        out = x @ w + b
        return jnp.sum(out), {"out": out}

    graded = SCALER.native("jax", argnums=(0, 1), has_aux=True)(fun)
    (loss, aux), (dw, db), finite = graded(SCALER.init("jax"), jnp.ones((3, 1)), jnp.zeros(1), X)
    np.testing.assert_allclose(loss, X.sum(), rtol=1e-5)
    np.testing.assert_allclose(aux["out"], X.sum(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(dw, X.sum(0)[:, None], rtol=1e-5)
    assert float(db[0]) == 8.0
    assert bool(finite)


def test_trap_a_16_bit_loss_is_widened_before_it_is_scaled():
    """float16(60000) * 2^10 is inf, and so would every gradient be."""
    graded = scaled_value_and_grad(lambda w: jnp.float16(60000.0) * w, SCALER)
    loss, grad, finite = graded(SCALER.init("jax"), jnp.float16(1.0))
    assert (loss.dtype, float(loss)) == ("float32", 60000.0)
    assert not bool(finite), "its gradient in float16 is not representable once scaled, and that is said"
    graded = scaled_value_and_grad(lambda w: (jnp.float16(60000.0) * w).astype(jnp.float16), polyamp.LossScaler.off())
    loss, grad, finite = graded(polyamp.LossScaler.off().init("jax"), jnp.float16(1.0))
    assert bool(finite)
    assert (grad.dtype, float(grad)) == ("float32", 60000.0)


def test_scaling_that_is_off_costs_no_multiplication():
    off = polyamp.LossScaler.off()
    text = str(jax.make_jaxpr(scaled_value_and_grad(lambda w: jnp.sum(w), off))(off.init("jax"), jnp.ones(3)))
    assert "mul" not in text
    assert "div" not in text


def overflowing(scaler, calls):
    """Calls by an eager loop whose gradients overflow whatever the scale."""
    graded, scale_state = scaler.native("jax")(lambda w: jnp.sum(w["kernel"] * jnp.inf + w["bias"])), scaler.init("jax")
    for _ in range(calls):
        _, _, finite = graded(scale_state, {"kernel": jnp.ones(2), "bias": jnp.ones(2)})
        scale_state = scaler.update(scale_state, finite)


def test_s17_a_loop_of_ones_own_hears_of_a_scale_that_is_stuck():
    asked = {
        how: polyamp.LossScaler(init_scale=1.0, min_scale=1.0, patience=4, on_stuck=how)
        for how in ("raise", "warn", "ignore")
    }
    overflowing(asked["raise"], 8)
    message = r"8 steps in a row were skipped .* floor of 1: .*inf or NaN gradients: kernel\. .* in the loss"
    with pytest.raises(LossScaleStuckError, match=message):
        overflowing(asked["raise"], 9)
    with pytest.warns(UserWarning, match=message):
        overflowing(asked["warn"], 9)
    overflowing(asked["ignore"], 9)


def test_what_is_wrong_is_named():
    graded = scaled_value_and_grad(loss_fn, SCALER)
    with pytest.raises(LossScaleError, match=r"scaler\.init\('jax'\).*Received: dict"):
        graded(WEIGHTS, X, Y)
    with pytest.raises(LossError, match="scale"):
        scaled_value_and_grad(lambda w: w, SCALER)(SCALER.init("jax"), jnp.ones(3))
    with pytest.raises(UnsupportedError, match="arg_nums"):
        SCALER.native("jax", arg_nums=1)
