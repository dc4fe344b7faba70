"""The reference backend's observer: what it shows of a pass, and that the pass leaves nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import LossScaler, Recipe, losses
from polyamp.contract import registry
from polyamp.parity.trace.observer import HasObserver
from polyamp.reference import MLP

X = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)


def loss_fn(model: Any, batch: Any) -> Any:
    output = model(batch)
    return losses.mean_squared_error(output, np.zeros(output.shape, np.float32))


def normalized() -> MLP:
    plain = MLP.random([4, 5, 3], seed=0)
    scale = {"norm0/scale": np.full(5, 2.0, np.float32), "norm0/bias": np.ones(5, np.float32)}
    running = {"norm0/mean": np.zeros(5, np.float32), "norm0/variance": np.ones(5, np.float32)}
    return MLP({**plain.parameters, **scale}, running)


def watch(model: MLP, recipe: Recipe, loss: Any = loss_fn) -> tuple[Any, list[tuple[str, str, Any, str]], Any]:
    backend = registry.get("reference")
    assert isinstance(backend, HasObserver)
    seen: list[tuple[str, str, Any, str]] = []
    with backend.observer.model_copy(model) as mine, backend.observer.disable_dropout(mine, None):
        state = polyamp.init(mine, recipe)
        found = backend.observer.capture_pass(state, loss, X, lambda *each: seen.append(each))
        return state, seen, found


def test_every_module_shows_its_output_and_then_its_cotangent() -> None:
    _, seen, found = watch(normalized(), Recipe())
    layers = ("dense0", "norm0", "dense1")
    forward = [*((path, what) for path in layers for what in ("input", "output")), ("", "output")]
    backward = [(path, "cotangent") for path in ("", *reversed(layers))]
    assert [each[:2] for each in seen] == forward + backward
    assert {each[3] for each in seen} == {"float32"}
    arrays = {each[:2]: each[2] for each in seen}
    model = normalized()
    hidden = X @ model.parameters["dense0/kernel"]
    np.testing.assert_array_equal(arrays["dense0", "input"], X)
    np.testing.assert_allclose(arrays["dense0", "output"], hidden, rtol=1e-6)
    np.testing.assert_array_equal(arrays["norm0", "input"], arrays["dense0", "output"])
    np.testing.assert_array_equal(arrays["dense1", "input"], np.maximum(arrays["norm0", "output"], 0))
    out = arrays["", "output"]
    assert found.loss == pytest.approx(float(np.mean(np.square(out))), rel=1e-6)
    np.testing.assert_allclose(arrays["", "cotangent"], 2 * out / out.size, rtol=1e-5)
    np.testing.assert_allclose(found.gradients["dense1/bias"], arrays["dense1", "cotangent"].sum(0), rtol=1e-5)
    assert found.hidden_reason == ""


def test_under_float16_dtypes_are_told_and_cotangents_are_unscaled() -> None:
    half = Recipe(policy="mixed_float16", scaler=LossScaler.static(1024.0))
    _, seen, found = watch(MLP.random([4, 5, 3], seed=0), half)
    _, wide, judge = watch(MLP.random([4, 5, 3], seed=0), Recipe())
    assert {each[3] for each in seen if each[0] and each[1] != "input"} == {"float16"}
    for mine, theirs in zip(seen, wide, strict=True):
        assert mine[:2] == theirs[:2]
        assert mine[2].dtype == np.float32
        np.testing.assert_allclose(mine[2], theirs[2], atol=2e-3 * float(np.abs(theirs[2]).max()))
    assert found.loss == pytest.approx(judge.loss, rel=1e-3)


def test_a_second_call_has_a_number_and_a_pass_leaves_nothing_behind() -> None:
    model = normalized()
    before = {name: array.copy() for name, array in {**model.parameters, **model.running}.items()}

    def twice(model: Any, batch: Any) -> Any:
        return loss_fn(model, batch) + loss_fn(model, 2.0 * batch)

    state, seen, _ = watch(model, Recipe(), twice)
    assert [each[0] for each in seen if each[1] == "output"] == [
        *("dense0", "norm0", "dense1", ""),
        *("dense0#2", "norm0#2", "dense1#2", "#2"),
    ]
    for held in (model, state.model):
        for name, array in {**held.parameters, **held.running}.items():
            np.testing.assert_array_equal(array, before[name])
    assert model.shown is None


def test_what_it_cannot_watch_is_refused() -> None:
    observer = registry.get("reference").observer  # type: ignore[attr-defined]  # it is an `HasObserver`
    with pytest.raises(polyamp.UnsupportedError, match="no float64"), observer.model_copy(normalized(), wide=True):
        pass
    with pytest.raises(polyamp.ModelError, match=r"class MLP\. Received: a list of 1"), observer.model_copy([1]):
        pass
