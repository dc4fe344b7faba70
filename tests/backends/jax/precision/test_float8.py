"""Products in 8 bits in JAX (S36): codes, products, structures, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import polyamp
from polyamp import Float8, Policy, UnsupportedError
from polyamp.reference import float8 as reference
from polyamp_jax.precision.interpreter.float8_products import quantizer
from tests.fixtures import float8_values

POLICY = Policy("mixed_float8", float8=Float8(emulate=True))
HALF = Policy("mixed_bfloat16")
WIDE_GRADIENTS = Policy("mixed_float8", float8=Float8(emulate=True, gradients="float8_e4m3fn"))
ROW, BLOCK32 = (Policy("mixed_float8", float8=Float8(scaling=each, emulate=True)) for each in ("row", "block32"))
X = jnp.sin(jnp.linspace(-1.0, 1.0, 8 * 16).reshape(8, 16) * 3)


@pytest.mark.parametrize("form", float8_values.FORMATS)
@pytest.mark.parametrize("kind", float8_values.KINDS)
def test_codes_have_the_references_bits(kind: str, form: str) -> None:
    x = float8_values.values(kind)
    want = reference.quantize(x, form)
    got = jax.jit(quantizer.quantize, static_argnums=1)(jnp.asarray(x, jnp.bfloat16), form)
    assert int(got.exponent) == want.exponent
    np.testing.assert_array_equal(float8_values.bits(got.numbers), float8_values.bits(want.numbers))


@pytest.mark.parametrize("form", float8_values.FORMATS)
def test_s36_codes_of_rows_and_blocks_have_the_references_bits(form: str) -> None:
    run = jax.jit(quantizer.quantize, static_argnums=(1, 2, 3))
    float8_values.check_codes(lambda x, *settings: run(jnp.asarray(x, jnp.bfloat16), *settings), form)


class Dense(nnx.Module):
    def __init__(self, kernel: Any, *, on_the_left: bool = False) -> None:
        self.kernel, self.on_the_left = nnx.Param(jnp.asarray(kernel)), on_the_left

    def __call__(self, x: Any) -> Any:
        kernel = self.kernel[...]
        return jax.lax.dot_general(kernel, x, (((0,), (1,)), ((), ()))).T if self.on_the_left else x @ kernel


@pytest.mark.parametrize("on_the_left", [False, True])
@pytest.mark.parametrize("policy", [POLICY, WIDE_GRADIENTS, ROW, BLOCK32], ids=lambda policy: repr(policy.float8))
def test_a_dense_layer_has_the_references_products(policy: Policy, on_the_left: bool) -> None:
    x, w, g = float8_values.products()
    run = policy.replace(output="bfloat16").autocast(Dense(w, on_the_left=on_the_left))
    out, back_x = jax.vjp(run, jnp.asarray(x))
    (dx,) = back_x(jnp.asarray(g, jnp.bfloat16))
    float8_values.check_products(out, dx, kernel_gradient(policy, w, x, g, on_the_left=on_the_left), policy.float8)


@pytest.mark.parametrize("value", float8_values.NOT_FINITE)
def test_s36_infinity_or_nan_in_the_gradient_alone_is_not_cut(value: float) -> None:
    x, w, _ = float8_values.products()
    g = float8_values.broken_gradient(value)
    out, back = jax.vjp(lambda x, w: POLICY.replace(output="bfloat16").autocast(Dense(w))(x), jnp.asarray(x), w)
    assert bool(jnp.isfinite(out).all())
    float8_values.check_broken_gradients(*back(jnp.asarray(g, jnp.bfloat16)))


@pytest.mark.parametrize("narrow", [POLICY, ROW], ids=("tensor", "row"))
def test_s36_what_is_saved_of_operands_is_in_8_bits(narrow: Policy) -> None:
    saved = {}
    x, w = jnp.ones((1024, 256)), jnp.ones((256, 256))
    for policy in (narrow, HALF):
        chosen = policy.replace(output="bfloat16")
        _, back = jax.vjp(lambda x, w, chosen=chosen: chosen.autocast(Dense(w))(x), x, w)
        saved[policy] = sum(each.nbytes for each in jax.tree.leaves(back))
    assert saved[narrow] <= 0.55 * saved[HALF]


def test_s36_blocks_of_several_contracted_axes_have_the_order_of_the_parameter() -> None:
    """x (40, 4, 16) by w (16, 4, 96): the blocks are those of w's first axis and then its second."""
    x, w, g = float8_values.products()
    given, kernel = x.reshape(40, 16, 4).transpose(0, 2, 1), w.reshape(16, 4, 96)

    class Heads(nnx.Module):
        def __init__(self) -> None:
            self.kernel = nnx.Param(jnp.asarray(kernel))

        def __call__(self, x: Any) -> Any:
            return jax.lax.dot_general(x, self.kernel[...], (((1, 2), (1, 0)), ((), ())))

    run = BLOCK32.replace(output="bfloat16").autocast(Heads())
    out, back_x = jax.vjp(run, jnp.asarray(given))
    dx = back_x(jnp.asarray(g, jnp.bfloat16))[0].transpose(0, 2, 1).reshape(40, 64)
    dw = reference.gradients(x, w, g, BLOCK32.float8, np.float64)[1]
    float8_values.check_products(out, dx, dw, BLOCK32.float8)


