"""S12: a parameter that the forward pass writes is running state, in every mode, as in a loop of one's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import polyamp
from polyamp.errors import ModelError, TraceError
from polyamp_jax import scaled_value_and_grad

ROWS, WIDTH = 8, 4
X = np.asarray(jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)), jnp.bfloat16).astype(jnp.float32))
Y = np.random.default_rng(1).normal(size=(ROWS, 2)).astype(np.float32)
BATCH = {"x": X, "y": Y}
POLICIES = {
    "float32": polyamp.Policy("float32"),
    "autocast": polyamp.Policy(compute="bfloat16"),
    "cast": polyamp.Policy(compute="bfloat16", mode="cast"),
}
WIDE = {
    "float32": polyamp.Policy("float32"),
    "autocast": polyamp.Policy(compute="bfloat16", overrides={"**": "float32"}),
    "cast": polyamp.Policy(compute="bfloat16", mode="cast", overrides={"**": "float32"}),
}
"""The same ways through the code with every operation in float32, and inputs that 16 bits hold, so that numbers can be
compared to the last digits."""


IN_16_BITS = pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
"""flax's SpectralNorm writes float32, the dtype of its statistics, to a weight whatever the weight's dtype is."""


class Spectral(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.SpectralNorm(nnx.Linear(WIDTH, 8, rngs=rngs), rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.first(x, update_stats=True)))

    def written(self) -> Any:
        return self.first.layer_instance.kernel[...]


class WeightNormed(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.WeightNorm(nnx.Linear(WIDTH, 8, rngs=rngs), rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.first(x)))

    def written(self) -> Any:
        return self.first.layer_instance.kernel[...]


class MaxNorm(nnx.Module):
    """Columns no longer than 0.5; the write is in a nested `nnx.jit`."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(WIDTH, 8, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.jit
        def constrain(layer: Any) -> None:
            kernel = jax.lax.stop_gradient(layer.kernel[...])
            layer.kernel[...] = kernel * jnp.minimum(1.0, 0.5 / jnp.linalg.norm(kernel, axis=0))

        constrain(self.first)
        return self.last(jnp.tanh(self.first(x)))

    def written(self) -> Any:
        return self.first.kernel[...]


class Counted(nnx.Module):
    """Adds one to a parameter at each call, and shows what the call computed with."""

    def __init__(self, start: float = 1.0) -> None:
        self.w = nnx.Param(jnp.full((3,), start))
        self.other = nnx.Param(jnp.ones(()))

    def __call__(self, x: Any) -> Any:
        self.w[...] = jax.lax.stop_gradient(self.w[...]) + 1.0
        return self.w[...] * self.other[...] + 0.0 * jnp.sum(x)


def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def recipe(policy: Any = "float32", **settings: Any) -> polyamp.Recipe:
    settings.setdefault("optimizer", polyamp.sgd(0.1))
    return polyamp.Recipe(policy=policy, **settings)


@functools.cache
def by_hand(kind: Callable[[], Any], windows: int) -> tuple[Any, float]:
    """The model and its last loss after 20 steps of a loop of one's own: gradients are the mean over all rows."""
    model = kind()
    own = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, own: Any) -> Any:
        total, sums = jnp.zeros(()), None
        for x, y in zip(np.array_split(X, windows), np.array_split(Y, windows), strict=True):
            share = len(x) / ROWS
            loss, grads = nnx.value_and_grad(loss_fn)(model, {"x": x, "y": y})
            total += loss * share
            grads = jax.tree.map(lambda g, share=share: g * share, grads)
            sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
        own.update(model, sums)
        return total

    for _ in range(20):
        loss = step(model, own)
    return model, float(loss)


def sigma(model: Any) -> Any:
    return np.linalg.svd(np.asarray(model.written(), np.float64), compute_uv=False)[0]


@pytest.mark.parametrize(
    ("mode", "kind", "windows"),
    [*((mode, Spectral, 1) for mode in WIDE), ("autocast", WeightNormed, 1), ("cast", MaxNorm, 3)],
)
def test_s12_twenty_steps_are_those_of_a_loop_by_hand(mode: str, kind: Callable[[], Any], windows: int) -> None:
    model, loss = by_hand(kind, windows)
    made = recipe(WIDE[mode], accumulate_steps=windows)
    state, step = polyamp.init(kind(), made), polyamp.train_step(loss_fn, made)
    for _ in range(20):
        state, result = step(state, BATCH)
    assert sigma(state.model) == pytest.approx(sigma(model), rel=2e-6)
    assert float(result.loss) == pytest.approx(loss, rel=2e-5)
    np.testing.assert_allclose(state.model.written(), model.written(), rtol=2e-5, atol=1e-6)


@IN_16_BITS
@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_s12_under_a_mixed_policy_sigma_stays_at_one(mode: str) -> None:
    """It was 2.5: the norm was that of the weights that nobody had divided."""
    model, _ = by_hand(Spectral, 1)
    made = recipe(POLICIES[mode])
    state, step = polyamp.init(Spectral(), made), polyamp.train_step(loss_fn, made)
    for _ in range(20):
        state, _ = step(state, BATCH)
    assert sigma(state.model) == pytest.approx(sigma(model), rel=2e-2)
    assert state.params["first"]["layer_instance"]["kernel"].dtype == "float32"


