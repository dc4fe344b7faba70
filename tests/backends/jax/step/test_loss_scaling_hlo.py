"""How often the compiled step reads the gradients, and that both ways to sum them agree.

What another platform is given is read from the program lowered for it, which needs no such device. See
docs/measurements/jax_loss_scaling.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp
from polyamp_jax.step.grad_stats import _SMALL_SIZE, _one_sum, _three_sums, global_norm_and_finite

WAYS = pytest.mark.parametrize("way", [_one_sum, _three_sums, global_norm_and_finite])
SMALL = [jnp.ones((4, 4)) for _ in range(20)]
LARGE = [jnp.ones((_SMALL_SIZE // 128, 128)) for _ in range(3)]


def lowered(leaves: Any, platform: str) -> str:
    return str(jax.jit(global_norm_and_finite).trace(leaves).lower(lowering_platforms=(platform,)).as_text())


def reductions(text: str) -> int:
    """Sums over arrays of more than one axis, or over the small ones end to end."""
    return len(re.findall(r"stablehlo\.reduce\([^\n]*dimensions = \[0(?:, 1)?\][^\n]*: \(tensor<\d{3,}", text)) + len(
        re.findall(r"stablehlo\.reduce\([^\n]*dimensions = \[0, 1\][^\n]*: \(tensor<\d{1,2}x", text)
    )


@WAYS
@pytest.mark.parametrize("exponent", [-125, -100, -64, -62, -31, -30, -29, 0, 30, 63, 64, 100, 126])
def test_s10_every_way_is_right_over_the_whole_range(way: Callable[..., Any], exponent: int) -> None:
    values = np.ldexp(np.random.default_rng(0).uniform(0.5, 1.0, 1000), exponent).astype(np.float32)
    norm, finite = jax.jit(way)([jnp.asarray(values[:7]), jnp.asarray(values[7:].reshape(3, 331)), jnp.zeros((0, 3))])
    expected = np.linalg.norm(values.astype(np.float64))
    if expected < np.finfo(np.float32).max:
        np.testing.assert_allclose(float(norm), expected, rtol=1e-5)
    assert (norm.dtype, finite.dtype, bool(finite)) == (np.float32, np.bool_, True)


@WAYS
def test_s10_every_way_is_right_with_mixed_magnitudes(way: Callable[..., Any]) -> None:
    for values in ([1e-30, 1.0], [1e-30, 1e30], [0.0, -0.0], [1e19, -1e19, 1e-25], [-3e38], [1e-37, 1e-9], [1e-37]):
        norm, finite = jax.jit(way)([jnp.asarray(values, jnp.float32), jnp.zeros((5, 5))])
        np.testing.assert_allclose(float(norm), np.linalg.norm(values), rtol=1e-5)
        assert bool(finite)


@WAYS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("others", [1e-35, 1.0, 3e38])
@pytest.mark.parametrize("size", [3, 2 * _SMALL_SIZE])
def test_s10_every_way_finds_every_kind(way: Callable[..., Any], bad: float, others: float, size: int) -> None:
    leaves = [jnp.ones((2, 2)), jnp.full(size, others).at[size // 2].set(bad)]
    norm, finite = jax.jit(way)(leaves)
    assert not bool(finite)
    assert not np.isfinite(norm)


def test_s10_the_bounds_keep_constants_in_the_squares() -> None:
    """Gradients known at compile time: XLA would else multiply the powers of two with each other, to 0 or inf."""
    for value in (0.0, 1e-30, 1.0, 1e30):
        norm, finite = jax.jit(lambda value=value: _three_sums([jnp.full((2, 2), value), jnp.full(1, value)]))()
        np.testing.assert_allclose(float(norm), value * 5.0**0.5, rtol=1e-6)
        assert bool(finite)


@pytest.mark.parametrize(("platform", "choices"), [("cpu", 1), ("cuda", 0), ("tpu", 0)])
def test_s10_a_platform_is_given_one_way_only(platform: str, choices: int) -> None:
    """The way is chosen when the step is compiled. Only a CPU's depends on the data: a GPU's host would wait for it."""
    text = lowered(LARGE, platform)
    assert reductions(text) == 3 * len(LARGE)
    assert not re.search(r"stablehlo\.(if|while|custom_call)", text)
    cases = re.findall(r"stablehlo\.case\"\((%\w+)\)", text)
    known = [index for index in cases if re.search(rf"{index} = (stablehlo\.constant|\"stablehlo\.case\")", text)]
    assert len(known) <= 2, "from the platform's number, a constant, to the branch's, and that branch"
    assert len(cases) - len(known) == choices


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_s10_the_sums_of_one_pass_do_not_wait_for_each_other(platform: str) -> None:
    """Every read of a gradient comes before the first select, so that XLA may make all the sums at once."""
    text = lowered(LARGE, platform)
    first = re.search(r"stablehlo\.select|@_where", text[: text.index("func.func private")])
    body = text[: text.index("func.func private")]
    assert first is not None
    assert reductions(body[: first.start()]) == 3 * len(LARGE)


def test_s10_small_gradients_are_summed_together_on_a_cpu() -> None:
    assert reductions(lowered(SMALL, "cpu")) == 3
    assert reductions(lowered([*SMALL, *LARGE], "cpu")) == 3 * (1 + len(LARGE))


def test_s10_a_sum_in_range_is_the_only_one_on_a_cpu() -> None:
    """The other two are in the branch of a conditional, which is run for a sum out of range."""
    program = jax.make_jaxpr(_one_sum)(LARGE).jaxpr
    (branches,) = [eqn.params["branches"] for eqn in program.eqns if eqn.primitive.name == "cond"]
    sums = [sum(eqn.primitive.name == "reduce_sum" for eqn in each.eqns) for each in (program, *branches)]
    total = len(LARGE) + 1
    assert sums == [total, 2 * total, 0], "beside it; out of range; in range"


def test_s10_the_compiled_step_reads_large_gradients_few_times(backend: Any, recipe: Any) -> None:
    """One sum and the update, and at most one float32 copy; two sums more if the first is out of range; no callback."""
    size = _SMALL_SIZE // 128
    params = {"w": jnp.ones((128, size)), "v": jnp.ones((size, 128))}
    chosen = recipe(polyamp.Policy("mixed_float16", mode="cast"), clip_norm=1.0)
    state = polyamp.init((lambda p, x: x @ p["w"] @ p["v"], params), chosen)

    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(model(batch).astype(jnp.float32)))

    text = backend.train_step(loss, chosen).lower(state, jnp.ones((3, 128))).compile().as_text()
    assert not re.search(r" (conditional|while|custom-call)\([^\n]*callback", text)
    assert text.count(" conditional(") == 1
    square = rf"f32\[(?:128,{size}|{size},128|{128 * size})\]"
    found = re.findall(rf"= {square}\S* multiply\([^\n]*/square\"", text)
    assert len(found) == 3 * len(params), "squares of three sums"


@WAYS
@pytest.mark.parametrize(
    "values",
    [[2.0**-12] * 4, [2.0**-20] * 4, [2.0**-31], [2e19] + [0.0] * 1000],
    ids=["above the lower bound", "near it", "below it", "one beyond 2^64 among zeros"],
)
def test_s10_the_bounds_of_the_sums_cut_nothing_off(way: Callable[..., Any], values: list[float]) -> None:
    norm, finite = jax.jit(way)([jnp.asarray(values, jnp.float32)])
    np.testing.assert_allclose(float(norm), np.linalg.norm(values), rtol=1e-5)
    assert bool(finite)
