"""Faults in the code of the GPT, and in arrays that came wrongly."""

from __future__ import annotations

from typing import Final

from tests.parity.faults.planted import Fault, backward, forward
from tests.parity.faults.planted import carried as wrong
from tests.porting.faults.changes import gates, rows_swapped, transposed
from tests.porting.faults.planting import Carried, Edit

_SDPA: Final = "functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
_SUM: Final = "x = parts.wte(idx) + parts.wpe(pos)"
_ATTN: Final = "x = x + self.attn(self.ln_1(x))"
_MLP: Final = "return self.c_proj(self.gelu(self.c_fc(x)))"
_REST: Final = "return x + self.mlp(self.ln_2(x))"
_NNX: Final = "return x + self.linear2(nnx.gelu(self.linear1(self.layer_norm2(x))))"
_NNX_ATTN: Final = "x = x + self.mha(self.layer_norm1(x), mask=mask)"
_KERAS_ATTN: Final = "x = inputs + self.att(x, x, use_causal_mask=True)"
_KERAS_REST: Final = "return x + self.ffn(self.layernorm2(x))"
_LINEN: Final = "y = nn.gelu(nn.Dense(4 * WIDTH)(y))"
_EQX_ATTN: Final = "x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))"


def _fault(
    kind: str, what: str, first: str, second: str, places: tuple[str, ...], *edits: Edit, grad: bool = False
) -> Fault:
    at = (backward if grad else forward)("gpt", *places)
    return Fault(kind, what, "gpt", first, second, at, edits)


def _carried(what: str, first: str, second: str, places: tuple[str, ...], *carried: Carried) -> Fault:
    return Fault("layout", what, "gpt", first, second, wrong("gpt", *places), carried=carried)


_NORM_1: Final = ("norm 1@0",)
_ATTENTION: Final = ("attention@0",)
_GELU: Final = ("gelu@0", "proj@0", "mlp@0")
_BEHIND: Final = ("block@0", "norm 1@1")

