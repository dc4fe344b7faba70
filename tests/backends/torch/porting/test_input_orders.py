"""What the Sequentials of a torch model prove about the order of what layers take, and what they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polyamp.porting.layouts.input_order import InputOrder
from polyamp_torch.porting.converter import CONVERTER


class OwnForward(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return super().forward(x.permute(0, 2, 3, 1))


class View(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.flatten(1)


def orders(*modules: nn.Module) -> dict[str, InputOrder]:
    found = CONVERTER.inventory(nn.Sequential(*modules)).inputs
    return {path: order for path, order in found.items() if order.channels is not None}


def conv() -> nn.Module:
    return nn.Conv2d(3, 4, 3)


@pytest.mark.parametrize(
    "between",
    [
        (nn.Flatten(),),
        (nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten()),
        (nn.SyncBatchNorm(4), nn.AdaptiveAvgPool2d(2), nn.Upsample(scale_factor=2), nn.Flatten()),
    ],
)
def test_s30_a_flatten_in_a_sequential_is_one_of_channels_first(between: tuple[nn.Module, ...]) -> None:
    assert orders(conv(), *between, nn.Linear(24, 5)) == {str(len(between) + 1): InputOrder("0", "first")}
    assert orders(nn.Sequential(conv(), *between), nn.Linear(24, 5)) == {"1": InputOrder("0/0", "first")}


def test_s30_an_unflatten_is_one_of_channels_first() -> None:
    made = orders(nn.Linear(5, 24), nn.GELU(), nn.Unflatten(1, (4, 2, 3)), nn.ConvTranspose2d(4, 3, 3))
    assert made == {"3": InputOrder("0", "first")}


@pytest.mark.parametrize(
    "between",
    [
        (View(),),  # a function of the user's
        (nn.Flatten(2), nn.Flatten()),
        (nn.Flatten(), nn.LayerNorm(24)),  # arrays in the order of the flatten
        (nn.Flatten(), nn.BatchNorm1d(24)),
        (nn.Flatten(), nn.PReLU(24)),
        (nn.Softmax(-1), nn.Flatten()),
    ],
)
def test_s30_other_modules_prove_nothing(between: tuple[nn.Module, ...]) -> None:
    assert orders(conv(), *between, nn.Linear(24, 5)) == {}


def test_s30_a_sequential_with_another_forward_or_hooks_proves_nothing() -> None:
    assert CONVERTER.inventory(OwnForward(conv(), nn.Flatten(), nn.Linear(24, 5))).inputs == {}
    flatten = nn.Flatten()
    flatten.register_forward_hook(lambda module, args, output: output.flip(1))
    assert orders(conv(), flatten, nn.Linear(24, 5)) == {}
    patched: Any = nn.Flatten()
    patched.forward = lambda x: x.permute(0, 2, 3, 1).flatten(1)
    assert orders(conv(), patched, nn.Linear(24, 5)) == {}


def test_s30_a_layer_of_two_places_proves_nothing() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(conv(), nn.Flatten(), nn.Linear(24, 5))
            self.again = self.net[2]

        def forward(self, x: Any) -> Any:
            return self.net(x) + self.again(torch.ones(1, 24))

    assert CONVERTER.inventory(Net()).inputs == {}
    shared = nn.ReLU()
    assert orders(conv(), shared, nn.Flatten(), shared, nn.Linear(24, 5)) == {"4": InputOrder("0", "first")}
