"""A small diffusion model on the digits: the noise in an image is learned, samples are drawn with averaged weights.

python examples/diffusion.py --framework torch

The recipe is `diffusion.toml`; the same weights go into a torch module, a Keras model and a flax module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import PIXELS, arguments, report
from common import batches as images

import polyamp

Array = np.ndarray[Any, np.dtype[np.float32]]

RECIPE = Path(__file__).with_name("diffusion.toml")
WIDTH, FEATURES, LEVELS = 128, 16, 50
KEPT = np.cumprod(1.0 - np.linspace(1e-3, 0.15, LEVELS)).astype(np.float32)
"""By level of noise, the share of an image's variance that is left."""


def weights(seed: int = 0) -> dict[str, Array]:
    """Layer -> kernel as (in, out): normal, of the variance 2 / in, the last one smaller."""
    rng = np.random.default_rng(seed)
    sizes = {"image": (PIXELS, WIDTH), "level": (FEATURES, WIDTH), "hidden": (WIDTH, WIDTH), "noise": (WIDTH, PIXELS)}
    return {
        name: (rng.normal(size=size) * np.sqrt((0.1 if name == "noise" else 2.0) / size[0])).astype(np.float32)
        for name, size in sizes.items()
    }


def torch_model() -> Any:
    """An `nn.Module`."""
    import torch
    from torch import nn
    from torch.nn.functional import silu

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, kernel in weights().items():
                layer = nn.Linear(*kernel.shape)
                layer.load_state_dict(
                    {"weight": torch.from_numpy(kernel.T.copy()), "bias": torch.zeros(kernel.shape[1])}
                )
                self.add_module(name, layer)

        def forward(self, x: Any, level: Any) -> Any:
            h = silu(self.image(x) + self.level(level))
            return self.noise(h + silu(self.hidden(h)))

    return Denoiser()


def tensorflow_model() -> Any:
    """A functional `keras.Model`."""
    import keras
    from keras import layers

    start = {
        name: {"name": name, "kernel_initializer": lambda shape, dtype, kernel=kernel: keras.ops.cast(kernel, dtype)}
        for name, kernel in weights().items()
    }
    x, level = keras.Input((PIXELS,)), keras.Input((FEATURES,))
    h = layers.Activation("silu")(
        layers.Dense(WIDTH, **start["image"])(x) + layers.Dense(WIDTH, **start["level"])(level)
    )
    h = h + layers.Dense(WIDTH, "silu", **start["hidden"])(h)
    return keras.Model([x, level], layers.Dense(PIXELS, **start["noise"])(h))


def jax_model() -> Any:
    """A flax linen module with its variables."""
    import flax.linen as nn
    import jax.numpy as jnp

    class Denoiser(nn.Module):
        @nn.compact
        def __call__(self, x: Any, level: Any) -> Any:
            h = nn.silu(nn.Dense(WIDTH, name="image")(x) + nn.Dense(WIDTH, name="level")(level))
            return nn.Dense(PIXELS, name="noise")(h + nn.silu(nn.Dense(WIDTH, name="hidden")(h)))

    params = {
        name: {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(kernel.shape[1])} for name, kernel in weights().items()
    }
    return Denoiser(), {"params": params}


MODELS: dict[str, Callable[[], Any]] = {"torch": torch_model, "tensorflow": tensorflow_model, "jax": jax_model}


def features(level: Any) -> Array:
    """Sines and cosines of a level of noise: float32, (rows, FEATURES)."""
    angles = level[:, None] * np.exp(-np.arange(FEATURES // 2) / 2.0)
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)


def batches(steps: int) -> Iterator[dict[str, Array]]:
    """Images with noise, the features of its level, and the noise: float32."""
    rng = np.random.default_rng(2)
    for image in images(steps):
        level = rng.integers(0, LEVELS, len(image["x"]))
        noise, kept = rng.normal(size=image["x"].shape).astype(np.float32), KEPT[level, None]
        noisy = np.sqrt(kept) * (2.0 * image["x"] - 1.0) + np.sqrt(1.0 - kept) * noise
        yield {"x": noisy, "level": features(level), "noise": noise}


def predict(framework: str, model: Any, x: Any, level: Any) -> Any:
    """The noise that the model sees in `x`."""
    return model([x, level]) if framework == "tensorflow" else model(x, level)


def train(framework: str, recipe: polyamp.Recipe, steps: int) -> tuple[Any, list[float]]:
    """The state, and the loss of each step."""

    def loss_fn(model: Any, batch: Any) -> Any:
        return polyamp.losses.mean_squared_error(predict(framework, model, batch["x"], batch["level"]), batch["noise"])

    state, step = polyamp.init(MODELS[framework](), recipe), polyamp.train_step(loss_fn, recipe)
    results = []
    for batch in batches(steps):
        state, result = step(state, batch)
        results.append(result.loss)
    return state, [float(loss) for loss in results]


def sample(framework: str, model: Any, number: int, seed: int = 0) -> Array:
    """Images drawn with a model, from noise to none in LEVELS steps: float32, (number, PIXELS), about -1 to 1."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(number, PIXELS)).astype(np.float32)
    for level in reversed(range(LEVELS)):
        inputs: list[Any] = [x, features(np.full(number, level))]
        if framework == "torch":
            import torch

            inputs = list(map(torch.from_numpy, inputs))
        found = predict(framework, model, *inputs)
        noise = np.asarray(found.detach() if framework == "torch" else found, np.float32)
        before = KEPT[level - 1] if level else 1.0
        own = KEPT[level] / before
        x = (x - (1.0 - own) / np.sqrt(1.0 - KEPT[level]) * noise) / np.sqrt(own)
        if level:
            x = x + np.sqrt((1.0 - own) * (1.0 - before) / (1.0 - KEPT[level])) * rng.normal(size=x.shape)
        x = x.astype(np.float32)
    return x


def main() -> None:
    """Train, draw samples with the averaged weights, and print one."""
    args = arguments(__doc__, steps=600)
    state, losses = train(args.framework, polyamp.Recipe.load(RECIPE), args.steps)
    with polyamp.averaged(state) as model:
        drawn = sample(args.framework, polyamp.Policy("float32").autocast(model), 16)
    for row in drawn[0].reshape(8, 8):
        print("".join(" .:*#"[int(np.clip((value + 1.0) * 2.5, 0, 4))] * 2 for value in row))
    report(losses[0], np.mean(losses[-20:]), mean=f"{drawn.mean():.2f}", deviation=f"{drawn.std():.2f}")


if __name__ == "__main__":
    main()
