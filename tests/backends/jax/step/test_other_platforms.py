"""Steps lowered for CUDA and TPU on a machine without either: what would run there, as far as a program says it.

The conformance suite's steps are lowered so too, by `tests/conformance/other_platforms.py`.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import polyamp
from polyamp import losses
from polyamp.contract import registry
from tests.conformance.other_platforms import check_program

PLATFORMS = ("cuda", "tpu")
NARROW = {"mixed_bfloat16": "bf16", "mixed_float16": "f16"}


class Net(nn.Module):
    """A convolution, an attention layer, a norm and a dense layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        rows = nn.Conv(8, (3, 3))(x).reshape(x.shape[0], -1, 8)
        rows = nn.LayerNorm()(rows + nn.MultiHeadDotProductAttention(2)(rows, rows))
        return nn.Dense(4)(rows.mean(1))


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> Any:
    return losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def lowered(policy: str, **options: Any) -> str:
    """The text of the step of a recipe, lowered for both platforms."""
    net, batch = Net(), {"x": jnp.ones((8, 4, 4, 3)), "y": jnp.zeros(8, jnp.int32)}
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.adamw(1e-3), clip_norm=1.0, **options)
    state = polyamp.init((net, net.init(jax.random.key(0), batch["x"])), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    traced = jax.jit(lambda state, batch: step(state, batch)).trace(state, batch)
    return str(traced.lower(lowering_platforms=PLATFORMS).as_text())


@pytest.mark.parametrize("policy", NARROW)
def test_s03_s04_products_are_16_bits_wide_and_sums_float32(policy: str) -> None:
    text = lowered(policy)
    products = re.findall(r"stablehlo\.(?:dot_general|convolution).*-> tensor<[\dx]*x(\w+)>", text)
    assert len(products) > 20
    assert set(products) == {NARROW[policy]}
    exponentials = re.findall(r"stablehlo\.(?:exponential|rsqrt|log) .*: tensor<(?:[\dx]*x)?(\w+)>", text)
    assert set(exponentials) == {"f32"}


@pytest.mark.parametrize("accumulate_steps", [1, 4])
def test_s09_a_step_reads_nothing_on_the_host(accumulate_steps: int) -> None:
    """No callback and no transfer: the decision to skip stays on the device."""
    text = lowered("mixed_float16", accumulate_steps=accumulate_steps)
    assert not re.search(r"callback|infeed|outfeed|stablehlo\.(?:send|recv)", text)
    assert set(re.findall(r"custom_call @(\w+)", text)) <= {"Sharding"}


def test_masters_and_moments_leave_the_step_as_they_came() -> None:
    """The state's arrays have the same dtypes before and after: 16 bits are between them alone."""
    head = re.search(r"func\.func public @main\((.*?)\) -> \((.*?)\) \{", lowered("mixed_bfloat16"), re.DOTALL)
    assert head is not None
    assert "xf32>" in head[1]
    assert "bf16" not in head[1] + head[2]


FAULTS = {
    "products in other dtypes": lambda m, x: jnp.mean(m(x).astype("float32") @ jnp.ones((4, 4))),
    "a branch that depends on data": lambda m, x: jax.lax.cond(jnp.mean(m(x)) > 0, m, lambda x: 2.0 * m(x), x).mean(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_conformance_suites_check_finds(fault: str) -> None:
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1))
    x, params = jnp.ones((4, 4)), {"w": jnp.ones((4, 4))}

    def check(loss_fn: Any) -> None:
        state = polyamp.init((lambda p, x: x @ p["w"], params), recipe)
        check_program(registry.get("jax").train_step(loss_fn, recipe), state, x)

    check(lambda m, x: jnp.mean(m(x)))
    with pytest.raises(AssertionError, match=fault):
        check(FAULTS[fault])
