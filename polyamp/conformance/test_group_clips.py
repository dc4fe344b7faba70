"""Rules S11 and S27: groups whose gradients are clipped by limits of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import Group
from polyamp.conformance.problems import (
    advance,
    batch,
    changed_arrays,
    flat_weights,
    layers,
    loss_fn,
    recipe,
    relative_difference,
    to_float,
    train,
)
from polyamp.contract import registry
from polyamp.contract.backend import Backend
from polyamp.contract.harness import DenseWeights, Harness
from polyamp.errors import PolyampError

SCALER = polyamp.LossScaler(init_scale=16.0)


def updates(harness: Harness, made: polyamp.Recipe) -> list[DenseWeights]:
    """Return what one step of SGD with rate 1 subtracts: the gradients, clipped."""
    state = polyamp.init(harness.mlp(layers()), made)
    before = harness.weights(state)
    state, _ = advance(state, [batch()])
    return [
        DenseWeights(*(old - new for old, new in zip(one, other, strict=True)))
        for one, other in zip(before, harness.weights(state), strict=True)
    ]


def norm(*parts: Any) -> float:
    return float(np.sqrt(sum(float(np.sum(np.square(part, dtype=np.float64))) for part in parts)))


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("limit", [None, 0.01])
def test_s11_a_group_is_clipped_by_its_own_norm_and_the_others_by_theirs(
    backend: Backend, harness: Harness, limit: float | None, scale: float | None
) -> None:
    scaler = polyamp.LossScaler.off() if scale is None else polyamp.LossScaler.static(scale)
    plain = updates(harness, recipe(optimizer=polyamp.sgd(1.0)))
    groups = [Group("**/dense1", clip_norm=0.03125)]
    made = recipe(optimizer=polyamp.sgd(1.0, groups=groups), clip_norm=limit, scaler=scaler)
    clipped = updates(harness, made)
    assert norm(*plain[1]) > 0.06
    for name in ("kernel", "bias"):
        got, want = getattr(clipped[1], name), getattr(plain[1], name) * (0.03125 / norm(*plain[1]))
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-6)
        factor = 1.0 if limit is None else limit / norm(*plain[0])
        np.testing.assert_allclose(getattr(clipped[0], name), getattr(plain[0], name) * factor, rtol=2e-4, atol=2e-6)
    _, (result,) = train(harness, made, [batch()])
    assert relative_difference(to_float(backend, result.grad_norm), norm(*plain[0], *plain[1])) < 1e-5, (
        "before the clip"
    )


def test_s11_values_of_a_group_and_two_groups_that_overlap(harness: Harness) -> None:
    """The kind decides before the glob (S27). A set's norm is that of the parameters that it has in the end."""
    plain = updates(harness, recipe(optimizer=polyamp.sgd(1.0)))
    groups = [
        Group("**/dense0", clip_norm=0.02),
        Group("**/dense1", clip_norm=0.03),
        Group(kind="bias", clip_value=0.01),
    ]
    made = recipe(optimizer=polyamp.sgd(1.0, groups=groups), clip_norm=1e-9)
    for got, want, limit in zip(updates(harness, made), plain, (0.02, 0.03), strict=True):
        np.testing.assert_allclose(got.kernel, want.kernel * (limit / norm(want.kernel)), rtol=2e-4, atol=2e-6)
        np.testing.assert_allclose(got.bias, np.clip(want.bias, -0.01, 0.01), rtol=2e-4, atol=2e-6)


def test_s11_group_clips_train_as_the_reference_does(backend: Backend, harness: Harness, tmp_path: Path) -> None:
    """For 50 steps, with a late group, accumulation, skipped steps and `clip_eps`; resumed bit for bit."""
    groups = [
        Group("**/dense1", clip_norm=0.05, trainable_after=4),
        Group(kind="bias", clip_value=0.02, learning_rate_scale=0.5),
    ]
    made = recipe(
        optimizer=polyamp.adamw(0.02, weight_decay=0.1, groups=groups),
        scaler=SCALER,
        clip_norm=0.1,
        clip_eps=1e-3,
        accumulate_steps=2,
    )
    batches = [batch(i, gain=np.inf if i in (4, 21) else 1.0 + i % 3) for i in range(50)]
    state, results = train(harness, made, batches[:30])
    polyamp.save(state, tmp_path / "half")
    state, more = advance(state, batches[30:])
    oracle = registry.get("reference").testing()
    expected, wanted = train(oracle, made, batches)
    np.testing.assert_allclose(flat_weights(harness, state), flat_weights(oracle, expected), rtol=0, atol=2.5e-5)
    norms = [to_float(backend, one.grad_norm) for one in (*results, *more) if not backend.to_numpy(one.skipped)]
    np.testing.assert_allclose(norms, [float(one.grad_norm) for one in wanted if not one.skipped], rtol=5e-5)
    again = polyamp.restore(polyamp.init(harness.mlp(layers()), made), tmp_path / "half")
    again, _ = advance(again, batches[30:])
    assert changed_arrays(backend.export_state(state), backend.export_state(again)) == []


def test_s11_group_clips_in_two_halves(backend: Backend, harness: Harness) -> None:
    """The caller's gradients stay as they are."""
    made = recipe(optimizer=polyamp.sgd(0.5, groups=[Group("**/dense0", clip_norm=0.01)]), clip_norm=0.02)
    state, twin = (polyamp.init(harness.mlp(layers()), made) for _ in range(2))
    _, gradients = polyamp.value_and_grad(loss_fn)(state, batch())
    copies = {name: np.array(backend.to_numpy(value)) for name, value in backend.named_gradients(gradients)}
    state, _ = polyamp.apply_gradients(state, gradients)
    assert all(np.array_equal(backend.to_numpy(g), copies[name]) for name, g in backend.named_gradients(gradients))
    twin, _ = advance(twin, [batch()])
    np.testing.assert_allclose(flat_weights(harness, state), flat_weights(harness, twin), rtol=1e-6, atol=1e-6)


def test_s27_two_clips_of_one_group_are_refused(harness: Harness) -> None:
    with pytest.raises(PolyampError, match="clip_norm and clip_value are two ways to clip"):
        Group("**/dense0", clip_norm=1.0, clip_value=1.0)
    with pytest.raises(
        PolyampError, match=r"clip_norm must be None or a finite number above 0\. Received: clip_norm=-1"
    ):
        Group("**/dense0", clip_norm=-1)
    absent = recipe(optimizer=polyamp.adamw(0.1, groups=[Group("**/dense7", clip_norm=1.0)]))
    with pytest.raises(PolyampError, match=r"'\*\*/dense7' matches no trainable parameter"):
        polyamp.init(harness.mlp(layers()), absent)
