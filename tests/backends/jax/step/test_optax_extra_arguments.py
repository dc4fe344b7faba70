"""optax transformations that ask for more than gradients: `value=` and `grad=` they get, `value_fn=` is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyamp
from polyamp.errors import GradientError, UnsupportedError

START = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)}


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]) * batch["gain"], batch["y"])


def item(seed: int, gain: float = 1.0, size: int = 8) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(size, 4)).astype("f4"), rng.normal(size=(size, 3)).astype("f4")
    return {"x": x, "y": y, "gain": np.full((size, 3), gain, "f4")}


def made(optimizer: Any, **settings: Any) -> tuple[Any, polyamp.Recipe]:
    settings.setdefault("scaler", polyamp.LossScaler(init_scale=1024.0))
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, **settings)
    return polyamp.init((lambda p, x: x @ p["w"], START), recipe), recipe


def by_hand(optimizer: Any, batches: list[Any]) -> Any:
    """optax's own loop over the batches."""

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["y"]))

    params, state = START, optimizer.init(START)
    for batch in batches:
        value, grad = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grad, state, params, value=value, grad=grad)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("how", ["step", "accumulated", "halves"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.polyak_sgd(max_learning_rate=1.0),
        lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, rtol=1.0, patience=1)),
    ],
    ids=["polyak", "plateau"],
)
def test_the_value_is_the_unscaled_loss_of_applied_steps(make: Any, how: str) -> None:
    state, recipe = made(make(), accumulate_steps=3 if how == "accumulated" else 1)
    step, grad_of = polyamp.train_step(loss_fn, recipe), polyamp.value_and_grad(loss_fn)
    for seed, gain in enumerate((1.0, 1.0, np.inf, 1.0, 1.0)):
        if how == "halves":
            _, grads = grad_of(state, item(seed, gain))
            state, result = polyamp.apply_gradients(state, grads)
        else:
            state, result = step(state, item(seed, gain))
        assert bool(result.skipped) == (gain != 1.0)
    wanted, expected = by_hand(make(), [item(seed) for seed in (0, 1, 3, 4)])
    np.testing.assert_allclose(state.params["w"], wanted["w"], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def recording() -> Any:
    """Keeps what it was given last, and moves nothing."""

    def init(params: Any) -> Any:
        return {"value": jnp.zeros(()), "grad": jax.tree.map(jnp.zeros_like, params), "updates": params}

    def update(updates: Any, state: Any, params: Any = None, *, value: Any, grad: Any) -> Any:
        del state, params
        return jax.tree.map(jnp.zeros_like, updates), {"value": value, "grad": grad, "updates": updates}

    return optax.GradientTransformationExtraArgs(init, update)


def test_grad_is_unscaled_and_not_clipped() -> None:
    state, recipe = made(recording(), clip_norm=0.25)
    _, gradients = polyamp.value_and_grad(loss_fn)(state, item(0))
    state, result = polyamp.train_step(loss_fn, recipe)(state, item(0))
    seen = state.opt_state
    assert float(seen["value"]) == float(result.loss)
    assert seen["value"].dtype == jnp.float32
    np.testing.assert_allclose(seen["grad"]["w"], gradients.values["w"], rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(seen["updates"]["w"]), 0.25, rtol=1e-6)
    assert float(result.grad_norm) > 0.25


def test_s20_gradients_without_a_loss_are_refused_before_anything_is_applied() -> None:
    state, _ = made(optax.polyak_sgd())
    loss, gradients = polyamp.value_and_grad(loss_fn)(state, item(0))
    assert float(gradients.loss) == float(loss)
    before = state.backend.export_state(state)
    with pytest.raises(
        GradientError, match=r"\(scale_by_polyak\) asks for the value of the loss.*_replace\(loss=\.\.\."
    ):
        polyamp.apply_gradients(state, polyamp.Gradients(gradients.values, gradients.running))
    after = state.backend.export_state(state)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    polyamp.apply_gradients(state, gradients._replace(values={"w": gradients.values["w"] * 2}))


@pytest.mark.parametrize(
    ("make", "name", "wanted"),
    [
        (optax.lbfgs, "scale_by_zoom_linesearch", "value_fn="),
        (
            lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(4)),
            "scale_by_backtracking_linesearch",
            "value_fn=",
        ),
    ],
    ids=["lbfgs", "backtracking"],
)
def test_s20_what_evaluates_the_loss_again_is_refused_by_init(make: Any, name: str, wanted: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"optimizer: optax's {name} asks for {wanted} at every update"):
        made(make())


def test_l_bfgs_without_a_line_search_trains() -> None:
    state, recipe = made(optax.lbfgs(0.1, linesearch=None))
    losses = []
    for _ in range(6):
        state, result = polyamp.train_step(loss_fn, recipe)(state, item(0))
        losses.append(float(result.loss))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("whole", [True, False], ids=["object", "transformation"])
def test_the_value_reaches_what_multi_steps_wraps(whole: bool) -> None:
    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, rtol=1.0, patience=1))
    several = optax.MultiSteps(plateau, 2)
    optimizer = several if whole else several.gradient_transformation()
    state, recipe = made(optimizer)
    step = polyamp.train_step(loss_fn, recipe)
    for seed in range(4):
        state, _ = step(state, item(seed))
    wanted, expected = by_hand(several, [item(seed) for seed in range(4)])
    np.testing.assert_allclose(state.params["w"], wanted["w"], rtol=1e-5, atol=1e-6)
    assert float(state.opt_state.inner_opt_state[1].scale) == float(expected.inner_opt_state[1].scale) < 1.0
