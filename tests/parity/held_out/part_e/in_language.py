"""Faults of part E in the code of the decoder, of the encoder and decoder, and of the encoder."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.part_c.variants import BRAIN, HALF
from tests.parity.held_out.part_e.variants import carried, fault

_D: Final = "decoder"
_S: Final = "seq2seq"
_E: Final = "encoder"
_DROP: Final = {"options": {"randomness": "shared", "steps": 1}}
_ATTENTION: Final = "layers/0/attention layers/0/attention/o"
_MIXED: Final = "layers/0/attention layers/0/attention/dense"
_MLP: Final = "layers/0/mlp/down layers/0/mlp"
_APART: Final = "encoder/relative encoder/attention encoder/attention/o"
_READS: Final = "encoder/attention/q encoder/attention/k encoder/attention/v encoder/attention"
DECODER: Final = (
    fault(_D, "torch nnx", "formula", "positions divided by 4, as for a longer context", _ATTENTION, ("positions = jnp.arange(x.shape[1], dtype=jnp.float32)", "positions = jnp.arange(x.shape[1], dtype=jnp.float32) / 4.0")),
    fault(_D, "torch torch", "formula", "heads split with the size in front", _ATTENTION, ("each(x).reshape(rows, length, -1, SIZE).transpose(1, 2)", "each(x).reshape(rows, length, SIZE, -1).permute(0, 3, 1, 2)"), says="formula|layout"),
    fault(_D, "nnx nnx", "formula", "sigmoid for the softmax", _ATTENTION, ("jax.nn.softmax(scores, -1)", "jax.nn.sigmoid(scores)")),
    fault(_D, "torch torch", "epsilon", "no epsilon", "layers/0/norm1", ("keepdim=True) + 1e-5)", "keepdim=True))")),
    fault(_D, "torch torch", "formula", "residual of what the norm gives", "layers/0/norm2 layers/0", ("x = x + self.attention(self.norm1(x))", "x = self.norm1(x)\n        x = x + self.attention(x)"), under=BRAIN),
    fault(_D, "nnx torch", "formula", "SiLU behind the product", _MLP, ("functional.silu(self.gate(x)) * self.up(x)", "functional.silu(self.gate(x) * self.up(x))")),
    fault(_D, "nnx torch", "formula", "the past is masked", _ATTENTION, ("~mask, -1e4", "mask, -1e4"), under=HALF),
    fault(_D, "torch nnx", "loss", "loss of the last place alone", "loss", ("return -picked.mean()", "return -picked[:, -1].mean()"), says="formula", under=BRAIN),
    fault(_D, "torch torch", "stopped", "embeddings frozen", "embed", ('x = self.embed(batch["tokens"])', 'x = self.embed(batch["tokens"]).detach()'), stage="backward"),
    carried(_D, "torch nnx", "halves of the down kernel's rows exchanged", "layers/1/mlp/down", r"layers/1/mlp/down/kernel", lambda x: x.reshape(2, 16, 24)[::-1].reshape(32, 24)),
)  # fmt: skip
SEQ2SEQ: Final = (
    fault(_S, "torch nnx", "formula", "distances one too large", _APART, ("places[None, :] - places[:, None]", "places[None, :] - places[:, None] + 1"), says="formula|layout"),
    fault(_S, "torch torch", "formula", "distances without a sign", _APART, ("(places[None, :] - places[:, None]).clamp", "(places[None, :] - places[:, None]).abs().clamp"), says="formula|layout", under=HALF),
    fault(_S, "torch torch", "formula", "memory through the decoder's norm too", "decoder/cross decoder/cross/k decoder/cross/v decoder/norm2", ("self.cross(self.norm2(x), memory, None)", "self.cross(self.norm2(x), self.norm2(memory), None)")),
    fault(_S, "torch torch", "formula", "MLP before the cross attention", "decoder/norm2 decoder/norm3 decoder/cross decoder/cross/q decoder/mlp decoder/mlp/wi", ("        if memory is not None:\n            x = x + self.cross(self.norm2(x), memory, None)\n        x = x + self.mlp(self.norm3(x))\n", "        x = x + self.mlp(self.norm3(x))\n        if memory is not None:\n            x = x + self.cross(self.norm2(x), memory, None)\n")),
    fault(_S, "nnx nnx", "formula", "keys for values", "encoder/attention encoder/attention/v encoder/attention/o", ("self.q(x), self.k(memory), self.v(memory)", "self.q(x), self.k(memory), self.k(memory)"), says="formula|missing"),
    fault(_S, "torch nnx", "epsilon", "1e-8 for 1e-6", f"encoder/norm1 {_READS}", ("+ 1e-6)", "+ 1e-8)")),
    fault(_S, "torch torch", "formula", "mask of -1 in the decoder's own attention", "decoder/attention decoder/attention/o", ("torch.full(scores.shape[-2:], -1e4).triu(1)", "torch.full(scores.shape[-2:], -1.0).triu(1)"), under=BRAIN),
    fault(_S, "torch torch", "loss", "word 1 ignored for 0", "loss", ("ignore_index=0", "ignore_index=1"), says="formula", under=BRAIN),
    fault(_S, "torch nnx", "halved", "source's embeddings without a gradient", "shared encoder encoder/norm1", ('self.encoder(self.shared(batch["source"]))', 'self.encoder(jax.lax.stop_gradient(self.shared(batch["source"])))'), stage="backward"),
    carried(_S, "torch nnx", "tables of distances exchanged", "encoder/relative decoder/relative", r"(encoder|decoder)/relative/embedding", lambda a, b: (b, a)),
)  # fmt: skip
ENCODER: Final = (
    fault(_E, "torch nnx", "formula", "kinds all 0", "embeddings/kind embeddings/norm", ("self.kind(kinds)", "self.kind(jnp.zeros_like(kinds))"), says="formula|layout"),
    fault(_E, "torch torch", "epsilon", "Keras's own in the norm of the embeddings", "embeddings/norm", ("self.kind, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)", "self.kind, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=1e-3)"), under=HALF),
    fault(_E, "nnx torch", "formula", "ReLU for GELU", "layers/0/down", ("functional.gelu(self.up(x))", "functional.relu(self.up(x))")),
    fault(_E, "torch nnx", "formula", "first norm used twice", "layers/0/norm2 layers/0/norm1 layers/0 layers/1/attention layers/1/attention/*", ("return self.norm2(x + self.dropout2(", "return self.norm1(x + self.dropout2("), says="formula|missing"),
    fault(_E, "nnx nnx", "formula", "mask with the wrong sign", _MIXED, ("* -1e4", "* 1e4")),
    fault(_E, "torch nnx", "stopped", "classifier alone is trained", "pooler", ("self.classifier(jnp.tanh(self.pooler(x[:, 0])))", "self.classifier(jax.lax.stop_gradient(jnp.tanh(self.pooler(x[:, 0]))))"), stage="backward"),
    fault(_E, "torch torch", "randomness", "dropout of the sum, not of the branch", "layers/0/norm1 layers/0/dropout1", ("self.norm1(x + self.dropout1(self.attention(x, mask)))", "self.norm1(self.dropout1(x + self.attention(x, mask)))"), **_DROP),
    fault(_E, "nnx torch", "randomness", "rate of 0.5 behind the attention", "layers/0/norm1 layers/0/dropout1", ("self.dropout1, self.dropout2 = nn.Dropout(RATE), nn.Dropout(RATE)", "self.dropout1, self.dropout2 = nn.Dropout(0.5), nn.Dropout(RATE)"), **_DROP),
    fault(_E, "torch torch", "randomness", "dropout behind the pooler, dropout off", "anywhere", ("self.classifier(torch.tanh(self.pooler(x[:, 0])))", "self.classifier(functional.dropout(torch.tanh(self.pooler(x[:, 0])), RATE, self.training))"), says="~dropout"),
    carried(_E, "torch torch", "words shifted by one", "embeddings/word", r"embeddings/word/weight", lambda x: x[[28, *range(28)]]),
)  # fmt: skip
PLANTS: Final = (*DECODER, *SEQ2SEQ, *ENCODER)
"""All of them."""