@IN_16_BITS
@pytest.mark.parametrize("mode", WIDE)
def test_s12_the_halves_and_a_model_under_a_policy(mode: str) -> None:
    model, _ = by_hand(Spectral, 1)
    made = recipe(WIDE[mode], clip_norm=1e6)
    state, half = polyamp.init(Spectral(), made), polyamp.value_and_grad(loss_fn)
    for _ in range(20):
        _, grads = half(state, BATCH)
        state, _ = polyamp.apply_gradients(state, grads)
    assert sigma(state.model) == pytest.approx(sigma(model), rel=2e-6)

    scaler = polyamp.LossScaler(init_scale=8.0)
    scale_state = scaler.init("jax")
    graded = scaled_value_and_grad(lambda m, batch: loss_fn(WIDE[mode].autocast(m), batch), scaler)
    own = Spectral()
    update = nnx.Optimizer(own, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(own: Any, update: Any) -> None:
        _, found, _ = graded(scale_state, own, BATCH)
        update.update(own, found)

    for _ in range(20):
        step(own, update)
    assert sigma(own) == pytest.approx(sigma(model), rel=2e-6)


def shown(model: Any, batch: Any) -> Any:
    out = model(batch["x"])
    return jnp.mean(out), out


@pytest.mark.parametrize("mode", POLICIES)
def test_s12_the_next_micro_batch_sees_the_write_and_the_optimizer_updates_it(mode: str) -> None:
    """Micro-batches of 3, 3 and 2 rows: two programs in one window."""
    made = recipe(POLICIES[mode], accumulate_steps=3, optimizer=polyamp.sgd(0.5, weight_decay=0.1))
    state, step = polyamp.init(Counted(), made), polyamp.train_step(shown, made)
    state, result = step(state, BATCH)
    np.testing.assert_array_equal(np.asarray(result.aux, np.float32)[:, 0], [2.0, 3.0, 4.0])
    np.testing.assert_array_equal(state.params["w"], np.full(3, 4.0, np.float32))  # no gradient, so no decay (S23)
    mean = (3 * 2.0 + 3 * 3.0 + 2 * 4.0) / ROWS
    wide = 1e-6 if mode != "cast" else 4e-3
    np.testing.assert_allclose(state.params["other"], 1.0 - 0.5 * (mean + 0.1), rtol=wide)


@pytest.mark.parametrize("mode", POLICIES)
def test_s12_two_calls_and_what_loss_fn_writes_itself(mode: str) -> None:
    def twice(model: Any, batch: Any) -> Any:
        first = model(batch["x"])
        between = model.w[...]
        model.w[...] = model.w[...] * 10.0
        second = model(batch["x"])
        masters = polyamp.parameters(model)["w"]
        return jnp.mean(first + second), (first, between, second, masters)

    made = recipe(POLICIES[mode], optimizer=polyamp.sgd(0.0))
    state, result = polyamp.train_step(twice, made)(polyamp.init(Counted(), made), BATCH)
    assert [float(np.asarray(x, np.float32)[0]) for x in result.aux] == [2.0, 2.0, 21.0, 21.0]
    assert result.aux[3].dtype == "float32"
    np.testing.assert_array_equal(state.params["w"], np.full(3, 21.0, np.float32))


@pytest.mark.parametrize(("mode", "windows"), [("float32", 2), ("autocast", 1), ("autocast", 2), ("cast", 2)])
def test_s12_a_skipped_step_takes_the_write_back(mode: str, windows: int) -> None:
    made = recipe(
        POLICIES[mode],
        accumulate_steps=windows,
        optimizer=polyamp.adamw(0.1),
        scaler=polyamp.LossScaler(init_scale=8.0),
    )
    start = Counted(1.0 / 3.0)
    state = polyamp.init(start, made)
    step = polyamp.train_step(lambda m, b: jnp.mean(m(b["x"])) * jnp.max(b["by"]), made, donate=False)
    for by in (np.inf, 1.0, np.nan, 1.0):
        new, result = step(state, {"x": X, "by": np.full(ROWS, by, np.float32)})
        assert bool(result.skipped) == (not np.isfinite(by))
        before = state.params
        if result.skipped:
            assert jax.tree.map(lambda a: np.asarray(a).tobytes(), new.params) == jax.tree.map(
                lambda a: np.asarray(a).tobytes(), before
            )
            assert jax.tree.structure(new) == jax.tree.structure(state)
        else:
            np.testing.assert_allclose(new.params["w"], before["w"] + windows, rtol=1e-2)
        state = new
    _, grads = polyamp.value_and_grad(lambda m, b: jnp.mean(m(b["x"])) * jnp.inf)(state, BATCH)
    new, result = polyamp.apply_gradients(state, grads)
    assert bool(result.skipped)
    assert np.asarray(new.params["w"]).tobytes() == np.asarray(state.params["w"]).tobytes()


def test_s12_in_mode_cast_elements_that_were_not_written_keep_the_masters_digits() -> None:
    class Clamped(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.asarray([0.1, 0.2, 0.9, 3.0], jnp.float32))

        def __call__(self, x: Any) -> Any:
            self.w[...] = jnp.minimum(self.w[...], 0.7)
            return x @ self.w[...]

    made = recipe(POLICIES["cast"], optimizer=polyamp.sgd(0.0), accumulate_steps=2)
    state = polyamp.init(Clamped(), made)
    state, _ = polyamp.train_step(lambda m, b: jnp.mean(m(b["x"])), made)(state, BATCH)
    short = float(jnp.asarray(0.7, jnp.bfloat16))
    np.testing.assert_array_equal(state.params["w"], np.asarray([0.1, 0.2, short, short], np.float32))


@pytest.mark.parametrize("mode", POLICIES)
@pytest.mark.parametrize("nested", [nnx.jit, nnx.remat])
def test_s12_what_a_nested_transformation_hands_on_was_not_written(mode: str, nested: Any) -> None:
    """The program of a step without writes has no select and no carry for them."""

    class Nested(nnx.Module):
        def __init__(self, run: Any) -> None:
            self.layer = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0))
            self.run = run

        def __call__(self, x: Any) -> Any:
            return self.run(lambda layer, x: layer(x))(self.layer, x)

    made = recipe(POLICIES[mode])
    state = polyamp.init(Nested(nested), made)
    _, grads = polyamp.value_and_grad(loss_fn)(state, BATCH)
    assert grads.running.written is None


