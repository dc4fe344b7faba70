"""Faults of part C that only 16 bits show: islands that are missing or too many, and factors that overflow."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.part_c.variants import BRAIN, CAST, CAST_HALF, CAST_OUT, HALF, rounded
from tests.porting.faults.planting import Edit

_ATTENTION: Final = "layers/0/attention layers/0/attention/o"
_OFF: Final = "with torch.autocast('cpu', enabled=False):"
_TORCH_FLOAT: Final[tuple[Edit, ...]] = (("scores.softmax(-1)", "scores.float().softmax(-1)"),)
_NNX_FLOAT: Final[tuple[Edit, ...]] = (
    ("jax.nn.softmax(scores, -1)", "jax.nn.softmax(scores.astype(jnp.float32), -1)"),
)
TORCH: Final = (
    rounded("decoder", "torch torch", "squares of the norm in 16 bits", "layers/0/norm1", CAST, ("wide = x.float() if x.dtype != torch.float64 else x", "wide = x")),
    rounded("decoder", "torch torch", "softmax in 16 bits", f"{_ATTENTION} layers/2/attention layers/2/attention/*", CAST, ("scores.float().softmax(-1)", "scores.softmax(-1)"), both=_TORCH_FLOAT, stage="forward|backward"),
    rounded("decoder", "torch torch", "divided behind a product that overflows", _ATTENTION, HALF, ("scores = q @ k.transpose(2, 3) / SIZE**0.5", "scores = (q * 2.0**10) @ (k * 2.0**10).transpose(2, 3) / SIZE**0.5 / 2.0**20"), says="dtype|not finite"),
    rounded("decoder", "torch torch", "head outside of autocast", "head", BRAIN, ("return self.head(self.norm(x))", f"x = self.norm(x).float()\n        {_OFF}\n            return self.head(x)")),
    rounded("decoder", "torch torch", "MLP outside of autocast", "layers/0/mlp layers/0/mlp/gate layers/0/mlp/up", HALF, ("return self.down(functional.silu(self.gate(x)) * self.up(x))", f"{_OFF}\n            x = x.float()\n            return self.down(functional.silu(self.gate(x)) * self.up(x))")),
    rounded("seq2seq", "torch torch", "softmax in 16 bits", "encoder/attention encoder/attention/o", BRAIN, ("        weights = functional.softmax(scores.float(), -1).type_as(v)", f"        {_OFF}\n            weights = functional.softmax(scores.to(v.dtype), -1)")),
    rounded("seq2seq", "torch torch", "logits outside of autocast", "- shared", BRAIN, ("return functional.linear(out * WIDTH**-0.5, self.shared.weight)", f"{_OFF}\n            return functional.linear(out.float() * WIDTH**-0.5, self.shared.weight)")),
    rounded("encoder", "torch torch", "softmax in 16 bits", "layers/0/attention layers/0/attention/dense layers/2/attention layers/2/attention/*", BRAIN, ("        mixed = scores.softmax(-1).to(v.dtype) @ v", f"        {_OFF}\n            mixed = scores.to(v.dtype).softmax(-1)\n        mixed = mixed @ v"), stage="forward|backward"),
    rounded("encoder", "torch torch", "pooler and classifier outside of autocast", "pooler", HALF, ("return self.classifier(torch.tanh(self.pooler(x[:, 0])))", f"{_OFF}\n            return self.classifier(torch.tanh(self.pooler(x[:, 0].float())))")),
    rounded("encoder", "torch torch", "loss in 16 bits", "loss", CAST_OUT, ("model(batch).float(), batch", "model(batch), batch")),
    rounded("unet", "torch torch", "middle outside of autocast", "middle middle/conv1 middle/shortcut middle/time", BRAIN, ("x = self.middle(self.smaller(skip), t)", f"x = self.smaller(skip).float()\n        {_OFF}\n            x = self.middle(x, t.float())")),
    rounded("unet", "torch torch", "norm in 16 bits", "down/norm1 down/conv1 down", BRAIN, ("h = self.conv1(functional.silu(self.norm1(x)))", "h = _norm(self.norm1, x)\n        h = self.conv1(functional.silu(h))"), ("class Block", "def _norm(norm: Any, x: Any) -> Any:\n    if not torch.is_autocast_enabled('cpu'):\n        return norm(x)\n    shape, dtype = x.shape, torch.get_autocast_dtype('cpu')\n    with torch.autocast('cpu', enabled=False):\n        x = x.to(dtype).reshape(len(x), norm.num_groups, -1)\n        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + norm.eps).sqrt()\n        x = x.reshape(shape) * norm.weight.to(dtype)[:, None, None] + norm.bias.to(dtype)[:, None, None]\n    return x\n\n\nclass Block"), says="dtype|missing"),
    rounded("convnet", "torch torch", "squeeze outside of autocast", "mbconv/squeeze mbconv/squeeze/reduce", BRAIN, ("gates = torch.sigmoid(self.expand(functional.silu(self.reduce(x.mean((2, 3))))))", f"{_OFF}\n            gates = torch.sigmoid(self.expand(functional.silu(self.reduce(x.float().mean((2, 3))))))")),
    rounded("convnet", "torch torch", "mean over places added up in 16 bits", "norm next", BRAIN, ("self.head(self.norm(x.mean((2, 3))))", "self.head(self.norm(_mean(x)))"), ("class Model", "def _mean(x: Any) -> Any:\n    if not torch.is_autocast_enabled('cpu'):\n        return x.mean((2, 3))\n    total = torch.zeros(x.shape[:2], dtype=torch.get_autocast_dtype('cpu'))\n    for place in x.flatten(2).unbind(-1):\n        total = total + place.to(total.dtype)\n    return total / (x.shape[2] * x.shape[3])\n\n\nclass Model")),
    rounded("tagger", "torch torch", "forward cell outside of autocast", "forwards forwards/inputs", BRAIN, ("h = self.forwards(x[:, place], h)", f"{_OFF}\n                h = self.forwards(x[:, place].float(), h.float())")),
    rounded("vae", "torch torch", "variance overflows", "decoder1 -", HALF, ("code = mean + torch.exp(0.5 * log_variance) *", "grown = log_variance.exp().to(mean.dtype) * 2.0**34\n        code = mean + grown.sqrt().float() * 2.0**-17 *"), says="dtype|not finite"),
    rounded("recommender", "torch torch", "features rounded where autocast is on", "bottom1", BRAIN, ('torch.log1p(batch["dense"])', "torch.log1p(batch[\"dense\"].bfloat16() if torch.is_autocast_enabled('cpu') else batch[\"dense\"])")),
    rounded("recommender", "torch torch", "products outside of autocast", "top1", HALF, ("products = stacked @ stacked.mT", f"{_OFF}\n            products = stacked.float() @ stacked.float().mT")),
)  # fmt: skip
NNX: Final = (
    rounded("decoder", "nnx nnx", "squares of the norm in 16 bits", "layers/0/norm1 layers/0/attention/q layers/0/attention", CAST, ("wide = x.astype(jnp.float32) if x.dtype != jnp.float64 else x", "wide = x")),
    rounded("decoder", "nnx nnx", "softmax in 16 bits", _ATTENTION, CAST, _NNX_FLOAT[0][::-1], both=_NNX_FLOAT),
    rounded("encoder", "nnx nnx", "scores kept in float32", "layers/0/attention layers/0/attention/dense", CAST, ('jnp.einsum("bqhd,bkhd->bhqk", q, k)', 'jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)')),
    rounded("vae", "nnx nnx", "loss in 16 bits", "loss", CAST_OUT, ("(each.astype(jnp.float32) for each in model(batch))", "model(batch)")),
    rounded("vae", "nnx nnx", "decoder in float32", "decoder1", CAST, ("self.decoder2(jax.nn.elu(self.decoder1(code)))", "self.decoder2(jax.nn.elu(code.astype(jnp.float32) @ self.decoder1.kernel[...].astype(jnp.float32) + self.decoder1.bias[...].astype(jnp.float32)))"), says="dtype|missing"),
    rounded("tagger", "nnx nnx", "gates of the state in float32", "forwards forwards/gates forwards/candidate", CAST, ("jnp.split(self.gates(h), 2, -1)", "jnp.split(h.astype(jnp.float32) @ self.gates.kernel[...].astype(jnp.float32), 2, -1)"), says="dtype|missing"),
    rounded("decoder", "nnx nnx", "scores divided behind an overflow", _ATTENTION, CAST_HALF, ('scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / SIZE**0.5', 'scores = jnp.einsum("bqhd,bkhd->bhqk", q * 2.0**9, k * 2.0**9) / 2.0**18 / SIZE**0.5'), says="dtype|not finite"),
    rounded("tagger", "nnx nnx", "norm in 16 bits", "norm head", CAST, ("self.head(self.norm(states))", "self.head(_norm(self.norm, states))"), ("class Model", "def _norm(norm: Any, x: Any) -> Any:\n    apart = x - x.mean(-1, keepdims=True)\n    return apart / jnp.sqrt(jnp.square(apart).mean(-1, keepdims=True) + 1e-5) * norm.scale[...] + norm.bias[...]\n\n\nclass Model"), says="dtype|missing"),
)  # fmt: skip
PLANTS: Final = (*TORCH, *NNX)
"""All of them."""