FAULTS: Final = (
    _fault("formula", "exact GELU for tanh", "keras", "torch", _GELU, ('nn.GELU(approximate="tanh")', "nn.GELU()")),
    _fault("formula", "exact GELU for tanh", "torch", "nnx", _GELU, (_NNX, _NNX.replace("(x))))", "(x)), approximate=False))"))),
    _fault("formula", "exact GELU for tanh", "torch", "torch", _GELU, ('nn.GELU(approximate="tanh")', "nn.GELU()")),
    _fault("formula", "exact GELU for tanh", "nnx", "keras", (*_GELU, "fc@0"), ("activation=gelu_tanh", 'activation="gelu"')),
    _fault("formula", "GELU of tanh for the exact one's sigmoid", "torch", "linen", _GELU, (_LINEN, "y = nn.Dense(4 * WIDTH)(y)\n        y = y * nn.sigmoid(1.702 * y)")),
    _fault("formula", "causal mask missing", "torch", "keras", _ATTENTION, ("self.att(x, x, use_causal_mask=True)", "self.att(x, x)")),
    _fault("formula", "causal mask missing", "keras", "nnx", _ATTENTION, ("mask = nnx.make_causal_mask(tokens)", "mask = None")),
    _fault("formula", "causal mask off by one", "torch", "equinox", _ATTENTION, ("len(x)), bool))", "len(x)), bool), 1)")),
    _fault("formula", "causal mask off by one", "nnx", "torch", _ATTENTION, (_SDPA, _SDPA.replace("is_causal=True", "torch.ones(t, t).tril(1) > 0"))),
    _fault("formula", "attention scaled by the width", "linen", "torch", _ATTENTION, ("is_causal=True", "is_causal=True, scale=c**-0.5")),
    _fault("formula", "attention without scale", "keras", "torch", _ATTENTION, ("is_causal=True", "is_causal=True, scale=1.0")),
    _fault("formula", "post-norm for pre-norm", "keras", "torch", ("norm 1@0", "attention@0", "block@0"), (_ATTN, "x = self.ln_1(x + self.attn(x))")),
    _fault("formula", "residual of the attention missing", "torch", "nnx", ("norm 2@0", "block@0"), (_NNX_ATTN, _NNX_ATTN.replace("x + ", ""))),
    _fault("formula", "residual of the MLP taken before the attention", "torch", "keras", _BEHIND, (_KERAS_REST, _KERAS_REST.replace("x + ", "inputs + "))),
    _fault("formula", "keys not normalised", "torch", "equinox", _ATTENTION, (_EQX_ATTN, _EQX_ATTN.replace("(y, y, y", "(y, x, y"))),
    _fault("formula", "softmax over the queries", "nnx", "torch", _ATTENTION, (f"y = {_SDPA}", "y = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(torch.ones(t, t).triu(1) > 0, -1e9).softmax(-2) @ v")),
    _fault("formula", "logits scaled", "torch", "nnx", ("head", "whole"), ("attend(self.final_norm(x))", "attend(self.final_norm(x)) * WIDTH**-0.5")),
    _fault("formula", "positions from 1", "keras", "torch", ("positions", "embedding", "norm 1@0"), ("device=idx.device)", "device=idx.device).add(1) % CONTEXT")),
    _fault("formula", "positions shifted by one", "torch", "linen", ("positions", "norm 1@0"), ("positions[: tokens.shape[1]]", "jnp.roll(positions, 1, 0)[: tokens.shape[1]]")),
    _fault("formula", "positions shifted by one", "torch", "haiku", ("positions", "norm 1@0"), ("positions[: tokens.shape[1]]", "jnp.roll(positions, 1, 0)[: tokens.shape[1]]")),
    _fault("formula", "embedding scaled by the root of the width", "nnx", "torch", ("embedding", "norm 1@0"), (_SUM, "x = parts.wte(idx) * WIDTH**0.5 + parts.wpe(pos)")),
    _fault("formula", "bias of the MLP left out", "keras", "torch", ("proj@0", "mlp@0", *_BEHIND), (_MLP, "return functional.linear(self.gelu(self.c_fc(x)), self.c_proj.weight)")),
    _fault("epsilon", "1e-3 for 1e-5", "keras", "torch", _NORM_1, ("self.ln_1 = nn.LayerNorm(WIDTH)", "self.ln_1 = nn.LayerNorm(WIDTH, 1e-3)")),
    _fault("epsilon", "1e-6 for 1e-5 in the last norm", "linen", "torch", ("last norm",), ('"ln_f": nn.LayerNorm(WIDTH)', '"ln_f": nn.LayerNorm(WIDTH, 1e-6)')),
    _fault("epsilon", "Keras's own", "torch", "keras", _NORM_1, ("self.layernorm1 = layers.LayerNormalization(epsilon=1e-5)", "self.layernorm1 = layers.LayerNormalization()")),
    _fault("epsilon", "1e-6 for 1e-5", "torch", "nnx", ("norm 2@0",), ("self.layer_norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-5", "self.layer_norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-6")),
    _fault("epsilon", "1e-4 for 1e-5", "equinox", "torch", ("norm 2@0",), ("self.ln_2 = nn.LayerNorm(WIDTH)", "self.ln_2 = nn.LayerNorm(WIDTH, 1e-4)")),
    _fault("dtype", "queries rounded to float16", "keras", "torch", _ATTENTION, (_SDPA, _SDPA.replace("(q,", "(q.half().float(),"))),
    _fault("dtype", "activations rounded to bfloat16", "nnx", "torch", ("proj@0", "mlp@0"), (_MLP, "return self.c_proj(self.gelu(self.c_fc(x)).bfloat16().float())")),
    _fault("dtype", "activations rounded to float16", "torch", "linen", ("proj@0", "mlp@0"), (_LINEN, _LINEN + "\n        y = y.astype(jnp.float16).astype(jnp.float32)")),
    _fault("dtype", "logits rounded to bfloat16", "keras", "nnx", ("head", "whole"), ("attend(self.final_norm(x))", "attend(self.final_norm(x)).astype(jnp.bfloat16).astype(jnp.float32)")),
    _fault("gradient", "stopped at the positions", "keras", "torch", ("positions", "embedding"), (_SUM, "x = parts.wte(idx) + parts.wpe(pos).detach()"), grad=True),
    _fault("gradient", "stopped in the attention", "nnx", "torch", ("attention@1", "norm 1@1"), (_ATTN, "x = x + self.attn(self.ln_1(x)).detach()"), grad=True),
    _fault("gradient", "stopped in the MLP's first product", "torch", "nnx", ("fc@1", "norm 2@1", "gelu@1"), (_NNX, _NNX.replace("self.linear1(self.layer_norm2(x))", "jax.lax.stop_gradient(self.linear1(self.layer_norm2(x)))")), ("import jax.numpy as jnp\n", "import jax\nimport jax.numpy as jnp\n"), grad=True),
    _fault("gradient", "stopped before the second block", "keras", "linen", ("block@0", "norm 1@1", "proj@0", "mlp@0", "norm 2@0"), ("x = DecoderBlock(name=f\"block{number}\")(x, mask)", "x = DecoderBlock(name=f\"block{number}\")(jax.lax.stop_gradient(x), mask)"), grad=True),
    _carried("heads swapped in the queries", "torch", "keras", _ATTENTION, Carried(r"^transformer_block/.*query/kernel", lambda x: x[:, ::-1])),
    _carried("heads swapped in the queries", "keras", "torch", _ATTENTION, Carried(r"h/0/attn/c_attn/weight", gates(lambda x: x.reshape(2, 8, 16)[::-1].reshape(16, 16), 3, [0]))),
    _carried("query kernel transposed", "nnx", "torch", _ATTENTION, Carried(r"h/0/attn/c_attn/weight", gates(lambda x: x.T, 3, [0]))),
    _carried("output projection transposed", "torch", "torch", ("attention@1",), Carried(r"h/1/attn/c_proj/weight", transposed)),
    _carried("key and value kernels swapped", "linen", "torch", ("attention@1",), Carried(r"h/1/attn/c_attn/weight", gates(None, 3, [0, 2, 1]))),
    _carried("two rows of the embedding swapped", "torch", "nnx", ("tokens", "embedding"), Carried(r"token_emb", rows_swapped)),
    _carried("scale and bias of a norm swapped", "keras", "torch", ("norm 2@1",), Carried(r"h/1/ln_2/", lambda a, b: (b, a))),
)  # fmt: skip
"""All faults of the GPT's code."""
