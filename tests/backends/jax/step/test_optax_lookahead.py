"""`optax.lookahead` in a recipe: the training of optax by hand, and the slow parameters in the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyamp
from polyamp.errors import UnsupportedError

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def apply_fn(params: Any, x: Any) -> Any:
    return x @ params["w"] + params["b"]


def started() -> dict[str, Any]:
    return {"w": jnp.full((4, 2), 0.3), "b": jnp.zeros(2)}


def loss_fn(model: Any, x: Any) -> Any:
    return jnp.mean((model(x) - 1.0) ** 2)


def lookahead(reset_state: bool = False) -> Any:
    return optax.lookahead(optax.adam(0.1), sync_period=3, slow_step_size=0.5, reset_state=reset_state)


@pytest.mark.parametrize("reset_state", [False, True])
def test_it_trains_as_optax_by_hand(reset_state: bool, tmp_path: Path) -> None:
    optimizer = lookahead(reset_state)
    pair = optax.LookaheadParams.init_synced(started())
    own = optimizer.init(pair)
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, scaler=polyamp.LossScaler(init_scale=8.0))
    state = polyamp.init((apply_fn, started()), recipe)
    step = polyamp.train_step(loss_fn, recipe, donate=False)
    for number in range(8):
        grads = jax.grad(lambda params: jnp.mean((apply_fn(params, X) - 1.0) ** 2))(pair.fast)
        updates, own = optimizer.update(grads, own, pair)
        pair = optax.apply_updates(pair, updates)
        skipped, result = step(state, X * np.float32(np.inf))
        assert bool(result.skipped)
        for one, other in zip(jax.tree.leaves(skipped.opt_state), jax.tree.leaves(state.opt_state), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), "a skipped step moves no slow parameter"
        state, _ = step(state, X)
        if number == 3:
            polyamp.save(state, tmp_path / "state")
            state = polyamp.restore(polyamp.init((apply_fn, started()), recipe), tmp_path / "state")
    for name in ("w", "b"):
        np.testing.assert_allclose(state.params[name], pair.fast[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.opt_state.slow[name], pair.slow[name], rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(pair.fast["w"] - pair.slow["w"])).max() > 1e-2


def test_inside_of_another_transformation_it_is_refused() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=optax.chain(optax.clip(1.0), lookahead()))
    with pytest.raises(UnsupportedError, match=r"Put it outermost: optax\.lookahead\(optax\.chain"):
        polyamp.init((apply_fn, started()), recipe)
