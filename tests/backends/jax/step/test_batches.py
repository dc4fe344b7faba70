"""JAX: what NumPy made float64 is float32 in a step, in x64 mode too; what JAX made float64 stays (S26, S2)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp

X64: Any = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_s26_float64_of_numpy(x64: bool, compiled: bool, count: int) -> None:
    seen: dict[str, str] = {}
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1), accumulate_steps=count)

    def loss_fn(model: Any, batch: Any) -> Any:
        seen.update({name: str(value.dtype) for name, value in batch.items()})
        return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])

    with X64(x64):
        state = polyamp.init((lambda p, x: x @ p["w"], {"w": jnp.ones((4, 3), jnp.float32)}), recipe)
        batch: Any = {"x": np.ones((8, 4)), "y": np.zeros((8, 3)), "native": jnp.ones((8, 1), float)}
        native = str(batch["native"].dtype)
        whole = batch
        if count == 2:
            batch = [jax.tree.map(lambda leaf, i=i: leaf[i : i + 4], whole) for i in (0, 4)]
        step = polyamp.train_step(loss_fn, recipe, compile=compiled)
        state, result = step(state, batch)
        assert seen == {"x": "float32", "y": "float32", "native": native}
        assert native == ("float64" if x64 else "float32")
        assert state.params["w"].dtype == result.loss.dtype == jnp.float32
        seen.clear()
        polyamp.value_and_grad(loss_fn, compile=compiled)(state, whole)
        assert seen == {"x": "float32", "y": "float32", "native": native}


def test_s26_with_float64_parameters_it_stays() -> None:
    seen = []
    recipe = polyamp.Recipe(policy="float64", optimizer=polyamp.sgd(0.1))

    def loss_fn(model: Any, batch: Any) -> Any:
        seen.append(str(batch.dtype))
        return jnp.mean(model(batch))

    with X64(True):
        state = polyamp.init((lambda p, x: x @ p["w"], {"w": jnp.ones((4, 3), jnp.float64)}), recipe)
        polyamp.train_step(loss_fn, recipe)(state, np.ones((8, 4)))
    assert set(seen) == {"float64"}