def kernel_gradient(
    policy: Policy, w: Any, x: Any, g: Any, *, on_the_left: bool = False, kind: type[Dense] = Dense
) -> Any:
    """Return the gradient by the kernel, with `g` as the cotangent of the output."""
    recipe = polyamp.Recipe(policy=policy.replace(output="bfloat16"), optimizer=polyamp.sgd(0.1))
    state = polyamp.init(kind(w, on_the_left=on_the_left), recipe)
    weighted = polyamp.value_and_grad(lambda model, x: (model(x).astype(jnp.float32) * g).sum())
    _, gradients = weighted(state, jnp.asarray(x))
    (found,) = jax.tree.leaves(gradients.values)
    return np.asarray(found)


class Net(nnx.Module):
    """Two layers and a head; the middle one is plain, rematerialised, or scanned over two layers."""

    def __init__(self, kind: str = "plain") -> None:
        rngs = nnx.Rngs(0)
        self.kind = kind
        self.first, self.head = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.body = nnx.Param(jax.random.normal(jax.random.key(1), (2, 32, 32)) * 0.2)

    def __call__(self, x: Any) -> Any:
        h, kernels = jax.nn.relu(self.first(x)), self.body[...]
        layer = jax.checkpoint(one_layer) if self.kind == "remat" else one_layer
        if self.kind == "scan":
            h, _ = jax.lax.scan(lambda h, w: (one_layer(h, w), None), h, kernels)
        else:
            for number in range(2):
                h = layer(h, kernels[number])
        return self.head(h)


def one_layer(h: Any, kernel: Any) -> Any:
    return jax.nn.relu(h @ kernel)


def loss_fn(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def train(model: Any, policy: Policy = POLICY, steps: int = 2) -> Any:
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.5))
    state, step = polyamp.init(model, recipe), jax.jit(polyamp.train_step(loss_fn, recipe))
    for _ in range(steps):
        state, _ = step(state, {"x": X, "y": jnp.cos(X)})
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]


@pytest.mark.parametrize(("kind", "policy"), [("remat", POLICY), ("scan", POLICY), ("remat", ROW), ("scan", BLOCK32)])
def test_structures_have_the_same_bits(kind: str, policy: Policy) -> None:
    for got, want in zip(train(Net(kind), policy), train(Net(), policy), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-8)
    rows = [row for row in polyamp.explain(Net(kind), policy, X).operations if row.name == "dot_general"]
    assert {row.rule for row in rows if row.module == ""} == {"float8"}


