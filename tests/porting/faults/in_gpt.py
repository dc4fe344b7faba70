"""Faults in the GPT."""

from __future__ import annotations

from typing import Final

from tests.porting.faults.changes import gates, half, rows_swapped, transposed
from tests.porting.faults.planting import Carried, Fault

_H: Final = r"transformer/h/\d/"
_H0: Final = "transformer/h/0/"
_SDPA: Final = "functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
_SUM: Final = "x = parts.wte(idx) + parts.wpe(pos)"
_ATTN: Final = "x = x + self.attn(self.ln_1(x))"
_MLP: Final = "return self.c_proj(self.gelu(self.c_fc(x)))"
_REST: Final = "\n        return x + self.mlp(self.ln_2(x))"
_SPLIT: Final = "q, k, v = self.c_attn(x).split(self.n_embd, dim=2)"
_NNX: Final = "return x + self.linear2(nnx.gelu(self.linear1(self.layer_norm2(x))))"
_TARGET: Final = "transformer/h/0/attn"


def _torch(what: str, source: str, at: str, before: str, after: str) -> Fault:
    return Fault(what, "gpt", source, "torch", at, ((before, after),))


TORCH: Final = (
    _torch("epsilon 1e-3", "keras", _H + "ln_1", "self.ln_1 = nn.LayerNorm(WIDTH)", "self.ln_1 = nn.LayerNorm(WIDTH, 1e-3)"),
    _torch("epsilon 1e-6", "linen", "transformer/ln_f", '"ln_f": nn.LayerNorm(WIDTH)', '"ln_f": nn.LayerNorm(WIDTH, 1e-6)'),
    _torch("exact GELU for tanh", "keras", _H + "mlp/(gelu|c_proj)", 'nn.GELU(approximate="tanh")', "nn.GELU()"),
    _torch("causal mask missing", "keras", _TARGET, "is_causal=True", "is_causal=False"),
    _torch("causal mask off by one", "nnx", _TARGET, _SDPA, _SDPA.replace("is_causal=True", "torch.ones(t, t).tril(1) > 0")),
    _torch("causal mask reversed", "keras", _TARGET, _SDPA, _SDPA.replace("is_causal=True", "torch.ones(t, t).triu() > 0")),
    _torch("attention scale of the width", "keras", _TARGET, "is_causal=True", "is_causal=True, scale=c**-0.5"),
    _torch("attention without scale", "equinox", _TARGET, "is_causal=True", "is_causal=True, scale=1.0"),
    _torch(
        "heads interleaved", "keras", _TARGET,
        "y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y",
        "y.view(b, t, c // self.n_head, self.n_head).permute(0, 3, 1, 2) for y",
    ),
    _torch("queries and keys swapped", "keras", _TARGET, _SPLIT, _SPLIT.replace("q, k, v", "k, q, v")),
    _torch("keys and values swapped", "haiku", _TARGET, _SPLIT, _SPLIT.replace("q, k, v", "q, v, k")),
    _torch(
        "packed projection read by heads", "keras", _TARGET, _SPLIT,
        "q, k, v = (y.reshape(b, t, c) for y in self.c_attn(x).view(b, t, self.n_head, 3, -1).unbind(3))",
    ),
    _torch(
        "output projection transposed", "keras", _TARGET,
        "return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))",
        "return functional.linear(y.transpose(1, 2).reshape(b, t, c), self.c_proj.weight.T, self.c_proj.bias)",
    ),
    _torch("heads not put back before the reshape", "keras", _TARGET, "y.transpose(1, 2).contiguous().view", "y.contiguous().view"),
    _torch("softmax over the queries", "keras", _TARGET, f"y = {_SDPA}",
        "y = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(torch.ones(t, t).triu(1) > 0, -1e9).softmax(-2) @ v"),
    _torch("queries rounded to float16", "keras", _TARGET, _SDPA, _SDPA.replace("(q,", "(q.half().float(),")),
    _torch("post-norm for pre-norm", "keras", _H0 + "(ln_1|attn)", _ATTN, "x = self.ln_1(x + self.attn(x))"),
    _torch("residual of the attention missing", "keras", _H0 + "ln_2", _ATTN, "x = self.attn(self.ln_1(x))"),
    _torch("residual of the MLP missing", "nnx", "transformer/h/1/ln_1", _ATTN + _REST, _ATTN + _REST.replace("x + ", "")),
    _torch("positions from 1", "keras", "transformer/wpe", "device=idx.device)", "device=idx.device).add(1) % CONTEXT"),
    _torch("positions reversed", "nnx", "transformer/wpe", "device=idx.device)", "device=idx.device).flip(0)"),
    _torch("positions not added", "keras", f"{_H0}ln_1|transformer/wpe", _SUM, "x = parts.wte(idx)"),
    _torch("embedding scaled by the root of the width", "keras", _H0 + "ln_1", _SUM, "x = parts.wte(idx) * WIDTH**0.5 + parts.wpe(pos)"),
    _torch("gradient of the positions stopped", "keras", "transformer/wpe", _SUM, "x = parts.wte(idx) + parts.wpe(pos).detach()"),
    _torch("head not tied", "keras", "lm_head", "self.transformer.wte.weight = self.lm_head.weight  # type: ignore[union-attr]", "pass"),
    _torch("last norm left out", "keras", "behind .*h/1/mlp/c_proj|transformer/ln_f", "self.lm_head(parts.ln_f(x))", "self.lm_head(x)"),
    _torch("blocks in reverse", "keras", _H0 + "ln_1", "for block in parts.h:", "for block in reversed(parts.h):"),
    _torch("RMSNorm for LayerNorm", "keras", "transformer/ln_f", '"ln_f": nn.LayerNorm(WIDTH)', '"ln_f": nn.RMSNorm(WIDTH, 1e-5)'),
    _torch("bias missing", "keras", _H + "mlp/c_fc", "nn.Linear(WIDTH, 4 * WIDTH)", "nn.Linear(WIDTH, 4 * WIDTH, bias=False)"),
    _torch("bias left out in the call", "keras", _H0 + "mlp/c_proj|transformer/h/1/ln_1", _MLP, "return functional.linear(self.gelu(self.c_fc(x)), self.c_proj.weight)"),
    _torch("activations rounded to bfloat16", "nnx", _H0 + "mlp/c_proj", _MLP, "return self.c_proj(self.gelu(self.c_fc(x)).bfloat16().float())"),
)  # fmt: skip

