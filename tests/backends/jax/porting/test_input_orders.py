"""What the Sequentials of flax and equinox prove about the order of what layers take, and what they do not."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from polyamp.porting.layouts.input_order import InputOrder
from polyamp_jax.porting.converter import CONVERTER

RNGS = nnx.Rngs(0)
KEY = jax.random.key(0)


def conv() -> Any:
    return nnx.Conv(3, 4, (3, 3), padding="VALID", rngs=RNGS)


def dense(inputs: int = 80) -> Any:
    return nnx.Linear(inputs, 5, rngs=RNGS)


def orders(*parts: Any) -> dict[str, InputOrder]:
    found = CONVERTER.inventory(nnx.Sequential(*parts)).inputs
    return {path: order for path, order in found.items() if order.layer.endswith("layers/0")}


def pool(x: Any) -> Any:
    return nnx.max_pool(x, (2, 2), strides=(2, 2))


def flat(x: Any) -> Any:
    return x.reshape(x.shape[0], -1)


@pytest.mark.parametrize(
    ("functions", "channels"),
    [
        ((flat,), "last"),
        ((nnx.relu, pool, flat), "last"),
        ((jax.nn.gelu, lambda x: nnx.avg_pool(x, (2, 2)), flat, jnp.tanh), "last"),
        ((lambda x: x.transpose(0, 3, 1, 2), flat), None),  # no image of channels last any more
        ((lambda x: flat(x.transpose(0, 3, 1, 2)),), "first"),
        ((lambda x: x.mean((1, 2)),), ""),  # the channels themselves
        ((lambda x: flat(x.transpose(0, 2, 1, 3)),), None),
        ((lambda x: flat(x[:, ::-1]),), None),
        ((lambda x: flat(x[..., ::-1]),), None),
        ((lambda x: x.reshape(-1, 80),), None),  # for images of another size it is none
        ((lambda x: x.reshape(-1),), None),
        ((flat, lambda x: x[:, ::-1]), None),
    ],
)
def test_s30_functions_of_a_sequential_are_called_to_see_their_order(functions: Any, channels: str | None) -> None:
    expected = {} if channels is None else {f"layers/{len(functions) + 1}": InputOrder("layers/0", channels or None)}
    assert orders(conv(), *functions, dense()) == expected


def test_s30_modules_of_the_users_and_of_two_places_prove_nothing() -> None:
    class Flatten(nnx.Module):
        def __call__(self, x: Any) -> Any:
            return flat(x)

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.net = nnx.Sequential(conv(), flat, dense())
            self.again = self.net.layers[2]

    assert orders(conv(), Flatten(), dense()) == {}
    assert CONVERTER.inventory(Net()).inputs == {}


def test_s30_linens_and_equinoxs_sequentials_too() -> None:
    class Net(linen.Module):
        def setup(self) -> None:
            self.net = linen.Sequential([linen.Conv(4, (3, 3)), linen.relu, flat, linen.Dense(5)])

        def __call__(self, x: Any) -> Any:
            return self.net(x)

    variables = Net().init(KEY, jnp.zeros((1, 6, 7, 3)))
    assert CONVERTER.inventory((Net(), variables)).inputs == {"net/layers_3": InputOrder("net/layers_0", "last")}
    nn = eqx.nn
    parts = [nn.Conv2d(3, 4, 3, key=KEY), nn.Lambda(jax.nn.relu), nn.AvgPool2d(2, 2), nn.Lambda(jnp.ravel)]
    net = nn.Sequential([nn.Sequential(parts), nn.Linear(24, 5, key=KEY)])
    assert CONVERTER.inventory(net).inputs == {"layers/1": InputOrder("layers/0/layers/0", "first")}
