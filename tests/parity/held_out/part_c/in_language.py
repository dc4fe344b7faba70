"""Faults of part C in the code of the decoder, of the encoder and decoder, and of the encoder."""

from __future__ import annotations

from typing import Any, Final

from tests.parity.held_out.part_c.variants import BRAIN, HALF, carried, fault
from tests.porting.faults.planting import Edit

_D: Final = "decoder"
_S: Final = "seq2seq"
_E: Final = "encoder"
_DROP: Final = {"options": {"randomness": "shared", "steps": 1}}
_ATTENTION: Final = "layers/0/attention layers/0/attention/o"
_MLP: Final = "layers/0/mlp/down layers/0/mlp"


def _third(code: str) -> Edit:
    """A line behind the layers of an encoder, whose third layer is then another."""
    before = "        self.pooler, self.classifier = nn"
    return before, f"        self.layers[2].{code}\n{before}"


DECODER: Final = (
    fault(_D, "torch nnx", "epsilon", "1e-4 in one norm of three layers", "layers/1/norm2 layers/1/mlp/gate layers/1/mlp/up layers/1/mlp", ("+ 1e-5)", '+ getattr(self, "epsilon", 1e-5))'), ("        self.norm = RMSNorm()\n", "        self.norm = RMSNorm()\n        self.layers[1].norm2.epsilon = 1e-4\n")),
    fault(_D, "torch torch", "epsilon", "1e-4 in the last norm", "norm", ("+ 1e-5)", '+ getattr(self, "epsilon", 1e-5))'), ("        self.norm = RMSNorm()\n", "        self.norm = RMSNorm()\n        self.norm.epsilon = 1e-4\n"), under=BRAIN),
    fault(_D, "torch torch", "formula", "a window of three tokens", _ATTENTION, (".tril() > 0", ".tril().triu(-2) > 0")),
    fault(_D, "torch nnx", "formula", "logits bounded by a tanh", "- head", ("return self.head(self.norm(x))", "return 4.0 * jnp.tanh(self.head(self.norm(x)) / 4.0)")),
    fault(_D, "nnx torch", "formula", "scaled in the queries and in the scores", _ATTENTION, ("q, k = rotate(q), rotate(k)", "q, k = rotate(q) * SIZE**-0.5, rotate(k)")),
    fault(_D, "torch torch", "formula", "positions counted from the end", _ATTENTION, ("torch.arange(x.shape[-2], dtype=torch.float32)", "torch.arange(x.shape[-2], dtype=torch.float32).flip(0)"), under=HALF),
    fault(_D, "torch nnx", "formula", "frequencies over the width", _ATTENTION, ("jnp.arange(0, SIZE, 2, dtype=jnp.float32) / SIZE)", "jnp.arange(0, SIZE, 2, dtype=jnp.float32) / WIDTH)")),
    fault(_D, "torch torch", "formula", "the gate's sigmoid with 1.702", _MLP, ("functional.silu(self.gate(x)) * self.up(x)", "self.gate(x) * torch.sigmoid(1.702 * self.gate(x)) * self.up(x)")),
    fault(_D, "torch nnx", "formula", "attention divided by the root of twice the layers", "layers/0/norm2 layers/0/mlp/gate layers/0/mlp/up layers/0/mlp layers/0", ("x = x + self.attention(self.norm1(x))", "x = x + self.attention(self.norm1(x)) / (2 * BLOCKS) ** 0.5"), says="formula|factor", under=BRAIN),
    fault(_D, "torch torch", "formula", "the last layer left out", "norm layers/2/*", ("for layer in self.layers:", "for layer in self.layers[:-1]:"), says="formula|missing"),
    fault(_D, "nnx nnx", "formula", "no residual around the MLP", "layers/1/norm1 layers/1/attention/* layers/0", ("return x + self.mlp(self.norm2(x))", "return self.mlp(self.norm2(x))")),
    fault(_D, "torch nnx", "stopped", "queries without a gradient", "layers/2/attention/q", ("q, k = rotate(q), rotate(k)", "q, k = rotate(jax.lax.stop_gradient(q)), rotate(k)"), stage="backward"),
    fault(_D, "torch torch", "halved", "root of the squares detached", "layers/2 layers/2/* norm", ("torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)", "torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5).detach()"), stage="backward"),
    fault(_D, "torch torch", "loss", "squares of the normalisers added", "loss", ("return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())", "return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-3 * logits.logsumexp(-1).square().mean()"), says="formula"),
    fault(_D, "torch nnx", "loss", "special words left out", "loss", ("return -picked.mean()", "return -(picked[..., 0] * (labels > 3)).sum() / (labels > 3).sum()"), says="formula"),
    fault(_D, "nnx torch", "loss", "labels smoothed", "loss", ("labels.flatten())", "labels.flatten(), label_smoothing=0.05)"), says="formula", under=BRAIN),
    carried(_D, "torch nnx", "heads and sizes exchanged in the output's rows", "layers/2/attention/o", r"layers/2/attention/o/kernel", lambda x: x.reshape(4, 6, 24).swapaxes(0, 1).reshape(24, 24)),
    carried(_D, "torch torch", "query and key of the wrong layers", "layers/1/attention/k layers/2/attention/k", r"layers/[12]/attention/k/weight", lambda a, b: (b, a)),
)  # fmt: skip
SEQ2SEQ: Final = (
    fault(_S, "torch torch", "formula", "the next word is seen", "decoder/attention decoder/attention/o", (".triu(1)", ".triu(2)")),
    fault(_S, "torch nnx", "formula", "the mean taken away in the product alone", "encoder/norm1 encoder/attention/q encoder/attention/k encoder/attention/v encoder/attention", ("(x * jax.lax.rsqrt(variance + 1e-6))", "((x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(variance + 1e-6))")),
    fault(_S, "torch torch", "formula", "only the cross attention is scaled", "decoder/cross decoder/cross/o", ("scores = q @ k.mT", "scores = q @ k.mT * (1.0 if bias is not None else SIZE**-0.5)"), under=BRAIN),
    fault(_S, "nnx torch", "formula", "the source's embeddings times the root of the width", "encoder encoder/norm1 encoder/norm3 encoder/mlp encoder/mlp/wi shared", ('self.encoder(self.shared(batch["source"]))', 'self.encoder(self.shared(batch["source"]) * WIDTH**0.5)'), says="factor|formula"),
    fault(_S, "torch nnx", "formula", "squared ReLU for GELU", "encoder/mlp/wo encoder/mlp", ("jax.nn.gelu(self.wi(x), approximate=True)", "jnp.square(jax.nn.relu(self.wi(x)))")),
    fault(_S, "torch torch", "formula", "distances clipped at 1", "encoder/relative encoder/attention encoder/attention/o", ("clamp(-DISTANCES, DISTANCES)", "clamp(-1, 1)"), says="formula|layout"),
    fault(_S, "torch nnx", "formula", "norm of the MLP left out", "encoder/mlp encoder/mlp/wi", ("self.mlp(self.norm3(x))", "self.mlp(x)"), says="formula|missing|factor"),
    fault(_S, "torch torch", "formula", "weights of the attention over the heads", "encoder/attention encoder/attention/o", ("functional.softmax(scores.float(), -1)", "functional.softmax(scores.float(), 1)")),
    fault(_S, "torch torch", "halved", "target's embeddings without a gradient", "shared decoder", ('self.decoder(self.shared(batch["target"]), memory)', 'self.decoder(self.shared(batch["target"]).detach(), memory)'), stage="backward"),
    fault(_S, "nnx nnx", "stopped", "values of the encoder's attention detached", "encoder/attention/v decoder/attention/v decoder/cross/v", ('jnp.einsum("bhqk,bkhd->bqhd", weights, v)', 'jnp.einsum("bhqk,bkhd->bqhd", weights, jax.lax.stop_gradient(v))'), stage="backward"),
    fault(_S, "torch torch", "loss", "divided by the rows", "loss", ("ignore_index=0)", 'ignore_index=0, reduction="sum") / len(labels)'), says="factor|formula"),
    fault(_S, "torch nnx", "loss", "labels one place early", "loss", ('model(batch).astype(jnp.float32), batch["labels"]', 'model(batch).astype(jnp.float32), jnp.roll(batch["labels"], -1, 1)'), says="formula"),
    carried(_S, "torch nnx", "columns of the first MLP kernel the other way round", "encoder/mlp/wi", r"encoder/mlp/wi/kernel", lambda x: x[:, ::-1]),
    carried(_S, "torch torch", "heads of the output kernel turned round", "decoder/attention/o", r"decoder/attention/o/weight", lambda x: x.reshape(24, 3, 8)[:, ::-1].reshape(24, 24)),
)  # fmt: skip
ENCODER: Final = (
    fault(_E, "torch torch", "epsilon", "1e-3 in the last norm", "layers/2/norm2", _third("norm2.eps = 1e-3")),
    fault(_E, "torch nnx", "epsilon", "1e-5 in the norms behind the attention", "layers/0/norm1", ("self.attention, self.norm1 = Attention(rngs), nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)", "self.attention, self.norm1 = Attention(rngs), nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)"), under=BRAIN),
    fault(_E, "torch nnx", "formula", "mask behind the softmax", "layers/0/attention layers/0/attention/dense", ("        scores = scores + (1.0 - mask[:, None, None, :]) * -1e4\n", ""), ("jax.nn.softmax(scores)", "(jax.nn.softmax(scores) * mask[:, None, None, :])")),
    fault(_E, "torch torch", "formula", "padding seen in the last layer", "layers/2 layers/2/attention layers/2/attention/dense", ("        for layer in self.layers:\n            x = layer(x, batch[\"mask\"])", "        for number, layer in enumerate(self.layers):\n            x = layer(x, batch[\"mask\"] if number < 2 else torch.ones_like(batch[\"mask\"]))")),
    fault(_E, "nnx torch", "formula", "padding seen everywhere", "layers/0 layers/0/attention layers/0/attention/dense", ('layer(x, batch["mask"])', 'layer(x, torch.ones_like(batch["mask"]))'), under=HALF),
    fault(_E, "torch nnx", "formula", "no norm behind the embeddings", "embeddings embeddings/norm embeddings/dropout layers/0 layers/0/attention/*", ("return self.dropout(self.norm(x))", "return self.dropout(x)"), says="formula|missing"),
    fault(_E, "torch torch", "formula", "GELU by a sigmoid", "layers/0/down", ("functional.gelu(self.up(x))", "self.up(x) * torch.sigmoid(1.702 * self.up(x))")),
    fault(_E, "torch torch", "formula", "maximum pooled", "pooler", ("x[:, 0]", "x.max(1).values")),
    fault(_E, "torch nnx", "formula", "bias of the values forgotten", "layers/0/attention layers/0/attention/value layers/0/attention/dense", ("(self.query, self.key, self.value))", "(self.query, self.key, lambda y: y @ self.value.kernel[...]))"), says="formula|missing"),
    fault(_E, "torch torch", "formula", "residual from before the first norm", "layers/0/norm2", ("        x = self.norm1(x + self.dropout1(self.attention(x, mask)))\n        return self.norm2(x + self.dropout2(self.down(functional.gelu(self.up(x)))))", "        y = x + self.dropout1(self.attention(x, mask))\n        x = self.norm1(y)\n        return self.norm2(y + self.dropout2(self.down(functional.gelu(self.up(x)))))")),
    fault(_E, "torch torch", "stopped", "kinds frozen", "embeddings/kind", ("self.kind(kinds)", "self.kind(kinds).detach()"), stage="backward"),
    fault(_E, "nnx nnx", "halved", "gradient stopped in the second residual", "layers/2 layers/2/* layers/1", ("self.norm2(x + self.dropout2(", "self.norm2(jax.lax.stop_gradient(x) + self.dropout2("), stage="backward"),
    fault(_E, "torch torch", "loss", "smoothed by 0.2", "loss", ("label_smoothing=0.1", "label_smoothing=0.2"), says="formula"),
    fault(_E, "torch nnx", "loss", "softmax over the rows", "loss", ("jax.nn.log_softmax(logits)", "jax.nn.log_softmax(logits, 0)"), says="formula"),
    fault(_E, "torch nnx", "randomness", "no dropout behind the MLP", "layers/0/norm2 layers/0/dropout2", ("self.dropout2(self.down(jax.nn.gelu(self.up(x), approximate=False)))", "self.down(jax.nn.gelu(self.up(x), approximate=False))"), **_DROP),
    fault(_E, "torch torch", "randomness", "rate of 0.1 behind the embeddings", "embeddings/dropout embeddings layers/0", ("        self.dropout = nn.Dropout(RATE)", "        self.dropout = nn.Dropout(0.1)"), **_DROP),
    fault(_E, "torch torch", "randomness", "whole rows dropped behind the embeddings", "embeddings/dropout embeddings", ("        self.dropout = nn.Dropout(RATE)", "        self.dropout = nn.Dropout1d(RATE)"), **_DROP),
    fault(_E, "torch torch", "randomness", "no dropout behind the embeddings, dropout off", "anywhere", ("return self.dropout(self.norm(x))", "return self.norm(x)"), says="~dropout"),
    fault(_E, "nnx nnx", "randomness", "no dropout behind the MLP, dropout off", "anywhere", ("self.dropout2(self.down(jax.nn.gelu(self.up(x), approximate=False)))", "self.down(jax.nn.gelu(self.up(x), approximate=False))"), says="~dropout", under=BRAIN),
)  # fmt: skip


def _halves(*arrays: Any) -> tuple[Any, ...]:
    """Arrays that went through a file in float16."""
    return tuple(array.astype("float16").astype("float32") for array in arrays)


PRECISION: Final = (
    carried(_E, "torch torch", "kernels kept in float16", "anywhere", r"(query|key|value|dense|up|down)/weight", _halves, "dtype|formula"),
    carried(_D, "torch nnx", "embeddings kept in float16", "embed", r"embed/embedding", lambda x: _halves(x)[0], "dtype|formula"),
)  # fmt: skip
PLANTS: Final = (*DECODER, *SEQ2SEQ, *ENCODER, *PRECISION)
"""All of them."""
