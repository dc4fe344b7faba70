"""`polyamp.lint` for JAX: each planted fault is found in a pytree of parameters, and its clean counterpart is quiet."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import polyamp
from polyamp.errors import ArgumentError

X, Y = jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.arange(8) % 4
BATCH = (X, Y)


class Net(nn.Module):
    dtype: Any = jnp.float32
    norm: Any = nn.LayerNorm

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(16, dtype=self.dtype, name="body")(x)
        x = self.norm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(4, dtype=self.dtype, name="lm_head")(nn.relu(x))


class HalfNorm(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def net(dtype: Any = jnp.float32, norm: Any = nn.LayerNorm) -> tuple[Any, Any]:
    """Parameters and loss function."""
    model = Net(dtype, norm)

    def loss(params: Any, batch: Any) -> Any:
        logits = model.apply({"params": params}, batch[0]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return model.init(jax.random.key(0), X)["params"], loss


def half(params: Any, dtype: Any = jnp.bfloat16) -> Any:
    return jax.tree.map(lambda p: p.astype(dtype), params)


def rules(report: Any) -> list[str]:
    return [each.rule for each in report.findings]


def finding(report: Any, rule: str) -> Any:
    return next(each for each in report.findings if each.rule == rule)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_float32_and_mixed_precision_are_clean(dtype: Any) -> None:
    params, loss = net(dtype)  # flax computes a LayerNorm's statistics in float32
    report = polyamp.lint(params, optimizer=optax.adamw(1e-3), loss_fn=loss, batch=BATCH)
    assert rules(report) == []
    assert report.unchecked == {}


def test_parameters_in_16_bits_do_not_move() -> None:
    params, loss = net()
    params, optimizer = half(params), optax.adamw(1e-6, weight_decay=0.0)
    report = polyamp.lint(params, optimizer=optimizer, loss_fn=loss, batch=BATCH)
    found = finding(report, "parameters_in_16_bits")
    assert found.places[:2] == ["body/bias", "body/kernel"]
    gradients = jax.jit(jax.grad(loss))(params, BATCH)
    new = optax.apply_updates(params, optimizer.update(gradients, optimizer.init(params), params)[0])
    acts = jax.tree.map(lambda g: g != 0, gradients)
    still = jax.tree.map(lambda a, p, n: int((a & (p == n)).sum()), acts, params, new)
    every = sum(int(each.sum()) for each in jax.tree.leaves(acts))
    assert found.share == sum(jax.tree.leaves(still)) / every
    assert 0.8 < found.share < 1.0
    moments = finding(report, "moments_in_16_bits")
    assert moments.places[:2] == ["mu of body/bias", "nu of body/bias"]


def test_moments_in_16_bits_alone() -> None:
    params, _ = net()
    found = polyamp.lint(params, optimizer=optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    assert rules(found) == ["moments_in_16_bits"]
    assert {place.partition(" of ")[0] for place in found.findings[0].places} == {"mu"}


def test_the_state_of_a_training_is_taken() -> None:
    params, loss = net()
    params, optimizer = half(params), optax.adamw(1.0)
    state = optimizer.init(params)
    report = polyamp.lint(params, optimizer=optimizer, opt_state=state, loss_fn=loss, batch=BATCH)
    assert finding(report, "parameters_in_16_bits").share == 0.0
    other = optimizer.init({"a": X})
    with pytest.raises(ArgumentError, match="Pass the opt_state of these parameters"):
        polyamp.lint(params, optimizer=optimizer, opt_state=other, loss_fn=loss, batch=BATCH)


def test_a_warmup_is_no_measurement() -> None:
    params, loss = net()
    optimizer = optax.sgd(optax.linear_schedule(0.0, 1.0, 10))
    report = polyamp.lint(half(params), optimizer=optimizer, loss_fn=loss, batch=BATCH)
    assert finding(report, "parameters_in_16_bits").share is None


def test_a_norm_in_16_bits() -> None:
    params, loss = net(jnp.bfloat16, HalfNorm)
    found = finding(polyamp.lint(params, loss_fn=loss, batch=BATCH), "norm_in_16_bits")
    assert found.places == ["Net/norm: rsqrt"]


def test_a_softmax_in_16_bits() -> None:
    params, _ = net()

    def loss(params: Any, batch: Any) -> Any:
        logits = Net(jnp.bfloat16).apply({"params": params}, batch[0])
        return -jnp.log(jax.nn.softmax(logits)[:, 0].astype(jnp.float32)).mean()

    assert finding(polyamp.lint(params, loss_fn=loss, batch=BATCH), "softmax_in_16_bits").places == [".: exp"]
    labels = optax.softmax_cross_entropy_with_integer_labels

    def other(params: Any, batch: Any) -> Any:
        return labels(Net(jnp.bfloat16).apply({"params": params}, batch[0]), batch[1]).astype(jnp.float32).mean()

    assert finding(polyamp.lint(params, loss_fn=other, batch=BATCH), "softmax_in_16_bits").places == [".: exp"]

    def elu(params: Any, batch: Any) -> Any:  # an exponential that is no softmax
        return nn.elu(Net(jnp.bfloat16).apply({"params": params}, batch[0])).astype(jnp.float32).max()

    assert rules(polyamp.lint(params, loss_fn=elu, batch=BATCH)) == []


def test_a_scaler_and_the_dtype_that_needs_one() -> None:
    def found(dtype: Any, scaler: Any) -> list[str]:
        params, loss = net(dtype)
        return rules(polyamp.lint(params, scaler=scaler, loss_fn=loss, batch=BATCH))

    scaler, off = polyamp.LossScaler.for_policy("mixed_float16"), polyamp.LossScaler.off()
    assert found(jnp.bfloat16, scaler) == found(jnp.bfloat16, 1024.0) == ["scaler_without_float16"]
    assert found(jnp.bfloat16, off) == found(jnp.bfloat16, 1) == []
    assert found(jnp.float16, None) == found(jnp.float16, off) == ["float16_without_scaler"]
    assert found(jnp.float16, scaler) == []


def test_a_head_in_16_bits() -> None:
    params, loss = net()
    params = {**params, "lm_head": half(params["lm_head"])}
    assert finding(polyamp.lint(params, loss_fn=loss, batch=BATCH), "head_in_16_bits").places == ["lm_head/kernel"]
    params, loss = net()
    params = {**params, "body": half(params["body"])}
    assert "head_in_16_bits" not in rules(polyamp.lint(params, loss_fn=loss, batch=BATCH))


def test_leaves_that_are_no_arrays_stay() -> None:
    model = (jnp.tanh, {"w": np.ones((8, 4), "f4"), "steps": jnp.arange(3)})

    def loss(model: Any, batch: Any) -> Any:
        return (model[0](batch[0] @ model[1]["w"])).mean(), None

    report = polyamp.lint(model, optimizer=optax.sgd(0.1), loss_fn=loss, batch=BATCH, backend="jax")
    assert rules(report) == []


def test_an_nnx_state_and_an_equinox_module_are_pytrees() -> None:
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    graph, state = nnx.split(model, nnx.Param)
    other = eqx.nn.Linear(8, 4, key=jax.random.key(0), dtype=jnp.bfloat16)

    def loss(model: Any, batch: Any) -> Any:
        run = jax.vmap(model) if isinstance(model, eqx.Module) else nnx.merge(graph, model)
        return run(batch).astype(jnp.float32).mean()

    for each, kernel in ((state, "kernel"), (other, "weight")):
        report = polyamp.lint(each, optimizer=optax.adam(1e-9), loss_fn=loss, batch=X)
        assert rules(report) == ["parameters_in_16_bits", "moments_in_16_bits", "head_in_16_bits"]
        assert finding(report, "head_in_16_bits").places == [kernel]
        assert f"mu of {kernel}" in finding(report, "moments_in_16_bits").places
    with pytest.raises(ArgumentError, match=r"Pass its \.tx"):
        polyamp.lint(state, optimizer=nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))


def test_refused_arguments() -> None:
    params, _ = net()
    for arguments, message in (
        ({"step": print}, "step is for torch"),
        ({"opt_state": {}}, "Pass optimizer= too"),
        ({"optimizer": "adam"}, "optimizer must be an optax transformation. Received: 'adam'"),
        ({"scaler": "dynamic"}, "scaler must be a number"),
    ):
        with pytest.raises(ArgumentError, match=message):
            polyamp.lint(params, **arguments)
    with pytest.raises(ArgumentError, match="model must be a pytree of parameters"):
        polyamp.lint({"a": jnp.arange(3)})


def test_a_tied_head_and_one_without_a_weight() -> None:
    params = {"embedding": jnp.ones((5, 3), "bfloat16"), "body": jnp.ones((3, 3))}

    def tied(params: Any, batch: Any) -> Any:
        hidden = jnp.take(params["embedding"], batch, axis=0).astype(jnp.float32) @ params["body"]
        return jax.nn.log_softmax(hidden @ params["embedding"].T.astype(jnp.float32))[:, 0].mean()

    report = polyamp.lint(params, loss_fn=tied, batch=Y)
    assert finding(report, "head_in_16_bits").places == ["embedding"]
    report = polyamp.lint(
        params, loss_fn=lambda p, y: (jnp.ones((2, 2)) @ jnp.ones(2)).sum() * p["body"].sum(), batch=Y
    )
    assert report.unchecked["head_in_16_bits"] == "logits that a module makes"
