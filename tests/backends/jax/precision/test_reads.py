"""The gradient of a gather is a sum over the rows that were read: it accumulates in float32 (S4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import polyamp

DTYPES = ["float16", "bfloat16"]
COUNT = 4096
WEIGHTS = jnp.asarray(np.random.default_rng(0).uniform(size=(COUNT, 1)), jnp.float32)
ZEROS = jnp.zeros(COUNT, jnp.int32)
EYE = jnp.eye(4)

Read = Callable[[Any], Any]
READS: dict[str, Read] = {
    "x[indices]": lambda h: h[ZEROS],
    "take": lambda h: jnp.take(h, ZEROS, axis=0),
    "take, fill": lambda h: jnp.take(h, ZEROS, axis=0, mode="fill"),
    "take_along_axis": lambda h: jnp.take_along_axis(h, ZEROS[:, None], axis=0),
    "repeat": lambda h: jnp.repeat(h[:1], COUNT, axis=0),
    "repeat, counts": lambda h: jnp.repeat(h, jnp.array([COUNT, 0]), axis=0, total_repeat_length=COUNT),
    "vmap of an index": lambda h: jax.vmap(lambda n: h[n])(ZEROS),
    "vmap of dynamic_slice": lambda h: jax.vmap(lambda n: lax.dynamic_slice(h, (n, 0), (1, 4))[0])(ZEROS),
    "nested jit": lambda h: jax.jit(lambda h, n: h[n])(h, ZEROS),
    "scan over indices": lambda h: lax.scan(lambda _, n: (_, h[n]), None, ZEROS)[1],
    "map of a nested jit": lambda h: lax.map(lambda n: jax.jit(lambda h: h[n])(h), ZEROS),
    "checkpoint": lambda h: jax.checkpoint(lambda h: h[ZEROS])(h),
}


def total(read: Read) -> Any:
    """Of an activation, which is 16-bit, each row read with a weight of its own."""
    return lambda w, x: (read(x @ w) * WEIGHTS).sum() / COUNT


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bfloat16") for name in READS), *((name, "float16") for name in [*READS][::4])]
)
def test_s04_the_gradient_of_a_row_that_is_read_often(name: str, dtype: str) -> None:
    """4,096 reads of one row: added one by one in bfloat16 they stop at 256."""
    policy, loss = polyamp.Policy(compute=dtype, output="float32"), total(READS[name])
    x = jnp.ones((2, 4))
    found, wanted = jax.grad(policy.autocast(loss))(EYE, x), jax.grad(loss)(EYE, x)
    np.testing.assert_allclose(found, wanted, rtol=2e-3 if dtype == "float16" else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_s04_a_vmap_around_autocast_reads_a_shared_table(dtype: str) -> None:
    policy = polyamp.Policy(compute=dtype, output="float32")
    read = policy.autocast(lambda w, n: lax.dynamic_slice(jnp.ones((2, 4)) @ w, (n, 0), (1, 4))[0])
    gradient = jax.grad(lambda w: (jax.vmap(read, (None, 0))(w, ZEROS) * WEIGHTS).sum() / COUNT)(EYE)
    np.testing.assert_allclose(gradient, np.full((4, 4), float(WEIGHTS.mean())), rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_s04_a_table_of_16_bit_parameters(dtype: str) -> None:
    """Declared in 16 bits by the program itself, as a layer of `dtype=bfloat16` does."""
    policy = polyamp.Policy(compute=dtype, output="float32")
    loss = policy.autocast(lambda table: (table.astype(dtype)[ZEROS] * WEIGHTS).sum() / COUNT)
    gradient = jax.grad(loss)(jnp.ones((2, 4)))
    np.testing.assert_allclose(gradient[0], np.full(4, float(WEIGHTS.mean())), rtol=1e-2)


def test_s04_the_result_and_its_dtype_are_those_of_the_read() -> None:
    policy = polyamp.Policy("mixed_float16")
    values = jnp.asarray([[1.5, -0.0, 6e-8, 65504.0], [jnp.inf, jnp.nan, 0.1, -3.0]])

    def read(w: Any, x: Any) -> Any:
        return (x @ w)[jnp.array([1, 0, 1])]

    jaxpr = jax.make_jaxpr(policy.replace(output="float16").autocast(read))(EYE, values).jaxpr
    assert str(jaxpr.outvars[0].aval.dtype) == "float16"
    found = policy.replace(output="float16").autocast(lambda t: t.astype("float16")[jnp.array([1, 0, 1])])(values)
    np.testing.assert_array_equal(found, values.astype("float16")[jnp.array([1, 0, 1])])


def hlo(function: Any, *args: Any) -> str:
    text: str = jax.jit(function).lower(*args).compile().as_text()
    return text


@pytest.mark.parametrize("loop", [False, True])
def test_s04_the_forward_pass_holds_no_float32_copy_of_the_table(loop: bool) -> None:
    policy = polyamp.Policy(compute="float16", output="float32")
    table = jnp.ones((5000, 8), jnp.float16)
    indices = jnp.arange(16).reshape(4, 4)

    def read(table: Any, indices: Any) -> Any:
        if loop:
            return lax.fori_loop(0, 4, lambda n, total: total + table[indices[n]].sum(), jnp.float32(0))
        return table[indices]

    text = hlo(policy.autocast(read), table, indices)
    outside = [line for line in text.splitlines() if "f32[5000,8]" in line and "fused_computation" not in line]
    inside = text[text.index("ENTRY") :]
    assert "f32[5000,8]" not in inside, outside


@pytest.mark.parametrize("dtype", DTYPES)
def test_s04_scatters_that_add_run_in_float32(dtype: str) -> None:
    """Also where the program declares 16 bits: a sum, like any other."""
    policy = polyamp.Policy(compute=dtype, output="float32")
    ones = jnp.ones(COUNT, dtype)
    for add, wanted in (
        (lambda x: jax.ops.segment_sum(x, ZEROS, num_segments=2), [4096.0, 0.0]),
        (lambda x: jnp.zeros(2, dtype).at[ZEROS].add(x), [4096.0, 0.0]),
        (lambda x: jnp.zeros(2, dtype).at[ZEROS].subtract(x), [-4096.0, 0.0]),
        (lambda x: jnp.ones(2, dtype).at[ZEROS].multiply(x * 1.001), [float(dtype == "bfloat16"), 1.0]),
    ):
        found = policy.autocast(add)(ones)
        if wanted[0] in (0.0, 1.0) and dtype == "float16":
            wanted = [float(np.float32(np.float16(1.001)) ** np.float32(COUNT)), 1.0]
        np.testing.assert_allclose(found, wanted, rtol=1e-3)
    assert float(jnp.zeros(2, "bfloat16").at[ZEROS].add(jnp.ones(COUNT, "bfloat16"))[0]) == 256.0, "plain JAX"


def test_s04_the_forward_program_has_no_casts_for_it(equations: Any) -> None:
    policy = polyamp.Policy("mixed_float16")

    def casts(function: Any) -> int:
        found = equations(policy.autocast(function), EYE, jnp.ones((3, 4)))
        return sum(e.primitive.name == "convert_element_type" and e.invars[0].aval.shape != () for e in found)

    base = casts(lambda w, x: x @ w)
    assert casts(lambda w, x: (x @ w)[1:]) == base
    assert casts(lambda w, x: (x @ w)[0]) == base
    assert casts(lambda w, x: (x @ w)[x[0].argmax()]) == base
