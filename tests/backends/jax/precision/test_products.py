"""What a product asks for by itself, and products that are sums or multiplications (S4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import polyamp
import polyamp_jax

HALF, BRAIN = polyamp.Policy("mixed_float16"), polyamp.Policy("mixed_bfloat16")
W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4)), jnp.float32)
HIGHEST, HIGH, DEFAULT = lax.Precision.HIGHEST, lax.Precision.HIGH, lax.Precision.DEFAULT
PRODUCTS = ("dot_general", "conv_general_dilated")


def rows(function: Any, *args: Any, policy: polyamp.Policy = HALF) -> list[tuple[str, str]]:
    """(dtype, rule) of the products, those alike once."""
    found = polyamp.explain(function, policy, *args).operations
    return [(row.dtype, row.rule) for row in found if row.name in PRODUCTS]


def image(x: Any) -> Any:
    return x.reshape(1, -1, 4, 1)


@jax.custom_vjp
def precise(x: Any, w: Any) -> Any:
    return jnp.matmul(x, w, precision="highest")


precise.defvjp(
    lambda x, w: (precise(x, w), (x, w)),
    lambda kept, ct: (
        jnp.matmul(ct, kept[1].T, precision="highest"),
        jnp.matmul(kept[0].T, ct, precision="highest"),
    ),
)

# explicit precision

ASKED: dict[str, Callable[..., Any]] = {
    "highest": lambda w, x: jnp.matmul(x, w, precision=HIGHEST),
    "'float32'": lambda w, x: jnp.matmul(x, w, precision="float32"),
    "'high'": lambda w, x: jnp.dot(x, w, precision="high"),
    "'tensorfloat32'": lambda w, x: jnp.tensordot(x, w, 1, precision="tensorfloat32"),
    "einsum": lambda w, x: jnp.einsum("ij,jk->ik", x, w, precision=HIGHEST),
    "a pair": lambda w, x: lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision=(DEFAULT, HIGH)),
    "a preset": lambda w, x: lax.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32),
    "a preset's name": lambda w, x: jnp.matmul(x, w, precision="TF32_TF32_F32"),
    "an algorithm": lambda w, x: lax.dot(
        x, w, precision=lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32, 1, 1, 1, False)
    ),
    "convolution": lambda w, x: lax.conv_general_dilated(
        image(x), w[:2, :2, None, None], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=HIGHEST
    ),
    "nested jit": lambda w, x: jax.jit(lambda x: jnp.matmul(x, w, precision=HIGHEST))(x),
    "scan": lambda w, x: lax.scan(lambda c, _: (jnp.matmul(c, w, precision=HIGHEST), None), x, None, length=2)[0],
    "while": lambda w, x: lax.fori_loop(0, 2, lambda _, c: jnp.matmul(c, w, precision=HIGHEST), x),
    "cond": lambda w, x: lax.cond(x[0, 0] > 9, lambda: x, lambda: jnp.matmul(x, w, precision=HIGHEST)),
    "checkpoint": lambda w, x: jax.checkpoint(lambda x: jnp.matmul(x, w, precision=HIGHEST))(x),
    "custom_vjp": lambda w, x: precise(x, w),
    "vmap": lambda w, x: jax.vmap(lambda row: jnp.matmul(row, w, precision=HIGHEST))(x),
    "a scope inside": lambda w, x: jax.default_matmul_precision("highest")(lambda: x @ w)(),
    "jax.image.resize": lambda w, x: jax.image.resize(x, (6, 8), "linear"),
}


@pytest.mark.parametrize("name", ASKED)
def test_s04_a_precision_that_the_program_asks_for_is_honoured(name: str) -> None:
    function = ASKED[name]
    assert set(rows(function, W, X)) == {("float32", "precision")}
    if name not in ("a preset's name", "an algorithm"):  # which XLA's CPU backend refuses
        np.testing.assert_array_equal(jax.jit(HALF.autocast(function))(W, X), jax.jit(function)(W, X))


@pytest.mark.parametrize("precision", [None, DEFAULT, "bfloat16", "default", (DEFAULT, DEFAULT)])
def test_s04_the_fastest_precision_leaves_the_choice_to_autocast(precision: Any) -> None:
    def function(w: Any, x: Any) -> Any:
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision=precision)

    assert rows(function, W, X) == [("float16", "compute")]
    assert rows(function, W, X, policy=BRAIN) == [("bfloat16", "compute")]


def test_s04_only_the_operation_that_asks_is_float32_and_so_are_its_derivatives(products: Any) -> None:
    run = HALF.autocast(lambda w, x: (jnp.matmul(jnp.tanh(x @ w), w, precision="highest") @ w).sum())
    low, high = ("float16", "float16"), ("float32", "float32")
    assert products(run, W, X) == [low, high, low]
    found = products(jax.grad(run), W, X)
    assert (found.count(low), found.count(high)) == (5, 3)
    inside = products(HALF.autocast(jax.grad(lambda x, w: precise(x, w).sum())), X, W)
    assert set(inside) == {high}


def test_s04_a_product_of_16_bit_values_that_asks_is_float32() -> None:
    found = HALF.autocast(lambda w, x: jnp.matmul(x @ w, w, precision="highest"))(W, X)
    activation = (X.astype("float16") @ W.astype("float16")).astype("float32")
    np.testing.assert_array_equal(found, activation @ W)


def eager(function: Any, *args: Any) -> Any:
    return [e for e in jax.make_jaxpr(function)(*args).jaxpr.eqns if e.primitive.name == "dot_general"]


@pytest.mark.parametrize("default", ["highest", "float32", "tensorfloat32", "bfloat16", "F32_F32_F32"])
@pytest.mark.parametrize("how", ["scope", "config"])
def test_s04_a_default_precision_does_not_switch_autocast_off(default: str, how: str, request: Any) -> None:
    """It holds where a product stays in float32, as in plain JAX."""
    if how == "config":
        request.addfinalizer(lambda: jax.config.update("jax_default_matmul_precision", None))
        jax.config.update("jax_default_matmul_precision", default)

    def both(w: Any, x: Any) -> Any:
        return polyamp_jax.keep_precision(lambda y: y @ w)(x @ w)

    with jax.default_matmul_precision(default) if how == "scope" else jax.named_scope("same"):
        first, second = eager(HALF.autocast(both), W, X)
        (plain,) = eager(lambda w, x: x @ w, W, X)
        assert rows(both, W, X) == [("float16", "compute"), ("float32", "keep_precision")]
        assert rows(ASKED["custom_vjp"], W, X) == [("float32", "precision")]
    assert first.invars[0].aval.dtype == "float16"
    assert first.params["precision"] is None
    assert second.invars[0].aval.dtype == "float32"
    assert second.params["precision"] == plain.params["precision"] is not None


@jax.custom_jvp
def loose(x: Any, w: Any) -> Any:
    return x @ w


@loose.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return loose(*primals), tangents[0] @ primals[1] + primals[0] @ tangents[1]


@jax.custom_vjp
def loose_vjp(x: Any, w: Any) -> Any:
    return x @ w


loose_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct))


@pytest.mark.parametrize("inner", [loose, loose_vjp, jax.jit(lambda x, w: x @ w)])
def test_s04_a_default_precision_reaches_no_rule_of_a_custom_derivative(inner: Any, products: Any) -> None:
    run = HALF.autocast(lambda w, x: inner(x, w).sum())
    with jax.default_matmul_precision("highest"):
        found = products(jax.grad(run, argnums=(0, 1)), W, X)
    assert set(found) == {("float16", "float16")}


def test_s04_a_default_precision_reaches_what_is_left_as_it_is(equations: Any) -> None:
    """Opaque programs, which are not evaluated operation by operation."""

    def run(w: Any, x: Any) -> Any:
        return jnp.linalg.pinv(x) @ lax.scan(lambda c, _: (c @ w, None), x, None, length=2)[0]

    policy = HALF.replace(op_rules={"scan": "opaque"})
    with jax.default_matmul_precision("high"):
        ours, plain = equations(policy.autocast(run), W, X), equations(run, W, X)
    found, wanted = ([e.params["precision"] for e in made if e.primitive.name == PRODUCTS[0]] for made in (ours, plain))
    assert (HIGH, HIGH) in wanted
    assert found[:-1] == wanted[:-1]
    assert found[-1] is None, "the 16-bit product of the two"


def test_s04_the_policys_own_float32_matmul_is_no_precision_of_the_program() -> None:
    policy = HALF.replace(float32_matmul="highest")
    assert rows(lambda w, x: x @ w, W, X, policy=policy) == [("float16", "compute")]
    (product,) = eager(policy.autocast(polyamp_jax.keep_precision(lambda w, x: x @ w)), W, X)
    assert product.params["precision"] == (HIGHEST, HIGHEST)


def test_s04_preferred_element_type() -> None:
    """One that differs from the operands' declared dtype is obeyed; the declared one is what JAX itself writes."""

    def product(preferred: Any, dtype: str = "float32") -> Any:
        def run(w: Any, x: Any) -> Any:
            x, w = x.astype(dtype), w.astype(dtype)
            return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=preferred)

        (found,) = eager(HALF.autocast(run), W, X)
        return [str(v.aval.dtype) for v in (*found.invars, *found.outvars)]

    assert product(None) == product("float32") == ["float16"] * 3
    assert product("float32", "float16") == ["float16", "float16", "float32"]
    assert product("float32", "bfloat16") == ["float16", "float16", "float32"]
    assert product("bfloat16") == ["float16", "float16", "bfloat16"]


