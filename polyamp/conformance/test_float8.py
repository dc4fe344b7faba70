"""Rule S36: products of activations with parameters in 8 bits."""

from __future__ import annotations

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
EMULATED = Float8(emulate=True)


@pytest.fixture
def policy(backend: Backend, harness: Harness) -> polyamp.Policy:
    """Return the policy. A backend without such products refuses it by name, which is all that is asked of it."""
    chosen = polyamp.Policy("mixed_float8", float8=EMULATED)
    if not hasattr(backend, "has_float8_products"):
        with pytest.raises(UnsupportedError, match=r"no products in 8 bits \(S36\)"):
            polyamp.init(harness.mlp(layers(SIZES)), recipe(chosen))
        return polyamp.Policy("mixed_bfloat16")
    return chosen


def data(**options: Any) -> Any:
    return batch(inputs=16, outputs=16, **options)


@pytest.mark.parametrize("parts", [1, 2])
def test_s36_a_step_is_that_of_the_reference(harness: Harness, policy: polyamp.Policy, parts: int) -> None:
    """Micro-batches have scales of their own: with one for both, the second would be 0."""
    whole = data(size=16)
    whole["x"][8:] *= 2.0**-30
    batches = whole if parts == 1 else split_rows(whole, [8, 8])
    moved = []
    for module in (harness, ReferenceHarness(REFERENCE)):
        made = recipe(policy, optimizer=polyamp.sgd(1.0), accumulate_steps=parts)
        state = polyamp.init(module.mlp(layers(SIZES)), made)
        before = module.weights(state)
        state, _ = advance(state, [batches])
        after = module.weights(state)
        moved.append([new - old for a, b in zip(after, before, strict=True) for new, old in zip(a, b, strict=True)])
    for here, there in zip(*moved, strict=True):
        # bfloat16's roundoff, in an activation that is rounded to 8 bits again: now and then to the next number
        assert np.abs(here - there).max() <= 2.0**-5 * np.abs(there).max()


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


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("place", ["x", "gain"])
def test_s36_what_is_not_finite_skips_the_step(
    backend: Backend, harness: Harness, policy: polyamp.Policy, place: str, value: float
) -> None:
    state = polyamp.init(harness.mlp(layers(SIZES)), recipe(policy, scaler=polyamp.LossScaler(init_scale=2.0)))
    before = flat_weights(harness, state)
    bad = data()
    bad[place][1, 2] = value
    state, (result,) = advance(state, [bad])
    assert bool(backend.to_numpy(result.skipped))
    np.testing.assert_array_equal(flat_weights(harness, state), before)


def test_s36_sizes_that_are_no_multiple_of_16_stay_in_bfloat16(
    backend: Backend, harness: Harness, policy: polyamp.Policy
) -> None:
    del backend
    ends = []
    for chosen in (policy, polyamp.Policy("mixed_bfloat16")):
        state, _ = advance(polyamp.init(harness.mlp(layers((4, 8, 3))), recipe(chosen)), [batch(), batch(seed=1)])
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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_s36_a_monitor_measures_what_the_rounding_of_operands_loses(
    harness: Harness, policy: polyamp.Policy, accumulate: int
) -> None:
    """As the reference does; and the first layer's activations and parameters by plain NumPy."""
    if policy.float8 is None:
        return
    given, weights = data(), layers(SIZES)
    given["x"][:, :4] *= 2.0**-20  # to zero in 8 bits, beside the others
    weights[0].kernel[:, 2] *= 2.0**-21
    found = []
    for module in (harness, ReferenceHarness(REFERENCE)):
        made = recipe(policy, accumulate_steps=accumulate)
        monitor = polyamp.Monitor(every=2, gradients=False, updates=False, products=True)
        state = polyamp.init(module.mlp(weights), made)
        advance(state, [data(), given], monitor=monitor)
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
    assert first.inputs.underflow == 0.25
    x = given["x"].astype(ml_dtypes.bfloat16).astype(np.float32)
    parts = np.split(x, accumulate)
    lost = [part - dequantize(part, "float8_e4m3fn") for part in parts]
    assert first.inputs.sqnr == pytest.approx(10 * np.log10(np.sum(x**2) / np.sum(np.concatenate(lost) ** 2)), abs=1e-3)


def dequantize(values: Any, form: str) -> Any:
    codes = quantize(values, form)
    return np.ldexp(codes.numbers.astype(np.float32), -codes.exponent)
