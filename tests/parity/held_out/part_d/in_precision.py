"""Faults of part D that only 16 bits show: a softmax, a norm or a loss in 16 bits where the other side has float32."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.part_c.variants import BRAIN, CAST, CAST_HALF, CAST_OUT, HALF
from tests.parity.held_out.part_d.variants import rounded
from tests.porting.faults.planting import Edit

_MIXED: Final = "layers/0/attention layers/0/attention/dense"
_TORCH_NORM: Final = "def _norm(norm: Any, x: Any, eps: float) -> Any:\n    wide = x if x.dtype == torch.float64 else x.float()\n    apart = wide - wide.mean(-1, keepdim=True)\n    wide = apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + eps)\n    return (wide * norm.weight + norm.bias).to(x.dtype)\n\n\n"  # fmt: skip
_NNX_NORM: Final = "def _norm(norm: Any, x: Any, eps: float) -> Any:\n    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)\n    apart = wide - wide.mean(-1, keepdims=True)\n    wide = apart * jax.lax.rsqrt(jnp.square(apart).mean(-1, keepdims=True) + eps)\n    return (wide * norm.scale[...] + norm.bias[...]).astype(x.dtype)\n\n\n"  # fmt: skip
_TORCH_NARROW: Final[Edit] = ("wide = x if x.dtype == torch.float64 else x.float()", "wide = x")
_NNX_NARROW: Final[Edit] = ("wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)", "wide = x")
_SOFTMAX: Final[Edit] = ("jax.nn.softmax(scores)", "jax.nn.softmax(scores.astype(jnp.float32))")
_AUTOCAST: Final = "def _narrow(x: Any) -> Any:\n    if torch.is_autocast_enabled('cpu'):\n        return x.to(torch.get_autocast_dtype('cpu'))\n    return x.to(torch.float32)\n\n\n"  # fmt: skip


def _by_hand(before: str, after: str, first: str, norm: str) -> tuple[Edit, ...]:
    """A norm written out in float32 in the place of a module's."""
    return (before, after), (first, f"{norm}{first}")


_ENCODER: Final = _by_hand("self.dropout(self.norm(x))", "self.dropout(_norm(self.norm, x, 1e-12))", "class Embeddings", _TORCH_NORM)  # fmt: skip
_LAYER: Final = _by_hand("self.norm1(x + self.dropout1(self.attention(x, mask)))", "_norm(self.norm1, x + self.dropout1(self.attention(x, mask)), 1e-12)", "class Layer", _NNX_NORM)  # fmt: skip
_VAE: Final = _by_hand('torch.tanh(self.norm(self.encoder(batch["x"])))', 'torch.tanh(_norm(self.norm, self.encoder(batch["x"]), 1e-5))', "class Model", _TORCH_NORM)  # fmt: skip
_TAGGER: Final = _by_hand("self.head(self.norm(states))", "self.head(_norm(self.norm, states, 1e-5))", "class Cell", _TORCH_NORM)  # fmt: skip
PLANTS: Final = (
    rounded("encoder", "nnx nnx", "softmax in 16 bits", _MIXED, CAST, _SOFTMAX[::-1], both=(_SOFTMAX,)),
    rounded("decoder", "torch torch", "softmax in 16 bits", "layers/0/attention layers/0/attention/o", HALF, ("        weights = scores.softmax(-1).to(v.dtype)", "        with torch.autocast('cpu', enabled=False):\n            weights = scores.to(v.dtype).softmax(-1)")),
    rounded("encoder", "torch torch", "norm of the embeddings in 16 bits", "embeddings embeddings/norm embeddings/dropout", CAST, _TORCH_NARROW, both=_ENCODER),
    rounded("encoder", "nnx nnx", "norms behind the attention in 16 bits", "layers/0/norm1 layers/0/up layers/0", CAST_HALF, _NNX_NARROW, both=_LAYER),
    rounded("vae", "torch torch", "norm in 16 bits", "norm mean log_variance", CAST, _TORCH_NARROW, both=_VAE),
    rounded("tagger", "torch torch", "norm in 16 bits", "norm head", CAST, _TORCH_NARROW, both=_TAGGER),
    rounded("seq2seq", "torch torch", "squares of the norm in 16 bits", "encoder/norm1", BRAIN, ("x.to(torch.float32).pow(2)", "_narrow(x).pow(2)"), ("class T5Norm", f"{_AUTOCAST}class T5Norm")),
    rounded("decoder", "nnx nnx", "loss in 16 bits", "loss", CAST_OUT, ("model(batch)[:, :-1].astype(jnp.float32)", "model(batch)[:, :-1]")),
    rounded("vae", "torch torch", "loss in 16 bits", "loss", CAST_OUT, ("(each.float() for each in model(batch))", "model(batch)")),
    rounded("convnet", "nnx nnx", "loss in 16 bits", "loss", CAST_OUT, ("model(batch).astype(jnp.float32)", "model(batch)")),
    rounded("tagger", "torch torch", "loss in 16 bits", "loss", CAST_OUT, ("model(batch).float(), batch", "model(batch), batch")),
)  # fmt: skip
"""All of them."""
