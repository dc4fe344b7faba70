"""Rule S36: products of activations with parameters in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import (
    advance,
    batch,
    flat_weights,
    layers,
    loss_fn,
    modules_of,
    recipe,
    split_rows,
    to_float,
)
from polyamp.contract.backend import Backend
from polyamp.contract.harness import DenseWeights, Harness
from polyamp.errors import UnsupportedError
from polyamp.monitor.records import PRODUCT_OPERANDS, RoundingStats
from polyamp.recipe.float8 import Float8
from polyamp.reference.backend import BACKEND as REFERENCE
from polyamp.reference.float8 import quantize
from polyamp.reference.harness import ReferenceHarness

SIZES = (16, 32, 16)
BLOCK_SIZES = (64, 32, 32)
"""Sizes that products with blocks of 32 accept."""
PolicyOf = Callable[[str], polyamp.Policy]


@pytest.fixture
def policy_of(backend: Backend, harness: Harness) -> PolicyOf:
    """Return the policy by its scaling. A backend without such products refuses it by name, which is all that is asked
    of it."""

    def made(scaling: str) -> polyamp.Policy:
        chosen = polyamp.Policy("mixed_float8", float8=Float8(scaling=scaling, emulate=True))
        if not hasattr(backend, "has_float8_products"):
            with pytest.raises(UnsupportedError, match=r"no products in 8 bits \(S36\)"):
                polyamp.init(harness.mlp(layers(SIZES)), recipe(chosen))
            return polyamp.Policy("mixed_bfloat16")
        return chosen

    return made


@pytest.fixture
def policy(policy_of: PolicyOf) -> polyamp.Policy:
    return policy_of("tensor")


def data(sizes: tuple[int, ...] = SIZES, **options: Any) -> Any:
    return batch(inputs=sizes[0], outputs=sizes[-1], **options)


def uneven(size: int = 16) -> Any:
    """A batch for `BLOCK_SIZES`: half of its rows are small, and so are half of the numbers of each row."""
    made = data(BLOCK_SIZES, size=size)
    made["x"][size // 2 :] *= 2.0**-30
    made["x"][:, 32:] *= 2.0**-20
    return made


def moves(harness: Harness, policy: polyamp.Policy, sizes: tuple[int, ...], whole: Any, parts: int) -> Any:
    """Yield how far a step moves each array, here and in the reference."""
    batches = whole if parts == 1 else split_rows(whole, [8, 8])
    moved = []
    for module in (harness, ReferenceHarness(REFERENCE)):
        made = recipe(policy, optimizer=polyamp.sgd(1.0), accumulate_steps=parts)
        state = polyamp.init(module.mlp(layers(sizes)), made)
        before = module.weights(state)
        state, _ = advance(state, [batches])
        after = module.weights(state)
        moved.append([new - old for a, b in zip(after, before, strict=True) for new, old in zip(a, b, strict=True)])
    yield from zip(*moved, strict=True)


@pytest.mark.parametrize("parts", [1, 2])
def test_s36_a_step_is_that_of_the_reference(harness: Harness, policy: polyamp.Policy, parts: int) -> None:
    """Micro-batches have scales of their own: with one for both, the second would be 0."""
    whole = data(size=16)
    whole["x"][8:] *= 2.0**-30
    for here, there in moves(harness, policy, SIZES, whole, parts):
        # bfloat16's roundoff, in an activation that is rounded to 8 bits again: now and then to the next number
        assert np.abs(here - there).max() <= 2.0**-5 * np.abs(there).max()


@pytest.mark.parametrize(("scaling", "parts"), [("row", 1), ("block32", 2)])
def test_s36_a_step_with_scales_of_rows_or_blocks_is_that_of_the_reference(
    harness: Harness, policy_of: PolicyOf, scaling: str, parts: int
) -> None:
    for here, there in moves(harness, policy_of(scaling), BLOCK_SIZES, uneven(), parts):
        # the next number of a gradient in float8_e5m2 is 1/4 from it: such numbers are few
        assert np.linalg.norm(here - there) <= 2.0**-4 * np.linalg.norm(there)


def test_s36_products_differ_from_bfloat16s_by_the_roundoff_of_8_bits(
    backend: Backend, harness: Harness, policy: polyamp.Policy
) -> None:
    outputs = []
    for chosen in (policy, polyamp.Policy("mixed_bfloat16"), polyamp.Policy("float32")):
        model = harness.mlp(layers(SIZES))
        outputs.append(np.asarray(backend.to_numpy(chosen.autocast(model)(harness.array(data()["x"])))))
    exact = outputs[2]
    narrow, half = (np.abs(each - exact).max() / np.abs(exact).max() for each in outputs[:2])
    if policy.float8 is not None:
        assert 2 * half < narrow < 2.0**-3


def test_s36_a_loss_scale_changes_nothing(harness: Harness, policy: polyamp.Policy) -> None:
    weights = {}
    for scale in (1.0, 1024.0):
        made = recipe(policy, scaler=polyamp.LossScaler(kind="static", init_scale=scale))
        state, _ = advance(polyamp.init(harness.mlp(layers(SIZES)), made), [data(seed=n) for n in range(3)])
        weights[scale] = flat_weights(harness, state)
    np.testing.assert_array_equal(weights[1.0], weights[1024.0])


def test_s36_micro_batches_are_products_of_their_own(
    backend: Backend, harness: Harness, policy: polyamp.Policy
) -> None:
    """Their mean gradient is that of two batches, but for the rounding of float32."""
    parts = split_rows(data(size=16), [8, 8])
    gradients = []
    for part in parts:
        state = polyamp.init(harness.mlp(layers(SIZES)), recipe(policy))
        _, found = polyamp.value_and_grad(loss_fn)(state, part)
        gradients.append({name: np.array(backend.to_numpy(each)) for name, each in backend.named_gradients(found)})
    state = polyamp.init(harness.mlp(layers(SIZES)), recipe(policy, optimizer=polyamp.sgd(1.0), accumulate_steps=2))
    before = {name: np.array(each) for name, each in backend.export_state(state).items()}
    state, _ = advance(state, [parts])
    after = backend.export_state(state)
    for name, one in gradients[0].items():
        moved = before[f"model/{name}"] - np.asarray(after[f"model/{name}"])
        np.testing.assert_allclose(moved, (one + gradients[1][name]) / 2.0, rtol=0, atol=2.0**-22, err_msg=name)


@pytest.mark.parametrize(
    ("place", "value", "scaling"),
    [
        ("x", np.inf, "tensor"),
        ("x", np.nan, "tensor"),
        ("gain", np.inf, "tensor"),
        ("gain", np.nan, "tensor"),
        ("x", np.inf, "row"),
        ("gain", np.inf, "block32"),
    ],
)
def test_s36_what_is_not_finite_skips_the_step(
    backend: Backend, harness: Harness, policy_of: PolicyOf, place: str, value: float, scaling: str
) -> None:
    made = recipe(policy_of(scaling), scaler=polyamp.LossScaler(init_scale=2.0))
    state = polyamp.init(harness.mlp(layers(BLOCK_SIZES)), made)
    before = flat_weights(harness, state)
    bad = data(BLOCK_SIZES)
    bad[place][1, 2] = value
    state, (result,) = advance(state, [bad])
    assert bool(backend.to_numpy(result.skipped))
    np.testing.assert_array_equal(flat_weights(harness, state), before)


@pytest.mark.parametrize(("scaling", "sizes"), [("tensor", (4, 8, 3)), ("block32", (16, 32, 16))])
def test_s36_sizes_that_are_no_multiple_of_16_or_32_stay_in_bfloat16(
    harness: Harness, policy_of: PolicyOf, scaling: str, sizes: tuple[int, ...]
) -> None:
    ends = []
    for chosen in (policy_of(scaling), polyamp.Policy("mixed_bfloat16")):
        batches = [data(sizes), data(sizes, seed=1)]
        state, _ = advance(polyamp.init(harness.mlp(layers(sizes)), recipe(chosen)), batches)
        ends.append(flat_weights(harness, state))
    np.testing.assert_array_equal(ends[0], ends[1])


def test_s36_a_module_taken_out_has_bfloat16s_bits(harness: Harness, policy: polyamp.Policy) -> None:
    chosen = policy.replace(overrides={"dense*": "bfloat16"}) if policy.float8 is not None else policy
    ends = []
    for each in (chosen, polyamp.Policy("mixed_bfloat16", overrides={"dense*": "bfloat16"})):
        state, _ = advance(polyamp.init(harness.mlp(layers(SIZES)), recipe(each)), [data(), data(seed=1)])
        ends.append(flat_weights(harness, state))
    np.testing.assert_array_equal(ends[0], ends[1])


def test_s36_training_goes_down_as_in_bfloat16(backend: Backend, harness: Harness, policy: polyamp.Policy) -> None:
    losses = {}
    for name in (policy, polyamp.Policy("mixed_bfloat16")):
        made = recipe(name, optimizer=polyamp.adamw(0.01))
        state = polyamp.init(harness.mlp(layers(SIZES)), made)
        _, results = advance(state, [data()] * 20)
        losses[name] = [to_float(backend, each.loss) for each in results]
    here, half = losses[policy], losses[polyamp.Policy("mixed_bfloat16")]
    assert here[-1] < 0.7 * here[0]
    assert abs(here[-1] - half[-1]) < 0.05 * half[0]


def test_s36_a_micro_batch_of_small_numbers_is_not_flushed(
    backend: Backend, harness: Harness, policy: polyamp.Policy
) -> None:
    """With the scale of the large rows, the small ones would be 0, and so would their outputs without a bias."""
    kernel = np.eye(16, dtype=np.float32)
    model = harness.mlp([DenseWeights(kernel, np.zeros(16, np.float32))])
    run = policy.autocast(model)
    small = (2.0**-30 * data()["x"]).astype(np.float32)
    alone = np.asarray(backend.to_numpy(run(harness.array(small))))
    assert np.abs(alone / small - 1.0).max() < 2.0**-3
    both = np.asarray(backend.to_numpy(run(harness.array(np.concatenate([small, data()["x"]])))))
    assert (both[: len(small)] == 0).all() or policy.float8 is None


def identity(harness: Harness, gain: float) -> Any:
    kernel = gain * np.eye(64, dtype=np.float32)
    return harness.mlp([DenseWeights(kernel, np.zeros(64, np.float32))])


@pytest.mark.parametrize("scaling", ["row", "block32"])
def test_s36_small_rows_and_blocks_are_not_flushed(
    backend: Backend, harness: Harness, policy_of: PolicyOf, scaling: str
) -> None:
    """A row of small numbers has a scale of its own; small numbers of a row have one with blocks alone."""
    policy, x = policy_of(scaling), uneven()["x"]
    out = np.asarray(backend.to_numpy(policy.autocast(identity(harness, 1.0))(harness.array(x))))
    near = np.abs(out / x - 1.0) < 2.0**-3
    assert near[:, :32].all()  # also in the rows that are 2^-30 of the others
    assert (near[:, 32:].all() if scaling == "block32" else (out[:, 32:] == 0).all()) or policy.float8 is None


@pytest.mark.parametrize("scaling", ["row", "block32"])
def test_s36_the_largest_numbers_divided_by_their_scales_are_no_infinity(
    backend: Backend, harness: Harness, policy_of: PolicyOf, scaling: str
) -> None:
    """The largest bfloat16 number rounds to 256 in 8 bits, with the scale 2^-120: together 2^128."""
    policy, x = policy_of(scaling), np.full((8, 64), np.float32(2.0**128 - 2.0**120))
    out = np.asarray(backend.to_numpy(policy.autocast(identity(harness, 2.0**-100))(harness.array(x))))
    assert policy.float8 is None or (out == 2.0**28).all()


@pytest.mark.parametrize(("accumulate", "scaling"), [(1, "tensor"), (2, "tensor"), (1, "row"), (1, "block32")])
def test_s36_a_monitor_measures_what_the_rounding_of_operands_loses(
    harness: Harness, policy_of: PolicyOf, accumulate: int, scaling: str
) -> None:
    """As the reference does; and the first layer's activations and parameters by plain NumPy."""
    policy = policy_of(scaling)
    if policy.float8 is None:
        return
    given, weights = data(BLOCK_SIZES), layers(BLOCK_SIZES)
    given["x"][:, :4] *= 2.0**-20  # to zero in 8 bits, beside the others
    weights[0].kernel[:, 2] *= 2.0**-21
    found = []
    for module in (harness, ReferenceHarness(REFERENCE)):
        made = recipe(policy, accumulate_steps=accumulate)
        monitor = polyamp.Monitor(every=2, gradients=False, updates=False, products=True)
        state = polyamp.init(module.mlp(weights), made)
        advance(state, [data(BLOCK_SIZES), given], monitor=monitor)
        modules = monitor.records[0].modules
        assert [each.module for each in modules] == modules_of(state)
        found.append([each.products for each in modules])
    assert len(found[0]) == len(found[1]) == 2
    for here, there in zip(*found, strict=True):
        assert here is not None
        assert there is not None
        for name in PRODUCT_OPERANDS:
            one: RoundingStats = getattr(here, name)
            other: RoundingStats = getattr(there, name)
            assert one.elements == other.elements
            assert one.underflow == pytest.approx(other.underflow, abs=2.0 / one.elements)
            assert one.sqnr == pytest.approx(other.sqnr, abs=0.3)
    first = found[0][0]
    assert first is not None
    assert first.inputs.underflow == 4 / 64
    x = given["x"].astype(ml_dtypes.bfloat16).astype(np.float32)
    parts = np.split(x, accumulate)
    lost = [part - quantize(part, "float8_e4m3fn", scaling).to_float64() for part in parts]
    assert first.inputs.sqnr == pytest.approx(10 * np.log10(np.sum(x**2) / np.sum(np.concatenate(lost) ** 2)), abs=1e-3)
