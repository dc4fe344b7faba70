"""Language models from transformers to flax linen, in the ways in which JAX code bases write them.

FlaxBert: transformers 4's own flax models. T5X: google-research/t5x `examples/t5`. CLIP: as google-research/scenic
has it. All are written anew, small.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import linen

from tests.porting.public.linen_models import GPT2
from tests.porting.public.zoo.building_blocks import (
    HEADS,
    HIDDEN,
    SIZES,
    WIDTH,
    Named,
    Only,
    RMSNorm,
    attend,
    heads_of,
    shapes,
)
from tests.porting.public.zoo.case import VOCABULARY, Batch, Case, images, tokens


# Post-norm BERT, with dense layers, and with flax's attention layer.
class Bert(Only, transformers.BertModel):
    FIELD = "pooler_output"


def bert(kind: Any = Bert, **options: Any) -> Any:
    return kind(transformers.BertConfig(**SIZES, max_position_embeddings=16, **options))


def norm(name: str) -> Any:
    return linen.LayerNorm(epsilon=1e-12, name=name)


class FlaxBertEmbeddings(linen.Module):
    @linen.compact
    def __call__(self, ids: Any) -> Any:
        x = linen.Embed(VOCABULARY, WIDTH, name="word_embeddings")(ids)
        x = x + linen.Embed(16, WIDTH, name="position_embeddings")(jnp.arange(ids.shape[1]))
        return norm("LayerNorm")(x + linen.Embed(2, WIDTH, name="token_type_embeddings")(jnp.zeros_like(ids)))


class FlaxBertSelfAttention(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        q, k, v = (heads_of(linen.Dense(WIDTH, name=name)(x)) for name in ("query", "key", "value"))
        return attend(q, k, v).reshape(x.shape)


class FlaxBertOutput(linen.Module):
    @linen.compact
    def __call__(self, x: Any, residual: Any) -> Any:
        return norm("LayerNorm")(linen.Dense(WIDTH, name="dense")(x) + residual)


class FlaxBertAttention(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return FlaxBertOutput(name="output")(FlaxBertSelfAttention(name="self")(x), x)


class FlaxBertIntermediate(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.gelu(linen.Dense(HIDDEN, name="dense")(x), approximate=False)


class FlaxBertLayer(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = FlaxBertAttention(name="attention")(x)
        return FlaxBertOutput(name="output")(FlaxBertIntermediate(name="intermediate")(x), x)


class FlaxBertEncoder(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return Named(FlaxBertLayer, name="layer")(x)


class FlaxBertPooler(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return jnp.tanh(linen.Dense(WIDTH, name="dense")(x[:, 0]))


class FlaxBert(linen.Module):
    @linen.compact
    def __call__(self, ids: Any) -> Any:
        x = FlaxBertEncoder(name="encoder")(FlaxBertEmbeddings(name="embeddings")(ids))
        return FlaxBertPooler(name="pooler")(x)


class EncoderLayer(linen.Module):
    """Post-norm, with flax's attention layer."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = linen.MultiHeadDotProductAttention(num_heads=HEADS, name="self_attention")(x, x)
        x = norm("self_attention_layer_norm")(x + y)
        y = linen.gelu(linen.Dense(HIDDEN, name="intermediate")(x), approximate=False)
        return norm("output_layer_norm")(x + linen.Dense(WIDTH, name="output")(y))


class BertEncoder(linen.Module):
    @linen.compact
    def __call__(self, ids: Any) -> Any:
        x = linen.Embed(VOCABULARY, WIDTH, name="word_embeddings")(ids)
        x = x + linen.Embed(16, WIDTH, name="position_embeddings")(jnp.arange(ids.shape[1]))
        x = x + linen.Embed(2, WIDTH, name="type_embeddings")(jnp.zeros_like(ids))
        x = norm("embeddings_layer_norm")(x)
        for number in range(2):
            x = EncoderLayer(name=f"encoder_layer_{number}")(x)
        return jnp.tanh(linen.Dense(WIDTH, name="pooler_transform")(x[:, 0]))


# T5 in T5X: kernels of its own dense class, scales of its own norm, a table (heads, buckets).
class T5(Only, transformers.T5ForConditionalGeneration):
    INPUTS = ("input_ids", "decoder_input_ids")


def t5() -> Any:
    """Its head has weights of its own, as in T5 1.1; transformers 5 ties it, whatever the configuration says."""
    model = T5(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=HIDDEN, num_layers=2, num_heads=HEADS,
            relative_attention_num_buckets=8, relative_attention_max_distance=16, feed_forward_proj="gated-gelu",
            tie_word_embeddings=False, decoder_start_token_id=0,
        )
    )  # fmt: skip
    model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.2)
    return model


class Joined(linen.Module):
    """T5X's dense layer stores the kernel with heads joined."""

    features: int

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return x @ self.param("kernel", linen.initializers.normal(0.2), (x.shape[-1], self.features))


def buckets(queries: int, keys: int, both: bool) -> Any:
    """T5's buckets of relative positions, 8 of them up to a distance of 16."""
    away = np.arange(keys)[None] - np.arange(queries)[:, None]
    count, found = 8, np.zeros_like(away)
    if both:
        count = 4
        found = found + (away > 0) * count
        away = np.abs(away)
    else:
        away = -np.minimum(away, 0)
    exact = count // 2
    far = exact + (np.log(np.maximum(away, 1) / exact) / np.log(16 / exact) * (count - exact)).astype(int)
    return found + np.where(away < exact, away, np.minimum(far, count - 1))


