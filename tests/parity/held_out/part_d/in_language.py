"""Faults of part D in the code of the decoder, of the encoder and decoder, and of the encoder."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.part_c.variants import BRAIN, HALF
from tests.parity.held_out.part_d.variants import carried, fault

_D: Final = "decoder"
_S: Final = "seq2seq"
_E: Final = "encoder"
_DROP: Final = {"options": {"randomness": "shared", "steps": 1}}
_ATTENTION: Final = "layers/0/attention layers/0/attention/o"
_MIXED: Final = "layers/0/attention layers/0/attention/dense"
_MLP: Final = "layers/0/mlp/down layers/0/mlp"
_EPSILON: Final = ("+ 1e-5)", '+ getattr(self, "epsilon", 1e-5))')
DECODER: Final = (
    fault(_D, "torch nnx", "formula", "queries and keys brought to length 1", _ATTENTION, ("q, k = rotate(q), rotate(k)", "q, k = (rotate(each / jnp.linalg.norm(each, axis=-1, keepdims=True)) for each in (q, k))")),
    fault(_D, "torch torch", "formula", "values rotated too", _ATTENTION, ("q, k = rotate(q), rotate(k)", "q, k, v = rotate(q), rotate(k), rotate(v)"), under=BRAIN),
    fault(_D, "nnx torch", "formula", "mask of -1e-4 for -1e4", _ATTENTION, ("~mask, -1e4", "~mask, -1e-4")),
    fault(_D, "nnx nnx", "epsilon", "1e-3 in the first layer's second norm", "layers/0/norm2 layers/0/mlp layers/0/mlp/gate layers/0/mlp/up", _EPSILON, ("        self.norm = RMSNorm()\n", "        self.norm = RMSNorm()\n        self.layers[0].norm2.epsilon = 1e-3\n")),
    fault(_D, "torch nnx", "formula", "both halves of the MLP through SiLU", _MLP, ("* self.up(x)", "* jax.nn.silu(self.up(x))")),
    fault(_D, "torch torch", "formula", "norm behind the attention for before it", "layers/0/norm1 layers/0/attention layers/0/attention/q layers/0/attention/k layers/0/attention/v", ("x = x + self.attention(self.norm1(x))", "x = x + self.norm1(self.attention(x))"), under=HALF),
    fault(_D, "torch torch", "formula", "logits by the embeddings", "- head", ("self.head(self.norm(x))", "functional.linear(self.norm(x), self.embed.weight)"), says="formula|missing"),
    fault(_D, "nnx nnx", "stopped", "weights of the attention without a gradient", "layers/1/attention/q layers/1/attention/k", ("jax.nn.softmax(scores, -1).astype(v.dtype)", "jax.lax.stop_gradient(jax.nn.softmax(scores, -1)).astype(v.dtype)"), stage="backward"),
    fault(_D, "torch nnx", "loss", "bits for nats", "loss", ("return -picked.mean()", "return -picked.mean() / jnp.log(2.0)"), says="factor|formula"),
    fault(_D, "torch torch", "loss", "first three places not counted", "loss", ("model(batch)[:, :-1].float()", "model(batch)[:, 3:-1].float()"), ('batch["tokens"][:, 1:]', 'batch["tokens"][:, 4:]'), says="formula"),
    carried(_D, "torch nnx", "heads of the keys exchanged", "layers/0/attention/k", r"layers/0/attention/k/kernel", lambda x: x.reshape(32, 2, 8)[:, ::-1].reshape(32, 16)),
)  # fmt: skip
SEQ2SEQ: Final = (
    fault(_S, "torch torch", "formula", "cross attention masked as the decoder's own", "decoder/cross decoder/cross/o", ("self.norm2, self.cross = T5Norm(), Attention(False)", "self.norm2, self.cross = T5Norm(), Attention(True)")),
    fault(_S, "torch nnx", "formula", "biases divided by the root of the size", "encoder/attention encoder/attention/o", ("scores = scores + bias", "scores = scores + bias / SIZE**0.5"), under=BRAIN),
    fault(_S, "nnx torch", "formula", "no residual around the cross attention", "decoder decoder/norm3 decoder/mlp decoder/mlp/wi", ("x = x + self.cross(", "x = self.cross(")),
    fault(_S, "torch torch", "formula", "decoder without the last norm", "decoder decoder/last_norm -", ("return self.last_norm(x)", "return self.last_norm(x) if memory is None else x"), says="formula|missing"),
    fault(_S, "nnx nnx", "formula", "decoder reads the labels", "shared decoder decoder/norm1 decoder/attention decoder/attention/*", ('self.shared(batch["target"])', 'self.shared(batch["labels"])'), says="formula|layout"),
    fault(_S, "torch torch", "epsilon", "1e-3 before the cross attention", "decoder/norm2", ("+ 1e-6)", '+ getattr(self, "epsilon", 1e-6))'), ("        self.encoder, self.decoder = Side(False), Side(True)\n", "        self.encoder, self.decoder = Side(False), Side(True)\n        self.decoder.norm2.epsilon = 1e-3\n"), under=HALF),
    fault(_S, "torch nnx", "stopped", "keys without a gradient", "decoder/cross/k", ("self.q(x), self.k(memory), self.v(memory)", "self.q(x), jax.lax.stop_gradient(self.k(memory)), self.v(memory)"), stage="backward"),
    fault(_S, "torch torch", "loss", "mean of the rows' means", "loss", ("functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)", '(functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=0, reduction="none").sum(1) / (labels != 0).sum(1)).mean()'), says="formula", under=BRAIN),
    carried(_S, "torch torch", "query's kernel transposed", "decoder/cross/q", r"decoder/cross/q/weight", lambda x: x.T),
)  # fmt: skip
ENCODER: Final = (
    fault(_E, "torch torch", "formula", "positions left out", "embeddings/norm", ("+ self.position(torch.arange(tokens.shape[1]))", "+ 0 * self.position(torch.arange(tokens.shape[1]))")),
    fault(_E, "torch nnx", "formula", "norm on the branch of the MLP alone", "layers/0/norm2", ("return self.norm2(x + self.dropout2(self.down(jax.nn.gelu(self.up(x), approximate=False))))", "return x + self.norm2(self.dropout2(self.down(jax.nn.gelu(self.up(x), approximate=False))))"), under=BRAIN),
    fault(_E, "torch nnx", "formula", "root of the width for the head's", _MIXED, ("/ (WIDTH // HEADS) ** 0.5", "/ WIDTH**0.5")),
    fault(_E, "torch torch", "formula", "logits through tanh", "- classifier", ("return self.classifier(torch.tanh(self.pooler(x[:, 0])))", "return torch.tanh(self.classifier(torch.tanh(self.pooler(x[:, 0]))))"), under=HALF),
    fault(_E, "nnx nnx", "formula", "mask from the words", f"layers/0 {_MIXED}", ('layer(x, batch["mask"])', 'layer(x, (batch["tokens"] > 3).astype(jnp.float32))')),
    fault(_E, "torch torch", "stopped", "values without a gradient", "layers/1/attention/value", ("scores.softmax(-1).to(v.dtype) @ v", "scores.softmax(-1).to(v.dtype) @ v.detach()"), stage="backward"),
    fault(_E, "torch nnx", "stopped", "pooler reads states without a gradient", "pooler layers/1 layers/1/norm2", ("self.pooler(x[:, 0])", "self.pooler(jax.lax.stop_gradient(x[:, 0]))"), stage="backward", under=BRAIN),
    fault(_E, "torch torch", "randomness", "dropout before the norm", "embeddings/norm embeddings/dropout", ("return self.dropout(self.norm(x))", "return self.norm(self.dropout(x))"), **_DROP),
    fault(_E, "torch torch", "randomness", "dropout of the attention's weights, dropout off", "anywhere", ("scores.softmax(-1).to(v.dtype) @ v", "functional.dropout(scores.softmax(-1), RATE, self.training).to(v.dtype) @ v"), says="~dropout"),
)  # fmt: skip
PLANTS: Final = (*DECODER, *SEQ2SEQ, *ENCODER)
"""All of them."""
