"""One small model in torch, Keras, flax linen and flax nnx (convolution, batch normalization with running statistics,
embedding, layer normalization, dense layers), its batches, and what it is trained with.

Images have the channels last in every framework; torch's model turns them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

import polyamp
from polyamp import porting

Array = np.ndarray[Any, Any]

SIDE, CHANNELS, WORDS, WIDTH, CLASSES = 4, 6, 7, 8, 3
STEPS, STOP, OVERFLOWS = 50, 25, (10, 35)
"""How long a run is, after which step it is stopped, and the numbers of the steps that overflow."""
CALM: Final = [number for number in range(STEPS) if number not in OVERFLOWS]
"""The steps that are applied."""
SCALER: Final = polyamp.LossScaler(init_scale=2.0**8, growth_interval=6, max_scale=2.0**12)
"""Grows and backs off, and stays where nothing but the planted batches overflows."""
RECIPES: Final = {
    "adamw": polyamp.Recipe(
        policy="mixed_float16",
        scaler=SCALER,
        optimizer=polyamp.adamw(
            polyamp.schedules.warmup_cosine(2e-3, warmup_steps=5, total_steps=STEPS),
            weight_decay=0.1,
            groups=[*polyamp.no_decay("bias", "norm"), polyamp.Group(kind="embedding", trainable_after=30)],
        ),
        ema=polyamp.Ema(0.9, statistics="average"),
    ),
    "momentum": polyamp.Recipe(
        policy="mixed_float16",
        scaler=SCALER.replace(hysteresis=2),
        optimizer=polyamp.sgd(0.02, momentum=0.9),
        clip_norm=1.0,
    ),
    "adafactor": polyamp.Recipe(policy="mixed_float16", scaler=SCALER, optimizer=polyamp.adafactor(5e-3)),
    "muon": polyamp.Recipe(
        policy="mixed_float16",
        scaler=SCALER,
        optimizer=polyamp.muon(5e-3, adamw_learning_rate=2e-3, ns_coefficients=(2.0, -1.5, 0.5)),
    ),
}


def batch(number: int) -> dict[str, Array]:
    """Images with words, and which class; one of those in `OVERFLOWS` holds what float16 does not."""
    rng = np.random.default_rng(number)
    labels = rng.integers(0, CLASSES, 8).astype(np.int32)
    images = rng.normal(size=(8, SIDE, SIDE, 3)) + labels[:, None, None, None]
    words = (rng.integers(0, 2, (8, 5)) + 2 * labels[:, None]).astype(np.int32)
    factor = 1e30 if number in OVERFLOWS else 1.0
    return {"images": (images * factor).astype(np.float32), "words": words, "labels": labels}


def loss_fn(model: Any, batch: Any) -> Any:
    """Cross-entropy: the same in every framework."""
    return polyamp.losses.softmax_cross_entropy(model(batch["images"], batch["words"]), batch["labels"])


def weights() -> porting.Canonical:
    """Where all begin, in the canonical layout."""
    rng = np.random.default_rng(0)

    def layer(kind: str, **shapes: tuple[int, ...]) -> porting.Layer:
        arrays = {}
        for name, shape in shapes.items():
            fan = int(np.prod(shape[:-1])) if name in ("kernel", "table") else 1
            start = 1.0 if name in ("scale", "variance") else 0.0
            drawn = rng.normal(size=shape) / np.sqrt(fan) if name in ("kernel", "table") else np.full(shape, start)
            arrays[name] = porting.Lazy.of(drawn.astype(np.float32))
        fixed = frozenset({"mean", "variance"} & set(shapes)) if kind == "batch_norm" else frozenset()
        return porting.Layer(kind, arrays, fixed=fixed)

    one = (CHANNELS,)
    layers = {
        "conv": layer("conv", kernel=(3, 3, 3, CHANNELS), bias=one),
        "batch_norm": layer("batch_norm", scale=one, bias=one, mean=one, variance=one),
        "table": layer("embedding", table=(WORDS, WIDTH)),
        "mix": layer("dense", kernel=(CHANNELS + WIDTH, WIDTH), bias=(WIDTH,)),
        "layer_norm": layer("layer_norm", scale=(WIDTH,), bias=(WIDTH,)),
        "head": layer("dense", kernel=(WIDTH, CLASSES), bias=(CLASSES,)),
    }
    return porting.Canonical(layers, "this test")


def build_torch() -> Any:
    """An `nn.Module`."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, CHANNELS, 3, padding=1)
            self.batch_norm = nn.BatchNorm2d(CHANNELS)
            self.table = nn.Embedding(WORDS, WIDTH)
            self.mix = nn.Linear(CHANNELS + WIDTH, WIDTH)
            self.layer_norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, images: Any, words: Any) -> Any:
            h = torch.relu(self.batch_norm(self.conv(images.permute(0, 3, 1, 2)))).mean((2, 3))
            h = torch.cat([h, self.table(words).mean(1).to(h.dtype)], 1)
            return self.head(torch.relu(self.layer_norm(self.mix(h))))

    return Net()


