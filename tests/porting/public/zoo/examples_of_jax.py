"""Examples of haiku, equinox and flax's nnx, and their counterparts in torch.

haiku: its MNIST and transformer examples, and `hk.nets.ResNet18`. equinox: its examples of a convolutional network, a
vision transformer and a recurrent classifier. nnx: flax's MNIST tutorial, and Qwen 2 with rotary attention and grouped
keys. torch's side follows the examples of pytorch/examples and torchvision. All but `hk.nets` and transformers are
written anew, small.
"""

from __future__ import annotations

from typing import Any, Final

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from torch import nn
from torch.nn import functional as F

from tests.porting.public.zoo.building_blocks import HEADS, HIDDEN, SIZES, WIDTH, Only, attend, heads_of, rotate
from tests.porting.public.zoo.case import VOCABULARY, Batch, Case, channels_first, images, tokens, unchanged


def transformed(function: Any, batch: Batch) -> Any:
    """A haiku model with its parameters' shapes."""
    model = hk.without_apply_rng(hk.transform(function))
    return model, jax.eval_shape(model.init, jax.random.key(0), *batch)


def with_state(function: Any, batch: Batch) -> Any:
    """A haiku model with running statistics."""
    model = hk.without_apply_rng(hk.transform_with_state(function))
    return model, jax.eval_shape(lambda key, x: model.init(key, x, is_training=True), jax.random.key(0), *batch)


# MNIST, in torch, haiku and nnx.
class MnistNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(16 * 36, 32), nn.Linear(32, 10)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = self.dropout2(F.relu(self.fc1(torch.flatten(self.dropout1(x), 1))))
        return self.fc2(x)


def haiku_mnist(x: Any) -> Any:
    network = hk.Sequential(
        [
            hk.Conv2D(8, 3, padding="VALID"), jax.nn.relu, hk.Conv2D(16, 3, padding="VALID"), jax.nn.relu,
            hk.MaxPool(2, 2, "VALID"), hk.Flatten(), hk.Linear(32), jax.nn.relu, hk.Linear(10),
        ]
    )  # fmt: skip
    return network(x)


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 8, (3, 3), padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), padding="VALID", rngs=rngs)
        self.dropout1, self.dropout2 = nnx.Dropout(0.25, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.linear1, self.linear2 = nnx.Linear(16 * 36, 32, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))
        x = self.dropout1(nnx.max_pool(x, (2, 2), (2, 2)))
        return self.linear2(self.dropout2(nnx.relu(self.linear1(x.reshape(len(x), -1)))))


class EquinoxCNN(eqx.Module):
    layers: list[Any]

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 4)
        self.layers = [
            eqx.nn.Conv2d(1, 8, 3, key=keys[0]), jax.nn.relu, eqx.nn.Conv2d(8, 16, 3, key=keys[1]), jax.nn.relu,
            eqx.nn.MaxPool2d(2, 2), jnp.ravel, eqx.nn.Linear(16 * 36, 32, key=keys[2]), jax.nn.relu,
            eqx.nn.Linear(32, 10, key=keys[3]),
        ]  # fmt: skip

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


