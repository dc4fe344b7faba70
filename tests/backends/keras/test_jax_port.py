"""`polyamp.port` between Keras on JAX and a module of flax in one process, and from Keras on torch by file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import polyamp
from polyamp import porting
from tests.backends.keras.test_port import IMAGES, image_network


class FlaxNet(nnx.Module):
    """The network of `image_network`."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(2, 4, (3, 3), padding="VALID", rngs=rngs)
        self.norm = nnx.BatchNorm(4, epsilon=1e-3, rngs=rngs)
        self.hidden, self.head = nnx.Linear(48, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.norm(nnx.relu(self.conv(x))).reshape(x.shape[0], -1)
        return self.head(nnx.gelu(self.hidden(x), approximate=False))


@pytest.mark.parametrize("from_keras", [True, False])
def test_weights_move_between_keras_and_a_module(from_keras: bool) -> None:
    sides = (image_network(), FlaxNet()) if from_keras else (FlaxNet(), image_network())
    ported, report = polyamp.port(*sides, check=IMAGES)
    assert (ported is sides[1]) is not from_keras  # Keras is filled in place, and nnx anew
    assert report.clean
    assert len(report.moved) == 4
    assert report.checked.outputs < 1e-5
    assert max(report.checked.gradients.values()) < 1e-4


_ON_TORCH = """
import numpy as np
from polyamp import porting
from tests.backends.keras.test_port import IMAGES, image_network

model = image_network(7)
porting.save(model, "net.safetensors")
np.save("outputs.npy", model.predict_on_batch(IMAGES))
"""


_TRAINED_ON_TORCH = """
import numpy as np
import polyamp
from tests.backends.keras import test_jax_port, test_port

state = test_jax_port.trained(test_port.image_network(7))
polyamp.save(state, "trained.polyamp")
np.savez("arrays.npz", **{name.replace("/", "|"): each for name, each in state.backend.export_state(state).items()})
"""


def run_on_torch(program: str, folder: Path) -> None:
    paths = os.pathsep.join([*filter(None, sys.path), os.getcwd()])  # noqa: PTH109  # entries are str
    settings = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", program], cwd=folder, env=settings, check=True)


def trained(model: Any, steps: int = 3) -> Any:
    """A state after some steps, of which the second overflows."""
    scaler = polyamp.LossScaler(init_scale=64.0)
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.adamw(1e-2), scaler=scaler)
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(lambda model, x: polyamp.losses.mean_squared_error(model(x), x[:, 0, :3, 0]), recipe)
    for number in range(steps):
        state, _ = step(state, IMAGES * np.float32(np.inf if number == 1 else 1.0))
    return state


def test_a_training_goes_on_from_keras_on_torch_with_the_same_arrays(tmp_path: Path) -> None:
    run_on_torch(_TRAINED_ON_TORCH, tmp_path)
    state, report = polyamp.port(tmp_path / "trained.polyamp", trained(image_network(0), steps=0))
    assert report.clean
    found, there = state.backend.export_state(state), np.load(tmp_path / "arrays.npz")
    compared = 0
    for name in there.files:
        path, parts = name.replace("|", "/"), name.split("|")
        if parts[:2] == ["optimizer", "state"] and parts[-1] != "step":
            path = "/".join(["optimizer", "slots", parts[-1], *parts[2:-1]])
        elif parts[0] in ("optimizer", "rng"):
            continue
        compared += 1
        assert there[name].tobytes() == np.asarray(found[path]).tobytes(), name
    assert compared > 3 * 8  # parameters, two slots of each, statistics, and the scale
    assert int(found["optimizer/count"]) == 2


def test_a_model_moves_from_keras_on_torch_by_file(tmp_path: Path) -> None:
    run_on_torch(_ON_TORCH, tmp_path)
    model, report = porting.load(image_network(0), porting.open(tmp_path / "net.safetensors"))
    assert len(report.moved) == 4
    np.testing.assert_allclose(model.predict_on_batch(IMAGES), np.load(tmp_path / "outputs.npy"), rtol=1e-5, atol=1e-6)
