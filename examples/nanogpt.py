"""nanoGPT's recipe on a small GPT: weight decay on matrices only, warmup and cosine, clipping, accumulation, bfloat16.

python examples/nanogpt.py --framework torch

The recipe is `nanogpt.toml`. The same weights go into a torch module, a Keras model and a flax module, in which the
blocks have different paths; the recipe names them by aliases.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import arguments, report

import polyamp

TEXT = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
"""
CHARACTERS = sorted(set(TEXT))
VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS = len(CHARACTERS), 16, 32, 2, 2
RECIPE = Path(__file__).with_name("nanogpt.toml")


def weights(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Path -> array, kernels as (in, out): normal of 0.02, residual projections smaller, norms 1, biases 0."""
    rng = np.random.default_rng(seed)
    shapes = {"wte/embedding": (VOCABULARY, WIDTH), "wpe/embedding": (CONTEXT, WIDTH)}
    sizes = {"attn/c_attn": (1, 3), "attn/c_proj": (1, 1), "mlp/c_fc": (1, 4), "mlp/c_proj": (4, 1)}
    for block in (f"h_{number}" for number in range(BLOCKS)):
        shapes |= {f"{block}/{name}/kernel": (n * WIDTH, m * WIDTH) for name, (n, m) in sizes.items()}
    shapes["lm_head/kernel"] = (WIDTH, VOCABULARY)
    small = 0.02 / (2 * BLOCKS) ** 0.5
    made = {path: rng.normal(0, small if "c_proj" in path else 0.02, shape) for path, shape in shapes.items()}
    made |= {path.replace("kernel", "bias"): np.zeros(a.shape[1]) for path, a in made.items() if path.startswith("h_")}
    for norm in (*(f"h_{number}/ln_{which}" for number in range(BLOCKS) for which in (1, 2)), "ln_f"):
        made |= {f"{norm}/scale": np.ones(WIDTH), f"{norm}/bias": np.zeros(WIDTH)}
    return {path: array.astype(np.float32) for path, array in made.items()}


def torch_gpt() -> Any:
    """An `nn.Module`; its blocks are `transformer.h.0`, ..."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            parts = self.c_attn(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(*parts, is_causal=True)
            return self.c_proj(y.transpose(1, 2).flatten(2))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return self.c_proj(functional.gelu(self.c_fc(x)))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
            self.ln_2, self.mlp = nn.LayerNorm(WIDTH), MLP()

        def forward(self, x: Any) -> Any:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = {"wte": nn.Embedding(VOCABULARY, WIDTH), "wpe": nn.Embedding(CONTEXT, WIDTH)}
            blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.transformer = nn.ModuleDict({**parts, "h": blocks, "ln_f": nn.LayerNorm(WIDTH)})
            self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, ids: Any) -> Any:
            part: Any = self.transformer
            x = part.wte(ids) + part.wpe(torch.arange(ids.shape[1]))
            for block in part.h:
                x = block(x)
            return self.lm_head(part.ln_f(x))

    model = GPT()
    state = {}
    for path, array in weights().items():
        name = path.replace("h_", "h/") if path.startswith("h_") else path
        name = name if name.startswith("lm_head") else f"transformer/{name}"
        module, _, leaf = name.rpartition("/")
        value = torch.from_numpy(array.T.copy() if leaf == "kernel" else array)
        state[f"{module}/{'bias' if leaf == 'bias' else 'weight'}".replace("/", ".")] = value
    model.load_state_dict(state)
    return model


