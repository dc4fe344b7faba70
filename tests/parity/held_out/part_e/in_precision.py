"""Faults of part E that only 16 bits show: a softmax, a norm or a loss in 16 bits where the other side has float32."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.part_c.variants import CAST, CAST_HALF, CAST_OUT, HALF
from tests.parity.held_out.part_e.variants import rounded
from tests.porting.faults.planting import Edit

_NORM: Final = "def _norm(norm: Any, x: Any, eps: float) -> Any:\n    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)\n    apart = wide - wide.mean(-1, keepdims=True)\n    wide = apart * jax.lax.rsqrt(jnp.square(apart).mean(-1, keepdims=True) + eps)\n    return (wide * norm.scale[...] + norm.bias[...]).astype(x.dtype)\n\n\n"  # fmt: skip
_NARROW: Final[Edit] = ("wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)", "wide = x")
_WIDE: Final = "def _wide(x: Any) -> Any:\n    return x if x.dtype == torch.float64 else x.float()\n\n\n"
_VAE: Final[tuple[Edit, ...]] = (
    ('jnp.tanh(self.norm(self.encoder(batch["x"])))', 'jnp.tanh(_norm(self.norm, self.encoder(batch["x"]), 1e-5))'),
    ("class Model", f"{_NORM}class Model"),
)
_TAGGER: Final[tuple[Edit, ...]] = (
    ("self.head(self.norm(states))", "self.head(_norm(self.norm, states, 1e-5))"),
    ("class Cell", f"{_NORM}class Cell"),
)
_ENCODER: Final[tuple[Edit, ...]] = (
    ("scores.softmax(-1)", "_wide(scores).softmax(-1)"),
    ("class Embeddings", f"{_WIDE}class Embeddings"),
)
PLANTS: Final = (
    rounded("encoder", "torch torch", "softmax in 16 bits", "layers/0/attention layers/0/attention/dense", CAST, ("_wide(scores).softmax(-1)", "scores.softmax(-1)"), both=_ENCODER),
    rounded("seq2seq", "torch torch", "softmax in 16 bits", "encoder/attention encoder/attention/o", HALF, ("        weights = functional.softmax(scores.float(), -1).type_as(v)", "        with torch.autocast('cpu', enabled=False):\n            weights = functional.softmax(scores.to(v.dtype), -1)")),
    rounded("decoder", "nnx nnx", "mean of the squares in 16 bits", "layers/0/norm1 layers/0/attention/q layers/0/attention/k layers/0/attention/v layers/0/attention", CAST, ("jnp.mean(jnp.square(wide), -1, keepdims=True)", "jnp.mean(jnp.square(wide).astype(x.dtype), -1, keepdims=True)")),
    rounded("vae", "nnx nnx", "norm in 16 bits", "norm mean log_variance", CAST, _NARROW, both=_VAE),
    rounded("tagger", "nnx nnx", "norm in 16 bits", "norm head", CAST_HALF, _NARROW, both=_TAGGER),
    rounded("decoder", "torch torch", "loss in 16 bits", "loss", CAST_OUT, ("model(batch)[:, :-1].float()", "model(batch)[:, :-1]")),
    rounded("encoder", "nnx nnx", "loss in 16 bits", "loss", CAST_OUT, ("model(batch).astype(jnp.float32)", "model(batch)")),
    rounded("recommender", "torch torch", "loss in 16 bits", "loss", CAST_OUT, ('binary_cross_entropy_with_logits(model(batch).float(), batch["clicked"])', 'binary_cross_entropy_with_logits(logits := model(batch), batch["clicked"].to(logits.dtype))')),
)  # fmt: skip
"""All of them."""
