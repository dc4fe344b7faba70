"""The doctor's operations in JAX on the CPU, and the traps of this version, reproduced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyamp_jax.observe.capabilities import PROBE
from polyamp_jax.observe.known_traps import TRAPS
from tests.core.doctor.backend_checks import check_operations, measure_small

CPU = PROBE.devices()[0]


def test_every_dtype_is_measured() -> None:
    found = measure_small(PROBE, CPU)
    narrow = found.dtypes["float8_e4m3fn"].operations
    assert narrow["matmul"].training_speed is not None
    assert narrow["convolution"].training_speed is not None
    assert narrow["attention"].problem is not None
    assert CPU == ("cpu:0", "cpu", "cpu:0")


def test_inputs_have_the_dtype() -> None:
    check_operations(PROBE, CPU)


def test_the_traps_are_those_of_this_version() -> None:
    assert len([trap for trap in TRAPS if trap.holds_for(jax.__version__, "cpu")]) >= 1
    assert len([trap for trap in TRAPS if trap.holds_for("0.10.2", "cpu")]) == 2


def test_a_compiled_product_of_bfloat16_is_not_rounded() -> None:
    """What the doctor calls float32 in disguise; the same product op by op is rounded."""
    left, right = (jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.bfloat16) for _ in range(2))

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return (a @ b).astype(jnp.float32)

    rounded = jnp.asarray(jax.jit(product)(left, right), jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(rounded, product(left, right))
    assert bool((rounded != jax.jit(product)(left, right)).any())


def test_attention_in_float16_does_not_compile() -> None:
    heads = jnp.ones((1, 4, 1, 8), jnp.float16)
    if not [trap for trap in TRAPS if "F16_F16_F32" in trap.summary and trap.holds_for(jax.__version__, "cpu")]:
        return  # another version
    with pytest.raises(ValueError, match="F16_F16_F32"):
        jax.jit(jax.nn.dot_product_attention)(heads, heads, heads)
