"""Faults in the code of the vision transformer, and in arrays that came wrongly."""

from __future__ import annotations

from typing import Final

from tests.parity.faults.planted import Fault, backward, forward
from tests.parity.faults.planted import carried as wrong
from tests.porting.faults.changes import gates
from tests.porting.faults.planting import Carried, Edit

_BLOCK: Final = "x = x + self.self_attention(y, y, y, need_weights=False)[0]"
_REST: Final = f"{_BLOCK}\n        return x + self.mlp(self.ln_2(x))"
_CAT: Final = "x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)"
_PATCHES: Final = "x = self.conv_proj(x).flatten(2).transpose(1, 2)"
_NNX_CAT: Final = "x = jnp.concatenate([cls_token, patches], axis=1) + self.position_embeddings[...]"
_KERAS_MHA: Final = "layers.MultiHeadAttention(num_heads=VIT_HEADS, key_dim=VIT_WIDTH // VIT_HEADS)(x1, x1)"
_TOKENS: Final = ("token", "positions", "norm 1@0", "block@0")
_GELU: Final = ("gelu@0", "proj@0", "mlp@0")


def _fault(
    kind: str, what: str, first: str, second: str, places: tuple[str, ...], *edits: Edit, grad: bool = False
) -> Fault:
    at = (backward if grad else forward)("vit", *places)
    return Fault(kind, what, "vit", first, second, at, edits)


FAULTS: Final = (
    _fault("formula", "tanh GELU for exact", "keras", "torch", (*_GELU, "fc@0"), ("nn.Linear(VIT_WIDTH, VIT_MLP), nn.GELU()", 'nn.Linear(VIT_WIDTH, VIT_MLP), nn.GELU("tanh")')),
    _fault("formula", "tanh GELU for exact", "torch", "nnx", _GELU, ("partial(nnx.gelu, approximate=False)", "nnx.gelu")),
    _fault("formula", "tanh GELU for exact", "torch", "equinox", _GELU, ("gelu = partial(jax.nn.gelu, approximate=False)", "gelu = jax.nn.gelu")),
    _fault("formula", "tanh GELU for exact", "linen", "linen", _GELU, ("x = nn.gelu(nn.Dense(VIT_MLP)(x), approximate=False)", "x = nn.gelu(nn.Dense(VIT_MLP)(x))")),
    _fault("formula", "class token at the end", "torch", "nnx", _TOKENS, (_NNX_CAT, _NNX_CAT.replace("cls_token, patches", "patches, cls_token"))),
    _fault("formula", "positions not added to the token", "nnx", "torch", _TOKENS, ("x = self.ln(self.layers(x + self.pos_embedding))", "x = self.ln(self.layers(torch.cat([x[:, :1], x[:, 1:] + self.pos_embedding[:, 1:]], 1)))")),
    _fault("formula", "patches read column by column", "keras", "torch", _TOKENS, (_PATCHES, "x = self.conv_proj(x).transpose(2, 3).flatten(2).transpose(1, 2)")),
    _fault("formula", "mean over patches for the token", "nnx", "torch", ("head",), ("self.head(x[:, 0])", "self.head(x.mean(1))")),
    _fault("formula", "causal where all is seen", "torch", "keras", ("attention@0",), (_KERAS_MHA, _KERAS_MHA.replace("(x1, x1)", "(x1, x1, use_causal_mask=True)"))),
    _fault("formula", "post-norm for pre-norm", "nnx", "torch", ("norm 2@0", "fc@0", "mlp@0"), (_REST, _REST.replace("return x + self.mlp(self.ln_2(x))", "return self.ln_2(x + self.mlp(x))"))),
    _fault("formula", "residual taken behind the norm", "keras", "torch", ("norm 2@0", "block@0"), (_BLOCK, _BLOCK.replace("x + ", "y + "))),
    _fault("formula", "NaN in a division", "nnx", "torch", ("head", "last norm"), ("return self.head(x[:, 0])", "return self.head(x[:, 0] * 0 / 0)")),
    _fault("epsilon", "torch's own", "keras", "torch", ("norm 1@0",), ("norm = partial(nn.LayerNorm, eps=1e-6)", "norm = nn.LayerNorm")),
    _fault("epsilon", "1e-5 for 1e-6 in the last norm", "torch", "nnx", ("last norm",), ("self.final_norm = nnx.LayerNorm(VIT_WIDTH, rngs=rngs)", "self.final_norm = nnx.LayerNorm(VIT_WIDTH, epsilon=1e-5, rngs=rngs)")),
    _fault("epsilon", "Keras's own in the last norm", "nnx", "keras", ("last norm",), ("layers.LayerNormalization(epsilon=1e-6)(x)\n    logits", "layers.LayerNormalization()(x)\n    logits")),
    _fault("epsilon", "1e-5 for 1e-6", "torch", "haiku", ("norm 2@0",), ("y = jax.nn.gelu(hk.Linear(VIT_MLP)(layer_norm(x, 1e-6))", "y = jax.nn.gelu(hk.Linear(VIT_MLP)(layer_norm(x, 1e-5))")),
    _fault("dtype", "patches rounded to float16", "keras", "torch", _TOKENS, (_PATCHES, _PATCHES + ".half().float()")),
    _fault("dtype", "token rounded to bfloat16", "torch", "nnx", _TOKENS, ("cls_token = jnp.tile(self.cls_token[...], [patches.shape[0], 1, 1])", "cls_token = jnp.tile(self.cls_token[...].astype(jnp.bfloat16), [patches.shape[0], 1, 1])")),
    _fault("gradient", "stopped in the second half of the residual", "torch", "equinox", ("proj@1", "mlp@1", "block@1"), ("x = x + self.attention(y, y, y)\n        return x + jax.vmap(self.mlp)(jax.vmap(self.layer_norm2)(x))", "x = x + self.attention(y, y, y)\n        return x + jax.lax.stop_gradient(jax.vmap(self.mlp)(jax.vmap(self.layer_norm2)(x)))"), grad=True),
    _fault("gradient", "stopped at the token", "keras", "torch", ("token", "positions", "patches"), (_CAT, _CAT.replace("self.class_token.", "self.class_token.detach().")), grad=True),
    Fault("layout", "patch kernel's rows and columns swapped", "vit", "keras", "torch", wrong("vit", "patches"), carried=(Carried("conv_proj/weight", lambda x: x.swapaxes(2, 3)),)),
    Fault("layout", "packed projection interleaved by heads", "vit", "nnx", "torch", wrong("vit", "attention@1"), carried=(Carried("layers/1/self_attention/in_proj_weight", lambda x: x.reshape(3, 3, 4, 12).swapaxes(0, 1).reshape(36, 12)),)),
    Fault("layout", "queries and keys swapped", "vit", "keras", "torch", wrong("vit", "attention@0"), carried=(Carried("layers/0/self_attention/in_proj_weight", gates(None, 3, [1, 0, 2])),)),
    Fault("layout", "colours reversed", "vit", "torch", "keras", wrong("vit", "patches"), carried=(Carried("^patches/kernel", lambda x: x[:, :, ::-1]),)),
)  # fmt: skip
"""All faults of the ViT's code."""