class RelativePositionBiases(linen.Module):
    both: bool

    @linen.compact
    def __call__(self, length: int) -> Any:
        table = self.param("rel_embedding", linen.initializers.normal(0.2), (HEADS, 8))
        return table[:, buckets(length, length, self.both)][None]


class T5Attention(linen.Module):
    @linen.compact
    def __call__(self, x: Any, y: Any, bias: Any = 0.0, causal: bool = False) -> Any:
        q = heads_of(Joined(WIDTH, name="query")(x))
        k, v = (heads_of(Joined(WIDTH, name=name)(y)) for name in ("key", "value"))
        return Joined(WIDTH, name="out")(attend(q, k, v, 1.0, bias, causal).reshape(x.shape))


class T5Mlp(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        gate = linen.gelu(Joined(HIDDEN, name="wi_0")(x), approximate=True)
        return Joined(WIDTH, name="wo")(gate * Joined(HIDDEN, name="wi_1")(x))


class T5XEncoder(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        bias = RelativePositionBiases(True, name="relpos_bias")(x.shape[1])
        for number in range(2):
            x = T5XEncoderLayer(name=f"layers_{number}")(x, bias)
        return RMSNorm(name="encoder_norm")(x)


class T5XEncoderLayer(linen.Module):
    @linen.compact
    def __call__(self, x: Any, bias: Any) -> Any:
        y = RMSNorm(name="pre_attention_layer_norm")(x)
        x = x + T5Attention(name="attention")(y, y, bias)
        return x + T5Mlp(name="mlp")(RMSNorm(name="pre_mlp_layer_norm")(x))


class T5XDecoderLayer(linen.Module):
    @linen.compact
    def __call__(self, x: Any, encoded: Any, bias: Any) -> Any:
        y = RMSNorm(name="pre_self_attention_layer_norm")(x)
        x = x + T5Attention(name="self_attention")(y, y, bias, True)
        y = RMSNorm(name="pre_cross_attention_layer_norm")(x)
        x = x + T5Attention(name="encoder_decoder_attention")(y, encoded)
        return x + T5Mlp(name="mlp")(RMSNorm(name="pre_mlp_layer_norm")(x))


class T5XDecoder(linen.Module):
    @linen.compact
    def __call__(self, x: Any, encoded: Any) -> Any:
        bias = RelativePositionBiases(False, name="relpos_bias")(x.shape[1])
        for number in range(2):
            x = T5XDecoderLayer(name=f"layers_{number}")(x, encoded, bias)
        return Joined(VOCABULARY, name="logits_dense")(RMSNorm(name="decoder_norm")(x))


class T5X(linen.Module):
    @linen.compact
    def __call__(self, tokens: Any, decoder_tokens: Any) -> Any:
        embed = linen.Embed(VOCABULARY, WIDTH, name="token_embedder")
        encoded = T5XEncoder(name="encoder")(embed(tokens))
        return T5XDecoder(name="decoder")(embed(decoder_tokens), encoded)


# CLIP's image encoder.
class ClipVision(Only, transformers.CLIPVisionModelWithProjection):
    FIELD, INPUTS = "image_embeds", ("pixel_values",)


def clip() -> Any:
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return ClipVision(transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=8, projection_dim=16))


class ResidualAttentionBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = linen.LayerNorm(epsilon=1e-5, name="ln_1")(x)
        x = x + linen.MultiHeadDotProductAttention(num_heads=HEADS, name="attn")(y, y)
        y = linen.Dense(HIDDEN, name="c_fc")(linen.LayerNorm(epsilon=1e-5, name="ln_2")(x))
        return x + linen.Dense(WIDTH, name="c_proj")(y * jax.nn.sigmoid(1.702 * y))


class ScenicClip(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Conv(WIDTH, (8, 8), (8, 8), use_bias=False, name="conv1")(x).reshape(len(x), -1, WIDTH)
        scale = linen.initializers.normal(0.2)
        first = jnp.tile(self.param("class_embedding", scale, (WIDTH,))[None, None], (len(x), 1, 1))
        x = jnp.concatenate([first, x], 1)
        x = x + self.param("positional_embedding", scale, x.shape[1:])
        x = linen.LayerNorm(epsilon=1e-5, name="ln_pre")(x)
        for number in range(2):
            x = ResidualAttentionBlock(name=f"resblocks_{number}")(x)
        x = linen.LayerNorm(epsilon=1e-5, name="ln_post")(x[:, 0])
        return x @ self.param("proj", scale, (WIDTH, 16))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=HEADS, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def two_texts(rng: np.random.Generator) -> Batch:
    return tokens()(rng)[0], tokens(5)(rng)[0]


CASES: Final = [
    Case("GPT-2, tied head", "transformers → flax linen", gpt2, lambda batch: shapes(
        GPT2(vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=HEADS), batch), tokens()),
    Case("BERT", "transformers → transformers' flax", bert, lambda batch: shapes(FlaxBert(), batch), tokens()),
    Case("BERT, attention layers", "transformers → flax linen", bert, lambda batch: shapes(BertEncoder(), batch),
         tokens()),
    Case("T5 1.1", "transformers → T5X (linen)", t5, lambda batch: shapes(T5X(), batch), two_texts,
         forms={"rel_embedding": "transpose"}, tries=2),
    Case("CLIP, image encoder", "transformers → scenic (linen)", clip, lambda batch: shapes(ScenicClip(), batch),
         images(), names={"pre_layrnorm": "ln_pre"}, tries=2),
]  # fmt: skip
