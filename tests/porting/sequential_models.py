"""One small convolutional network whose flatten a graph of modules proves, as five libraries write it.

`plain` has the flatten in a Sequential within another; `turned` has the values moved to the other library's order
before they are flattened; `hidden` flattens in a function of its own, which proves nothing.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

import polyamp
from polyamp.errors import PortError

FIRST: Final = ("torch", "equinox")
IMAGE: Final = (3, 10, 14)
FLAT: Final = 4 * 4 * 6
"""Values behind a convolution of 3 by 3 and a pooling of 2 by 2."""


def torch_model() -> Any:
    from torch import nn

    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(features, nn.Flatten(), nn.Dropout(0.5), nn.Linear(FLAT, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


def torch_hidden() -> Any:
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.flatten, _, *rest = torch_model()
            self.head = nn.Sequential(*rest)

        def forward(self, x: Any) -> Any:
            return self.head(self.flatten(self.features(x)))

    return Net().eval()


def keras_model() -> Any:
    import keras
    from keras import layers

    features = [layers.Conv2D(4, 3), layers.BatchNormalization(epsilon=1e-5, momentum=0.9)]
    inner = keras.Sequential([*features, layers.ReLU(), layers.MaxPooling2D(2)])
    image = keras.Input((*IMAGE[1:], IMAGE[0]))
    hidden = layers.Dense(8, activation="relu")(layers.Dropout(0.5)(layers.Flatten()(inner(image))))
    return keras.Model(image, layers.Dense(2)(hidden))


def _nnx(flatten: Any) -> Any:
    from flax import nnx

    rngs = nnx.Rngs(0)
    features = nnx.Sequential(
        nnx.Conv(3, 4, (3, 3), padding="VALID", rngs=rngs),
        nnx.BatchNorm(4, momentum=0.9, use_running_average=True, rngs=rngs),
        nnx.relu,
        lambda x: nnx.max_pool(x, (2, 2), strides=(2, 2)),
    )
    return nnx.Sequential(features, flatten, nnx.Linear(FLAT, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 2, rngs=rngs))


def nnx_model() -> Any:
    return _nnx(lambda x: x.reshape(x.shape[0], -1))


def nnx_turned() -> Any:
    return _nnx(lambda x: x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1))


def linen_model() -> Any:
    import jax
    from flax import linen

    class Net(linen.Module):
        def setup(self) -> None:
            self.features = linen.Sequential(
                [
                    linen.Conv(4, (3, 3), padding="VALID"),
                    linen.BatchNorm(momentum=0.9, use_running_average=True),
                    linen.relu,
                    lambda x: linen.max_pool(x, (2, 2), strides=(2, 2)),
                    lambda x: x.reshape((x.shape[0], -1)),
                    linen.Dense(8),
                    linen.relu,
                    linen.Dense(2),
                ]
            )

        def __call__(self, x: Any) -> Any:
            return self.features(x)

    return Net(), Net().init(jax.random.key(0), np.zeros((1, *IMAGE[1:], IMAGE[0]), np.float32))


def equinox_model() -> Any:
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 4, 3, key=keys[0]),
            eqx.nn.GroupNorm(1, 4),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(FLAT, 8, key=keys[1]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Linear(8, 2, key=keys[2]),
        ]
    )


def nnx_group_norm() -> Any:
    """The counterpart of equinox's, which has no running statistics."""
    from flax import nnx

    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Conv(3, 4, (3, 3), padding="VALID", rngs=rngs),
        nnx.GroupNorm(4, num_groups=1, epsilon=1e-5, rngs=rngs),
        nnx.relu,
        lambda x: nnx.max_pool(x, (2, 2), strides=(2, 2)),
        lambda x: x.reshape(x.shape[0], -1),
        nnx.Linear(FLAT, 8, rngs=rngs),
        nnx.relu,
        nnx.Linear(8, 2, rngs=rngs),
    )


BUILD: Final = {
    "torch": torch_model,
    "torch hidden": torch_hidden,
    "keras": keras_model,
    "nnx": nnx_model,
    "nnx turned": nnx_turned,
    "linen": linen_model,
    "equinox": equinox_model,
    "nnx group_norm": nnx_group_norm,
}
PAIRS: Final = {
    "torch nnx linen haiku": [
        ("torch", "nnx"),
        ("nnx", "torch"),
        ("torch", "nnx turned"),
        ("torch", "linen"),
        ("torch hidden", "nnx"),
    ],
    "torch keras": [("torch", "keras"), ("keras", "torch"), ("torch hidden", "keras")],
    "equinox nnx": [("equinox", "nnx group_norm")],
}
"""Libraries of a process -> the pairs that it ports."""


def call(name: str, model: Any, x: Any) -> Any:
    """The outputs of a model for images with their channels first."""
    library = name.partition(" ")[0]
    if library == "torch":
        import torch

        return model(torch.tensor(x)).detach().numpy()
    if library == "equinox":
        import jax

        return np.asarray(jax.vmap(model)(x))
    x = np.moveaxis(x, 1, -1)
    return np.asarray(model[0].apply(model[1], x) if library == "linen" else model(x))


def port(source: str, target: str) -> dict[str, Any]:
    """What a port without a batch gave: the error, or the distance of the outputs."""
    ours, theirs = BUILD[source](), BUILD[target]()
    try:
        ported, report = polyamp.port(ours, theirs)
    except PortError as error:
        return {"error": str(error)}
    x = np.random.default_rng(0).standard_normal((3, *IMAGE)).astype(np.float32)
    one, other = call(source, ours, x), call(target, ported, x)
    return {
        "distance": float(np.max(np.abs(one - other)) / np.max(np.abs(one))),
        "clean": report.clean,
        "notes": [note for note in report.notes if "rows" in note],
    }
