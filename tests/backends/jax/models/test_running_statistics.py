"""Running statistics in mode "cast" stay float32, whichever library keeps them: their averages move by small steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import polyamp

X = (2.0 * np.random.default_rng(0).normal(size=(16, 3)) + 3.0).astype(np.float32)
STEPS = 300
MOMENTUM = 0.99


class Scaled(eqx.Module):
    """A block with a parameter of its own that hands the state through."""

    norm: eqx.nn.BatchNorm
    scale: jax.Array

    def __call__(self, x: Any, state: Any) -> Any:
        y, state = self.norm(x, state)
        return y * self.scale, state


class Blocks(eqx.Module):
    block: Scaled
    last: eqx.nn.Linear

    def __init__(self, mode: Any) -> None:
        norm = eqx.nn.BatchNorm(3, "batch", mode=mode, momentum=MOMENTUM)
        self.block = Scaled(norm, jnp.ones(3))
        self.last = eqx.nn.Linear(3, 2, key=jax.random.key(0))

    def __call__(self, x: Any, state: Any) -> Any:
        y, state = self.block(x, state)
        return self.last(y), state


class Linen(linen.Module):  # type: ignore[misc]  # flax is not typed
    @linen.compact  # type: ignore[untyped-decorator]  # flax is not typed
    def __call__(self, x: Any) -> Any:
        return linen.Dense(2)(linen.BatchNorm(use_running_average=False, momentum=MOMENTUM)(x))


class Nnx(nnx.Module):  # type: ignore[misc]  # flax is not typed
    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(3, momentum=MOMENTUM, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.last(self.norm(x))


def haiku_model() -> Any:
    def forward(x: Any) -> Any:
        return hk.Linear(2)(hk.BatchNorm(True, True, MOMENTUM)(x, is_training=True))

    transformed = hk.transform_with_state(forward)
    return transformed, *transformed.init(jax.random.key(0), X)


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "equinox-batch": (lambda: eqx.nn.make_with_state(Blocks)("batch"), {"axis_name": "batch"}),
    "equinox-ema": (lambda: eqx.nn.make_with_state(Blocks)("ema"), {"axis_name": "batch"}),
    "linen": (lambda: (Linen(), Linen().init(jax.random.key(0), X)), {}),
    "nnx": (Nnx, {}),
    "haiku": (haiku_model, {}),
}


def statistics(name: str, policy: polyamp.Policy) -> list[Any]:
    build, options = MODELS[name]
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.0))
    state = polyamp.init(build(), recipe, **options)
    step = polyamp.train_step(lambda model, batch: jnp.mean(model(batch) ** 2), recipe)
    for _ in range(STEPS):
        state, _ = step(state, X)
    leaves = jax.tree.leaves(state.running.statistics)
    return [np.asarray(leaf) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


@pytest.mark.parametrize("name", MODELS)
def test_averages_of_a_cast_model_go_on_in_float32(name: str) -> None:
    wide = statistics(name, polyamp.Policy("float32"))
    narrow = statistics(name, polyamp.Policy("mixed_bfloat16", mode="cast"))
    assert len(wide) >= 2
    for mine, exact in zip(narrow, wide, strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, exact, rtol=0.06 if name == "haiku" else 0.01)  # haiku averages in 16 bits
