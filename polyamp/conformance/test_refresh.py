"""Rule S28: after a model was changed, `refresh` keeps the optimizer state of what stayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import (
    advance,
    batch,
    flat_weights,
    layers,
    recipe,
    relative_difference,
    stateful_recipe,
    to_float,
)
from polyamp.contract import registry
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import ModelError, StateError, UnsupportedError

RATE = stateful_recipe().optimizer.learning_rate
Slots = dict[str, np.ndarray[Any, Any]]


def advance_state(state: Any, seeds: Sequence[int], outputs: int = 3) -> Any:
    return advance(state, [batch(seed, outputs=outputs) for seed in seeds])[0]


def layer_slots(arrays: Slots, number: int) -> Slots:
    """The optimizer's arrays of one dense layer."""
    return {n: a for n, a in arrays.items() if n.startswith("optimizer/") and f"dense{number}/" in n and a.size > 1}


def test_s28_a_new_head_starts_anew_and_the_body_goes_on(backend: Backend, harness: Harness, tmp_path: Path) -> None:
    state = advance_state(polyamp.init(harness.mlp(layers()), stateful_recipe()), range(3))
    before = backend.export_state(state)
    head = layers((8, 5), seed=7)[0]
    state = polyamp.refresh(state, harness.with_head(state, head))
    after = backend.export_state(state)
    assert layer_slots(before, 0)
    for name, array in layer_slots(before, 0).items():
        assert np.array_equal(after[name], array), name
        assert np.any(array != 0), name
    assert layer_slots(after, 1)
    assert not any(np.any(array != 0) for array in layer_slots(after, 1).values())
    for name in ("step", *(name for name in before if name.startswith("loss_scale/"))):
        assert np.array_equal(after[name], before[name]), name
    assert to_float(backend, state.step) == 3
    state = advance_state(state, range(3, 5), outputs=5)
    polyamp.save(state, tmp_path / "grown")  # S22 holds for what has grown
    again = polyamp.init(harness.mlp([layers()[0], head]), stateful_recipe())
    again = polyamp.restore(again, tmp_path / "grown")
    ends = [flat_weights(harness, advance_state(each, range(5, 7), outputs=5)) for each in (state, again)]
    assert np.array_equal(ends[0], ends[1])


def test_s28_a_new_head_takes_the_first_step_of_a_new_parameter(backend: Backend, harness: Harness) -> None:
    """Its bias correction counts its own updates (S23), while the rate is that of the state's next update (S13)."""
    settings: dict[str, Any] = {"scaler": polyamp.LossScaler.off(), "optimizer": polyamp.adam(RATE, eps=1e-12)}
    state = advance_state(polyamp.init(harness.mlp(layers()), recipe(**settings)), range(3))
    head = layers((8, 3), seed=7)[0]
    state = polyamp.refresh(state, harness.with_head(state, head), fresh="dense1")
    state = advance_state(state, [3])
    moved = np.abs(harness.weights(state)[1].kernel - head.kernel)
    rate = float(RATE(3))
    np.testing.assert_allclose(np.median(moved), rate, rtol=1e-3)


def test_s28_nothing_changed_changes_nothing(backend: Backend, harness: Harness) -> None:
    ends = []
    for refreshes in (False, True):
        state = advance_state(polyamp.init(harness.mlp(layers()), stateful_recipe()), range(3))
        if refreshes:
            state = polyamp.refresh(state, state.model)
        ends.append(flat_weights(harness, advance_state(state, range(3, 5))))
    assert np.array_equal(ends[0], ends[1])


def test_s28_thawed_layers_start_anew_and_frozen_ones_are_dropped(backend: Backend, harness: Harness) -> None:
    state = polyamp.init(harness.mlp(layers()), stateful_recipe())
    try:
        model = harness.with_frozen(state, [0])
    except UnsupportedError:
        return  # its models have no such switch
    state = advance_state(polyamp.refresh(state, model), range(3))
    start, head = layers()[0], layer_slots(backend.export_state(state), 1)
    assert np.array_equal(harness.weights(state)[0].kernel, start.kernel)
    assert layer_slots(backend.export_state(state), 0) == {}
    state = polyamp.refresh(state, harness.with_frozen(state, []))
    after = backend.export_state(state)
    assert all(np.array_equal(after[name], array) for name, array in head.items())
    assert layer_slots(after, 0)
    assert not any(np.any(array != 0) for array in layer_slots(after, 0).values())
    state = advance_state(state, range(3, 5))
    assert not np.array_equal(harness.weights(state)[0].kernel, start.kernel)
    frozen = polyamp.refresh(state, harness.with_frozen(state, [1]))
    assert layer_slots(backend.export_state(frozen), 1) == {}


def test_s28_what_is_said_of_parameters_must_be_there(backend: Backend, harness: Harness) -> None:
    state = advance_state(polyamp.init(harness.mlp(layers()), stateful_recipe()), [0])
    before = backend.export_state(state)
    for name in ("fresh", "keep"):
        with pytest.raises(ModelError, match=rf"{name}: the glob 'haed/\*\*' matches no trained parameter"):
            polyamp.refresh(state, state.model, **{name: "haed/**"})
    assert all(np.array_equal(array, before[name]) for name, array in backend.export_state(state).items())
    assert to_float(backend, advance_state(state, [1]).step) == 2
    with pytest.raises(StateError, match=r"refresh takes a state .* Received: tuple"):
        polyamp.refresh((state, None))  # type: ignore[arg-type]  # the mistake


def test_s28_training_on_is_the_references(backend: Backend, harness: Harness) -> None:
    """Two swaps of the head and six steps, against the NumPy reference."""
    ends = []
    for own in (harness, registry.get("reference").testing()):
        settings = recipe(optimizer=polyamp.adamw(RATE, weight_decay=0.1))
        state = advance_state(polyamp.init(own.mlp(layers()), settings), range(2))
        for number_, outputs in enumerate((5, 3)):
            state = polyamp.refresh(state, own.with_head(state, layers((8, outputs), seed=number_ + 5)[0]))
            state = advance_state(state, range(2 * number_ + 2, 2 * number_ + 4), outputs=outputs)
        ends.append(flat_weights(own, state))
    assert relative_difference(ends[0], ends[1]) < 2e-4
