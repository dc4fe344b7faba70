"""Faults in the vision transformer."""

from __future__ import annotations

from typing import Final

from tests.porting.faults.changes import gates, rows_swapped
from tests.porting.faults.planting import Carried, Fault

_BLOCK: Final = "x = x + self.self_attention(y, y, y, need_weights=False)[0]"
_REST: Final = "\n        return x + self.mlp(self.ln_2(x))"
_CAT: Final = "x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)"
_PATCHES: Final = "x = self.conv_proj(x).flatten(2).transpose(1, 2)"
_TOKENS: Final = "layers/0/ln_1|class_token|pos_embedding"
_NNX_CAT: Final = "x = jnp.concatenate([cls_token, patches], axis=1) + self.position_embeddings[...]"
_KERAS_MHA: Final = "layers.MultiHeadAttention(num_heads=VIT_HEADS, key_dim=VIT_WIDTH // VIT_HEADS)(x1, x1)"


def _torch(what: str, source: str, at: str, before: str, after: str) -> Fault:
    return Fault(what, "vit", source, "torch", at, ((before, after),))


TORCH: Final = (
    _torch("torch's own epsilon", "keras", r"layers/\d/ln_[12]", "norm = partial(nn.LayerNorm, eps=1e-6)", "norm = nn.LayerNorm"),
    _torch("tanh GELU for exact", "keras", r"layers/\d/mlp/[12]", "nn.Linear(VIT_WIDTH, VIT_MLP), nn.GELU()", 'nn.Linear(VIT_WIDTH, VIT_MLP), nn.GELU("tanh")'),
    _torch("class token at the end", "keras", _TOKENS, _CAT, "x = torch.cat([x, self.class_token.expand(len(x), -1, -1)], dim=1)"),
    _torch("class token left out of the positions", "nnx", _TOKENS, "x = self.ln(self.layers(x + self.pos_embedding))", "x = self.ln(self.layers(torch.cat([x[:, :1], x[:, 1:] + self.pos_embedding[:, 1:]], 1)))"),
    _torch("patches read column by column", "keras", _TOKENS, _PATCHES, "x = self.conv_proj(x).transpose(2, 3).flatten(2).transpose(1, 2)"),
    _torch("last patch read instead of the token", "keras", "head", "self.head(x[:, 0])", "self.head(x[:, -1])"),
    _torch("mean over patches instead of the token", "nnx", "head", "self.head(x[:, 0])", "self.head(x.mean(1))"),
    _torch("attention over the batch", "keras", r"layers/\d/self_attention", "VIT_HEADS, batch_first=True)", "VIT_HEADS)"),
    _torch("residual of the attention missing", "linen", "layers/0/ln_2", _BLOCK, _BLOCK.replace("x + ", "")),
    _torch("residual taken behind the norm", "keras", "layers/0/ln_2", _BLOCK, _BLOCK.replace("x + ", "y + ")),
    _torch("post-norm for pre-norm in the MLP", "nnx", "layers/0/(ln_2|mlp/0)", _BLOCK + _REST, _BLOCK + "\n        return self.ln_2(x + self.mlp(x))"),
    _torch("dropout in the attention", "nnx", r"layers/\d/self_attention", "VIT_HEADS, batch_first=True)", "VIT_HEADS, dropout=0.1, batch_first=True)"),
    _torch("attention's bias missing", "keras", r"layers/\d/self_attention", "VIT_HEADS, batch_first=True)", "VIT_HEADS, bias=False, batch_first=True)"),
    _torch("softmax behind the head", "keras", "behind head", "return self.head(x[:, 0])", "return self.head(x[:, 0]).softmax(-1)"),
    _torch("other stride, other patches", "keras", "conv_proj|pos_embedding", "kernel_size=PATCH, stride=PATCH)", "kernel_size=PATCH, stride=PATCH, dilation=1, padding=1)"),
)  # fmt: skip

