"""One network with a method, a submodule, a parameter of its own and a setting, in each of JAX's libraries."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen, nnx

WIDTH = 4
START = 2.5


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        blocks = [nnx.Linear(WIDTH, WIDTH, rngs=rngs)]
        self.blocks = nnx.List(blocks) if hasattr(nnx, "List") else blocks  # from flax 0.12
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.log_gain = nnx.Param(jnp.asarray(START))
        self.calls = nnx.Variable(jnp.zeros(()))
        self.size = WIDTH

    def encode(self, x: Any) -> Any:
        return self.drop(self.norm(self.encoder(x)))

    def count(self) -> int:
        return self.size

    @property
    def gain(self) -> Any:
        return jnp.exp(self.log_gain[...])

    def __call__(self, x: Any) -> Any:
        return self.blocks[0](self.encode(x))


class Linen(linen.Module):
    size: int = WIDTH

    def setup(self) -> None:
        self.encoder = linen.Dense(WIDTH)
        self.blocks = [linen.Dense(WIDTH)]
        self.norm = linen.BatchNorm(use_running_average=False)
        self.drop = linen.Dropout(0.5, deterministic=False)
        self.log_gain = self.param("log_gain", lambda key: jnp.asarray(START))

    def encode(self, x: Any) -> Any:
        return self.drop(self.norm(self.encoder(x)))

    def count(self) -> int:
        return self.size

    @property
    def gain(self) -> Any:
        return jnp.exp(self.log_gain)

    def __call__(self, x: Any) -> Any:
        return self.blocks[0](self.encode(x))


class Equinox(eqx.Module):
    encoder: eqx.nn.Linear
    blocks: list[eqx.nn.Linear]
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    log_gain: Any
    size: int

    def __init__(self, key: Any) -> None:
        one, two = jax.random.split(key)
        self.encoder = eqx.nn.Linear(WIDTH, WIDTH, key=one)
        self.blocks = [eqx.nn.Linear(WIDTH, WIDTH, key=two)]
        self.norm = eqx.nn.BatchNorm(WIDTH, "batch", mode="batch")
        self.drop = eqx.nn.Dropout(0.5)
        self.log_gain = jnp.asarray(START)
        self.size = WIDTH

    def encode(self, x: Any, state: Any, *, key: Any) -> Any:
        h, state = self.norm(self.encoder(x), state)
        return self.drop(h, key=key), state

    def count(self) -> int:
        return self.size

    @property
    def gain(self) -> Any:
        return jnp.exp(self.log_gain)

    def __call__(self, x: Any, state: Any, *, key: Any) -> Any:
        h, state = self.encode(x, state, key=key)
        return self.blocks[0](h), state


class Functions(NamedTuple):
    """What `hk.multi_transform` makes functions of."""

    encode: Any
    decode: Any


def _haiku() -> Any:
    encoder, block = hk.Linear(WIDTH, name="encoder"), hk.Linear(WIDTH, name="blocks")
    norm = hk.BatchNorm(True, True, 0.9, name="norm")

    def encode(x: Any) -> Any:
        return hk.dropout(hk.next_rng_key(), 0.5, norm(encoder(x), is_training=True))

    def whole(x: Any) -> Any:
        return block(encode(x))

    return whole, Functions(encode, block)


def made(kind: str) -> tuple[Any, dict[str, Any]]:
    """(the model, what `init` needs beside it)."""
    x = jnp.ones((2, WIDTH))
    if kind == "nnx":
        return Nnx(nnx.Rngs(0)), {}
    if kind == "linen":
        module = Linen()
        return (module, module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)), {
            "rngs": {"dropout": 0}
        }
    if kind == "equinox":
        return eqx.nn.make_with_state(Equinox)(jax.random.key(0)), {"rngs": 0, "axis_name": "batch"}
    transformed = hk.multi_transform_with_state(_haiku)
    return (transformed, transformed.init(jax.random.key(0), x)), {"rngs": 0}
