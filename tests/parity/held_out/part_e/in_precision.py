"""Faults of part E that only 16 bits show: a softmax, a norm or a loss in 16 bits where the other side has float32."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.part_c.variants import CAST, CAST_OUT, HALF
from tests.parity.held_out.part_e.variants import rounded
from tests.porting.faults.planting import Edit

_NORM: Final = "def _norm(norm: Any, x: Any, eps: float) -> Any:\n    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)\n    apart = wide - wide.mean(-1, keepdims=True)\n    wide = apart * jax.lax.rsqrt(jnp.square(apart).mean(-1, keepdims=True) + eps)\n    return (wide * norm.scale[...] + norm.bias[...]).astype(x.dtype)\n\n\n"  # fmt: skip
_NARROW: Final[Edit] = ("wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)", "wide = x")
_SOFTMAX: Final = "def _wide(x: Any) -> Any:\n    return x if x.dtype == torch.float64 else x.float()\n\n\ndef _softmax(x: Any) -> Any:\n    e = (x - x.amax(-1, keepdim=True)).exp()\n    return e / e.sum(-1, keepdim=True)\n\n\n"  # fmt: skip
_VAE: Final[tuple[Edit, ...]] = (
    ('jnp.tanh(self.norm(self.encoder(batch["x"])))', 'jnp.tanh(_norm(self.norm, self.encoder(batch["x"]), 1e-5))'),
    ("class Model", f"{_NORM}class Model"),
)
_CONVNET: Final[tuple[Edit, ...]] = (
    ("h = self.norm(self.depthwise(x))", "h = _norm(self.norm, self.depthwise(x), 1e-6)"),
    ("class NeXt", f"{_NORM}class NeXt"),
)
_ENCODER: Final[tuple[Edit, ...]] = (
    ("scores.softmax(-1)", "_softmax(_wide(scores))"),
    ("class Embeddings", f"{_SOFTMAX}class Embeddings"),
)
PLANTS: Final = (
    rounded("encoder", "torch torch", "softmax in 16 bits", "layers/0/attention layers/0/attention/dense", CAST, ("_softmax(_wide(scores))", "_softmax(scores)"), both=_ENCODER),
    rounded("seq2seq", "torch torch", "softmax in 16 bits", "encoder/attention encoder/attention/o", HALF, ("        weights = functional.softmax(scores.float(), -1).type_as(v)", "        with torch.autocast('cpu', enabled=False):\n            weights = _softmax(scores.to(v.dtype))"), ("class T5Norm", f"{_SOFTMAX}class T5Norm")),
    rounded("decoder", "nnx nnx", "mean of the squares in 16 bits", "layers/0/norm1 layers/0/attention/q layers/0/attention/k layers/0/attention/v layers/0/attention", CAST, ("jnp.mean(jnp.square(wide), -1, keepdims=True)", "jnp.mean(jnp.square(wide).astype(x.dtype), -1, keepdims=True)")),
    rounded("vae", "nnx nnx", "norm in 16 bits", "norm mean log_variance", CAST, _NARROW, both=_VAE),
    rounded("convnet", "nnx nnx", "norm in 16 bits", "next/norm next/up", CAST, _NARROW, both=_CONVNET),
    rounded("decoder", "torch torch", "loss in 16 bits", "loss", CAST_OUT, ("model(batch)[:, :-1].float()", "model(batch)[:, :-1]")),
    rounded("encoder", "nnx nnx", "loss in 16 bits", "loss", CAST_OUT, ("model(batch).astype(jnp.float32)", "model(batch)")),
)  # fmt: skip
"""All of them."""
