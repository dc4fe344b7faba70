"""S4: a loss that a model of JAX's libraries computes by itself, in a method or in its call, is float32 inside."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import polyamp

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
ROWS = ((), (8,))
"""Shapes of sums that are a loss, or one per row; the gradients of biases have others."""


def total(x: Any, encoder: Any, decoder: Any) -> Any:
    """The loss of a variational autoencoder, and what it is made of."""
    mean, log_var = jnp.split(encoder(x), 2, -1)
    out = decoder(mean)
    square = jnp.mean(jnp.sum((out - x) ** 2, axis=-1))
    kl = jnp.mean(jnp.sum(-0.5 * (1 + log_var - jnp.square(mean) - jnp.exp(log_var)), axis=1))
    return square + kl, (mean, log_var, out)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder, self.decoder = nnx.Linear(6, 4, rngs=rngs), nnx.Linear(2, 6, rngs=rngs)

    def total(self, x: Any) -> Any:
        return total(x, self.encoder, self.decoder)

    def __call__(self, x: Any) -> Any:
        return self.total(x)


class Linen(linen.Module):
    def setup(self) -> None:
        self.encoder, self.decoder = linen.Dense(4), linen.Dense(6)

    def total(self, x: Any) -> Any:
        return total(x, self.encoder, self.decoder)

    def __call__(self, x: Any) -> Any:
        return self.total(x)


class Equinox(eqx.Module):
    encoder: eqx.nn.Linear
    decoder: eqx.nn.Linear

    def __init__(self) -> None:
        one, two = jax.random.split(jax.random.key(0))
        self.encoder, self.decoder = eqx.nn.Linear(6, 4, key=one), eqx.nn.Linear(2, 6, key=two)

    def total(self, x: Any) -> Any:
        return total(x, jax.vmap(self.encoder), jax.vmap(self.decoder))

    def __call__(self, x: Any) -> Any:
        return self.total(x)


def model_of(kind: str) -> Any:
    if kind == "nnx":
        return Nnx(nnx.Rngs(0))
    return Equinox() if kind == "equinox" else (Linen(), Linen().init(jax.random.key(0), X))


def by_hand(mean: Any, log_var: Any, out: Any, dtype: str) -> float:
    """The loss in float64 of what the layers gave, but for the addition of two 16-bit numbers, which S4 leaves."""
    one = np.asarray(1 + log_var.astype(dtype), np.float64)
    mean, log_var, out = (np.asarray(part, np.float64) for part in (mean, log_var, out))
    kl = -0.5 * (one - mean**2 - np.exp(log_var)).sum(-1).mean()
    return float(((out - X) ** 2).sum(-1).mean() + kl)


@pytest.mark.parametrize("kind", ["nnx", "linen", "equinox"])
@pytest.mark.parametrize(("way", "policy"), [("method", "mixed_float16"), ("call", "mixed_bfloat16")])
def test_s04_a_loss_of_the_models_own_is_float32(kind: str, way: str, policy: str, equations: Any) -> None:
    def loss_fn(model: Any, x: Any) -> Any:
        return model.total(x) if way == "method" else model(x)

    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler.static(8.0))
    state = polyamp.init(model_of(kind), recipe)
    run = polyamp.value_and_grad(loss_fn)
    found = equations(lambda state, x: run(state, x)[0], state, X)
    read: dict[str, set[str]] = {}
    for equation in found:
        name, first = equation.primitive.name, equation.invars[0].aval
        if name != "reduce_sum" or equation.outvars[0].aval.shape in ROWS:
            read.setdefault(name, set()).add(str(first.dtype))
    powers = {dtype for name in ("integer_pow", "square", "pow") for dtype in read.get(name, ())}
    assert (read["reduce_sum"], read["exp"], powers) == ({"float32"}, {"float32"}, {"float32"})
    assert read["dot_general"] == {policy[6:]}
    _, result = polyamp.train_step(loss_fn, recipe, compile=False)(state, X)  # XLA may leave roundings out
    for part in result.aux:
        np.testing.assert_array_equal(part, part.astype(policy[6:]).astype(np.float32), "of 16-bit layers")
    assert float(result.loss) == pytest.approx(by_hand(*result.aux, policy[6:]), rel=1e-6)
