"""`compile`, `guard` and the policy on layers, on this Keras backend."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import polyamp
import polyamp_keras
from polyamp.errors import LossScaleError, LossScaleStuckError, RecipeError, UnsupportedError

RECIPE = polyamp.Recipe(
    policy="mixed_bfloat16",
    scaler=polyamp.LossScaler(init_scale=64.0),
    optimizer=polyamp.adamw(1e-2),
    clip_norm=1.0,
)


def values(variables: Any) -> list[Any]:
    return [keras.ops.convert_to_numpy(variable.value) for variable in variables]


def test_importing_the_package_imports_tensorflow_only_on_tensorflow(backend: str, imported_tensorflow: bool) -> None:
    assert imported_tensorflow == (backend == "tensorflow")


def test_the_names_of_the_tensorflow_package_are_the_same_objects(backend: str) -> None:
    if backend == "tensorflow":
        import polyamp_tensorflow

        assert all(getattr(polyamp_keras, name) is getattr(polyamp_tensorflow, name) for name in polyamp_keras.__all__)
    with pytest.raises(AttributeError, match=r"polyamp_keras' has no attribute 'train_step'"):
        polyamp_keras.train_step  # noqa: B018  # that it raises


def test_a_recipe_in_fit(model: Any, batches: Any, tmp_path: Path) -> None:
    x, y = batches
    polyamp_keras.compile(model, RECIPE, loss="mse")
    assert [layer.compute_dtype for layer in model.layers if layer.name in ("hidden", "norm", "out")] == [
        *("bfloat16", "float32", "float32")
    ]
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[polyamp_keras.LossScaleLogger()])
    assert (history.history["loss_scale"], history.history["skipped_steps"]) == ([32.0], [1])
    assert int(model.optimizer.iterations) == 3
    assert np.isfinite(values([model.get_layer("norm").moving_mean])[0]).all()
    assert all(variable.dtype == "float32" for variable in model.trainable_variables)

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, polyamp_keras.LossScaleOptimizer)
    assert (loaded.optimizer.scaler, float(loaded.optimizer.dynamic_scale)) == (RECIPE.scaler, 32.0)
    assert loaded.get_layer("hidden").compute_dtype == "bfloat16"
    for each in (model, loaded):
        each.fit(x[16:], y[16:], batch_size=8, shuffle=False, verbose=0)
    assert all(map(np.array_equal, values(model.variables), values(loaded.variables)))
    before = values(loaded.non_trainable_variables[:2])
    loaded.fit(np.full((8, 4), np.inf), y[:8], verbose=0)
    assert all(map(np.array_equal, before, values(loaded.non_trainable_variables[:2])))


def test_s08_micro_batches_count_by_their_rows(batches: Any) -> None:
    """The gradient of windows of 8 and 4 rows is that of one batch of 12; a skipped window moves nothing."""
    x, y = batches[0][16:28], batches[1][16:28] + 1.0
    found = []
    for rows, steps in ((12, 1), (8, 2)):
        dense = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="ones")])
        recipe = polyamp.Recipe(
            policy="float32", scaler=RECIPE.scaler, optimizer=polyamp.sgd(0.1), accumulate_steps=steps
        )
        polyamp_keras.compile(dense, recipe, loss="mse")
        dense.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
        found.append(values(dense.trainable_variables))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_s12_a_skipped_window_restores_the_statistics_from_before_it(model: Any, batches: Any) -> None:
    polyamp_keras.compile(model, RECIPE.replace(accumulate_steps=2, policy="float32"), loss="mse")
    before = values(model.variables[:6])
    model.fit(batches[0][:16], batches[1][:16], batch_size=8, shuffle=False, verbose=0)
    norm = model.get_layer("norm")
    assert all(map(np.array_equal, before, values(model.variables[:6])))
    assert np.array_equal(values([norm.moving_mean])[0], np.zeros(8))
    assert (model.optimizer.skipped_steps, int(model.optimizer.iterations)) == (1, 0)


def test_s17_a_stuck_scale_ends_fit(model: Any) -> None:
    scaler = polyamp.LossScaler(init_scale=1.0, min_scale=1.0, patience=2)
    polyamp_keras.compile(model, RECIPE.replace(scaler=scaler), loss="mse")
    with pytest.raises(LossScaleStuckError, match=r"2 steps in a row were skipped.*hidden/kernel"):
        model.fit(np.full((32, 4), np.inf), np.zeros((32, 3)), batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 0  # and the model has its variables


def test_guard_replaces_kerass_own_wrapper(model: Any, batches: Any) -> None:
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2), initial_scale=64.0)
    model.compile(theirs, "mse", auto_scale_loss=False)
    model.fit(batches[0][16:], batches[1][16:], batch_size=8, verbose=0)
    polyamp_keras.guard(model)
    ours = model.optimizer
    assert isinstance(ours, polyamp_keras.LossScaleOptimizer)
    assert (float(ours.dynamic_scale), int(ours.step_counter), int(ours.iterations)) == (64.0, 2, 2)
    model.fit(batches[0], batches[1], batch_size=8, shuffle=False, verbose=0)
    assert (int(ours.iterations), ours.skipped_steps) == (5, 1)


def test_apply_policy_and_dtype_policy(model: Any) -> None:
    with polyamp_keras.apply_policy(model, polyamp.Policy("mixed_bfloat16")) as applied:
        inner = keras.backend.standardize_dtype(model.get_layer("hidden")(keras.ops.ones((2, 4))).dtype)
        output = keras.backend.standardize_dtype(model(keras.ops.ones((2, 4))).dtype)
    assert (inner, output, applied.choices["norm"]) == ("bfloat16", "float32", ("float32", "sensitive"))
    assert model.get_layer("hidden").compute_dtype == "float32"
    assert polyamp_keras.dtype_policy("mixed_float16").name == "mixed_float16"


def test_s23_a_parameter_without_a_gradient_does_not_change(backend: str) -> None:
    used, unused = keras.Variable([1.0, 2.0], name="trained"), keras.Variable([3.0, 4.0], name="idle")
    inner = keras.optimizers.AdamW(0.1, weight_decay=0.5, use_ema=True)
    optimizer = polyamp_keras.LossScaleOptimizer(inner, polyamp.LossScaler(init_scale=4.0))
    optimizer.build([used, unused])
    kept = [variable for variable in inner.variables if "idle" in variable.path]
    assert len(kept) == 3
    for step in range(3):
        before = values([unused, *kept])
        optimizer.scale_loss(keras.ops.ones(()))
        with (
            pytest.warns(UserWarning, match="Gradients do not exist")
            if step == 0
            else warnings.catch_warnings(record=True)
        ):
            warnings.simplefilter("always")
            optimizer.apply([keras.ops.ones((2,)), None], [used, unused])
        average = before[0] if step == 0 else before[1]  # Keras's first update sets it to the parameter
        assert all(map(np.array_equal, [before[0], average, *before[2:]], values([unused, *kept])))
    assert not np.array_equal(values([used])[0], [1.0, 2.0])


def test_scale_loss_that_is_forgotten_is_an_error() -> None:
    optimizer = polyamp_keras.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    variable = keras.Variable([1.0])
    with pytest.raises(LossScaleError, match=r"scale_loss\(\) was not"):
        optimizer.apply([keras.ops.ones((1,))], [variable])


class Built(keras.Model):  # type: ignore[misc]  # Keras is untyped
    def __init__(self) -> None:
        super().__init__()
        self(np.ones((1, 2)))

    def call(self, x: Any) -> Any:
        return x


class TwoOptimizers(Built):
    def compile(self, d_optimizer: Any) -> None:
        super().compile()


class Needs(Built):
    def compile(self, optimizer: Any, alpha: float) -> None:
        super().compile(optimizer)


@pytest.mark.parametrize(
    ("kind", "error", "name"),
    [
        (TwoOptimizers, UnsupportedError, "LossScaleOptimizer objects"),
        (Needs, RecipeError, "compile, which hands it on"),
    ],
)
def test_s20_messages_name_the_package_of_this_backend(kind: Any, error: Any, name: str, backend: str) -> None:
    package = "polyamp_tensorflow" if backend == "tensorflow" else "polyamp_keras"
    with pytest.raises(error, match=f"{package}.{name}"):
        polyamp_keras.compile(kind(), RECIPE)


def test_s11_a_clip_of_the_recipe_that_the_optimizer_does_not_know_is_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OtherLimits(NamedTuple):
        norm: float | None = None
        value: float | None = None
        eps: float = 0.0
        quantile: float | None = 0.9

    monkeypatch.setattr(polyamp.Recipe, "clip", property(lambda recipe: OtherLimits(recipe.clip_norm)))
    with pytest.raises(RecipeError, match="clip_quantile"):
        polyamp_keras.compile(model, RECIPE, loss="mse")


def test_what_is_not_supported_is_refused_by_name(model: Any, backend: str) -> None:
    if backend == "torch":
        with pytest.raises(UnsupportedError, match="jit_compile=True"):
            polyamp_keras.compile(model, RECIPE, loss="mse", jit_compile=True)
