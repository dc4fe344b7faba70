"""What feeds a logarithm or `1 - x` is computed in float32 (S4), through chains and nested programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special

import polyamp
import polyamp_jax

DTYPES = ["float16", "bfloat16"]
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(64, 16)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(16, 16)) * 3, jnp.float32)
LABELS = jnp.asarray(RNG.uniform(size=(64, 16)) < 0.5, jnp.float32)

Function = Callable[[Any], Any]


def cross_entropy(p: Any, q: Any) -> Any:
    """Of probabilities and what they lack to 1."""
    return -jnp.mean(LABELS * jnp.log(p + 1e-7) + (1 - LABELS) * jnp.log(q + 1e-7))


def by_hand(z: Any) -> Any:
    p = jax.nn.sigmoid(z)
    return cross_entropy(p, 1 - p)


def in_scan(z: Any) -> Any:
    """The probability is made before the loop, and one iteration carries it to the logarithm of the next."""

    def body(carry: Any, row: Any) -> Any:
        return (row, carry[1] + jnp.log(1.0 + 1e-6 - carry[0])), None

    return lax.scan(body, (jnp.zeros(16), jnp.zeros(16)), jax.nn.sigmoid(z))[0][1]


def in_while(z: Any) -> Any:
    start = jax.nn.sigmoid(z)
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1], jnp.log(1.5 - c[1])), (0, start, start))[2]


def in_cond(z: Any) -> Any:
    return lax.cond(z[0, 0] > 0, lambda p: jnp.log(p + 1e-7), lambda p: jnp.log1p(-p + 1e-7), jax.nn.sigmoid(z))


@jax.custom_vjp
def surprise(p: Any) -> Any:
    return -jnp.log(p + 1e-7)


surprise.defvjp(lambda p: (surprise(p), p), lambda p, ct: (-ct / (p + 1e-7),))

CASES: dict[str, Function] = {
    "log(p + eps), log(1 - p + eps)": by_hand,
    "log(clip(p))": lambda z: jnp.log(jnp.clip(jax.nn.sigmoid(z), 1e-6, 1 - 1e-6)),
    "log1p(-p)": lambda z: jnp.log1p(-jnp.clip(jax.nn.sigmoid(z), 0, 1 - 1e-6)),
    "log2": lambda z: jnp.log2(jax.nn.sigmoid(z)),
    "log(erfc)": lambda z: jnp.log(special.erfc(z / 8)),
    "log(1 - tanh ** 2)": lambda z: jnp.log(1 - jnp.tanh(z) ** 2 + 1e-6),
    "log of a mean": lambda z: jnp.log(1 - jnp.mean(jax.nn.sigmoid(z), -1)),
    "1 + (-p)": lambda z: jnp.log(1 + (-jax.nn.sigmoid(z)) + 1e-6),
    "ones - p": lambda z: jnp.ones_like(z) - jax.nn.sigmoid(z),
    "1 - p": lambda z: 1 - jax.nn.sigmoid(z),
    "xlogy": lambda z: special.xlogy(LABELS, jax.nn.sigmoid(z)),
    "entr": lambda z: special.entr(jax.nn.sigmoid(z)),
    "logit": lambda z: special.logit(jnp.clip(jax.nn.sigmoid(z), 1e-6, 1 - 1e-6)),
    "jax.nn.log_sigmoid": jax.nn.log_sigmoid,
    "softplus": jax.nn.softplus,
    "where": lambda z: jnp.log(jnp.where(z > 0, jax.nn.sigmoid(z), 0.5)),
    "rows": lambda z: jnp.log(jax.nn.sigmoid(z)[jnp.array([1, 0, 3])][:, ::-1].T + 1e-7),
    "nested jits": lambda z: jax.jit(lambda p: jax.jit(jnp.log)(p + 1e-7))(jax.jit(jax.nn.sigmoid)(z)),
    "checkpoint": lambda z: jax.checkpoint(by_hand)(z),
    "vmap": lambda z: jax.vmap(lambda row: jnp.log(1 - jax.nn.sigmoid(row) + 1e-7))(z),
    "keep_precision": lambda z: polyamp_jax.keep_precision(jnp.log)(jax.nn.sigmoid(z) + 1e-7),
    "custom_vjp": lambda z: surprise(jax.nn.sigmoid(z)),
    "scan": in_scan,
    "while": in_while,
    "cond": in_cond,
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float16") for name in CASES), *((name, "bfloat16") for name in [*CASES][::4])]
)
def test_s04_it_equals_the_function_of_the_16_bit_input_in_float32(name: str, dtype: str) -> None:
    """The input's own rounding is all that differs from float32."""
    policy = polyamp.Policy(compute=dtype, output="float32")
    rounded = jnp.matmul(X.astype(dtype), W.astype(dtype)).astype(jnp.float32)
    found, wanted = policy.autocast(lambda x, w: CASES[name](x @ w))(X, W), CASES[name](rounded)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_s04_a_cross_entropy_by_hand_trains(dtype: str) -> None:
    """Of well separated examples, where a 16-bit probability is 1, or in float16 less than the epsilon is."""
    policy = polyamp.Policy(compute=dtype, output="float32")
    x, y = X, (X @ W > 0).astype(jnp.float32)

    def loss(w: Any, x: Any) -> Any:
        p = jax.nn.sigmoid(x @ w)
        return -jnp.mean((1 - y) * jnp.log(p + 1e-8) + y * jnp.log(1 - p + 1e-8))

    wanted, gradient = jax.value_and_grad(loss)(W, x)
    found, narrow = jax.value_and_grad(policy.autocast(loss))(W, x)
    assert float(found) == pytest.approx(float(wanted), rel=5e-3)
    assert float(jnp.linalg.norm(narrow - gradient)) < 3e-2 * float(jnp.linalg.norm(gradient))


