"""Rule S1 on complex parameters: trained as pairs of real numbers, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import batch, loss_fn, recipe, relative_difference, to_float
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import ModelError, UnsupportedError

RATE, CLIP = 0.1, 0.5


def complex_kernel() -> Any:
    """Shape (4, 3), complex64."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=(4, 3)) + 1j * rng.normal(size=(4, 3))).astype(np.complex64) / 2


def test_s01_complex_parameters_are_refused_by_name_or_trained_by_their_parts(
    backend: Backend, harness: Harness
) -> None:
    """SGD with a clip, by hand; the gradient is that by the real part plus i times that by the imaginary one."""
    made = recipe("mixed_float16", scaler=polyamp.LossScaler(init_scale=64.0), clip_norm=CLIP)
    try:
        model = harness.complex_dense(complex_kernel())
    except UnsupportedError:
        with pytest.raises(ModelError, match="has dtype complex64, which polyamp cannot train"):
            polyamp.init(harness.unusable("complex"), made)
        return
    state = polyamp.init(model, made)
    step = polyamp.train_step(loss_fn, made)
    expected = complex_kernel().astype(np.complex128)
    for seed, gain in enumerate((1.0, np.inf, 1.0, 1.0)):
        given = batch(seed, gain=gain)
        state, result = step(state, given)
        assert bool(to_float(backend, result.skipped)) == np.isinf(gain)
        if gain == 1.0:
            x, y = given["x"].astype(np.float64), given["y"].astype(np.float64)
            z = x @ expected
            gradient = x.T @ (4.0 * (np.abs(z) ** 2 - y) * z) / y.size
            norm = float(np.sqrt((np.abs(gradient) ** 2).sum()))
            assert relative_difference(to_float(backend, result.grad_norm), norm) < 1e-5
            expected = expected - RATE * gradient * min(1.0, CLIP / norm)
    (found,) = map(backend.to_numpy, polyamp.parameters(state.model).values())
    assert found.dtype == np.complex64
    assert np.abs(found - expected).max() < 1e-5