# ResNet-18 of torchvision, small, and of hk.nets.
class BasicBlock(nn.Module):
    """Padded as haiku pads: (0, 1) before a stride of 2."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1 if stride == 1 else 0, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Any) -> Any:
        y = self.conv1(x if self.conv1.stride == (1, 1) else F.pad(x, (0, 1, 0, 1)))
        y = self.bn2(self.conv2(F.relu(self.bn1(y))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(BasicBlock(64, 16, 1), BasicBlock(16, 16, 1))
        self.layer2 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32, 1))
        self.layer3 = nn.Sequential(BasicBlock(32, 48, 2))
        self.layer4 = nn.Sequential(BasicBlock(48, 64, 2))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.pad(F.relu(self.bn1(self.conv1(x))), (0, 1, 0, 1)), 3, 2)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def haiku_resnet(x: Any, is_training: bool) -> Any:
    network = hk.nets.ResNet(
        (2, 2, 1, 1), 10, {"decay_rate": 0.9, "eps": 1e-5}, bottleneck=False, channels_per_group=(16, 32, 48, 64),
        use_projection=(True, True, True, True),
        initial_conv_config={"kernel_shape": 3, "stride": 1, "padding": [(1, 1), (1, 1)]},
    )  # fmt: skip
    return network(x, is_training)


# A decoder, in torch as nanoGPT and in haiku as its transformer example.
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.c_attn(x).split(WIDTH, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.h, self.ln_f = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        return self.lm_head(self.ln_f(self.h(x)))


def haiku_transformer(ids: Any) -> Any:
    def norm(x: Any) -> Any:
        return hk.LayerNorm(-1, True, True)(x)

    x = hk.Embed(VOCABULARY, WIDTH)(ids)
    x = (
        x
        + hk.get_parameter("positional_embeddings", (16, WIDTH), init=hk.initializers.RandomNormal(0.02))[: x.shape[1]]
    )
    mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1])))
    for _ in range(2):
        y = norm(x)
        x = x + hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=hk.initializers.VarianceScaling())(y, y, y, mask)
        x = x + hk.Sequential([hk.Linear(4 * WIDTH), jax.nn.gelu, hk.Linear(WIDTH)])(norm(x))
    return hk.Linear(VOCABULARY, with_bias=False)(norm(x))


# A recurrent classifier.
class CharRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, 16)
        self.rnn = nn.LSTM(16, 24, batch_first=True)
        self.decoder = nn.Linear(24, VOCABULARY)

    def forward(self, ids: Any) -> Any:
        return self.decoder(self.rnn(self.encoder(ids))[0])


class EquinoxRNN(eqx.Module):
    embedding: eqx.nn.Embedding
    cell: eqx.nn.LSTMCell
    linear: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        one, two, three = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(VOCABULARY, 16, key=one)
        self.cell = eqx.nn.LSTMCell(16, 24, key=two)
        self.linear = eqx.nn.Linear(24, VOCABULARY, key=three)

    def __call__(self, ids: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            carry = self.cell(x, carry)
            return carry, carry[0]

        _, states = jax.lax.scan(step, (jnp.zeros(24), jnp.zeros(24)), jax.vmap(self.embedding)(ids))
        return jax.vmap(self.linear)(states)


# The vision transformer of equinox's examples, to transformers.
class AttentionBlock(eqx.Module):
    layer_norm1: eqx.nn.LayerNorm
    layer_norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    linear1: eqx.nn.Linear
    linear2: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 3)
        biases = dict.fromkeys(["use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias"], True)
        self.layer_norm1, self.layer_norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, **biases, key=keys[0])
        self.linear1 = eqx.nn.Linear(WIDTH, HIDDEN, key=keys[1])
        self.linear2 = eqx.nn.Linear(HIDDEN, WIDTH, key=keys[2])

    def __call__(self, x: Any) -> Any:
        y = jax.vmap(self.layer_norm1)(x)
        x = x + self.attention(y, y, y)
        y = jax.vmap(self.linear1)(jax.vmap(self.layer_norm2)(x))
        return x + jax.vmap(self.linear2)(jax.nn.gelu(y, approximate=False))


class PatchEmbedding(eqx.Module):
    linear: eqx.nn.Conv2d

    def __init__(self, key: Any) -> None:
        self.linear = eqx.nn.Conv2d(3, WIDTH, 8, 8, key=key)

    def __call__(self, x: Any) -> Any:
        return self.linear(x).reshape(WIDTH, -1).T


class VisionTransformer(eqx.Module):
    patch_embedding: PatchEmbedding
    positional_embedding: Any
    cls_token: Any
    attention_blocks: list[AttentionBlock]
    mlp: eqx.nn.Sequential

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 6)
        self.patch_embedding = PatchEmbedding(keys[0])
        self.positional_embedding = jax.random.normal(keys[1], (17, WIDTH))
        self.cls_token = jax.random.normal(keys[2], (1, WIDTH))
        self.attention_blocks = [AttentionBlock(each) for each in keys[3:5]]
        self.mlp = eqx.nn.Sequential([eqx.nn.LayerNorm(WIDTH), eqx.nn.Linear(WIDTH, 10, key=keys[5])])

    def __call__(self, x: Any) -> Any:
        x = jnp.concatenate([self.cls_token, self.patch_embedding(x)]) + self.positional_embedding
        for block in self.attention_blocks:
            x = block(x)
        return self.mlp(x[0])


class ViT(Only, transformers.ViTForImageClassification):
    INPUTS = ("pixel_values",)


def vit(batch: Batch) -> Any:
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return ViT(transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10, layer_norm_eps=1e-5)).eval()


# Qwen 2 in nnx.
class Qwen2(Only, transformers.Qwen2ForCausalLM):
    pass


def qwen2() -> Any:
    return Qwen2(transformers.Qwen2Config(**SIZES, num_key_value_heads=2, max_position_embeddings=16))


class QwenAttention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q_proj = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.k_proj, self.v_proj = (nnx.Linear(WIDTH, WIDTH // 2, rngs=rngs) for _ in range(2))
        self.o_proj = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        q, k = rotate(heads_of(self.q_proj(x))), rotate(heads_of(self.k_proj(x), 2))
        return self.o_proj(attend(q, k, heads_of(self.v_proj(x), 2), causal=True).reshape(x.shape))


class QwenMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gate_proj, self.up_proj = (nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs) for _ in range(2))
        self.down_proj = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class QwenLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.input_layernorm = nnx.RMSNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.attn, self.mlp = QwenAttention(rngs), QwenMlp(rngs)
        self.post_attention_layernorm = nnx.RMSNorm(WIDTH, epsilon=1e-6, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class NnxQwen2(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedder = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([QwenLayer(rngs) for _ in range(2)])
        self.final_norm = nnx.RMSNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.embedder(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.final_norm(x))


def digits_last(rng: np.random.Generator) -> Batch:
    return (rng.standard_normal((2, 16, 16, 1)).astype(np.float32),)


CASES: Final = [
    Case("MNIST network", "torch's example → haiku's example", MnistNet,
         lambda batch: transformed(haiku_mnist, batch), images(16, 1)),
    Case("MNIST network", "flax's nnx tutorial → torch's example", lambda: CNN(nnx.Rngs(0)), lambda batch: MnistNet(),
         digits_last, to_target=lambda batch: tuple(channels_first(each) for each in batch)),
    Case("MNIST network", "torch's example → equinox's example", MnistNet,
         lambda batch: EquinoxCNN(jax.random.key(0)), images(16, 1), to_target=unchanged),
    Case("ResNet-18", "torchvision → hk.nets", ResNet, lambda batch: with_state(haiku_resnet, batch), images(),
         remark="torch's side pads before a stride of 2 as haiku does: by (0, 1)."),
    Case("nanoGPT", "torch → haiku's example", NanoGPT, lambda batch: transformed(haiku_transformer, batch), tokens()),
    Case("character LSTM", "torch's example → equinox", CharRNN, lambda batch: EquinoxRNN(jax.random.key(0)), tokens()),
    Case("ViT", "equinox's example → transformers", lambda: VisionTransformer(jax.random.key(0)), vit, images(),
         to_target=unchanged),
    Case("Qwen 2", "transformers → nnx", qwen2, lambda batch: NnxQwen2(nnx.Rngs(0)), tokens()),
]  # fmt: skip
