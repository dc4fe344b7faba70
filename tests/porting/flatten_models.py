"""Networks whose dense layers stand behind a flatten, or seem to, as they are written in six libraries.

One forward pass serves all of them. `FIRST` libraries have the channels first, the others last. Run as a command, it
ports every network between the libraries of one process, and prints what came out as JSON:
`python -m tests.porting.flatten_models torch nnx linen equinox haiku`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

import polyamp
from polyamp import porting
from polyamp.errors import PortError
from tests.porting import sequential_models

LAYERS: Final[dict[str, dict[str, tuple[str, int, int]]]] = {
    "heads": {"conv": ("conv", 3, 4), "mu": ("dense", 80, 5), "logvar": ("dense", 80, 3)},
    "pooled": {"left": ("conv", 3, 4), "right": ("conv", 3, 4), "fc": ("dense", 8, 5)},
    "fused": {"conv": ("conv", 3, 4), "fc": ("dense", 85, 5)},
    "film": {
        "conv": ("conv", 3, 4),
        "embed": ("dense", 5, 12),
        "film": ("dense", 12, 8),
        "out": ("conv", 4, 2),
        "fc": ("dense", 2, 3),
    },
    "added": {"conv": ("conv", 3, 4), "state": ("dense", 5, 80), "head": ("dense", 80, 3)},
    "decoder": {"project": ("dense", 5, 120), "up": ("conv", 4, 3)},
    "permuted": {"conv": ("conv", 3, 4), "fc": ("dense", 80, 5)},
    "twice": {"conv": ("conv", 3, 4), "fc": ("dense", 80, 40), "project": ("dense", 40, 120), "up": ("conv", 4, 3)},
}
"""Network -> its layers: kind, inputs, features. `added` adds a dense layer's output to flattened channels."""
FIRST: Final = ("torch", "equinox")
"""Libraries with the channels first."""
IMAGE: Final = (3, 6, 7)
"""Channels, height and width. A convolution of 3 by 3 makes 4 by 5 of it."""


def forward(kind: str, m: Any, ops: Any, first: bool, x: Any, s: Any) -> Any:
    """The pass of every library, with or without a batch axis."""
    axis, space = (-3, (-2, -1)) if first else (-1, (-3, -2))

    def flat(image: Any) -> Any:
        return image.reshape((*image.shape[:-3], -1))

    def image(values: Any) -> Any:
        sides = (4, 5, 6) if first else (5, 6, 4)
        return values.reshape((*values.shape[:-1], *sides))

    if kind == "pooled":
        return m.fc(ops.concat([ops.relu(m.left(x)), ops.relu(m.right(x))], axis).mean(space))
    if kind == "decoder":
        return m.up(ops.relu(image(m.project(s))))
    x = ops.relu(m.conv(x))
    if kind == "heads":
        return m.mu(flat(x)), m.logvar(flat(x))
    if kind == "fused":
        return m.fc(ops.concat([flat(x), s], -1))
    if kind == "added":
        return m.head(flat(x) + m.state(s))
    if kind == "film":
        scale, shift = ops.split(m.film(ops.relu(m.embed(s))))
        scale, shift = (each[..., None, None] if first else each[..., None, None, :] for each in (scale, shift))
        return m.fc(m.out(x * scale + shift).mean(space))
    if kind == "permuted":
        return m.fc(flat(ops.moveaxis(x, -3, -1) if first else x))
    return m.up(image(m.project(ops.relu(m.fc(flat(x))))))


def images(library: str, x: Any) -> Any:
    """A batch of images as a library has them."""
    return x if library in FIRST else np.ascontiguousarray(np.moveaxis(x, 1, -1))


def torch_model(kind: str, seed: int) -> Any:
    import torch
    from torch import nn

    ops = SimpleNamespace(
        concat=torch.cat, relu=torch.relu, split=lambda each: each.chunk(2, -1), moveaxis=torch.movedim
    )

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, (what, inputs, features) in LAYERS[kind].items():
                setattr(self, name, nn.Conv2d(inputs, features, 3) if what == "conv" else nn.Linear(inputs, features))

        def forward(self, x: Any, s: Any) -> Any:
            return forward(kind, self, ops, True, x, s)

    torch.manual_seed(seed)
    return Net()


