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


def test_a_model_moves_from_keras_on_torch_by_file(tmp_path: Path) -> None:
    paths = os.pathsep.join([*filter(None, sys.path), os.getcwd()])  # noqa: PTH109  # entries are str
    settings = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", _ON_TORCH], cwd=tmp_path, env=settings, check=True)
    model, report = porting.load(image_network(0), porting.open(tmp_path / "net.safetensors"))
    assert len(report.moved) == 4
    np.testing.assert_allclose(model.predict_on_batch(IMAGES), np.load(tmp_path / "outputs.npy"), rtol=1e-5, atol=1e-6)
