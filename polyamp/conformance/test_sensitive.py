"""Rule S4 in detail: what feeds a logarithm, products without free axes or contractions, the gradient of a gather."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import batch, layers, recipe
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness

MIXED = ["mixed_float16", "mixed_bfloat16"]
READS = 8192


@pytest.mark.parametrize("policy", MIXED)
def test_s04_what_feeds_a_logarithm_is_float32(backend: Backend, harness: Harness, policy: str) -> None:
    chosen = polyamp.Policy(policy, mode="autocast")
    values = np.linspace(0.1, 6.0, 4 * 600, dtype=np.float32).reshape(4, 600)  # sigmoid(6) is 0.9975: bfloat16's 1
    narrow = backend.cast(harness.array(values), chosen.compute)
    wide = backend.cast(narrow, "float32")
    wrong = {}
    for name, operation in harness.saturating().items():
        got, want = backend.to_numpy(chosen.autocast(operation)(narrow)), backend.to_numpy(operation(wide))
        if not np.allclose(got, want, rtol=1e-4, atol=0.0):
            wrong[name] = float(np.max(np.abs(got - want)))
    assert not wrong, f"the largest error of what was computed in 16 bits: {wrong}"


@pytest.mark.parametrize("policy", MIXED)
def test_s04_inner_products_run_in_float32(backend: Backend, harness: Harness, policy: str) -> None:
    chosen = polyamp.Policy(policy, mode="autocast")
    values = np.linspace(10.0, 12.0, 4 * 600, dtype=np.float32).reshape(4, 600)  # 600 * 121 is beyond float16
    narrow = backend.cast(harness.array(values), chosen.compute)
    exact = np.square(backend.to_numpy(narrow).astype(np.float64)).sum(-1)
    wrong = {}
    for name, operation in harness.inner_products().items():
        got = backend.to_numpy(chosen.autocast(operation)(narrow))
        if got.dtype != np.float32 or not np.allclose(got, exact, rtol=1e-5, atol=0.0):
            wrong[name] = got.tolist()
    assert not wrong, f"not {exact.tolist()}: {wrong}"


@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("way", ["outer product", "contraction of length 1"])
def test_s04_products_that_contract_nothing_follow_their_operands(
    backend: Backend, harness: Harness, way: str, policy: str
) -> None:
    positions = np.arange(4096, dtype=np.float32)  # rotary embeddings: bfloat16 knows 256 of them one by one
    frequencies = np.geomspace(1.0, 1e-4, 16, dtype=np.float32)
    left, right = harness.array(positions), harness.array(frequencies)
    column, row = harness.array(positions[:, None]), harness.array(frequencies[None, :])

    def angles(_: Any) -> Any:
        return harness.outer(left, right) if way == "outer product" else harness.matmul(column, row)

    got = backend.to_numpy(polyamp.Policy(policy).autocast(angles)(harness.array(np.zeros(1, np.float32))))
    assert np.abs(got - np.outer(positions, frequencies)).max() < 1e-3


@pytest.mark.parametrize("policy", MIXED)
def test_s04_the_gradient_of_a_gather_accumulates_in_float32(backend: Backend, harness: Harness, policy: str) -> None:
    rows = np.zeros(READS, np.int64)
    rows[0] = 1
    data = {"x": batch(size=2)["x"], "y": np.full((READS, 3), 3.0, np.float32)}  # every term has the same sign

    def loss_fn(model: Any, data: Any) -> Any:
        return polyamp.losses.mean_squared_error(model(data["x"]), data["y"])

    def gradients(name: str) -> list[Any]:
        made = recipe(polyamp.Policy(name, mode="autocast"), scaler="off")
        state = polyamp.init(harness.gathered(layers((4, 3)), rows), made)
        _, grads = polyamp.value_and_grad(loss_fn)(state, data)
        return [backend.to_numpy(value) for _, value in backend.named_gradients(grads)]

    for got, want in zip(gradients(policy), gradients("float32"), strict=True):
        assert np.abs(got - want).max() < 0.01 * np.abs(want).max()