OTHERS: Final = (
    Fault("exact GELU for tanh", "gpt", "torch", "nnx", r"transformer_blocks/0/linear2", ((_NNX, _NNX.replace("(x))))", "(x)), approximate=False))")),)),
    Fault("ReLU for GELU", "gpt", "keras", "nnx", r"transformer_blocks/0/linear2", ((_NNX, _NNX.replace("gelu", "relu")),)),
    Fault("epsilon 1e-3", "gpt", "torch", "nnx", r"transformer_blocks/\d/layer_norm1", (("self.layer_norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-5", "self.layer_norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-3"),)),
    Fault("causal mask missing", "gpt", "keras", "nnx", "transformer_blocks/0/mha", (("mask = nnx.make_causal_mask(tokens)", "mask = None"),)),
    Fault("wrong one of two norms", "gpt", "torch", "nnx", r"transformer_blocks/0/(layer_norm1|mha)", (("self.mha(self.layer_norm1(x)", "self.mha(self.layer_norm2(x)"),)),
    Fault("logits scaled", "gpt", "torch", "nnx", "behind final_norm", (("attend(self.final_norm(x))", "attend(self.final_norm(x)) * WIDTH**-0.5"),)),
    Fault("attention's dropout", "gpt", "nnx", "keras", r"transformer_block(_1)?/multi_head_attention", (("key_dim=WIDTH // HEADS)", "key_dim=WIDTH // HEADS, dropout=0.1)"),)),
    Fault("causal mask missing", "gpt", "torch", "keras", "transformer_block/multi_head_attention", (("self.att(x, x, use_causal_mask=True)", "self.att(x, x)"),)),
    Fault("Keras's own epsilon", "gpt", "torch", "keras", r"transformer_block(_1)?/layer_normalization", (("self.layernorm1 = layers.LayerNormalization(epsilon=1e-5)", "self.layernorm1 = layers.LayerNormalization()"),)),
    Fault("exact GELU for tanh", "gpt", "torch", "keras", r"transformer_block(_1)?/sequential/dense(_1)?", (("activation=gelu_tanh", 'activation="gelu"'),)),
    Fault("values not normalised", "gpt", "torch", "keras", "transformer_block/multi_head_attention", (("self.att(x, x, use", "self.att(x, inputs, use"),)),
    Fault("one head for two", "gpt", "torch", "keras", r"transformer_block(_1)?/multi_head_attention", (("(num_heads=HEADS, key_dim=WIDTH // HEADS)", "(num_heads=1, key_dim=WIDTH)"),)),
    Fault("causal mask off by one", "gpt", "torch", "equinox", "layers/0/attention", (("len(x)), bool))", "len(x)), bool), 1)"),)),
    Fault("epsilon 1e-3", "gpt", "torch", "equinox", r"layers/\d/mlp_norm", (("self.mlp_norm = eqx.nn.LayerNorm(WIDTH)", "self.mlp_norm = eqx.nn.LayerNorm(WIDTH, 1e-3)"),)),
    Fault("causal mask reversed", "gpt", "torch", "haiku", "language_model/transformer/multi_head_attention", (("np.tril(", "np.triu("),)),
    Fault("tanh for GELU", "gpt", "torch", "linen", "block0/Dense_1", (("nn.gelu(nn.Dense(4 * WIDTH)(y))", "nn.tanh(nn.Dense(4 * WIDTH)(y))"),)),
    Fault("layers of two equal blocks swapped", "gpt", "torch", "keras", r"transformer_block(_1)?/layer_normalization", names={"^transformer/h/0/": "transformer/h/2/", "^transformer/h/1/": "transformer/h/0/", "^transformer/h/2/": "transformer/h/1/"}),
)  # fmt: skip

