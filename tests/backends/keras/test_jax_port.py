"""`polyamp.port` between Keras on JAX and a module of flax in one process."""

from __future__ import annotations

from typing import Any

import pytest
from flax import nnx

import polyamp
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