class Immutable(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        w = self.param("w", linen.initializers.ones, (WIDTH,))
        if not self.is_initializing():
            self.put_variable("params", "w", w * 0.5)
        return x * w


class PlainLinen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return x * self.param("w", linen.initializers.ones, (WIDTH,))


class Forced(eqx.Module):
    w: Any

    def __call__(self, x: Any) -> Any:
        object.__setattr__(self, "w", self.w * 0.5)
        return x * self.w


def in_place(params: Any, x: Any) -> Any:
    params["w"] = params["w"] * 0.5
    return x * params["w"]


def _net(x: Any) -> Any:
    return x * hk.get_parameter("w", (WIDTH,), init=jnp.ones)


ONE = {"params": {"w": jnp.ones(WIDTH)}}


def _mean(model: Any, batch: Any) -> Any:
    return jnp.mean(model(batch["x"]))


def _mutable(model: Any, batch: Any) -> Any:
    return jnp.mean(model(batch["x"], mutable=["params"])[0])


def _through_params(model: Any, batch: Any) -> Any:
    tree = model.params.get("~", model.params)
    tree["w"] = tree["w"] * 0.5
    return jnp.mean(model(batch["x"]))


@pytest.mark.parametrize("mode", POLICIES)
@pytest.mark.parametrize(
    ("model", "function", "error", "message"),
    [
        (lambda: (Immutable(), ONE), _mean, Exception, 'collection "params" is immutable'),
        (
            lambda: (PlainLinen(), ONE),
            _mutable,
            TraceError,
            r"mutable= names 'params'",
        ),
        (lambda: (PlainLinen(), ONE), _through_params, TraceError, "writes to the parameter 'w'.*would be lost"),
        (lambda: Forced(jnp.ones(WIDTH)), _mean, TraceError, "writes to 'w' of an equinox module"),
        (lambda: (in_place, {"w": jnp.ones(WIDTH)}), _mean, TraceError, "would be lost"),
        (
            lambda: (hk.without_apply_rng(hk.transform(_net)), {"~": {"w": jnp.ones(WIDTH)}}),
            _through_params,
            TraceError,
            "writes to the parameter '~/w'",
        ),
    ],
)
def test_s12_a_write_that_cannot_be_kept_is_an_error(
    mode: str, model: Any, function: Any, error: Any, message: str
) -> None:
    made = recipe(POLICIES[mode])
    with pytest.raises(error, match=message):
        polyamp.train_step(function, made)(polyamp.init(model(), made), BATCH)


def test_s12_a_write_of_another_shape_and_one_under_vmap_are_errors() -> None:
    class Grows(Counted):
        def __call__(self, x: Any) -> Any:
            self.w = nnx.Param(jnp.ones(4))
            return super().__call__(x)

    made = recipe()
    with pytest.raises(ModelError, match=r"another shape to the parameter 'w': \(4,\) for \(3,\)"):
        polyamp.train_step(_mean, made)(polyamp.init(Grows(), made), BATCH)

    def mapped(model: Any, batch: Any) -> Any:
        return jnp.mean(jax.vmap(model)(batch["x"]))

    with pytest.raises(TraceError, match=r"under jax\.vmap, .*would be lost"):
        polyamp.train_step(mapped, made)(polyamp.init(Counted(), made), BATCH)