ARRAYS: Final = (
    Fault("heads permuted in the queries", "gpt", "torch", "keras", "transformer_block/multi_head_attention", carried=(Carried(r"^transformer_block/.*query/kernel", lambda x: x[:, ::-1]),)),
    Fault("query kernel transposed", "gpt", "nnx", "torch", "transformer/h/0/attn", carried=(Carried(r"h/0/attn/c_attn/weight", gates(lambda x: x.T, 3, [0])),)),
    Fault("key and value kernels swapped", "gpt", "keras", "torch", "transformer/h/1/attn", carried=(Carried(r"h/1/attn/c_attn/weight", gates(None, 3, [0, 2, 1])),)),
    Fault("output projection transposed", "gpt", "keras", "torch", "transformer/h/0/attn", carried=(Carried(r"h/0/attn/c_proj/weight", transposed),)),
    Fault("embedding rounded to float16", "gpt", "keras", "torch", "transformer/wte", carried=(Carried(r"wte/weight|lm_head/weight", half),)),
    Fault("two rows of the embedding swapped", "gpt", "torch", "keras", "token_and_position_embedding/embedding", carried=(Carried(r"token_and_position_embedding/embedding/", rows_swapped),)),
    Fault("bias forgotten", "gpt", "torch", "keras", "transformer_block_1/sequential/dense_1", carried=(Carried(r"transformer_block_1/sequential/dense_1/bias", lambda x: 0 * x),)),
    Fault("scale and bias of a norm swapped", "gpt", "keras", "torch", "transformer/h/1/ln_2", carried=(Carried(r"h/1/ln_2/", lambda a, b: (b, a)),)),
)  # fmt: skip

FAULTS: Final = (*TORCH, *OTHERS, *ARRAYS)