# products that are sums, products that are multiplications

LARGE = jnp.full((2, 512), 20.0)
INNER: dict[str, Callable[[Any], Any]] = {
    "einsum": lambda x: jnp.einsum("bi,bi->b", x, x),
    "einsum, two contracted": lambda x: jnp.einsum("bij,bij->b", x.reshape(2, 8, 64), x.reshape(2, 8, 64)),
    "vmap": lambda x: jax.vmap(jnp.vdot)(x, x),
    "vmap of jit": lambda x: jax.vmap(jax.jit(lambda a: a @ a))(x),
    "vecdot": lambda x: jnp.linalg.vecdot(x, x),
    "scan": lambda x: lax.map(lambda a: jnp.dot(a, a), x),
}


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("outside", [False, True])
def test_s04_inner_products_are_sums_whatever_the_batch_axes(name: str, outside: bool) -> None:
    """20 * 20 * 512 is beyond float16."""
    run = HALF.autocast(lambda w, x: INNER[name](x @ w))
    x = jnp.stack([LARGE, LARGE]) if outside else LARGE
    found = jax.vmap(run, (None, 0))(jnp.eye(512), x) if outside else run(jnp.eye(512), x)
    np.testing.assert_array_equal(found, np.full(found.shape, 204800.0))
    assert rows(lambda w, x: INNER[name](x @ w), jnp.eye(512), LARGE)[-1] == ("float32", "float32 (inner product)")