def tensorflow_gpt() -> Any:
    """A `keras.Model`; its blocks are `block_0`, ..."""
    import keras
    from keras import layers, ops

    class Attention(layers.Layer):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__(name="attn")
            self.c_attn, self.c_proj = layers.Dense(3 * WIDTH, name="c_attn"), layers.Dense(WIDTH, name="c_proj")

        def call(self, x: Any) -> Any:
            shape = (-1, CONTEXT, 3, HEADS, WIDTH // HEADS)
            parts = ops.unstack(ops.reshape(self.c_attn(x), shape), axis=2)
            return self.c_proj(ops.reshape(ops.dot_product_attention(*parts, is_causal=True), (-1, CONTEXT, WIDTH)))

    class Block(layers.Layer):  # type: ignore[misc]  # Keras is untyped
        def __init__(self, name: str) -> None:
            super().__init__(name=name)
            self.ln_1, self.ln_2 = (layers.LayerNormalization(epsilon=1e-5, name=f"ln_{n}") for n in (1, 2))
            self.attn = Attention()
            fc = layers.Dense(4 * WIDTH, lambda x: ops.gelu(x, approximate=False), name="c_fc")
            self.mlp = keras.Sequential([fc, layers.Dense(WIDTH, name="c_proj")], name="mlp")

        def call(self, x: Any) -> Any:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class Positions(layers.Layer):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__(name="wpe")
            self.embedding = self.add_weight(shape=(CONTEXT, WIDTH), name="embedding")

        def call(self, x: Any) -> Any:
            return x + ops.cast(self.embedding, x.dtype)

    ids = keras.Input((CONTEXT,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, WIDTH, name="wte")(ids))
    for number in range(BLOCKS):
        x = Block(f"block_{number}")(x)
    x = layers.LayerNormalization(epsilon=1e-5, name="ln_f")(x)
    model = keras.Model(ids, layers.Dense(VOCABULARY, use_bias=False, name="head")(x))
    values, leaves = weights(), {"gamma": "scale", "beta": "bias", "embeddings": "embedding"}
    for variable in model.trainable_variables:
        module, _, leaf = variable.path.rpartition("/")
        module = "lm_head" if module == "head" else module.replace("block_", "h_")
        variable.assign(values[f"{module}/{leaves.get(leaf, leaf)}"])
    return model


def jax_gpt() -> Any:
    """A flax linen module with its variables; its blocks are `h_0`, ..."""
    import flax.linen as nn
    import jax

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            parts = nn.Dense(3 * WIDTH, name="c_attn")(x).reshape(*x.shape[:2], 3, HEADS, -1)
            y = jax.nn.dot_product_attention(*(parts[:, :, part] for part in range(3)), is_causal=True)
            return nn.Dense(WIDTH, name="c_proj")(y.reshape(x.shape))

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(WIDTH, name="c_proj")(nn.gelu(nn.Dense(4 * WIDTH, name="c_fc")(x), approximate=False))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = x + Attention(name="attn")(nn.LayerNorm(epsilon=1e-5, name="ln_1")(x))
            return x + MLP(name="mlp")(nn.LayerNorm(epsilon=1e-5, name="ln_2")(x))

    class GPT(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            x = nn.Embed(VOCABULARY, WIDTH, name="wte")(ids)
            x = x + nn.Embed(CONTEXT, WIDTH, name="wpe")(np.arange(ids.shape[1]))
            for number in range(BLOCKS):
                x = Block(name=f"h_{number}")(x)
            x = nn.LayerNorm(epsilon=1e-5, name="ln_f")(x)
            return nn.Dense(VOCABULARY, use_bias=False, name="lm_head")(x)

    params: dict[str, Any] = {}
    for path, array in weights().items():
        *modules, leaf = path.split("/")
        place = params
        for module in modules:
            place = place.setdefault(module, {})
        place[leaf] = jax.numpy.asarray(array)
    return GPT(), {"params": params}


MODELS = {"torch": torch_gpt, "tensorflow": tensorflow_gpt, "jax": jax_gpt}


def batches(steps: int, size: int = 32) -> Iterator[dict[str, Any]]:
    """`x` and `y`, each the next character's number behind it: int32 (size, CONTEXT)."""
    numbers = np.asarray([CHARACTERS.index(character) for character in TEXT], np.int32)
    rng = np.random.default_rng(1)
    for _ in range(steps):
        starts = rng.integers(0, len(numbers) - CONTEXT - 1, size)
        rows = numbers[starts[:, None] + np.arange(CONTEXT + 1)]
        yield {"x": rows[:, :-1], "y": rows[:, 1:]}


def loss_fn(model: Any, batch: Any) -> Any:
    """Cross-entropy of the next character."""
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def train(framework: str, recipe: polyamp.Recipe, steps: int) -> tuple[Any, list[float]]:
    """The state, and the loss of each step."""
    state = polyamp.init(MODELS[framework](), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    results = []
    for batch in batches(steps):
        state, result = step(state, batch)
        results.append(result.loss)
    return state, [float(loss) for loss in results]


def main() -> None:
    """Train, and say how many parameters are decayed."""
    args = arguments(__doc__)
    state, losses = train(args.framework, polyamp.Recipe.load(RECIPE), args.steps)
    groups = state.groups
    decayed = sum(groups.of(path).spec.weight_decay > 0.0 for path in groups.numbers)
    report(losses[0], losses[-1], decayed=f"{decayed} of {len(groups.numbers)} parameters")


if __name__ == "__main__":
    main()
