"""LLaMA and Gemma, from transformers to flax linen.

EasyLM writes LLaMA with dense layers, MaxText with kernels of three axes; google-deepmind/gemma has einsum kernels that
hold several projections. All are written anew, small.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import transformers
from flax import linen

from polyamp import porting
from tests.porting.public.zoo.building_blocks import (
    HEADS,
    HIDDEN,
    SIZES,
    WIDTH,
    DenseGeneral,
    Named,
    Only,
    RMSNorm,
    attend,
    heads_of,
    rotate,
    shapes,
)
from tests.porting.public.zoo.case import VOCABULARY, Case, tokens


class Llama(Only, transformers.LlamaForCausalLM):
    pass


class Gemma(Only, transformers.GemmaForCausalLM):
    pass


def llama() -> Any:
    return Llama(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=16))


def gemma() -> Any:
    return Gemma(
        transformers.GemmaConfig(
            **SIZES, num_key_value_heads=1, head_dim=8, max_position_embeddings=16, pad_token_id=None
        )
    )


class Weighted(RMSNorm):
    """The norm of LLaMA's flax ports: its scale is called `weight` there, `kernel` in EasyLM."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        scale = self.param("weight", linen.initializers.ones, (x.shape[-1],))
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.epsilon) * scale


def dense(features: int, name: str) -> Any:
    return linen.Dense(features, use_bias=False, name=name)


class LlamaAttention(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        q = rotate(heads_of(dense(WIDTH, "q_proj")(x)))
        k, v = (heads_of(dense(WIDTH // 2, name)(x), 2) for name in ("k_proj", "v_proj"))
        return dense(WIDTH, "o_proj")(attend(q, rotate(k), v, causal=True).reshape(x.shape))


class LlamaMlp(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return dense(WIDTH, "down_proj")(linen.silu(dense(HIDDEN, "gate_proj")(x)) * dense(HIDDEN, "up_proj")(x))


class LlamaBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = x + LlamaAttention(name="self_attn")(Weighted(name="input_layernorm")(x))
        return x + LlamaMlp(name="mlp")(Weighted(name="post_attention_layernorm")(x))


class LlamaModel(linen.Module):
    @linen.compact
    def __call__(self, ids: Any) -> Any:
        x = linen.Embed(VOCABULARY, WIDTH, name="embed_tokens")(ids)
        return Weighted(name="norm")(Named(LlamaBlock, name="layers")(x))


class EasyLM(linen.Module):
    @linen.compact
    def __call__(self, ids: Any) -> Any:
        return dense(VOCABULARY, "lm_head")(LlamaModel(name="model")(ids))


class MaxTextAttention(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        q = rotate(DenseGeneral((HEADS, 8), name="query")(x))
        k, v = (DenseGeneral((2, 8), name=name)(x) for name in ("key", "value"))
        return DenseGeneral((WIDTH,), 2, name="out")(attend(q, rotate(k), v, causal=True))


class MaxTextMlp(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        gate = linen.silu(DenseGeneral((HIDDEN,), name="wi_0")(x))
        return DenseGeneral((WIDTH,), name="wo")(gate * DenseGeneral((HIDDEN,), name="wi_1")(x))


class MaxTextBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = x + MaxTextAttention(name="self_attention")(RMSNorm(name="pre_self_attention_layer_norm")(x))
        return x + MaxTextMlp(name="mlp")(RMSNorm(name="post_self_attention_layer_norm")(x))


class MaxTextDecoder(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        for number in range(2):
            x = MaxTextBlock(name=f"layers_{number}")(x)
        return DenseGeneral((VOCABULARY,), name="logits_dense")(RMSNorm(name="decoder_norm")(x))


class MaxText(linen.Module):
    @linen.compact
    def __call__(self, ids: Any) -> Any:
        return MaxTextDecoder(name="decoder")(linen.Embed(VOCABULARY, WIDTH, name="token_embedder")(ids))


class Einsum(linen.Module):
    shape: tuple[int, ...]

    @linen.compact
    def __call__(self, equation: str, x: Any) -> Any:
        return jnp.einsum(equation, x, self.param("w", linen.initializers.normal(0.2), self.shape))


class GemmaNorm(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        scale = self.param("scale", linen.initializers.zeros, (x.shape[-1],))
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + scale)


class GemmaAttention(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        q = Einsum((HEADS, WIDTH, 8), name="q_einsum")("BTD,NDH->BTNH", x)
        k, v = Einsum((2, 1, WIDTH, 8), name="kv_einsum")("BSD,CKDH->CBSKH", x)
        y = attend(rotate(q), rotate(k), v, causal=True)
        return Einsum((HEADS, 8, WIDTH), name="attn_vec_einsum")("BTNH,NHD->BTD", y)


class GemmaMlp(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        gates = self.param("gating_einsum", linen.initializers.normal(0.2), (2, WIDTH, HIDDEN))
        last = self.param("linear", linen.initializers.normal(0.2), (HIDDEN, WIDTH))
        return (linen.gelu(x @ gates[0], approximate=True) * (x @ gates[1])) @ last


class GemmaBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = x + GemmaAttention(name="attn")(GemmaNorm(name="pre_attention_norm")(x))
        return x + GemmaMlp(name="mlp")(GemmaNorm(name="pre_ffw_norm")(x))


class Embedder(linen.Module):
    def setup(self) -> None:
        self.table = self.param("input_embedding", linen.initializers.normal(0.2), (VOCABULARY, WIDTH))

    def encode(self, ids: Any) -> Any:
        return self.table[ids] * WIDTH**0.5

    def decode(self, x: Any) -> Any:
        return x @ self.table.T


class DeepMindGemma(linen.Module):
    @linen.compact
    def __call__(self, ids: Any) -> Any:
        embedder = Embedder(name="embedder")
        x = embedder.encode(ids)
        for number in range(2):
            x = GemmaBlock(name=f"layer_{number}")(x)
        return embedder.decode(GemmaNorm(name="final_norm")(x))


SHIFTED: Final = porting.Form("rms_norm", (porting.Rule(("scale",), ("scale",), (porting.operations.Shift(1.0),)),))
"""The form of a norm that adds 1 to its scale, which neither names nor shapes show."""

CASES: Final = [
    Case("LLaMA", "transformers → EasyLM (linen)", llama, lambda batch: shapes(EasyLM(), batch), tokens()),
    Case("LLaMA", "transformers → MaxText (linen)", llama, lambda batch: shapes(MaxText(), batch), tokens(),
         names={"^model/layers/": "decoder/layers_", "gate_proj": "wi_0", "up_proj": "wi_1",
                "input_layernorm": "pre_self_attention_layer_norm"}, tries=3),
    Case("Gemma", "transformers → DeepMind's (linen)", gemma, lambda batch: shapes(DeepMindGemma(), batch), tokens(),
         forms={"q_einsum": "ndh -> d(nh)", "kv_einsum": "ckdh -> d(kh)", "attn_vec_einsum": "nhd -> (nh)d",
                "gating_einsum": "cdf -> df", "(attention|ffw|final)_norm$": SHIFTED}, tries=2),
]  # fmt: skip
