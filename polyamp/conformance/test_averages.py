"""Rule S34: moving averages of the parameters, what moves them, and the model with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import advance, batch, changed_arrays, layers, loss_fn, recipe
from polyamp.contract.backend import Backend
from polyamp.contract.harness import DenseWeights, Harness
from polyamp.errors import ArgumentError, CheckpointError, RecipeError

OVERFLOW = polyamp.LossScaler(init_scale=16.0)


def averages(exported: dict[str, Any]) -> dict[str, Any]:
    """Return an export's averages, by the names of the arrays that they are of."""
    return {name.removeprefix("average/"): value for name, value in exported.items() if name.startswith("average/")}


def expected(values: list[dict[str, Any]], share: list[float]) -> dict[str, Any]:
    """Return the averages after the values of each applied update, in float64."""
    found = {name: value.astype(np.float64) for name, value in values[0].items()}
    for now, part in zip(values[1:], share, strict=True):
        found = {name: old + part * (now[name].astype(np.float64) - old) for name, old in found.items()}
    return found


@pytest.mark.parametrize(
    ("ema", "share"),
    [
        (polyamp.Ema(0.75), [1.0, 0.25, 0.25, 0.25, 0.25]),
        (polyamp.Ema(0.99, warmup=True), [1.0, 9 / 12, 9 / 13, 9 / 14, 9 / 15]),
        (polyamp.Ema(0.9, every=2), [0.0, 1.0, 0.0, 0.1, 0.0]),
        (polyamp.Ema(0.0, statistics="average"), [1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
    ids=["plain", "warmup", "every", "no memory"],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_s34_averages_move_once_per_applied_update(
    backend: Backend, harness: Harness, ema: polyamp.Ema, share: list[float], accumulate: int
) -> None:
    """A skipped step, between the third and the fourth update, moves nothing; a window moves them once."""
    made = recipe(optimizer=polyamp.adamw(0.1), ema=ema, scaler=OVERFLOW, accumulate_steps=accumulate)
    state = polyamp.init(harness.normalized_mlp(layers()), made)
    step = polyamp.train_step(loss_fn, made)
    values = []
    for number, gain in enumerate((None, 1.0, 1.0, 1.0, np.inf, 1.0, 1.0)):
        before = backend.export_state(state)
        if gain is not None:
            state, _ = step(state, batch(number, gain=gain))
        after = backend.export_state(state)
        if gain == np.inf:
            assert changed_arrays(averages(before), averages(after)) == []
        else:
            values.append({name: after[name] for name in averages(after)})
    found = averages(backend.export_state(state))
    assert {name.partition("/")[0] for name in found} == (
        {"model", "running"} if ema.statistics == "average" else {"model"}
    )
    for name, value in expected(values, share).items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], value, rtol=2e-6, atol=2e-6, err_msg=name)


def test_s34_a_first_move_copies_and_16_bit_parameters_have_float32_averages(
    backend: Backend, harness: Harness
) -> None:
    def own_loss(model: Any, batch: Any) -> Any:
        return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])

    made = recipe("bfloat16", ema=polyamp.Ema(0.99))
    weights = [DenseWeights(*(part.astype("bfloat16") for part in layer)) for layer in layers()]
    state, _ = advance(polyamp.init(harness.mlp(weights), made), [batch(0)], own_loss)
    exported = backend.export_state(state)
    assert len(averages(exported)) == 4
    for name, value in averages(exported).items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, exported[name].astype(np.float32), err_msg=name)
    state, _ = advance(state, [batch(1)], own_loss)
    assert any(
        (value != value.astype("bfloat16").astype(np.float32)).any()
        for value in averages(backend.export_state(state)).values()
    ), "averages have more digits than the parameters"


def test_s34_the_averaged_model_and_back(backend: Backend, harness: Harness) -> None:
    """The block leaves the training as it was, and `averaged_model` does not follow it."""
    made, x = recipe(ema=polyamp.Ema(0.5), optimizer=polyamp.sgd(0.5, momentum=0.9)), batch(9)["x"]

    def outputs(model: Any) -> Any:
        return np.asarray(backend.to_numpy(polyamp.Policy("float32").autocast(model)(harness.array(x))))

    def plain(state: Any) -> Any:
        return [backend.export_state(state)[name] for name in sorted(backend.export_state(state))]

    state, _ = advance(polyamp.init(harness.mlp(layers()), made), [batch(n) for n in range(3)])
    twin, _ = advance(polyamp.init(harness.mlp(layers()), made), [batch(n) for n in range(3)])
    current = outputs(state.model)
    with polyamp.averaged(state) as model:
        inside = outputs(model)
    apart = polyamp.averaged_model(state)
    assert np.abs(inside - current).max() > 1e-3
    np.testing.assert_array_equal(outputs(state.model), current)
    np.testing.assert_allclose(outputs(apart), inside, rtol=1e-6, atol=1e-6)
    state, _ = advance(state, [batch(4)])
    twin, _ = advance(twin, [batch(4)])
    np.testing.assert_allclose(outputs(apart), inside, rtol=1e-6, atol=1e-6)
    for one, other in zip(plain(state), plain(twin), strict=True):
        np.testing.assert_array_equal(one, other)


