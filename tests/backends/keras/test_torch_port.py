"""`polyamp.port` between Keras on torch and modules of torch, in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from tests.backends.keras.test_port import IMAGES, image_network


class TorchNet(nn.Module):
    """The network of `image_network`, with its channels first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, eps=1e-3, momentum=0.01)
        self.hidden, self.head = nn.Linear(48, 5), nn.Linear(5, 3)

    def forward(self, x: Any) -> Any:
        x = self.norm(self.conv(x).relu()).flatten(1)
        return self.head(nn.functional.gelu(self.hidden(x)))


@pytest.mark.parametrize("from_keras", [True, False])
def test_weights_move_between_keras_and_a_module(from_keras: bool) -> None:
    sides = (image_network(), TorchNet()) if from_keras else (TorchNet(), image_network())
    images = IMAGES if from_keras else IMAGES.transpose(0, 3, 1, 2).copy()
    ported, report = polyamp.port(*sides, check=images)
    assert ported is sides[1]
    assert report.clean
    assert len(report.moved) == 4
    assert report.checked.outputs < 1e-5
    assert max(report.checked.gradients.values()) < 1e-4
    assert "fc" not in str(report)
    assert "48" in str(report)  # the rows behind the flatten


def test_an_epsilon_is_named_and_parameters_still_require_gradients() -> None:
    target = image_network(1, epsilon=0.1)
    target.get_layer("head").trainable = False
    with pytest.warns(UserWarning, match="epsilon is 0.1, in the source"):
        polyamp.port(
            TorchNet(),
            target,
            check=polyamp.porting.Batch(IMAGES.transpose(0, 3, 1, 2).copy(), IMAGES, outputs=10.0, gradients=10.0),
        )
    head = target.get_layer("head").kernel.value
    assert not head.requires_grad
    assert head.grad is None
    assert target.get_layer("hidden").kernel.value.requires_grad
    assert np.isfinite(head.detach().numpy()).all()
