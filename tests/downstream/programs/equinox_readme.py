"""equinox: the example of its README, trained to its end with equinox's own layers and filters too."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

README = Path(os.environ["DOWNSTREAM_SOURCE"]) / "README.md"


def test_readme_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "equinox_readme"}
    exec("\n".join(blocks), names)
    model = names["model"]
    x = jax.random.normal(jax.random.key(1), (32, 2))
    y = x @ jnp.array([[1.0, -2.0, 0.5], [0.5, 1.0, -1.0]])

    def loss(model: Any) -> Any:
        return float(jnp.mean((jax.vmap(model)(x) - y) ** 2))

    first = loss(model)
    for _ in range(200):
        grads = names["loss_fn"](model, x, y)
        model = eqx.apply_updates(model, jax.tree.map(lambda grad: -0.2 * grad, grads))
    assert loss(model) < 0.01 * first


@pytest.mark.parametrize("has_aux", [False, True])
def test_filtered(has_aux: bool) -> None:
    model = eqx.nn.MLP(2, 1, 16, 2, key=jax.random.key(0))
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x = jax.random.normal(jax.random.key(1), (64, 2))
    y = jnp.sum(x, axis=1, keepdims=True) ** 2

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        loss = jnp.mean((jax.vmap(model)(x) - y) ** 2)
        return (loss, {"seen": len(x)}) if has_aux else loss

    @eqx.filter_jit
    def step(model: Any, state: Any) -> Any:
        value, grads = eqx.filter_value_and_grad(loss_fn, has_aux=has_aux)(model, x, y)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, value[0] if has_aux else value

    losses = []
    for _ in range(100):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    assert losses[-1] < 0.1 * losses[0]
