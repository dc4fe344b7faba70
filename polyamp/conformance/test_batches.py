"""Rules S24 and S26 on batches: an empty one is refused before the step, and NumPy's float64 goes in as float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import (
    Batch,
    batch,
    changed_arrays,
    flat_weights,
    layers,
    loss_fn,
    recipe,
    to_float,
    train,
)
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import BatchError


def empty_batch() -> Batch:
    return {name: value[:0] for name, value in batch().items()}


@pytest.mark.parametrize(
    ("count", "given"),
    [
        (1, empty_batch()),
        (1, {**empty_batch(), "rate": np.float32(0.5), "step": 3}),
        (2, empty_batch()),
        (2, [empty_batch(), empty_batch()]),
    ],
    ids=["one", "beside scalars", "split", "listed"],
)
def test_s24_an_empty_batch_is_refused_before_the_step(
    backend: Backend, harness: Harness, count: int, given: Any
) -> None:
    made = recipe(accumulate_steps=count)
    state = polyamp.init(harness.mlp(layers()), made)
    before = backend.export_state(state)
    calls: list[tuple[Any, Any]] = [(polyamp.train_step(loss_fn, made), given)]
    if count == 1:
        calls.append((polyamp.value_and_grad(loss_fn), given))
    for call, item in calls:
        with pytest.raises(
            BatchError, match=r"batch is empty: of its [36] arrays none has a row along axis 0.*drop_last"
        ):
            call(state, item)
    assert changed_arrays(before, backend.export_state(state)) == []
    full = [batch(size=2), batch(1, size=2)] if isinstance(given, list) else batch()
    state, result = polyamp.train_step(loss_fn, made)(state, full)
    assert to_float(backend, result.step) == 1


def test_s08_a_list_of_a_number_for_each_row_is_not_split_and_refused(backend: Backend, harness: Harness) -> None:
    """Whole in every micro-batch its entries would meet other rows."""
    made = recipe(accumulate_steps=2)
    state = polyamp.init(harness.mlp(layers()), made)
    before = backend.export_state(state)
    given = {**batch(), "lengths": [5, 1, 4, 2, 3, 5, 1, 2]}
    with pytest.raises(BatchError, match=r"batch\['lengths'\]"):
        polyamp.train_step(loss_fn, made)(state, given)
    assert changed_arrays(before, backend.export_state(state)) == []


def test_s24_an_empty_array_beside_others_is_the_programs_own(backend: Backend, harness: Harness) -> None:
    made = recipe()
    state = polyamp.init(harness.mlp(layers()), made)
    _, result = polyamp.train_step(loss_fn, made)(state, {**batch(), "boxes": np.zeros((0, 4), np.float32)})
    assert np.isfinite(to_float(backend, result.loss))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("form", ["one", "split", "listed"])
def test_s26_host_arrays_of_float64_train_as_float32(
    backend: Backend, harness: Harness, policy: str, form: str
) -> None:
    """Bit for bit what the same numbers in float32 give, scalars and both ways in included."""
    made = recipe(policy, accumulate_steps=1 if form == "one" else 2)
    wide = {name: value.astype(np.float64) for name, value in batch().items()}
    narrow = batch()
    halves: list[Any] = [
        [{name: value[i : i + 4] for name, value in item.items()} for i in (0, 4)] if form == "listed" else item
        for item in (wide, narrow)
    ]
    states, losses = [], []
    for item in halves:
        state, (result,) = train(harness, made, [item])
        states.append(flat_weights(harness, state))
        losses.append(to_float(backend, result.loss))
    assert losses[0] == losses[1]
    assert np.array_equal(states[0], states[1])
    if form == "one":
        state = polyamp.init(harness.mlp(layers()), made)
        found = [polyamp.value_and_grad(loss_fn)(state, item) for item in (wide, narrow)]
        assert to_float(backend, found[0][0]) == to_float(backend, found[1][0])
        for (_, one), (_, other) in zip(*(backend.named_gradients(g) for _, g in found), strict=True):
            assert np.array_equal(backend.to_numpy(one), backend.to_numpy(other))


def test_s26_what_loss_fn_sees_of_host_arrays_and_of_native_ones(backend: Backend, harness: Harness) -> None:
    """NumPy's arrays and scalars arrive as float32, integers as they are; the framework's own arrays stay (S2)."""
    seen: dict[str, str] = {}
    native = harness.array(np.ones((8, 1)))

    def watching(model: Any, item: Batch) -> Any:
        for name in ("x", "rate", "native", "label"):
            seen[name] = str(item[name].dtype)
        return loss_fn(model, item)

    made = recipe()
    state = polyamp.init(harness.mlp(layers()), made)
    wide = {name: value.astype(np.float64) for name, value in batch().items()}
    given = {**wide, "rate": np.float64(0.5), "label": np.arange(8, dtype=np.int32)}
    polyamp.train_step(watching, made)(state, {**given, "native": native})
    assert "float32" in seen["x"]
    assert "float32" in seen["rate"]
    assert "int32" in seen["label"]
    if not isinstance(native, np.ndarray):
        assert seen["native"] == str(native.dtype)
