"""Programs as users write them, on this Keras backend: examples/keras, and a training that changes backends."""

from __future__ import annotations

import hashlib
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
NEXT = {"tensorflow": "torch", "torch": "jax", "jax": "tensorflow"}
"""The Keras backend on which a training goes on. The suites of all backends are the whole circle."""
GO_ON = """
import sys, keras, numpy as np
import polyamp_keras
from tests.backends.keras.test_programs import digest, go_on
model = keras.models.load_model(sys.argv[1])
print(digest(model))
go_on(model)
model.save(sys.argv[1])
print(digest(model))
"""


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "keras" / name))


def arrays(model: Any) -> list[Any]:
    variables = [*model.variables, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(variable.value) for variable in variables]


def digest(model: Any) -> str:
    """Return a hash of the bits of every array of a model and its optimizer; seeds have a dtype for each backend."""
    found = hashlib.sha256()
    for array in arrays(model):
        kept = array if array.dtype == np.float32 else array.astype(np.int64)
        found.update(kept.tobytes() + str(kept.shape).encode())
    return found.hexdigest()


def go_on(model: Any) -> None:
    """Train on two batches, of which the first overflows."""
    x = np.random.default_rng(1).normal(size=(32, 4)).astype("float32")
    y = np.sin(x[:, :3])
    x[0] = np.inf
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = list((EXAMPLES / "keras").glob("*.py"))
    assert len(files) == 3
    assert all(f"keras/{path.name}" in listed for path in files)


def test_a_transformer_is_tuned_by_lora_and_quantized() -> None:
    program = example("lora_transformer.py")
    model = program["transformer"]()
    whole = program["train"](model, program["sentences"](64, step=1), 8)
    assert whole[-1] < 0.5 * whole[0]
    layers = [model.get_layer(name) for name in ("up", "down")]
    for layer in layers:
        layer.enable_lora(4)
    frozen = [keras.ops.convert_to_numpy(layer._kernel.value) for layer in layers]
    data = program["sentences"](64, step=3)
    tuned = program["train"](model, data, 8)
    assert tuned[-1] < 0.7 * tuned[0]
    for layer, kernel in zip(layers, frozen, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer._kernel.value), kernel)
        assert np.abs(keras.ops.convert_to_numpy(layer.lora_kernel_b.value)).max() > 0
        assert (layer.compute_dtype, layer.lora_kernel_a.dtype) == ("bfloat16", "float32")
    before = model.predict(data[0], verbose=0)
    with pytest.warns(UserWarning, match="does not have a `quantize` method"):
        model.quantize("int8")
    after = model.predict(data[0], verbose=0)
    assert all(layer._kernel.dtype == "int8" for layer in layers)
    assert model.get_layer("norm_2").compute_dtype == "float32"
    assert np.mean(np.argmax(before, -1) == np.argmax(after, -1)) > 0.9


def test_models_with_a_step_of_their_own_train_and_skip() -> None:
    for model, losses in example("own_train_step.py")["main"]():
        assert (model.optimizer.skipped_steps, int(model.optimizer.iterations)) == (1, 3 + 16)
        assert np.isfinite(losses).all()
        assert losses[-1] < losses[0]
        assert all(np.isfinite(array).all() for array in arrays(model))


def test_callbacks_save_stop_and_resume(tmp_path: Path) -> None:
    whole, again, best = example("resume_fit.py")["main"](tmp_path)
    assert all(map(np.array_equal, whole, again))
    assert all(np.isfinite(array).all() for array in (*whole, *best))


def test_a_training_goes_on_with_another_backend(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    program = example("resume_fit.py")
    model = program["network"]()
    program["fit"](model, 1)
    model.save(path)
    done = subprocess.run(
        [sys.executable, "-c", GO_ON, str(path)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "KERAS_BACKEND": NEXT[backend], "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=EXAMPLES.parent,
    )
    assert done.returncode == 0, done.stderr
    loaded, trained = done.stdout.split()[-2:]
    assert loaded == digest(model)
    back = keras.models.load_model(path)
    assert digest(back) == trained != loaded
    assert (back.optimizer.skipped_steps, int(back.optimizer.iterations)) == (2, 4)
    assert float(back.optimizer.dynamic_scale) == 16.0
    assert back.get_layer("hidden").compute_dtype == "bfloat16"
    go_on(back)
    assert back.optimizer.skipped_steps == 3