def keras_model(kind: str, seed: int) -> Any:
    import keras

    ops = SimpleNamespace(
        concat=keras.ops.concatenate, relu=keras.ops.relu, split=lambda each: keras.ops.split(each, 2, -1)
    )

    class Tensor:
        """Methods that other libraries' arrays have."""

        def __init__(self, value: Any) -> None:
            self.value, self.shape = value, value.shape

        def reshape(self, shape: Any) -> Any:
            return keras.ops.reshape(self.value, shape)

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            for name, (what, _, features) in LAYERS[kind].items():
                made = (
                    keras.layers.Conv2D(features, 3, name=name)
                    if what == "conv"
                    else keras.layers.Dense(features, name=name)
                )
                setattr(self, name, made)

        def call(self, inputs: Any) -> Any:
            return forward_keras(kind, self, ops, *inputs)

    keras.utils.set_random_seed(seed)
    model = Net()
    model([images("keras", np.zeros((2, *IMAGE), np.float32)), np.zeros((2, 5), np.float32)])
    return model


def forward_keras(kind: str, m: Any, ops: Any, x: Any, s: Any) -> Any:
    """The same pass with functions in the place of methods."""
    import keras

    def flat(image: Any) -> Any:
        return keras.ops.reshape(image, (image.shape[0], -1))

    def image(values: Any) -> Any:
        return keras.ops.reshape(values, (values.shape[0], 5, 6, 4))

    if kind == "pooled":
        return m.fc(keras.ops.mean(ops.concat([ops.relu(m.left(x)), ops.relu(m.right(x))], -1), (1, 2)))
    if kind == "decoder":
        return m.up(ops.relu(image(m.project(s))))
    x = ops.relu(m.conv(x))
    if kind == "heads":
        return m.mu(flat(x)), m.logvar(flat(x))
    if kind == "fused":
        return m.fc(ops.concat([flat(x), s], -1))
    if kind == "added":
        return m.head(flat(x) + m.state(s))
    if kind == "film":
        scale, shift = ops.split(m.film(ops.relu(m.embed(s))))
        return m.fc(keras.ops.mean(m.out(x * scale[:, None, None, :] + shift[:, None, None, :]), (1, 2)))
    if kind == "permuted":
        return m.fc(flat(x))
    return m.up(image(m.project(ops.relu(m.fc(flat(x))))))


def _jax_ops() -> SimpleNamespace:
    import jax
    import jax.numpy as jnp

    return SimpleNamespace(
        concat=jnp.concatenate, relu=jax.nn.relu, split=lambda each: jnp.split(each, 2, -1), moveaxis=jnp.moveaxis
    )


def nnx_model(kind: str, seed: int) -> Any:
    from flax import nnx

    ops = _jax_ops()

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            for name, (what, inputs, features) in LAYERS[kind].items():
                made: Any = nnx.Conv(inputs, features, (3, 3), padding="VALID", rngs=rngs) if what == "conv" else None
                setattr(self, name, made or nnx.Linear(inputs, features, rngs=rngs))

        def __call__(self, x: Any, s: Any) -> Any:
            return forward(kind, self, ops, False, x, s)

    return Net(nnx.Rngs(seed))


def linen_model(kind: str, seed: int) -> Any:
    import jax
    from flax import linen

    ops = _jax_ops()

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any, s: Any) -> Any:
            made = {
                name: linen.Conv(features, (3, 3), padding="VALID", name=name)
                if what == "conv"
                else linen.Dense(features, name=name)
                for name, (what, _, features) in LAYERS[kind].items()
            }
            return forward(kind, SimpleNamespace(**made), ops, False, x, s)

    x, s = images("linen", np.zeros((2, *IMAGE), np.float32)), np.zeros((2, 5), np.float32)
    return Net(), Net().init(jax.random.key(seed), x, s)


def haiku_model(kind: str, seed: int) -> Any:
    import haiku as hk
    import jax

    ops = _jax_ops()

    def net(x: Any, s: Any) -> Any:
        made = {
            name: hk.Conv2D(features, 3, padding="VALID", name=name)
            if what == "conv"
            else hk.Linear(features, name=name)
            for name, (what, _, features) in LAYERS[kind].items()
        }
        return forward(kind, SimpleNamespace(**made), ops, False, x, s)

    x, s = images("haiku", np.zeros((2, *IMAGE), np.float32)), np.zeros((2, 5), np.float32)
    made = hk.without_apply_rng(hk.transform(net))
    return made, made.init(jax.random.key(seed), x, s)


