"""What polyamp set up on a model is in its `.keras` file, and comes back by itself where polyamp_tensorflow is
imported: the policy with each layer's dtype, the optimizer, the guard over `fit`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import polyamp
from polyamp_tensorflow import apply_policy
from polyamp_tensorflow import compile as compile_model

# Keras 3.15 reads its variables so when it writes them, under NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 8)).astype(np.float32)
Y = RNG.normal(size=(32, 3)).astype(np.float32)
RECIPE = polyamp.Recipe(
    policy=polyamp.Policy("mixed_bfloat16", overrides={"wide": "float32"}),
    optimizer=polyamp.adamw(1e-2),
    scaler=polyamp.LossScaler(init_scale=16.0),
    clip_norm=1.0,
)


def make_model() -> Any:
    """With what a layer's dtype does not say: an operation's casts, the softmax inside attention, a `dtype=`."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    x = keras.layers.Dense(16, "gelu", name="wide")(inputs)
    x = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization(name="norm")(x))
    x = keras.layers.Reshape((4, 4))(x)
    x = keras.layers.Attention()([keras.ops.softmax(keras.ops.matmul(x, x)), x])
    x = keras.layers.Dense(8, "relu", dtype="float32", name="own")(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(8, "relu", name="narrow")(x)))


def train(model: Any, epochs: int) -> None:
    model.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0)


def choices(model: Any) -> list[tuple[str | None, str]]:
    """Of the policy that `compile` put on; names of operations are numbered by the process."""
    return list(vars(model)["_polyamp_applied_by_compile"].choices.values())


NEW_PROCESS = """
import sys
import numpy as np
import keras

folder = sys.argv[1]
try:
    keras.models.load_model(folder + "/model.keras")
except TypeError as error:
    print(str(error)[:400].replace("\\n", " "))
import polyamp_tensorflow

model = keras.models.load_model(folder + "/model.keras")
data = np.load(folder + "/data.npz")
x, y = data["x"], data["y"]
found = {"predicted": model.predict(x, verbose=0)}
found["without_compile"] = keras.models.load_model(folder + "/model.keras", compile=False).predict(x, verbose=0)
model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
found |= {f"weight_{n}": w.numpy() for n, w in enumerate(model.weights)}
x[3] = np.inf
before = [w.numpy() for w in model.weights]
model.fit(x[:16], y[:16], batch_size=16, verbose=0)
same = all(np.array_equal(a, b.numpy()) for a, b in zip(before, model.weights))
np.savez(folder + "/found.npz", same=same, skipped=model.optimizer.skipped_steps, **found)
"""


def test_s22_five_epochs_are_two_a_file_and_three_in_another_process(tmp_path: Path) -> None:
    model = make_model()
    compile_model(model, RECIPE, loss="mse", jit_compile=False)
    train(model, 2)
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    predicted = model.predict(X, verbose=0)
    other = subprocess.run([sys.executable, "-c", NEW_PROCESS, str(tmp_path)], capture_output=True, text=True)
    assert other.returncode == 0, other.stderr[-2000:]
    assert "Could not locate class 'PolyampFunctional'" in other.stdout
    assert "{'module': 'polyamp_tensorflow'" in other.stdout
    found = np.load(tmp_path / "found.npz")
    np.testing.assert_array_equal(found["predicted"], predicted)
    np.testing.assert_array_equal(found["without_compile"], predicted)
    train(model, 3)
    for number, weight in enumerate(model.weights):
        np.testing.assert_array_equal(found[f"weight_{number}"], weight.numpy(), err_msg=weight.path)
    assert (bool(found["same"]), int(found["skipped"])) == (True, 1)


def test_a_loaded_model_has_what_each_layer_got_and_its_own_dtypes_below(tmp_path: Path) -> None:
    model = make_model()
    compile_model(model, RECIPE, loss="mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert choices(loaded) == choices(model)
    assert ("float32", "override") in choices(loaded)
    assert (None, "given") in choices(loaded)
    loaded.save(tmp_path / "again.keras")
    loaded = keras.models.load_model(tmp_path / "again.keras")
    assert choices(loaded) == choices(model)
    vars(loaded)["_polyamp_applied_by_compile"].restore()
    assert {layer.compute_dtype for layer in loaded.layers} == {"float32"}
    compile_model(loaded, RECIPE.replace(policy="float32"), loss="mse")
    assert {layer.compute_dtype for layer in loaded.layers} == {"float32"}


@keras.saving.register_keras_serializable(package="tests")
class Block(keras.layers.Layer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = keras.layers.Dense(8)  # an automatic name, which counts per process
        self.norm = keras.layers.LayerNormalization()

    def build(self, shape: Any) -> None:
        self.inner.build(shape)
        self.norm.build(shape)

    def call(self, x: Any) -> Any:
        return x + self.norm(self.inner(x))


@keras.saving.register_keras_serializable(package="tests")
class Net(keras.Model):
    def __init__(self, width: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.width = width
        self.block = Block()
        self.norm = keras.layers.BatchNormalization()
        self.out = keras.layers.Dense(width)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.norm(self.block(x), training=training))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width}


def test_a_subclassed_model_and_one_inside_another(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    net = Net()
    net(X)
    compile_model(net, RECIPE.replace(policy="mixed_bfloat16"), loss="mse", run_eagerly=True)
    net.save(tmp_path / "net.keras")
    loaded = keras.models.load_model(tmp_path / "net.keras")
    assert isinstance(loaded, Net)
    assert [layer.compute_dtype for layer in (loaded.block, loaded.block.norm)] == ["bfloat16", "float32"]
    np.testing.assert_array_equal(loaded(X), net(X))
    for model in (net, loaded):
        model.fit(np.full_like(X, np.inf), Y, batch_size=16, epochs=1, verbose=0)
        assert np.isfinite(model.norm.moving_mean.numpy()).all()

    inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "relu"), Block()])
    outer = keras.Sequential([keras.Input((8,)), inner, keras.layers.Dense(3)])
    with apply_policy(inner, "mixed_bfloat16"):
        outer.save(tmp_path / "outer.keras")
        expected = outer(X)
    assert type(inner) is keras.Sequential
    loaded = keras.models.load_model(tmp_path / "outer.keras")
    assert [type(layer) is keras.Sequential for layer in (loaded, loaded.layers[0])] == [True, False]
    np.testing.assert_array_equal(loaded(X), expected)
    outer.save(tmp_path / "plain.keras")
    assert "polyamp" not in json.dumps(keras.models.load_model(tmp_path / "plain.keras").get_config())


def test_s12_a_window_that_was_open_while_saving_takes_statistics_back_to_those_of_the_file(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
    compile_model(model, RECIPE.replace(policy="float32", accumulate_steps=2), loss="mse", run_eagerly=True)
    model.train_on_batch(X, Y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    before = [variable.numpy() for variable in loaded.layers[0].variables]
    loaded.train_on_batch(np.full_like(X, np.inf), Y)
    assert loaded.optimizer.skipped_steps == 1
    for variable, value in zip(loaded.layers[0].variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)


def test_a_file_whose_model_has_other_layers_is_refused(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, name="only")])
    with apply_policy(model, "mixed_bfloat16"):
        config = keras.saving.serialize_keras_object(model)
    config["config"]["layers"][1]["config"]["name"] = "another"
    config["config"]["polyamp_tensorflow"]["settings"][0]["config"]["choices"][1][0] = "Conv1D"
    with pytest.raises(TypeError, match=r"the file's policy names 'only' \(Conv1D\), which the model .* another"):
        keras.saving.deserialize_keras_object(config)
