"""Rule S30: a model's weights, and a training state, move into another model whole or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import batch, flat_weights, layers, loss_fn, stateful_recipe
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import PortError, UnsupportedError
from polyamp.porting.layouts.converter import HasConverter

SOURCE, TARGET, OTHER = layers(), layers(seed=7), layers((8, 5), seed=7)


def model_weights(harness: Harness, model: Any) -> list[np.ndarray[Any, Any]]:
    """A model's weights, layer by layer."""
    return [np.asarray(array) for layer in harness.weights(polyamp.init(model, stateful_recipe())) for array in layer]


def is_porting_refused(backend: Backend, source: Any, target: Any) -> bool:
    """Whether the backend moves no models; it says so then."""
    if isinstance(backend, HasConverter):
        return False
    with pytest.raises(UnsupportedError, match=f"the {backend.name} backend of this version has no converter"):
        polyamp.port(source, target)
    return True


def test_s30_weights_move_bit_for_bit(backend: Backend, harness: Harness) -> None:
    source, target = harness.mlp(SOURCE), harness.mlp(TARGET)
    if is_porting_refused(backend, source, target):
        return
    ported, report = polyamp.port(source, target)
    assert report.clean
    wanted = [np.asarray(array) for layer in SOURCE for array in layer]
    for array, want in zip(model_weights(harness, ported), wanted, strict=True):
        np.testing.assert_array_equal(array, want)


def test_s30_what_does_not_fit_changes_nothing(backend: Backend, harness: Harness) -> None:
    source, target = harness.mlp(SOURCE), harness.mlp(OTHER)
    if is_porting_refused(backend, source, target):
        return
    with pytest.raises(PortError, match="have no partner"):
        polyamp.port(source, target)
    for array, want in zip(model_weights(harness, target), (a for layer in OTHER for a in layer), strict=True):
        np.testing.assert_array_equal(array, np.asarray(want))


def test_s30_a_training_state_goes_on_in_another(backend: Backend, harness: Harness) -> None:
    step = polyamp.train_step(loss_fn, stateful_recipe())
    state, other = (polyamp.init(harness.mlp(weights), stateful_recipe()) for weights in (SOURCE, TARGET))
    if is_porting_refused(backend, state, other):
        return
    for seed in range(3):
        state, _ = step(state, batch(seed))
    other, report = polyamp.port(state, other)
    assert report.clean
    scales = []
    ends = []
    for each in (state, other):
        for seed in range(3, 6):
            each, _ = step(each, batch(seed))  # one state after the other
            scales.append(float(backend.to_numpy(each.scale_state.scale)))
        ends.append(flat_weights(harness, each))
    assert scales[:3] == scales[3:]
    np.testing.assert_array_equal(ends[0], ends[1])
