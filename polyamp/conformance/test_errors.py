"""Rule S20: what cannot be honoured raises a clear error and leaves everything as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import batch, flat_weights, layers, loss_fn, recipe
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import GradientError, LossError, ModelError, PolyampError, RecipeError, UnsupportedError


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", "no trainable parameters"),
        ("integer", "has dtype int32, which polyamp cannot train|no trainable parameters"),
        ("float16", "stored as float16, but the policy stores parameters as float32. A loss scaler needs float32"),
    ],
)
def test_s20_models_that_cannot_be_trained(backend: Backend, harness: Harness, kind: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        polyamp.init(harness.unusable(kind), recipe("mixed_float16"), backend=backend.name)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda model, batch: model(batch["x"]), r"scalar loss. Received shape: \(8, 3\)"),
        (lambda model, batch: None, "a `return` missing"),
        (lambda model, batch: (loss_fn(model, batch), 1, 2), "a tuple of 3 items"),
    ],
    ids=["vector", "none", "triple"],
)
def test_s20_losses_that_cannot_be_differentiated(harness: Harness, broken: Any, message: str) -> None:
    made = recipe()
    state = polyamp.init(harness.mlp(layers()), made)
    before = flat_weights(harness, state)
    with pytest.raises(LossError, match=message):
        polyamp.train_step(broken, made)(state, batch())
    state, _ = polyamp.train_step(loss_fn, made)(state, batch())
    assert not np.array_equal(before, flat_weights(harness, state)), "the state must still be usable"


def test_s20_an_integer_loss_is_refused(backend: Backend, harness: Harness) -> None:
    scaler = polyamp.LossScaler()
    with pytest.raises(LossError, match=r"floating loss\. Received dtype: int32"):
        scaler.scale(harness.array(np.asarray(1, np.int32)), scaler.init(backend.name))


def test_s20_gradients_that_do_not_fit_are_refused(backend: Backend, harness: Harness) -> None:
    state = polyamp.init(harness.mlp(layers()), recipe())
    before = flat_weights(harness, state)
    _, gradients = polyamp.value_and_grad(loss_fn)(state, batch())
    other = polyamp.init(harness.mlp(layers((4, 5, 3))), recipe())
    _, misshapen = polyamp.value_and_grad(loss_fn)(other, batch())
    with pytest.raises(GradientError, match="shape"):
        polyamp.apply_gradients(state, misshapen)
    with pytest.raises(GradientError, match="must be the Gradients"):
        polyamp.apply_gradients(state, gradients.values)
    with pytest.raises(GradientError, match="2 states"):
        polyamp.apply_gradients([state, state], [gradients])
    with pytest.raises(GradientError, match="no gradients"):
        polyamp.LossScaler.off().unscale([], polyamp.LossScaler.off().init(backend.name))
    assert np.array_equal(before, flat_weights(harness, state))


def test_s20_an_unknown_option_is_refused(backend: Backend, harness: Harness) -> None:
    with pytest.raises(UnsupportedError, match=r"init\(\) on the .* backend accepts .*Received: colour="):
        polyamp.init(harness.mlp(layers()), recipe(), colour="red")
    state = polyamp.init(harness.mlp(layers()), recipe())
    with pytest.raises(UnsupportedError, match=r"train_step\(\) on the .* backend"):
        polyamp.train_step(loss_fn, recipe(), colour="red")(state, batch())


def test_s20_a_step_with_another_recipe_is_refused(harness: Harness) -> None:
    state = polyamp.init(harness.mlp(layers()), recipe())
    with pytest.raises(RecipeError, match="different recipes"):
        polyamp.train_step(loss_fn, recipe(clip_norm=1.0))(state, batch())
    step = polyamp.train_step(loss_fn, recipe())
    state, _ = step(state, batch())
    with pytest.raises(RecipeError, match="different recipes"):
        step(polyamp.init(harness.mlp(layers()), recipe(clip_norm=1.0)), batch())


def test_s20_every_error_is_a_polyamp_error(harness: Harness) -> None:
    with pytest.raises(PolyampError, match=r"recipe must be a polyamp\.Recipe"):
        polyamp.init(harness.mlp(layers()), {"policy": "float32"})  # type: ignore[arg-type]  # on purpose


def test_s20_state_describes_itself(backend: Backend, harness: Harness) -> None:
    state = polyamp.init(harness.mlp(layers()), recipe("mixed_float16"))
    text = repr(state)
    for part in (backend.name, "cpu", "67", "compute='float16'", "32768", "step=0"):
        assert part in text.lower().replace("gpu", "cpu").replace("cuda", "cpu"), text
    table = state._repr_html_()  # type: ignore[attr-defined]  # what a notebook asks for, if it is there
    assert table.startswith(f"<table><caption>{type(state).__name__}</caption>")
    assert "<tr><th>scale</th><td>32768</td></tr>" in table
    state, result = polyamp.train_step(loss_fn, state.recipe)(state, batch())
    assert "<tr><th>skipped</th><td>" in result._repr_html_()