def build_keras() -> Any:
    """A functional `keras.Model`, of which `model((images, words))` is written `model(images, words)` here."""
    import keras
    from keras import layers

    class Net(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__(name="net")
            self.conv = layers.Conv2D(CHANNELS, 3, padding="same", name="conv")
            self.batch_norm = layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name="batch_norm")
            self.table = layers.Embedding(WORDS, WIDTH, name="table")
            self.mix = layers.Dense(WIDTH, name="mix")
            self.layer_norm = layers.LayerNormalization(epsilon=1e-5, name="layer_norm")
            self.head = layers.Dense(CLASSES, name="head")

        def call(self, images: Any, words: Any, training: Any = None) -> Any:
            h = keras.ops.relu(self.batch_norm(self.conv(images), training=training))
            h = keras.ops.mean(h, (1, 2))
            h = keras.ops.concatenate([h, keras.ops.cast(keras.ops.mean(self.table(words), 1), h.dtype)], 1)
            return self.head(keras.ops.relu(self.layer_norm(self.mix(h))))

    model = Net()
    first = batch(0)
    model(first["images"], first["words"])
    return model


def build_linen() -> Any:
    """`(linen_module, variables)`."""
    import jax
    import jax.numpy as jnp
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, images: Any, words: Any) -> Any:
            h = nn.Conv(CHANNELS, (3, 3), name="conv")(images)
            h = nn.BatchNorm(use_running_average=False, momentum=0.9, name="batch_norm")(h)
            h = nn.relu(h).mean((1, 2))
            h = jnp.concatenate([h, nn.Embed(WORDS, WIDTH, name="table")(words).mean(1).astype(h.dtype)], 1)
            h = nn.LayerNorm(epsilon=1e-5, name="layer_norm")(nn.Dense(WIDTH, name="mix")(h))
            return nn.Dense(CLASSES, name="head")(nn.relu(h))

    first = batch(0)
    return Net(), Net().init(jax.random.key(0), first["images"], first["words"])


def build_nnx() -> Any:
    """An `nnx.Module`."""
    import jax.numpy as jnp
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.conv = nnx.Conv(3, CHANNELS, (3, 3), rngs=rngs)
            self.batch_norm = nnx.BatchNorm(CHANNELS, momentum=0.9, rngs=rngs)
            self.table = nnx.Embed(WORDS, WIDTH, rngs=rngs)
            self.mix = nnx.Linear(CHANNELS + WIDTH, WIDTH, rngs=rngs)
            self.layer_norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
            self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

        def __call__(self, images: Any, words: Any) -> Any:
            h = nnx.relu(self.batch_norm(self.conv(images))).mean((1, 2))
            h = jnp.concatenate([h, self.table(words).mean(1).astype(h.dtype)], 1)
            return self.head(nnx.relu(self.layer_norm(self.mix(h))))

    return Net(nnx.Rngs(0))


BUILD: Final = {
    "torch": {"torch": build_torch},
    "tensorflow": {"keras": build_keras},
    "jax": {"linen": build_linen, "nnx": build_nnx},
}
"""Framework, which has a process of its own -> its libraries."""


SOURCES: Final = {
    "torch": ("keras", "linen", "nnx"),
    "keras": ("torch", "linen"),
    "linen": ("torch", "keras", "nnx"),
    "nnx": ("torch", "keras", "linen"),
}
"""Library -> those whose stopped runs it goes on with. nnx and linen are of one framework: Keras, which runs op by op,
takes one of them."""


def made(framework: str, library: str) -> Any:
    """The model of a library with the weights that all begin with."""
    model, _ = porting.load(BUILD[framework][library](), weights(), strict=False, rows={"mix": None})
    return model


def entered(framework: str, given: dict[str, Array]) -> dict[str, Any]:
    """A batch as the framework takes it."""
    if framework != "torch":
        return dict(given)
    import torch

    return {name: torch.from_numpy(array) for name, array in given.items()}