OTHERS: Final = (
    Fault("class token at the end", "vit", "torch", "nnx", "encoder/layers/0/norm1|cls_token|position_embeddings", ((_NNX_CAT, _NNX_CAT.replace("cls_token, patches", "patches, cls_token")),)),
    Fault("positions not added", "vit", "torch", "nnx", "encoder/layers/0/norm1|cls_token|position_embeddings", ((_NNX_CAT, _NNX_CAT.replace(" + self.position_embeddings[...]", "")),)),
    Fault("tanh GELU for exact", "vit", "keras", "nnx", r"encoder/layers/\d/mlp/layers/[12]", (("partial(nnx.gelu, approximate=False)", "nnx.gelu"),)),
    Fault("epsilon 1e-5", "vit", "torch", "nnx", "final_norm", (("self.final_norm = nnx.LayerNorm(VIT_WIDTH, rngs=rngs)", "self.final_norm = nnx.LayerNorm(VIT_WIDTH, epsilon=1e-5, rngs=rngs)"),)),
    Fault("last norm's scale missing", "vit", "keras", "nnx", "final_norm", (("self.final_norm = nnx.LayerNorm(VIT_WIDTH, rngs=rngs)", "self.final_norm = nnx.LayerNorm(VIT_WIDTH, use_scale=False, rngs=rngs)"),)),
    Fault("Keras's own epsilon", "vit", "torch", "keras", "layer_normalization_4", (("layers.LayerNormalization(epsilon=1e-6)(x)\n    logits", "layers.LayerNormalization()(x)\n    logits"),)),
    Fault("norm over the patches too", "vit", "torch", "keras", r"layer_normalization(_2)?", (("x1 = layers.LayerNormalization(epsilon=1e-6)(x)", "x1 = layers.LayerNormalization(axis=[1, 2], epsilon=1e-6)(x)"),)),
    Fault("ReLU for GELU", "vit", "torch", "keras", "dense(_[123])?", (('layers.Dense(VIT_MLP, activation="gelu")', 'layers.Dense(VIT_MLP, activation="relu")'),)),
    Fault("causal where all is seen", "vit", "torch", "keras", "multi_head_attention", ((_KERAS_MHA, _KERAS_MHA.replace("(x1, x1)", "(x1, x1, use_causal_mask=True)")),)),
    Fault("keys not normalised", "vit", "torch", "keras", "multi_head_attention", ((_KERAS_MHA, _KERAS_MHA.replace("(x1, x1)", "(x1, x1, x)")),)),
    Fault("epsilon 1e-5", "vit", "torch", "equinox", r"attention_blocks/\d/layer_norm2", (("self.layer_norm2 = eqx.nn.LayerNorm(VIT_WIDTH, eps=1e-6)", "self.layer_norm2 = eqx.nn.LayerNorm(VIT_WIDTH)"),)),
    Fault("wrong epsilon in the source", "vit", "linen", "torch", r"layers/\d/ln_1", ours=(("x = nn.LayerNorm()(inputs)", "x = nn.LayerNorm(epsilon=1e-3)(inputs)"),)),
    Fault("queries and keys swapped", "vit", "keras", "torch", "layers/0/self_attention", carried=(Carried("layers/0/self_attention/in_proj_weight", gates(None, 3, [1, 0, 2])),)),
    Fault("packed projection interleaved by heads", "vit", "nnx", "torch", "layers/1/self_attention", carried=(Carried("layers/1/self_attention/in_proj_weight", lambda x: x.reshape(3, 3, 4, 12).swapaxes(0, 1).reshape(36, 12)),)),
    Fault("positions of two patches swapped", "vit", "keras", "torch", _TOKENS, carried=(Carried("pos_embedding", lambda x: rows_swapped(x[0])[None]),)),
    Fault("patch kernel's rows and columns swapped", "vit", "keras", "torch", "conv_proj", carried=(Carried("conv_proj/weight", lambda x: x.swapaxes(2, 3)),)),
    Fault("colours reversed", "vit", "torch", "keras", "patches", carried=(Carried("^patches/kernel", lambda x: x[:, :, ::-1]),)),
)  # fmt: skip

FAULTS: Final = (*TORCH, *OTHERS)
