"""Rule S29: the model in `loss_fn`, and its parameters."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import batch, layers, loss_fn, recipe
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness

Mode = Literal["autocast", "cast"]
MODES: list[Mode] = ["autocast", "cast"]


def l2_penalty(model: Any, batch: Any) -> Any:
    """The L2 penalty of all parameters."""
    return polyamp.losses.sum_of_squares(polyamp.parameters(model))


@pytest.mark.parametrize("mode", MODES)
def test_s29_parameters_in_loss_fn_are_the_masters(backend: Backend, harness: Harness, mode: Mode) -> None:
    """A penalty over them is float32, with the gradient 2 w, where the model computes in 16 bits too."""
    seen: list[str] = []

    def noted(model: Any, batch: Any) -> Any:
        seen.extend(str(array.dtype) for array in polyamp.parameters(model).values())
        return l2_penalty(model, batch)

    # a number that float16 rounds, and one whose square it has not
    weights = [layer._replace(bias=np.full_like(layer.bias, 1000.1)) for layer in layers()]
    made = recipe(polyamp.Policy("mixed_float16", mode=mode), scaler=polyamp.LossScaler(init_scale=4.0))
    state = polyamp.init(harness.mlp(weights), made)
    value, grads = polyamp.value_and_grad(noted)(state, batch())
    assert seen
    assert all("float32" in dtype for dtype in seen), seen
    expected = sum(float(np.sum(np.square(part, dtype=np.float64))) for layer in weights for part in layer)
    np.testing.assert_allclose(backend.to_numpy(value), expected, rtol=1e-6)
    masters = polyamp.parameters(state.model)
    gradients = backend.named_gradients(grads)
    assert list(masters) == [name for name, _ in gradients]
    for name, gradient in gradients:
        np.testing.assert_array_equal(backend.to_numpy(gradient), 2.0 * backend.to_numpy(masters[name]))


@pytest.mark.parametrize("mode", MODES)
def test_s29_gradients_of_a_call_and_of_a_penalty_add_up(backend: Backend, harness: Harness, mode: Mode) -> None:
    made = recipe(polyamp.Policy("mixed_bfloat16", mode=mode), accumulate_steps=2)
    weights = layers()

    def both(model: Any, batch: Any) -> Any:
        return loss_fn(model, batch) + 0.5 * l2_penalty(model, batch)

    apart = [polyamp.init(harness.mlp(weights), made) for _ in range(2)]
    found = [
        dict(backend.named_gradients(polyamp.value_and_grad(function)(state, batch())[1]))
        for function, state in zip((loss_fn, both), apart, strict=True)
    ]
    masters = polyamp.parameters(apart[0].model)
    for name, gradient in found[1].items():
        wanted = backend.to_numpy(found[0][name]) + backend.to_numpy(masters[name])
        np.testing.assert_allclose(backend.to_numpy(gradient), wanted, rtol=1e-5, atol=1e-6)
    state, result = polyamp.train_step(both, made)(polyamp.init(harness.mlp(weights), made), batch())
    assert not bool(backend.to_numpy(result.skipped))
    assert all(np.isfinite(part).all() for layer in harness.weights(state) for part in layer)
