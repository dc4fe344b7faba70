"""Keras on JAX in `polyamp.init` and `polyamp.train_step`: the model's variables are parts of the state."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import polyamp
import polyamp_keras
from polyamp.errors import ModelError, TraceError, UnsupportedError

RECIPE = polyamp.Recipe(
    policy="mixed_bfloat16",
    scaler=polyamp.LossScaler(init_scale=64.0),
    optimizer=polyamp.adamw(1e-2),
    clip_norm=1.0,
    ema=polyamp.Ema(0.5),
)


def loss_fn(model: Any, batch: Any) -> Any:
    """The mean squared error."""
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


def parts(batches: Any) -> list[Any]:
    """Batches of eight rows, of which the second overflows."""
    x, y = batches
    return [(x[start : start + 8], y[start : start + 8]) for start in range(0, 32, 8)]


def test_s12_a_skipped_step_leaves_everything_but_the_seeds(model: Any, batches: Any) -> None:
    first, overflow, *_ = parts(batches)
    dtypes = []

    def loss(model: Any, batch: Any) -> Any:
        dtypes.append((model.get_layer("hidden").compute_dtype, model.get_layer("norm").compute_dtype))
        output = model(batch[0])
        dtypes.append(output.dtype.name)
        return polyamp.losses.mean_squared_error(output, batch[1])

    state = polyamp.init(model, RECIPE)
    assert list(state.params) == ["hidden/bias", "hidden/kernel", "norm/beta", "norm/gamma", "out/bias", "out/kernel"]
    assert list(state.running.statistics) == ["norm/moving_mean", "norm/moving_variance"]
    assert list(state.running.streams) == ["dropout/seed_0"]
    step = polyamp.train_step(loss, RECIPE)
    state, result = step(state, first)
    before = polyamp.parameters(state.model), {**state.running.statistics}
    before = [{name: np.array(value) for name, value in each.items()} for each in before]
    seed = np.array(state.running.streams["dropout/seed_0"])
    state, result = step(state, overflow)
    assert (bool(result.skipped), float(result.scale), int(state.step)) == (True, 32.0, 1)
    for old, new in zip(before, (state.params, state.running.statistics), strict=True):
        assert all(np.array_equal(old[name], new[name]) for name in new)
    assert np.array_equal(state.running.streams["dropout/seed_0"], seed + np.array([0, 1], seed.dtype))
    assert dtypes == [("bfloat16", "float32"), "float32"]
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    assert {value.dtype.name for value in state.params.values()} == {"float32"}


def test_the_users_model_gets_the_values_when_state_model_is_read(model: Any, batches: Any) -> None:
    kernel = np.array(model.get_layer("hidden").kernel.value)
    state = polyamp.init(model, RECIPE)
    step = polyamp.train_step(loss_fn, RECIPE)
    batch = parts(batches)[0]
    state, _ = step(state, batch)
    once = np.array(state.params["hidden/kernel"])
    state, _ = step(state, batch)
    assert np.array_equal(model.get_layer("hidden").kernel.value, kernel)
    assert state.model is model
    trained = np.array(state.params["hidden/kernel"])
    assert np.array_equal(model.get_layer("hidden").kernel.value, trained)
    with polyamp.averaged(state) as averaged:
        assert averaged is model
        assert np.allclose(model.get_layer("hidden").kernel.value, (once + trained) / 2)
    assert np.array_equal(model.get_layer("hidden").kernel.value, trained)
    twin = polyamp.averaged_model(state)
    assert twin is not model
    assert np.allclose(twin.get_layer("hidden").kernel.value, (once + trained) / 2)
    step(state, batch)  # donates the state, and not the model's values
    assert np.isfinite(keras.ops.convert_to_numpy(model(batch[0]))).all()


def test_a_checkpoint_and_a_refreshed_model_go_on(model: Any, batches: Any, tmp_path: Path) -> None:
    batch = parts(batches)[0]
    step = polyamp.train_step(loss_fn, RECIPE)
    state, _ = step(polyamp.init(model, RECIPE), batch)
    polyamp.save(state, tmp_path / "state")
    restored = polyamp.restore(polyamp.init(keras.models.clone_model(model), RECIPE), tmp_path / "state")
    assert all(np.array_equal(state.params[name], restored.params[name]) for name in state.params)
    model.get_layer("hidden").trainable = False
    with pytest.raises(ModelError, match=r"'hidden/kernel' was frozen .* polyamp\.refresh\(state, state\.model\)"):
        step(state, batch)
    moment = np.array(state.opt_state.slots["exp_avg"]["out/kernel"])
    frozen = np.array(state.params["hidden/kernel"])
    state = polyamp.refresh(state, state.model)
    assert list(state.params) == ["norm/beta", "norm/gamma", "out/bias", "out/kernel"]
    assert np.array_equal(state.opt_state.slots["exp_avg"]["out/kernel"], moment)
    state, _ = step(state, batch)
    assert np.array_equal(state.running.statistics["hidden/kernel"], frozen)


def test_s25_the_models_own_losses_are_added_or_named(batches: Any) -> None:
    dense = keras.layers.Dense(3, kernel_initializer="ones", kernel_regularizer="l2", activity_regularizer="l2")
    model = keras.Sequential([keras.Input((4,)), dense])
    x, y = parts(batches)[0]
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1))
    full = polyamp.train_step(lambda m, b: loss_fn(m, b) + polyamp.losses.regularization(m), recipe)
    _, result = full(polyamp.init(model, recipe), (x, y))
    output = np.asarray(x).sum(1, keepdims=True).repeat(3, 1)
    expected = np.square(output).mean() + 0.01 * 12 + 0.01 * np.square(output).sum() / 8
    assert float(result.loss) == pytest.approx(expected, rel=2e-2)
    with pytest.warns(UserWarning, match=r"loss_fn leaves out what the model adds .* dense"):
        polyamp.train_step(loss_fn, recipe)(polyamp.init(model, recipe), (x, y))


def test_groups_overrides_and_accumulation_use_kerass_paths(model: Any, batches: Any) -> None:
    recipe = polyamp.Recipe(
        policy=polyamp.Policy("mixed_bfloat16", overrides={"hidden": "float32"}),
        optimizer=polyamp.adamw(1e-2, weight_decay=0.1, groups=polyamp.no_decay("bias", "norm")),
        accumulate_steps=2,
    )
    state = polyamp.init(model, recipe)
    decays = {name: state.groups.of(name).spec.weight_decay for name in state.params}
    assert decays == {name: 0.1 if name.endswith("kernel") else 0.0 for name in state.params}
    seen = []

    def loss(model: Any, batch: Any) -> Any:
        seen.append(model.get_layer("hidden").compute_dtype)
        return loss_fn(model, batch)

    state, result = polyamp.train_step(loss, recipe)(state, parts(batches)[0])
    assert (set(seen), int(state.step), bool(result.skipped)) == ({"float32"}, 1, False)
    state, result = polyamp.train_step(loss_fn, recipe)(state, parts(batches)[2])
    _, gradients = polyamp.value_and_grad(loss_fn)(state, parts(batches)[2])
    state, result = polyamp.apply_gradients(state, gradients)
    assert int(state.step) == 3


def test_autocast_runs_the_layers_of_a_model_or_of_a_step(model: Any, batches: Any) -> None:
    x, y = parts(batches)[0]
    policy = polyamp.Policy("mixed_bfloat16")
    with polyamp_keras.apply_policy(model, policy, heads=False):
        expected = np.asarray(model(x), "float32")
    assert np.array_equal(policy.autocast(model)(x), expected)
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    seen = []

    def loss(model: Any, batch: Any) -> Any:
        layer = model.get_layer("hidden")
        layer.activation = lambda value: (seen.append(value.dtype.name), keras.activations.gelu(value))[1]
        policy.autocast(model)(batch[0])
        return loss_fn(model, batch)

    polyamp.train_step(loss, recipe)(polyamp.init(model, recipe), (x, y))
    assert seen == ["bfloat16", "float32"]


def test_what_does_not_work_is_refused_by_name(model: Any, batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    batch = parts(batches)[0]
    with pytest.raises(ModelError, match="not built"):
        polyamp.init(keras.Sequential([keras.layers.Dense(3)]), RECIPE)
    with pytest.raises(UnsupportedError, match=r"Drop rngs="):
        polyamp.init(model, RECIPE, rngs=0)
    with pytest.raises(UnsupportedError, match=r"optimizer must be .* keras\.src\.optimizers"):
        polyamp.init(model, RECIPE.replace(optimizer=keras.optimizers.Adam(), clip_norm=None, ema=None))
    state = polyamp.init(model, RECIPE)
    with pytest.raises(TraceError, match=r"state\.params"):
        jax.jit(lambda state: state.model)(state)

    def mapped(model: Any, batch: Any) -> Any:
        return polyamp.losses.mean_squared_error(jax.vmap(lambda row: model(row[None])[0])(batch[0]), batch[1])

    with pytest.raises(TraceError, match="would be lost"):
        polyamp.train_step(mapped, RECIPE)(state, batch)
    other = polyamp.init(model, RECIPE)
    with pytest.raises(ModelError, match="one model in two states"):
        polyamp.value_and_grad(lambda models, batch: loss_fn(models[0], batch))([state, other], batch)
    with pytest.raises(UnsupportedError, match=r"Sequential with strict=True\. .*apply_policy"):
        polyamp.explain(model, "mixed_bfloat16", batch[0], strict=True)
    monkeypatch.setattr("polyamp_jax.models.adapters.keras.is_nnx_enabled", functools.partial(bool, 1))
    with pytest.raises(UnsupportedError, match="nnx-enabled"):
        polyamp.init(model, RECIPE)


def test_tensorflow_is_not_imported(imported_tensorflow: bool) -> None:
    assert imported_tensorflow is False
