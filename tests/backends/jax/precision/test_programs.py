"""Autocast over products of every kind, linear algebra, random numbers, windows, scatters, sorting and weak types.

`check` asserts the dtypes of the inner operations, values and gradients against
float32 and against casting by hand.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import polyamp
from tests.backends.jax.precision.cases import LOW, Table, W, X, close, equations, floats

case = Table()

RNG = np.random.default_rng(1)
IMAGE, KERNEL = (jnp.asarray(RNG.normal(size=s) / 2, jnp.float32) for s in ((2, 4, 4, 3), (3, 3, 3, 4)))
SPD = X @ X.T + 2 * jnp.eye(4)
HALF = polyamp.Policy("mixed_float16")


# products


@case((IMAGE, KERNEL), {**LOW, "conv_general_dilated": "compute"}, grad=(0, 1))
def convolution(ops: Any) -> Any:
    def run(x: Any, k: Any) -> Any:
        y = lax.conv_general_dilated(
            ops.cast(x), ops.cast(k), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return ops.dot(jnp.tanh(y), X)

    return run


@case((X[:, None] * jnp.ones((4, 3, 1)), X[None] * jnp.ones((4, 1, 1))), LOW, grad=(0, 1))
def einsum(ops: Any) -> Any:
    return lambda a, b: jnp.einsum("bij,bjk->bik", ops.cast(a), ops.cast(b))


@case((X, jnp.stack([W, X]), jnp.asarray([1, 3])), {"dot_general": "compute"}, hand=None, grad=())
def ragged_dot(ops: Any) -> Any:
    return lambda x, w, sizes: ops.dot(lax.ragged_dot(ops.cast(x), ops.cast(w), sizes), W)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ragged_products_run_in_the_compute_dtype(dtype: str) -> None:
    run = polyamp.Policy(compute=dtype, output="float32").autocast(lax.ragged_dot)
    args = (X, jnp.stack([W, X]), jnp.asarray([1, 3]))
    found = [floats(e.invars) for e in equations(run, *args) if "ragged_dot" in e.primitive.name]
    assert found == [{dtype}]
    close(run(*args), jnp.concatenate([X[:1] @ W, X[1:] @ X]), 4e-2)
    gradient = jax.grad(lambda w: jnp.sum(run(X, w, args[2])))(args[1])
    assert gradient.dtype == jnp.float32
    close(gradient, jax.grad(lambda w: jnp.sum(lax.ragged_dot(X, w, args[2])))(args[1]), 4e-2)


@pytest.mark.parametrize(("asked", "result"), [(None, "float16"), ("float32", "float32"), ("float16", "float16")])
def test_preferred_element_type(asked: str | None, result: str) -> None:
    """Asked for float32 of float32 operands, it is no wish: that is what jnp.einsum and others write by themselves."""

    def program(w: Any, x: Any) -> Any:
        return lax.dot(
            x.astype("float16") if asked else x, w.astype("float16") if asked else w, preferred_element_type=asked
        )

    (product,) = [e for e in equations(HALF.autocast(program), W, X) if e.primitive.name == "dot_general"]
    assert floats(product.invars) == {"float16"}
    assert floats(product.outvars) == {result}
    close(HALF.autocast(program)(W, X), X @ W, 4e-3)


# linear algebra, FFT, complex


@case((SPD, X), {**LOW, "cholesky": "float32"}, wide=1)
def cholesky(ops: Any) -> Any:
    return lambda w, x: ops.dot(jnp.linalg.cholesky(w), x)


@case((SPD, X), LOW, wide=2)
def qr(ops: Any) -> Any:
    return lambda w, x: ops.dot(jnp.linalg.qr(w)[1], x)


@case((SPD, X), {**LOW, "svd": "float32"}, wide=2, hand=None)
def svd(ops: Any) -> Any:
    return lambda w, x: ops.dot(jnp.linalg.svd(w, compute_uv=False)[None], x)


@case((SPD, X), {**LOW, "eigh": "float32"}, wide=2, hand=None)
def eigh(ops: Any) -> Any:
    return lambda w, x: ops.dot(jnp.linalg.eigh(w)[0][None], x)


@case((SPD, X), {**LOW, "lu": "float32"}, grad=())
def lu(ops: Any) -> Any:
    return lambda w, x: ops.dot(lax.linalg.lu(w)[0], x)


@case((SPD, X), {**LOW, "triangular_solve": "float32"}, wide=1)
def triangular_solve(ops: Any) -> Any:
    return lambda w, x: lax.linalg.triangular_solve(w, ops.keep(ops.dot(x, x)), left_side=True, lower=True)


@case((W, X), {**LOW, "fft": "float32"})
def fft(ops: Any) -> Any:
    return lambda w, x: jnp.abs(jnp.fft.rfft(ops.keep(ops.dot(x, w)))) ** 2


@case((W, X), {**LOW, "complex": "float32"})
def complex_numbers(ops: Any) -> Any:
    def run(w: Any, x: Any) -> Any:
        z = lax.complex(ops.keep(ops.dot(x, w)), w) * (1 + 2j)
        return z.real * 3, z.imag

    return run


@case((W, X), LOW, hand=None)
def complex_products(ops: Any) -> Any:
    def run(w: Any, x: Any) -> Any:
        z = (x + 1j * w).astype("complex64")
        return jnp.sin(z).real @ x, z * z

    return run


def test_complex_products_stay_complex() -> None:
    run = HALF.autocast(lambda a, b: a @ b)
    z = X + 1j * W
    assert run(z, z).dtype == jnp.complex64
    assert np.array_equal(run(z, z), z @ z)


def test_float8_passes_untouched() -> None:
    x = jnp.ones((2, 2), jnp.float8_e4m3fn)
    run = HALF.autocast(lambda a: (a.T, lax.dot(a, a, preferred_element_type=jnp.float32)))
    moved, product = jax.make_jaxpr(run)(x).jaxpr.outvars
    assert (str(moved.aval.dtype), str(product.aval.dtype)) == ("float8_e4m3fn", "float32")
    (dot,) = [e for e in equations(run, x) if e.primitive.name == "dot_general"]
    assert {str(v.aval.dtype) for v in dot.invars} == {"float8_e4m3fn"}


def test_the_native_op_list_is_the_same() -> None:
    def rows(policy: polyamp.Policy) -> Any:
        return polyamp.explain(lambda w, x: jnp.log(jax.nn.sigmoid(x @ w)).sum(), policy, W, X).operations

    assert rows(polyamp.Policy("mixed_float16", op_list="native")) == rows(HALF)


# random numbers, integers, weak types, float64


@case((W, X), LOW)
def keys(ops: Any) -> Any:
    def run(w: Any, x: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), 3)
        noise = jax.random.normal(key, (4, 4))
        kept = jax.random.bernoulli(jax.random.split(key)[0], 0.5, (4, 4))
        return ops.dot(jnp.where(kept, x, 0.0) + noise, w)

    return run


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_and_random_numbers_are_the_same_as_without(make: Any) -> None:
    def program(key: Any, x: Any) -> Any:
        one, other = jax.random.split(key)
        return jax.random.normal(one, (8,)), jax.random.uniform(other, (8,)), jax.random.randint(one, (8,), 0, 9), one

    got, want = HALF.autocast(program)(make(0), X), program(make(0), X)
    close(got, want, 1e-7)
    assert [x.dtype for x in got] == [x.dtype for x in want]


def test_integers_and_booleans_pass_untouched() -> None:
    def program(n: Any, flag: Any, x: Any) -> Any:
        return n @ n, n.sum(), ~flag, jnp.where(flag, n, 0), n.astype("float32") @ x

    n, flag = jnp.arange(16).reshape(4, 4), jnp.arange(4) > 1
    got, want = HALF.autocast(program)(n, flag, X), program(n, flag, X)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert all(np.array_equal(a, b) for a, b in zip(got[:4], want[:4], strict=True))
    products = [e for e in equations(HALF.autocast(program), n, flag, X) if e.primitive.name == "dot_general"]
    assert [floats(e.invars) for e in products] == [set(), {"float16"}]


def test_float64_stays_float64() -> None:
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        double = jnp.asarray(np.asarray(X, np.float64))

        def program(d: Any, x: Any) -> Any:
            return d @ d, jnp.exp(d), x @ x, d + x

        run = HALF.autocast(program)
        got, want = run(double, X), program(double, X)
        assert [x.dtype.name for x in got] == ["float64", "float64", "float32", "float64"]
        assert all(np.array_equal(got[n], want[n]) for n in (0, 1, 3))
        products = [floats(e.invars) for e in equations(run, double, X) if e.primitive.name == "dot_general"]
        assert products == [{"float64"}, {"float16"}]
        assert jax.grad(lambda d: jnp.sum(run(d, X)[0]))(double).dtype == jnp.float64


def test_python_numbers_do_not_promote() -> None:
    def program(w: Any, x: Any) -> Any:
        y = x @ w
        return jnp.maximum((y * 0.5 + 1) / 3 - np.pi, 0.1) ** 1, jnp.where(y > 0, y, 2.0), jnp.clip(y, -1.0, 1.0)

    found = equations(HALF.autocast(program), W, X)
    for name in ("mul", "add", "div", "sub", "max", "select_n"):
        operations = [floats(e.invars) for e in found if e.primitive.name == name]
        assert operations, name
        assert all(dtypes == {"float16"} for dtypes in operations), (name, operations)


def test_python_integers_do_not_promote() -> None:
    def program(w: Any, x: Any) -> Any:
        return jnp.clip(x @ w, -1, 1), jnp.where(w > 0, x @ w, 2)

    found = equations(HALF.autocast(program), W, X)
    for name in ("max", "min", "select_n"):
        operations = [floats(e.invars) for e in found if e.primitive.name == name]
        assert operations == [{"float16"}], name


def test_large_masks_do_not_become_infinite() -> None:
    def program(w: Any, x: Any) -> Any:
        scores = x @ w
        masked = jnp.where(jnp.zeros((4, 4), bool), scores, -1e9)
        return masked, jax.nn.softmax(masked), jax.nn.softmax(scores - 1e9), jnp.where(w > 9, scores, -1000000)

    run = HALF.autocast(program)
    got = run(W, X)
    assert all(np.isfinite(x).all() for x in got)
    np.testing.assert_array_equal(got[1], 0.25)
    close(got, program(W, X), 4e-3)
    assert np.isfinite(jax.grad(lambda w: sum(jnp.sum(x) for x in run(w, X)))(W)).all()


# windows, scatters, sorting


@case((W, X), LOW, hand=1e-3)  # by hand the cotangents meet in float32
def windows(ops: Any) -> Any:
    def run(w: Any, x: Any) -> Any:
        y = ops.keep(ops.dot(x, w))
        return (
            lax.reduce_window(y, -np.inf, lax.max, (2, 2), (2, 2), "VALID"),
            lax.reduce_window(y, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
        )

    return run


@case((W, X), {**LOW, "reduce": "float32"}, grad=())
def generic_reduction(ops: Any) -> Any:
    def run(w: Any, x: Any) -> Any:
        return lax.reduce(ops.keep(ops.dot(x, w)), np.float32(0), lambda a, b: a * 0.5 + b, (0,))

    return run


@case((W, X), LOW)
def scatters(ops: Any) -> Any:
    def run(w: Any, x: Any) -> Any:
        y = ops.keep(ops.dot(x, w))
        return y.at[0].set(1.0), y.at[jnp.array([1, 1])].add(w[:2]), y.at[2].max(0.1), y.at[0].multiply(w[1])

    return run


@case((W, X, jnp.asarray([0, 2])), LOW)
def gathers(ops: Any) -> Any:
    def run(w: Any, x: Any, n: Any) -> Any:
        y = ops.dot(x, w)
        return y[n], jnp.take_along_axis(y, n[None], 1), lax.dynamic_slice(y, (n[0], 0), (2, 2))

    return run


@case((W, X), LOW)
def slices(ops: Any) -> Any:
    def run(w: Any, x: Any) -> Any:
        y = ops.dot(x, w)
        return lax.dynamic_update_slice(y, y[:2] * 2, (1, 0)), lax.optimization_barrier(y), jnp.concatenate([y, y]).T

    return run


@case((W, X), LOW)
def sorting(ops: Any) -> Any:
    def run(w: Any, x: Any) -> Any:
        y = ops.dot(x, w)
        return lax.top_k(y, 2)[0], jnp.sort(y), jnp.argmax(y, 1), jnp.max(y)

    return run


@case((W, X), LOW)
def sharding_constraint(ops: Any) -> Any:
    devices = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    place = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("d"))
    return lambda w, x: lax.with_sharding_constraint(ops.dot(x, w), place)


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="jax.new_ref is of jax 0.9 and later")
def test_mutable_arrays_hold_their_declared_dtype() -> None:
    def program(w: Any, x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] = jnp.tanh(x @ w)
        ref[0] += jnp.exp(w[0])
        return ref[...] @ w

    run = HALF.autocast(program)
    close(run(W, X), program(W, X), 4e-3)
    close(jax.jit(run)(W, X), program(W, X), 4e-3)
    found = [floats(e.invars) for e in equations(run, W, X) if e.primitive.name == "dot_general"]
    assert found == [{"float16"}] * 2


@pytest.mark.parametrize(("name", "dtype"), case.parameters())
def test_inner_operations_run_in_the_dtypes_of_the_lists(name: str, dtype: str) -> None:
    case.programs[name](dtype)