def equinox_model(kind: str, seed: int) -> Any:
    import equinox as eqx
    import jax

    ops = _jax_ops()
    fields = LAYERS[kind]

    def build(self: Any, key: Any) -> None:
        for number, (name, (what, inputs, features)) in enumerate(fields.items()):
            own = jax.random.fold_in(key, number)
            made = eqx.nn.Conv2d(inputs, features, 3, key=own) if what == "conv" else None
            setattr(self, name, made or eqx.nn.Linear(inputs, features, key=own))

    def call(self: Any, x: Any, s: Any) -> Any:
        return forward(kind, self, ops, True, x, s)

    body = {"__annotations__": dict.fromkeys(fields, Any), "__init__": build, "__call__": call}
    return type("Net", (eqx.Module,), body)(jax.random.key(seed))


BUILD: Final[dict[str, Callable[[str, int], Any]]] = {
    "torch": torch_model,
    "keras": keras_model,
    "nnx": nnx_model,
    "linen": linen_model,
    "haiku": haiku_model,
    "equinox": equinox_model,
}


def call(library: str, model: Any, x: Any, s: Any) -> list[Any]:
    """The outputs of a model, images with their channels first."""
    x = images(library, x)
    if library == "torch":
        import torch

        found = model(torch.tensor(x), torch.tensor(s))
    elif library == "keras":
        found = model([x, s])
    elif library in ("linen", "haiku"):
        found = model[0].apply(model[1], x, s)
    elif library == "equinox":
        import jax

        found = jax.vmap(model)(x, s)
    else:
        found = model(x, s)
    outputs = [np.asarray(each.detach() if library == "torch" else each) for each in _several(found)]
    return [np.moveaxis(each, -1, 1) if each.ndim == 4 and library not in FIRST else each for each in outputs]


def _several(found: Any) -> tuple[Any, ...]:
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def batch(source: str, target: str, x: Any, s: Any) -> porting.Batch:
    """Inputs of both sides. Keras takes them as one list."""
    ours, theirs = (([images(each, x), s],) if each == "keras" else (images(each, x), s) for each in (source, target))
    return porting.Batch(ours, theirs)


def port(kind: str, source: str, target: str, **options: Any) -> dict[str, Any]:
    """What a port of a network gave: the error, or the distance of outputs on other inputs."""
    rng = np.random.default_rng(7)
    x, s = rng.standard_normal((4, *IMAGE)).astype("f4"), rng.standard_normal((4, 5)).astype("f4")
    ours, theirs = BUILD[source](kind, 1), BUILD[target](kind, 2)
    for name in ("batch", "check"):
        if name in options:
            options[name] = batch(source, target, x, s)
    try:
        ported, report = polyamp.port(ours, theirs, **options)
    except PortError as error:
        return {"error": str(error)}
    x, s = rng.standard_normal((3, *IMAGE)).astype("f4"), rng.standard_normal((3, 5)).astype("f4")
    pairs = zip(call(source, ours, x, s), call(target, ported, x, s), strict=True)
    distance = max(float(np.max(np.abs(one - other)) / np.max(np.abs(one))) for one, other in pairs)
    return {"distance": distance, "clean": report.clean, "notes": list(report.notes)}


def cases(libraries: list[str]) -> list[tuple[str, str, str]]:
    """(network, source, target): torch and nnx with every network, other pairs with two of them."""
    found = []
    for source in libraries:
        for target in libraries:
            if (source in FIRST) != (target in FIRST):
                kinds = LAYERS if {source, target} == {"torch", "nnx"} else ("fused", "permuted", "decoder", "heads")
                found += [(kind, source, target) for kind in list(kinds)[: None if source == "torch" else 2]]
    return found


def main(libraries: list[str]) -> None:
    """Print what all ports between libraries with other channel positions give."""
    found = {}
    for kind, source, target in cases(libraries):
        key = f"{kind} {source} {target}"
        found[f"{key} bare"] = port(kind, source, target)
        how = "check" if kind in ("heads", "fused") else "batch"
        found[f"{key} {how}"] = port(kind, source, target, **{how: True})
    for source, target in sequential_models.PAIRS[" ".join(libraries)]:
        found[f"{source} to {target}"] = sequential_models.port(source, target)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
