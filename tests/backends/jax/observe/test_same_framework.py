"""`polyamp.compare` of two models over JAX: of two of its libraries, on one device and several, compiled or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import polyamp
from tests import xla

ROOT = Path(__file__).parents[4]
SHAPES = ((4, 16), (16, 3))
RECIPE = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(0.01), clip_norm=1.0)


class Linen(linen.Module):
    approximate: bool = True

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.LayerNorm(name="norm")(linen.Dense(16, name="first")(x))
        x = linen.Dropout(0.5, deterministic=False, name="drop")(jax.nn.gelu(x, approximate=self.approximate))
        return linen.Dense(3, name="second")(x)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = (nnx.Linear(*shape, rngs=rngs) for shape in SHAPES)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(self.drop(jax.nn.gelu(self.norm(self.first(x)))))


def linen_model(seed: int = 0, **settings: Any) -> Any:
    module = Linen(**settings)
    keys = {"params": jax.random.key(seed), "dropout": jax.random.key(1)}
    return module, module.init(keys, np.ones((1, 4), np.float32))


def batch(step: int) -> Any:
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(8, 4)).astype("f4"), "y": rng.normal(size=(8, 3)).astype("f4")}


def loss_fn(model: Any, data: Any) -> Any:
    return jnp.mean((model(data["x"]) - data["y"]) ** 2)


RNGS = {"init": {"rngs": {"dropout": 0}}}


def test_linen_and_nnx_agree_and_another_activation_is_found() -> None:
    other = Nnx(nnx.Rngs(3))
    before = np.array(other.first.kernel[...])
    given: Any = {"options": (RNGS, {}), "inputs": batch(0)["x"]}
    report = polyamp.compare(linen_model(), other, batch, loss_fn, RECIPE, 2, randomness="shared", **given)
    assert report.agrees, str(report)
    assert {row.module for row in report.comparisons[0].rows} >= {"first", "norm", "second"}
    np.testing.assert_array_equal(other.first.kernel[...], before)
    report = polyamp.compare(linen_model(approximate=False), other, batch, loss_fn, RECIPE, **given)
    first = report.first
    assert first is not None
    assert (first.phase, first.step, first.stage, first.module) == ("float32", 1, "forward", "second"), str(report)


def test_float32_compiled_and_mixed_bfloat16_op_by_op_agree() -> None:
    options = (RNGS, {**RNGS, "step": {"compile": False}})
    recipes = (RECIPE.replace(policy="float32"), RECIPE)
    report = polyamp.compare(linen_model(), linen_model(7), batch, loss_fn, recipes, options=options)
    assert report.agrees, str(report)
    dtypes = {row.dtypes for row in report.comparisons[0].rows if (row.module, row.what) == ("first", "output")}
    assert dtypes == {("float32", "float32"), ("float32", "bfloat16")}


class Attending(nnx.Module):
    def __init__(self, width: int) -> None:
        self.attn = nnx.MultiHeadAttention(2, 6, width, decode=False, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.attn(x)


def attending(width: int, *, features_first: bool = False) -> Any:
    """The same attention as a plain function, of which names and shapes alone are known."""
    rng = np.random.default_rng(1)
    shapes = {"query": (6, width), "key": (6, width), "value": (6, width), "out": (width, 6)}
    params = {"attn": {name: {"kernel": rng.normal(size=shape).astype("f4")} for name, shape in shapes.items()}}

    def dense(params: Any, name: str, x: Any) -> Any:
        kernel = params["attn"][name]["kernel"]
        return x @ (kernel.T if features_first else kernel)

    def apply(params: Any, x: Any) -> Any:
        parts = (dense(params, name, x).reshape(*x.shape[:2], 2, -1) for name in ("query", "key", "value"))
        return dense(params, "out", jax.nn.dot_product_attention(*parts).reshape(*x.shape[:2], width))

    return apply, jax.tree.map(jnp.asarray, params)


def test_attention_written_by_hand_is_told_by_the_layer_of_the_other_side() -> None:
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype("f4")
    for pair in ((attending(8), Attending(8)), (Attending(8), attending(8))):
        report = polyamp.compare(*pair, x)
        assert report.agrees, str(report)
        compared = {(row.module, row.what) for row in report.comparisons[0].rows}
        assert compared >= {("attn", "parameter"), ("attn", "gradient"), ("", "output")}


def test_square_kernels_of_attention_by_hand_are_not_guessed() -> None:
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype("f4")
    match = r"how 'attn' goes into 'attn' cannot be told: the kernel of 'attn/\w+' may be \(inputs, features\) or"
    hand = attending(6, features_first=True)
    with pytest.raises(polyamp.PortError, match=match):
        polyamp.port(hand, Attending(6))
    for pair in ((hand, Attending(6)), (Attending(6), hand)):
        with pytest.raises(polyamp.PortError, match=match):
            polyamp.compare(*pair, x)


SHARDED = """
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import polyamp
from tests.backends.jax.observe.test_same_framework import RECIPE, RNGS, batch, linen_model, loss_fn

mesh = Mesh(np.array(jax.devices()), ("model",))
module, variables = linen_model(7)

def placed(leaf):
    axes = (None, "model") if leaf.ndim == 2 and leaf.shape[1] % 4 == 0 else ()
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*axes)))

other = module, jax.tree.map(placed, variables)
report = polyamp.compare(linen_model(), other, batch, loss_fn, RECIPE, options=RNGS)
assert report.agrees, str(report)
print(len(other[1]["params"]["first"]["kernel"].sharding.device_set), "devices")
"""


def test_one_device_and_four_agree() -> None:
    cheap = xla.FLAGS if xla.known() else "--xla_backend_optimization_level=0"
    flags = f"--xla_force_host_platform_device_count=4 {cheap}"
    run = subprocess.run(
        [sys.executable, "-c", SHARDED],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "4 devices"
