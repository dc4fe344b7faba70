"""`polyamp.compare` of float8 with bfloat16 in JAX: the rounding of S36 is no difference."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

import polyamp
from polyamp import Float8, Policy, Recipe

RECIPE = Recipe(policy=Policy("mixed_float8", float8=Float8(emulate=True)), optimizer=polyamp.sgd(0.1))


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(jax.nn.gelu(self.first(x)))


def test_s36_rounding_to_8_bits_is_no_difference() -> None:
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((16, 32)).astype(np.float32), "y": rng.integers(0, 16, 16)}
    report = polyamp.compare(
        Net(),
        Net(),
        batch,
        lambda model, batch: polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"]),
        (RECIPE.replace(policy="mixed_bfloat16"), RECIPE),
        steps=2,
    )
    assert report.agrees, str(report)