@pytest.mark.parametrize("dtype", DTYPES)
def test_s04_a_gate_next_to_1_keeps_its_digits(dtype: str) -> None:
    """A linear recurrence h = a h + (1 - a) x, whose gates are made of a product."""
    policy = polyamp.Policy(compute=dtype, output="float32")

    def recurrence(w: Any, x: Any) -> Any:
        gates = jax.nn.sigmoid(x @ w * 0.01 + 7.0)
        return lax.scan(lambda h, ax: (ax[0] * h + (1 - ax[0]) * ax[1], None), jnp.zeros(16), (gates, x + 3.0))[0]

    x = jnp.asarray(np.random.default_rng(1).normal(size=(1024, 16)), jnp.float32)
    found, wanted = policy.autocast(recurrence)(W, x), recurrence(W, x)
    np.testing.assert_allclose(found, wanted, rtol=2e-2 if dtype == "bfloat16" else 2e-3)


# what it costs, and what it leaves alone


def rules(function: Any, **changes: Any) -> list[tuple[str, str, str]]:
    policy = polyamp.Policy("mixed_float16", **changes)
    return [(row.name, row.dtype, row.rule) for row in polyamp.explain(function, policy, X, W).operations]


PRODUCT = ("dot_general", "float16", "compute")


def test_s04_the_report_says_why() -> None:
    assert rules(lambda x, w: jnp.log(jax.nn.sigmoid(x @ w) + 1e-7)) == [
        PRODUCT,
        ("logistic", "float32", "float32 (logarithm)"),
        ("add", "float32", "float32 (logarithm)"),
        ("log", "float32", "float32"),
    ]
    assert rules(lambda x, w: 1 - jax.nn.sigmoid(x @ w)) == [
        PRODUCT,
        ("logistic", "float32", "float32 (1 - x)"),
        ("sub", "float32", "promote"),
    ]


def test_s04_it_ends_at_products_their_biases_and_saturating_functions() -> None:
    found = rules(lambda x, w: jnp.log(jax.nn.sigmoid(jnp.tanh(x @ w + w[0]) * 0.5) + 1e-7))
    assert [row for row in found if row[1] == "float16"] == [
        PRODUCT,
        ("add", "float16", "compute (bias)"),
        ("tanh", "float16", "follow"),
        ("mul", "float16", "promote"),
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: jax.nn.sigmoid(x @ w) * 2.0,
        lambda x, w: 2.0 - jax.nn.sigmoid(x @ w),
        lambda x, w: 1 + jax.nn.sigmoid(x @ w),
        lambda x, w: jax.nn.silu(x @ w),
        lambda x, w: jnp.log(jax.nn.sigmoid(x @ w).astype("float16")),
    ],
)
def test_s04_elsewhere_a_sigmoid_is_16_bit(function: Any) -> None:
    assert ("logistic", "float16", "follow") in rules(function)


def test_s04_a_rule_of_the_policys_own_ends_it() -> None:
    assert ("logistic", "float16", "follow") in rules(
        lambda x, w: jnp.log(jax.nn.sigmoid(x @ w)), op_rules={"log": "follow"}
    )


def test_s04_a_program_rewritten_for_a_logarithm_is_not_taken_for_another_use() -> None:
    """One nested program, used under a logarithm and by itself."""
    gate = jax.jit(lambda z: jax.nn.sigmoid(z))

    def run(x: Any, w: Any) -> Any:
        z = x @ w
        return jnp.log(gate(z)), gate(z)

    policy = polyamp.Policy("mixed_float16")
    for _ in range(2):
        closed = jax.make_jaxpr(policy.autocast(run))(X, W)
        inner = [e.params["jaxpr"].jaxpr.eqns for e in closed.jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
        made = [str(e.outvars[0].aval.dtype) for eqns in inner for e in eqns if e.primitive.name == "logistic"]
        assert made == ["float32", "float16"]
