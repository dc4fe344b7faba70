"""A Keras model, and its training, on JAX and TensorFlow from files that a process of Keras on torch has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import polyamp
from polyamp import porting
from tests.backends.keras.other_process import start
from tests.backends.keras.test_port import IMAGES, image_network

_ON_TORCH = """
import numpy as np
from polyamp import porting
from tests.backends.keras.other_process import start
from tests.backends.keras.test_port import IMAGES, image_network

model = image_network(7)
porting.save(model, "net.safetensors")
np.save("outputs.npy", model.predict_on_batch(IMAGES))
"""


_TRAINED_ON_TORCH = """
import numpy as np
import polyamp
from tests.backends.keras import test_files_of_torch, test_port

state = test_files_of_torch.trained(test_port.image_network(7))
polyamp.save(state, "trained.polyamp")
np.savez("arrays.npz", **{name.replace("/", "|"): each for name, each in state.backend.export_state(state).items()})
"""


def run_on_torch(program: str, folder: Path) -> None:
    assert start(program, "torch", folder).wait(timeout=300) == 0


def trained(model: Any, steps: int = 3) -> Any:
    """A state after some steps, of which the second overflows."""
    scaler = polyamp.LossScaler(init_scale=64.0)
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.adamw(1e-2), scaler=scaler)
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(lambda model, x: polyamp.losses.mean_squared_error(model(x), x[:, 0, :3, 0]), recipe)
    for number in range(steps):
        state, _ = step(state, IMAGES * np.float32(np.inf if number == 1 else 1.0))
    return state


SLOT_NAME = {"jax": "optimizer/slots/{slot}/{path}", "tensorflow": "optimizer/{path}/{slot}"}
"""Name of an optimizer's array in the state of a backend."""
COUNT_NAME = {"jax": "optimizer/count", "tensorflow": "optimizer/iteration"}


def test_a_training_goes_on_from_keras_on_torch_with_the_same_arrays(tmp_path: Path, backend: str) -> None:
    run_on_torch(_TRAINED_ON_TORCH, tmp_path)
    state, report = polyamp.port(tmp_path / "trained.polyamp", trained(image_network(0), steps=0))
    assert report.clean
    found = state.backend.export_state(state)
    with np.load(tmp_path / "arrays.npz") as file:
        there = {tuple(name.split("|")): file[name] for name in file.files}
    compared = 0
    for parts, array in there.items():
        name = "/".join(parts)
        if parts[:2] == ("optimizer", "state") and parts[-1] != "step":
            name = SLOT_NAME[backend].format(slot=parts[-1], path="/".join(parts[2:-1]))
        elif parts[0] in ("optimizer", "rng"):
            continue
        compared += 1
        assert array.tobytes() == np.asarray(found[name]).tobytes(), name
    assert compared > 3 * 8  # parameters, two slots of each, statistics, and the scale
    assert int(found[COUNT_NAME[backend]]) == 2


def test_a_model_moves_from_keras_on_torch_by_file(tmp_path: Path) -> None:
    run_on_torch(_ON_TORCH, tmp_path)
    model, report = porting.load(image_network(0), porting.open(tmp_path / "net.safetensors"))
    assert len(report.moved) == 4
    np.testing.assert_allclose(model.predict_on_batch(IMAGES), np.load(tmp_path / "outputs.npy"), rtol=1e-5, atol=1e-6)