class Recomputed(Dense):
    """The layer, which the backward pass runs again."""

    def __call__(self, x: Any) -> Any:
        return jax.checkpoint(super().__call__)(x)


def test_a_checkpoint_has_the_same_bits() -> None:
    x, w, g = float8_values.products()
    found = []
    for kind in (Dense, Recomputed):
        run = POLICY.replace(output="bfloat16").autocast(kind(w))
        out, back = jax.vjp(run, jnp.asarray(x))
        found.append([out, *back(jnp.asarray(g, jnp.bfloat16)), kernel_gradient(POLICY, w, x, g, kind=kind)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def float8_rules(model: Any, policy: Policy = POLICY) -> dict[str, str]:
    rows = polyamp.explain(model, policy, X).operations
    return {row.module: row.rule for row in rows if row.name == "dot_general"}


def test_heads_stay_in_16_bits_unless_an_override_says_so() -> None:
    found = float8_rules(Net())
    assert (found["first"], found["head"]) == ("float8", "compute (head or override)")
    chosen = POLICY.replace(overrides={"head": "float8", "first": "bfloat16"})
    found = float8_rules(Net(), chosen)
    assert (found["first"], found["head"]) == ("compute (head or override)", "float8")


def test_products_have_8_bit_operands_and_float32_sums() -> None:
    program = jax.make_jaxpr(POLICY.autocast(Net()))(X)
    products = [str(eqn) for eqn in all_equations(program.jaxpr) if eqn.primitive.name == "dot_general"]
    assert sum("float32" in each for each in products) >= 3
    operands = [
        {str(v.aval.dtype) for v in eqn.invars}
        for eqn in all_equations(program.jaxpr)
        if eqn.primitive.name == "dot_general"
    ]
    assert operands.count({"float8_e4m3fn"}) == 3
    assert operands.count({"bfloat16"}) == 1


def all_equations(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from all_equations(getattr(inner, "jaxpr", inner))


def test_products_of_two_activations_and_sizes_stay_in_16_bits() -> None:
    class Scores(nnx.Module):
        def __init__(self) -> None:
            self.dense, self.odd = nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 8, rngs=nnx.Rngs(1))

        def __call__(self, x: Any) -> Any:
            return (self.dense(x) @ x.T).sum() + self.odd(x).sum()

    found = float8_rules(Scores())
    assert found == {"dense": "float8", "": "compute (no parameter)", "odd": "compute (size)"}


def test_under_vmap_a_product_is_refused() -> None:
    run = POLICY.autocast(Net())
    for mapped in (jax.vmap(run), jax.vmap(jax.jit(run))):
        with pytest.raises(UnsupportedError, match="its scales are those of the whole batch"):
            mapped(X)


def test_a_plain_function_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="a plain function has none"):
        POLICY.autocast(lambda x: x @ x.T)(X)


def test_a_device_without_such_products_is_refused_before_the_first_step() -> None:
    with pytest.raises(UnsupportedError, match=r"multiplies no 8-bit floats.*Float8\(emulate=True\)"):
        polyamp.init(Net(), polyamp.Recipe(policy="mixed_float8", optimizer=polyamp.sgd(0.5)))


def test_a_gradient_of_a_gradient_is_refused() -> None:
    """It would be that of the rounding; the bfloat16 policy has it."""

    def penalty(policy: Policy) -> Any:
        run = policy.autocast(Dense(np.ones((16, 16), np.float32)))
        slope = jax.grad(lambda x: jnp.tanh(run(x)).sum())
        return jax.grad(lambda x: jnp.square(slope(x)).sum())(X)

    assert bool(jnp.isfinite(penalty(HALF)).all())
    with pytest.raises(UnsupportedError, match="gradients of a product in 8 bits have no gradients of their own"):
        penalty(POLICY)
