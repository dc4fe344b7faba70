"""`observer.still`: dropout off in training mode, or with given numbers; what was traced outside is not used inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import polyamp

WIDTH, RATE = 6, 0.25
X = np.random.default_rng(0).normal(size=(5, 4, WIDTH)).astype(np.float32)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Dropout(RATE, deterministic=False)(x)
        return linen.MultiHeadDotProductAttention(2, dropout_rate=0.5, deterministic=False)(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dropout = nnx.Dropout(RATE, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, WIDTH, dropout_rate=0.5, deterministic=False, decode=False, rngs=rngs
        )

    def __call__(self, x: Any) -> Any:
        return self.attention(self.dropout(x))


class EquinoxNet(eqx.Module):
    dropout: eqx.nn.Dropout
    attention: eqx.nn.MultiheadAttention

    def __call__(self, x: Any, key: Any) -> Any:
        x = self.dropout(x, key=key)
        return self.attention(x, x, x, key=key)


def linen_model() -> tuple[Any, dict[str, Any]]:
    module = LinenNet()
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    return (module, variables), {"rngs": {"dropout": 0}}


def nnx_model() -> tuple[Any, dict[str, Any]]:
    return NnxNet(nnx.Rngs(0)), {}


def equinox_model() -> tuple[Any, dict[str, Any]]:
    attention = eqx.nn.MultiheadAttention(2, WIDTH, dropout_p=0.5, key=jax.random.key(0))
    return EquinoxNet(eqx.nn.Dropout(RATE), attention), {"rngs": 0, "axis_name": "batch"}


def haiku_model() -> tuple[Any, dict[str, Any]]:
    def forward(x: Any) -> Any:
        return hk.Linear(WIDTH)(hk.dropout(hk.next_rng_key(), RATE, x))

    made = hk.transform(forward)
    return (made, made.init(jax.random.key(0), X)), {"rngs": 0}


MODELS = {"linen": linen_model, "nnx": nnx_model, "equinox": equinox_model, "haiku": haiku_model}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return MODELS[request.param]


def mean(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


def losses(state: Any, step: Any, count: int = 2) -> list[float]:
    found = []
    for _ in range(count):
        state, result = step(state, X)
        found.append(float(result.loss))
    return found


def keeping(seen: dict[Any, Any]) -> Any:
    """What notes arrays by (path, what)."""
    return lambda path, what, array, _: seen.setdefault((path, what), array)


def test_dropout_passes_on_what_it_gets_and_drops_again_afterwards(model: Any, backend: Any) -> None:
    made, options = model()
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.0))
    step = polyamp.train_step(mean, recipe, donate=False)
    state = polyamp.init(made, recipe, **options)
    before, again = losses(state, step)
    assert before != again
    seen: dict[tuple[str, str], Any] = {}
    with backend.observer.model_copy(made) as own, backend.observer.disable_dropout(own, None) as count:
        inside = polyamp.init(own, recipe, **options)
        first, second = losses(inside, step)  # the very step that was traced outside
        assert first == second != before
        before_pass = count.calls
        found = backend.observer.capture_pass(inside, mean, X, keeping(seen))
        assert None in (count.calls, before_pass) or count.calls - before_pass >= 1
        assert found.loss == pytest.approx(first, rel=1e-6)
    for (path, what), array in seen.items():
        if what == "output" and "ropout" in path and path.count("/") == 0:
            np.testing.assert_array_equal(array, X)
    assert losses(state, step) == [before, again]


def test_given_numbers_make_the_masks(backend: Any) -> None:
    made, options = linen_model()
    shapes: list[tuple[int, ...]] = []

    def draws(shape: tuple[int, ...]) -> Any:
        shapes.append(shape)
        return np.random.default_rng(len(shapes)).random(shape, np.float32)

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.0))
    seen: dict[tuple[str, str], Any] = {}
    with backend.observer.disable_dropout(made, draws):
        state = polyamp.init(made, recipe, **options)
        backend.observer.capture_pass(state, mean, X, keeping(seen))
        assert shapes == [X.shape, (1, 1, 4, 4)]  # flax has one mask for all examples
        kept = np.random.default_rng(1).random(X.shape, np.float32) >= RATE
        np.testing.assert_allclose(seen["Dropout_0", "output"], np.where(kept, X / (1 - RATE), 0), 1e-6)
        backend.observer.capture_pass(state, mean, X, lambda *_: None)
        assert len(shapes) == 2  # it is not traced again
        step = polyamp.train_step(mean, recipe, donate=False)
        one, two = losses(state, step)
        assert (one, len(shapes)) == (two, 4)


def test_every_example_of_a_mapped_model_has_numbers_of_its_own(backend: Any) -> None:
    made, options = equinox_model()
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.0))
    numbers = np.random.default_rng(0).random(X.shape, np.float32)
    seen: dict[tuple[str, str], Any] = {}

    def draws(shape: tuple[int, ...]) -> Any:
        return numbers if shape == X.shape else np.ones(shape, np.float32)

    with backend.observer.disable_dropout(made, draws):
        state = polyamp.init(made, recipe, **options)
        backend.observer.capture_pass(state, mean, X, keeping(seen))
    np.testing.assert_allclose(seen["dropout", "output"], np.where(numbers >= RATE, X / (1 - RATE), 0), 1e-6)