def test_s34_a_schedule_free_model_is_evaluated_at_the_mean_of_its_steps(backend: Backend, harness: Harness) -> None:
    """x by the paper's three sequences in float64, over a skipped step; the training goes on at y."""
    beta, rates = 0.75, [0.0, 0.05, 0.1, 0.1]
    made = recipe(
        optimizer=polyamp.schedule_free(polyamp.schedules.linear_warmup(0.1, 2), betas=(beta, 0.9)), scaler=OVERFLOW
    )
    state, half = polyamp.init(harness.mlp(layers()), made), polyamp.value_and_grad(loss_fn)

    def host(found: Any) -> dict[str, Any]:
        return {name: backend.to_numpy(value).astype(np.float64) for name, value in found.items()}

    y = host(polyamp.parameters(state.model))
    x, z, square, total = y, y, {name: np.zeros_like(value) for name, value in y.items()}, 0.0
    for number, rate in enumerate(rates, 1):
        grads = host(dict(backend.named_gradients(half(state, batch(number))[1])))
        total += rate**2
        share = rate**2 / total if total else 0.0
        for name, grad in grads.items():
            square[name] = 0.9 * square[name] + 0.1 * grad**2
            z = {**z, name: z[name] - rate * grad / (np.sqrt(square[name] / (1 - 0.9**number)) + 1e-8)}
            x = {**x, name: x[name] + share * (z[name] - x[name])}
        state, _ = advance(state, [batch(number)])
        if number == 2:
            state, (result,) = advance(state, [batch(0, gain=np.inf)])
            assert bool(backend.to_numpy(result.skipped))
    trained = host(polyamp.parameters(state.model))
    with polyamp.averaged(state) as model:
        inside = host(polyamp.parameters(model))
    apart = host(polyamp.parameters(polyamp.averaged_model(state)))
    after = host(polyamp.parameters(state.model))
    for name, value in x.items():
        np.testing.assert_allclose(inside[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(trained[name], (1 - beta) * z[name] + beta * value, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(apart[name], inside[name])
        np.testing.assert_array_equal(after[name], trained[name])
    assert max(float(np.abs(inside[name] - trained[name]).max()) for name in x) > 1e-3
    with pytest.raises(RecipeError, match=r"schedule_free has an average of the parameters itself.*Leave it out"):
        made.replace(ema=polyamp.Ema(0.9))


def test_s34_averages_are_saved_and_go_on(backend: Backend, harness: Harness, tmp_path: Path) -> None:
    made = recipe(ema=polyamp.Ema(0.9, warmup=True))
    state, _ = advance(polyamp.init(harness.mlp(layers()), made), [batch(0), batch(1)])
    polyamp.save(state, tmp_path / "state")
    straight, _ = advance(state, [batch(2)])
    straight_arrays = backend.export_state(straight)
    fresh = polyamp.restore(polyamp.init(harness.mlp(layers(seed=1)), made), tmp_path / "state")
    resumed, _ = advance(fresh, [batch(2)])
    assert changed_arrays(straight_arrays, backend.export_state(resumed)) == []
    other = recipe(ema=polyamp.Ema(0.8, warmup=True))
    with pytest.raises(CheckpointError, match=r"ema\.decay: 0\.9 -> 0\.8"):
        polyamp.restore(polyamp.init(harness.mlp(layers()), other), tmp_path / "state")


def test_s34_a_refreshed_state_keeps_the_averages_of_what_stays(backend: Backend, harness: Harness) -> None:
    made = recipe(ema=polyamp.Ema(0.5))
    state, _ = advance(polyamp.init(harness.mlp(layers()), made), [batch(0), batch(1)])
    before = averages(backend.export_state(state))
    head = DenseWeights(np.full((8, 5), 0.25, np.float32), np.zeros(5, np.float32))
    state = polyamp.refresh(state, harness.with_head(state, head))
    after = averages(backend.export_state(state))
    kept = {name for name in after if name in before and before[name].tobytes() == after[name].tobytes()}
    assert len(kept) == 2
    (kernel,) = (after[name] for name in after if name not in kept and after[name].ndim == 2)
    np.testing.assert_array_equal(kernel, np.full(kernel.shape, 0.25, np.float32))


def test_s34_excluded_parameters_have_no_average(backend: Backend, harness: Harness) -> None:
    paths = list(polyamp.parameters(harness.mlp(layers())))
    globs = sorted({path.rpartition("/")[0] for path in paths})
    made = recipe(ema=polyamp.Ema(0.5, exclude=globs[-1]))
    state, _ = advance(polyamp.init(harness.mlp(layers()), made), [batch(0), batch(1)])
    assert len(averages(backend.export_state(state))) == 2
    current = {path: np.array(backend.to_numpy(value)) for path, value in polyamp.parameters(state.model).items()}
    with polyamp.averaged(state) as model:
        inside = {path: np.array(backend.to_numpy(value)) for path, value in polyamp.parameters(model).items()}
    same = {path for path, value in inside.items() if np.array_equal(value, current[path])}
    assert same == {path for path in paths if path.startswith(f"{globs[-1]}/")}
    assert len(same) == 2
    with pytest.raises(RecipeError, match="ema: exclude: the glob 'hea' matches no trainable parameter"):
        polyamp.init(harness.mlp(layers()), recipe(ema=polyamp.Ema(exclude="hea")))


def test_s20_a_state_without_averages_says_what_to_write(harness: Harness) -> None:
    state = polyamp.init(harness.mlp(layers()), recipe())
    for call in (polyamp.averaged, polyamp.averaged_model):
        with pytest.raises(RecipeError, match=r"has no averages.*Recipe\(\.\.\., ema=polyamp\.Ema\(decay=0\.999\)\)"):
            call(state)
        with pytest.raises(ArgumentError, match=call.__name__):
            call(3)  # type: ignore[arg-type]  # no state
