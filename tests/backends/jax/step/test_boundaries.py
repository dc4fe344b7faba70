"""What a step refuses or says at its boundary: states that are gone, interrupts, signatures."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp
from polyamp.errors import CheckpointError, StateError
from polyamp_jax import BACKEND, scaled_value_and_grad

RECIPE = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.1))
BATCH = {"x": np.ones((4, 2), np.float32), "y": np.zeros((4, 1), np.float32)}


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])


def fresh() -> Any:
    return polyamp.init((lambda p, x: x @ p["w"], {"w": jnp.ones((2, 1))}), RECIPE)


def test_a_state_that_is_gone_is_said_to_be() -> None:
    state = fresh()
    step = polyamp.train_step(loss_fn, RECIPE)
    _, gradients = polyamp.value_and_grad(loss_fn)(state, BATCH)
    new, _ = step(state, BATCH)
    calls: list[Any] = [
        lambda: step(state, BATCH),
        lambda: polyamp.train_step(loss_fn, RECIPE, compile=False)(state, BATCH),
        lambda: polyamp.value_and_grad(loss_fn)(state, BATCH),
        lambda: polyamp.apply_gradients(state, gradients),
    ]
    for call in calls:
        with pytest.raises(StateError, match=r"arrays are gone.*polyamp\.restore.*donate=False"):
            call()
    assert step(new, BATCH)[1].step == 2


def test_other_errors_are_left_as_they_are() -> None:
    def broken(model: Any, batch: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        polyamp.train_step(broken, RECIPE)(fresh(), BATCH)


@pytest.mark.parametrize("donate", [True, False])
def test_an_interrupt_at_any_line_of_a_step(donate: bool) -> None:
    """With donate=False the state is whole afterwards; otherwise it is whole, or said to be gone."""
    step = polyamp.train_step(loss_fn, RECIPE, donate=donate)
    state = fresh()
    state, _ = step(state, BATCH)  # compiled
    expected = {k: v.tobytes() for k, v in BACKEND.export_state(state).items()}
    outcomes = []
    for line in range(1, 1000):
        copy = jax.tree.map(jnp.copy, state).with_host_facts(state.lagging) if donate else state
        seen = 0

        def trace(frame: Any, event: str, arg: Any, line: int = line) -> Any:
            nonlocal seen
            if "polyamp" not in frame.f_code.co_filename:
                return None
            if event == "line":
                seen += 1
                if seen == line:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            step(copy, BATCH)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(before)
        try:
            now = {k: v.tobytes() for k, v in BACKEND.export_state(copy).items()}
        except CheckpointError:
            with pytest.raises(StateError):
                step(copy, BATCH)
            outcomes.append("gone")
        else:
            assert now == expected
            outcomes.append("whole")
    assert len(outcomes) > 5
    assert set(outcomes) == ({"whole", "gone"} if donate else {"whole"})


def test_a_scaled_function_shows_the_scale_state_in_its_signature() -> None:
    scaler = polyamp.LossScaler(init_scale=4.0)

    def loss(params: Any, x: Any, *, weight: float = 1.0) -> Any:
        return jnp.mean(x @ params) * weight

    graded = scaled_value_and_grad(loss, scaler)
    assert list(inspect.signature(graded).parameters) == ["scale_state", "params", "x", "weight"]
    assert inspect.signature(graded).parameters["weight"].default == 1.0
    assert inspect.signature(loss).return_annotation is not inspect.signature(graded).return_annotation
    scale_state, params = scaler.init("jax"), jnp.ones((2, 1))
    jitted = jax.jit(lambda *a, **k: graded(*a, **k)[1])
    expected = jitted(scale_state, params, BATCH["x"])
    donating = jax.jit(graded, donate_argnames="params", static_argnames="weight")
    _, grads, _ = donating(scale_state, params, BATCH["x"], weight=1.0)
    assert params.is_deleted()
    assert not any(leaf.is_deleted() for leaf in scale_state)
    assert np.array_equal(grads, expected)


def test_signatures_that_leave_no_room_for_a_name() -> None:
    scaler = polyamp.LossScaler(init_scale=4.0)
    taken = scaled_value_and_grad(lambda w, scale_state: jnp.sum(w) * scale_state, scaler)
    assert str(inspect.signature(taken)).startswith("(loss_scale_state")
    only = scaled_value_and_grad(lambda w, /, x: jnp.sum(w) * x, scaler)
    first, second, *_ = inspect.signature(only).parameters.values()
    assert first.kind is second.kind is inspect.Parameter.POSITIONAL_ONLY
    assert taken(scaler.init("jax"), jnp.ones(2), 3.0)[1].tolist() == [3.0, 3.0]
    assert only(scaler.init("jax"), jnp.ones(2), x=3.0)[1].tolist() == [3.0, 3.0]


def test_windows_of_bfloat16_parameters_are_summed_in_float32() -> None:
    """1,024 micro-batches whose gradients are 1 or 1/512: a bfloat16 sum stands still at 256 and loses the small."""
    recipe = polyamp.Recipe(policy="bf16-true", optimizer=polyamp.sgd(1.0), accumulate_steps=1024)
    state = polyamp.init((lambda p, x: x * p["w"], {"w": jnp.zeros((), jnp.bfloat16)}), recipe)
    x = np.where(np.arange(1024) % 2 == 0, 1.0, 2.0**-9).astype(np.float32)[:, None]
    _, result = polyamp.train_step(lambda m, b: jnp.mean(m(b)), recipe)(state, x)
    np.testing.assert_allclose(float(result.grad_norm), x.mean(), rtol=1e-6)


def test_a_state_kept_by_donate_false_outlives_the_donation_of_its_successor() -> None:
    """What an update leaves alone must not be handed on as the same buffer."""

    def noisy(params: Any, x: Any, rng: Any) -> Any:
        return x @ params["w"] + jax.random.normal(rng, ()) * 0.0

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.1), scaler=polyamp.LossScaler.off())
    params = {"w": jnp.ones((2, 1)), "unused": jnp.ones(3)}
    state = polyamp.init((noisy, params), recipe, rngs=0)
    kept, _ = polyamp.train_step(loss_fn, recipe, donate=False)(state, BATCH)
    polyamp.train_step(loss_fn, recipe)(kept, BATCH)
    assert BACKEND.export_state(state)["model/unused"].tolist() == [1.0] * 3
    _, gradients = polyamp.value_and_grad(loss_fn)(state, BATCH)
    applied, _ = polyamp.apply_gradients(state, gradients)
    polyamp.train_step(loss_fn, recipe)(applied, BATCH)
    assert BACKEND.export_state(state)["model/unused"].tolist() == [1.0] * 3