POSITIONS, FREQUENCIES = jnp.arange(4096, dtype=jnp.float32), 10000.0 ** -jnp.linspace(0.0, 1.0, 8)
OUTER: dict[str, Callable[..., Any]] = {
    "einsum": lambda p, f: jnp.einsum("i,j->ij", p, f),
    "einsum with a batch": lambda p, f: jnp.einsum("bi,bj->bij", p[None], f[None])[0],
    "tensordot": lambda p, f: jnp.tensordot(p, f, 0),
    "an axis of 1": lambda p, f: p[:, None] @ f[None],
    "jnp.outer": jnp.outer,
}


@pytest.mark.parametrize("name", OUTER)
def test_s04_products_that_contract_nothing_follow_their_operands(name: str) -> None:
    """A rotary embedding written with one: positions up to 4,096 times frequencies."""
    angles = OUTER[name]
    found = BRAIN.autocast(lambda p, f: jnp.cos(angles(p, f)))(POSITIONS, FREQUENCIES)
    np.testing.assert_allclose(found, jnp.cos(POSITIONS[:, None] * FREQUENCIES), atol=1e-3)
    if name != "jnp.outer":
        assert rows(angles, POSITIONS, FREQUENCIES) == [("float32", "promote (outer product)")]
        (product,) = eager(HALF.autocast(lambda w, x: angles(x @ w[:, 0], x @ w[:, 1])), W, X)[2:]
        assert {str(v.aval.dtype) for v in (*product.invars, *product.outvars)} == {"float16"}


def test_s04_a_vector_minus_a_product_has_no_bias() -> None:
    """Thresholds minus a score: not what a layer adds to its product."""
    policy = polyamp.Policy("mixed_float16")

    def rule(function: Any) -> Any:
        return [row[2:4] for row in polyamp.explain(function, policy, W, X).operations if row.name == "sub"]

    assert rule(lambda w, x: w[0] - x @ w) == [("float32", "promote")]
    assert rule(lambda w, x: x @ w - w[0]) == [("float16", "compute (bias)")]
