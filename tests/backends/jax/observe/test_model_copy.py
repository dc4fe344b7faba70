"""`observer.working`: the user's model stays as it is; a wide one computes in float64 throughout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import polyamp

WIDE = polyamp.Policy(param="float64", compute="float64", output="float64")


def mean_squared(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["x"]) * batch["gain"] - batch["y"]) ** 2)


@pytest.mark.parametrize("kind", ["nnx", "haiku"])
def test_a_wide_model_computes_and_trains_the_same_with_more_digits(
    kind: str, backend: Any, make_kind: Any, batch: Any, recipe: Any
) -> None:
    made, seen = make_kind(kind, norm=True), {}
    for wide in (False, True):
        seen[wide] = arrays = {}
        with backend.observer.model_copy(made.model, wide=wide) as model, backend.observer.disable_dropout(model, None):
            rule = recipe(WIDE if wide else "float32", optimizer=polyamp.sgd(0.1, momentum=0.9), clip_norm=1.0)
            state = polyamp.init(model, rule, **made.options)

            def see(path: str, what: Any, array: Any, dtype: str, to: Any = arrays, name: Any = str(wide)) -> None:
                assert dtype == {"True": "float64", "False": "float32"}[name]
                to[path, what] = array

            found = backend.observer.capture_pass(state, mean_squared, batch(), see)
            arrays |= {(name, "gradient"): gradient for name, gradient in found.gradients.items()}
            state, _ = polyamp.train_step(mean_squared, rule)(state, batch())
            arrays |= {
                (name, "state"): array for name, array in backend.export_state(state).items() if array.dtype.kind == "f"
            }
    for key, array in seen[True].items():
        assert array.dtype == np.float64 or key[0] == "loss_scale/scale", key
        np.testing.assert_allclose(seen[False][key], array, 1e-5, 1e-6)
    assert jnp.zeros(1).dtype == np.float32


def test_layers_that_say_float32_compute_in_float64(backend: Any) -> None:
    class Linen(linen.Module):
        dtype: Any = jnp.float32

        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(3, dtype=self.dtype)(linen.LayerNorm(dtype=jnp.bfloat16)(x))

    class Nnx(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.LayerNorm(4, dtype=jnp.bfloat16, rngs=rngs)
            self.dense = nnx.Linear(4, 3, dtype=jnp.float32, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.dense(self.norm(x))

    x = np.ones((2, 4), np.float32)
    module, own = Linen(), Nnx(nnx.Rngs(0))
    for model in ((module, module.init(jax.random.key(0), x)), own):
        dtypes = set()
        with backend.observer.model_copy(model, wide=True) as wide:
            state = polyamp.init(wide, polyamp.Recipe(policy=WIDE, optimizer=polyamp.sgd(0.1)))
            loss = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
            backend.observer.capture_pass(state, loss, x, lambda _, __, ___, dtype, to=dtypes: to.add(dtype))
        assert dtypes == {"float64"}
    assert (own.norm.dtype, own.dense.kernel.dtype) == (jnp.bfloat16, np.float32)


def test_an_nnx_model_is_not_changed(backend: Any) -> None:
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with backend.observer.model_copy(model) as own:
        assert own is not model
        own(np.arange(6, dtype=np.float32).reshape(2, 3))
        own.eval()
    assert not np.asarray(model.mean[...]).any()
    assert not model.use_running_average


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox", "haiku"])
def test_in_inference_statistics_are_used_and_nothing_is_dropped(kind: str, backend: Any, make_kind: Any) -> None:
    made = make_kind(kind, norm=True, dropout=kind != "haiku")
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    seen: dict[tuple[str, str], Any] = {}
    with backend.observer.model_copy(made.model, inference=True) as model:
        state = polyamp.init(model, polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.0)), **made.options)
        step = polyamp.train_step(lambda model, x: jnp.mean(model(x) ** 2), state.recipe)
        state, first = step(state, x)
        backend.observer.capture_pass(
            state, lambda model, x: jnp.mean(model(x)), x, lambda *see: seen.update({see[:2]: see[2]})
        )
        assert float(step(state, x)[1].loss) == float(first.loss)
    if kind != "haiku":  # whose averages of nothing are 0
        np.testing.assert_allclose(seen["norm", "output"], seen[made.layers[0], "output"], 1e-3, 1e-4)


@pytest.mark.parametrize("kind", ["nnx", "linen", "haiku", "equinox", "function"])
def test_the_device_is_the_models_own(kind: str, backend: Any, make_kind: Any) -> None:
    assert backend.observer.device(make_kind(kind).model) == "cpu:0"
