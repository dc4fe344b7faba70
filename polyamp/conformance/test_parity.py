"""Rule S21: the same weights and batches give the same curves as the NumPy reference, and so as each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import batch, flat_weights, layers, recipe, relative_difference, to_float, train
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.reference import BACKEND as REFERENCE

FLOAT32_TOLERANCE = 2.5e-5
"""To the reference, so that two backends are within 5e-5 of each other."""

OPTIMIZERS = {
    "sgd_momentum": polyamp.sgd(0.05, momentum=0.9),
    "sgd_nesterov_decay": polyamp.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": polyamp.adam(1e-3),
    "adam_large_eps": polyamp.adam(1e-3, eps=1e-3, weight_decay=1e-2),
    "adamw": polyamp.adamw(1e-3),
    "rmsprop": polyamp.rmsprop(1e-3),
    "rmsprop_momentum": polyamp.rmsprop(1e-3, momentum=0.9, centered=True, eps=1e-3),
    "adagrad": polyamp.adagrad(1e-2, lr_decay=1e-2),
    "lion": polyamp.lion(1e-4, weight_decay=0.1),
    "nadam": polyamp.nadam(1e-3),
    "nadam_decoupled": polyamp.nadam(1e-3, eps=1e-3, weight_decay=1e-2, decoupled_weight_decay=True),
    "nadamw": polyamp.nadamw(1e-3, eps=1e-3),
    "amsgrad": polyamp.adamw(1e-3, eps=1e-3, amsgrad=True),
    "lamb": polyamp.lamb(1e-3, eps=1e-3),
    "adafactor": polyamp.adafactor(1e-2, weight_decay=0.1),
    "muon": polyamp.muon(1e-2, adamw_learning_rate=1e-3, eps=1e-3),
    "muon_moonlight": polyamp.muon(1e-3, scale="moonlight", nesterov=False, eps=1e-3),
    "schedule_free": polyamp.schedule_free(polyamp.schedules.linear_warmup(1e-3, 20), eps=1e-3, weight_decay=0.1),
}


def loss_curve(backend: Backend, harness: Harness, made: polyamp.Recipe, steps: int) -> tuple[list[float], Any]:
    """The loss curve and the last state of the suite's MLP."""
    state, results = train(harness, made, [batch(i, size=16) for i in range(steps)], weights=layers((4, 16, 3)))
    return [to_float(backend, result.loss) for result in results], state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_s21_float32_curves_agree_over_100_steps(backend: Backend, harness: Harness, name: str) -> None:
    made = recipe(optimizer=OPTIMIZERS[name], clip_norm=2.0)
    mine, state = loss_curve(backend, harness, made, 100)
    reference, oracle = loss_curve(REFERENCE, REFERENCE.testing(), made, 100)
    assert relative_difference(mine, reference) <= FLOAT32_TOLERANCE
    np.testing.assert_allclose(
        flat_weights(harness, state), flat_weights(REFERENCE.testing(), oracle), rtol=1e-3, atol=1e-4
    )


SCHEDULES: dict[str, polyamp.schedules.Schedule] = {
    "linear_warmup": polyamp.schedules.linear_warmup(0.1, 10, start=0.01, origin=-1),
    "cosine": polyamp.schedules.cosine(0.1, 25),
    "warmup_cosine": polyamp.schedules.warmup_cosine(0.1, 5, 25, origin=-1),
    "step": polyamp.schedules.step(0.1, every=7, factor=0.5),
    "piecewise": polyamp.schedules.piecewise((0.1, 0.01), (12,)),
    "join": polyamp.schedules.join(
        [
            polyamp.schedules.linear(0.1, 2, 5, end=0.02, start=0.01, origin=-1),
            polyamp.schedules.wsd(0.1, 1, 5, 3, end=0.01),
            polyamp.schedules.one_cycle(0.1, 1.5, 4),
            polyamp.schedules.inverse_sqrt(0.1, 2),
            polyamp.schedules.polynomial(0.1, 6, 2.0),
            polyamp.schedules.exponential(0.1, 0.5, 2),
            polyamp.schedules.restarts(0.1, 2, 2, end=0.01, peak_factor=0.5),
        ],
        (4, 8, 12, 16, 20, 24),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_s21_schedules_agree(backend: Backend, harness: Harness, name: str) -> None:
    made = recipe(optimizer=polyamp.sgd(SCHEDULES[name], momentum=0.9))
    mine, _ = loss_curve(backend, harness, made, 30)
    reference, _ = loss_curve(REFERENCE, REFERENCE.testing(), made, 30)
    assert relative_difference(mine, reference) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_s21_mixed_curves_are_no_further_apart_than_from_float32(
    backend: Backend, harness: Harness, policy: str
) -> None:
    def distances(optimizer: Any) -> tuple[float, float]:
        made = {p: recipe(p, optimizer=optimizer, scaler=None) for p in ("float32", policy)}
        mine = {p: np.array(loss_curve(backend, harness, r, 60)[0]) for p, r in made.items()}
        theirs = {p: np.array(loss_curve(REFERENCE, REFERENCE.testing(), r, 60)[0]) for p, r in made.items()}
        own = max(relative_difference(side["float32"], side[policy]) for side in (mine, theirs))
        return relative_difference(mine[policy], theirs[policy]), own

    apart, own = distances(polyamp.sgd(0.05, momentum=0.9))
    assert 0.0 < own < 0.2
    assert apart <= 2.0 * own


def test_s21_losses_agree_with_the_reference(backend: Backend, harness: Harness) -> None:
    rng = np.random.default_rng(0)
    logits = (10.0 * rng.normal(size=(6, 4))).astype(np.float32)
    targets = rng.uniform(size=(6, 4)).astype(np.float32)
    labels = rng.integers(0, 4, 6).astype(np.int32)
    cases: list[tuple[Any, Any, Any]] = [
        (polyamp.losses.mean_squared_error, logits, targets),
        (polyamp.losses.sigmoid_cross_entropy, logits, targets),
        (polyamp.losses.huber, logits, targets),
        (polyamp.losses.softmax_cross_entropy, logits, labels),
    ]
    for function, first, second in cases:
        for reduction in ("mean", "none"):
            got = backend.to_numpy(function(harness.array(first), harness.array(second), reduction=reduction))
            want = np.asarray(function(first, second, reduction=reduction))
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6, err_msg=function.__name__)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_trap_cross_entropy_of_30_is_30(backend: Backend, harness: Harness, dtype: str) -> None:
    """Clipped probabilities report 16.1."""
    logits = backend.cast(harness.array(np.array([[0.0, 30.0]], np.float32)), dtype)
    loss = polyamp.losses.softmax_cross_entropy(logits, harness.array(np.array([0], np.int32)))
    assert to_float(backend, loss) == 30.0


def test_s20_losses_refuse_shapes_that_would_broadcast(harness: Harness) -> None:
    one, two = harness.array(np.ones((3, 1), np.float32)), harness.array(np.ones(3, np.float32))
    with pytest.raises(polyamp.LossError, match="one shape"):
        polyamp.losses.mean_squared_error(one, two)
    with pytest.raises(polyamp.LossError, match="integer labels"):
        polyamp.losses.softmax_cross_entropy(one, two)
