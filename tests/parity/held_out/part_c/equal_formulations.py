"""Equal formulations of part C: the same function in other words, and islands in float32 that the policy makes too."""

from __future__ import annotations

from typing import Final

from tests.porting.faults.planting import Edit

_SOFTMAX: Final = "def _softmax(x: Any) -> Any:\n    e = (x - x.amax(-1, keepdim=True).detach()).exp()\n    return e / e.sum(-1, keepdim=True)\n\n\n"
_NORM: Final = "def _norm(norm: Any, x: Any, eps: float) -> Any:\n    apart = x - x.mean(-1, keepdim=True)\n    return apart / (apart.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight + norm.bias\n\n\n"
_NNX_NORM: Final = "def _norm(norm: Any, x: Any, eps: float) -> Any:\n    apart = x - x.mean(-1, keepdims=True)\n    return apart / jnp.sqrt(jnp.square(apart).mean(-1, keepdims=True) + eps) * norm.scale[...] + norm.bias[...]\n\n\n"
ALL_POLICIES: Final[tuple[tuple[str, str, str, tuple[Edit, ...]], ...]] = (
    ("decoder", "torch", "attention by einsum", (("scores = q @ k.transpose(2, 3) / SIZE**0.5", 'scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / SIZE**0.5'), ("(weights @ v)", 'torch.einsum("bhqk,bhkd->bhqd", weights, v)'))),
    ("decoder", "torch", "softmax by exp and sum", (("scores.softmax(-1)", "_softmax(scores.float() if scores.dtype != torch.float64 else scores)"), ("class Attention", f"{_SOFTMAX}class Attention"))),
    ("decoder", "torch", "one-hot for the labels", (("functional.cross_entropy(logits.flatten(0, 1), labels.flatten())", "-(functional.one_hot(labels, WORDS) * logits.log_softmax(-1)).sum(-1).mean()"),)),
    ("decoder", "torch", "torch's own RMS norm", (("wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)", "wide = functional.rms_norm(wide, (WIDTH,), None, 1e-5)"),)),
    ("decoder", "torch", "norm in an island", (("        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)\n", "        with torch.autocast('cpu', enabled=False):\n            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)\n"),)),
    ("decoder", "torch", "mask of positions", (("mask = torch.ones(length, length).tril() > 0", "mask = torch.arange(length)[:, None] >= torch.arange(length)[None]"),)),
    ("decoder", "torch", "gate and up in one product", (("self.down(functional.silu(self.gate(x)) * self.up(x))", "self._gated(functional.linear(x, torch.cat([self.gate.weight, self.up.weight])).chunk(2, -1))"), ("class Block", "    def _gated(self, both: Any) -> Any:\n        return self.down(functional.silu(both[0]) * both[1])\n\n\nclass Block"))),
    ("decoder", "nnx", "attention by matrix products", (('jnp.einsum("bqhd,bkhd->bhqk", q, k)', "(q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1))"), ('jnp.einsum("bhqk,bkhd->bqhd", weights, v)', "(weights @ v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)"))),
    ("decoder", "nnx", "loss by the normaliser", (("return -picked.mean()", "return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]).mean()"),)),
    ("decoder", "nnx", "one-hot for the labels", (("return -picked.mean()", "return -(jax.nn.one_hot(labels, WORDS) * jax.nn.log_softmax(logits)).sum(-1).mean()"),)),
    ("decoder", "nnx", "jax's own RMS by the norm's length", (("jnp.mean(jnp.square(wide), -1, keepdims=True)", "(jnp.sum(wide * wide, -1, keepdims=True) / WIDTH)"),)),
    ("seq2seq", "torch", "float32 as the softmax's dtype", (("functional.softmax(scores.float(), -1)", "functional.softmax(scores, -1, dtype=torch.float32)"),)),
    ("seq2seq", "torch", "attention by einsum", (("scores = q @ k.mT", 'scores = torch.einsum("bhqd,bhkd->bhqk", q, k)'), ("(weights @ v)", 'torch.einsum("bhqk,bhkd->bhqd", weights, v)'))),
    ("seq2seq", "torch", "sum over the count", (("functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)", 'functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum") / (labels != 0).sum()'),)),
    ("seq2seq", "torch", "softmax in an island", (("        weights = functional.softmax(scores.float(), -1).type_as(v)", "        with torch.autocast('cpu', enabled=False):\n            weights = functional.softmax(scores.float(), -1)\n        weights = weights.type_as(v)"),)),
    ("seq2seq", "nnx", "divided by the root", (("(x * jax.lax.rsqrt(variance + 1e-6))", "(x / jnp.sqrt(variance + 1e-6))"),)),
    ("seq2seq", "nnx", "mask by where", (("scores = scores + jnp.triu(jnp.full(scores.shape[-2:], -1e4), 1)", "scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e4)"),)),
    ("seq2seq", "nnx", "one-hot for the labels", (("-jnp.sum(jnp.where(counted, picked, 0.0)) / counted.sum()", "-(jax.nn.one_hot(labels, WORDS) * jax.nn.log_softmax(logits) * counted[..., None]).sum() / counted.sum()"),)),
    ("encoder", "torch", "norm by hand", (("return self.dropout(self.norm(x))", "return self.dropout(_norm(self.norm, x, 1e-12))"), ("class Embeddings", f"{_NORM}class Embeddings"))),
    ("encoder", "torch", "attention by einsum", (("scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5", 'scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5'),)),
    ("encoder", "torch", "scaled in the queries", (("scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5", "scores = (q / (WIDTH // HEADS) ** 0.5) @ k.transpose(-1, -2)"),)),
    ("encoder", "torch", "softmax in an island", (("        mixed = scores.softmax(-1).to(v.dtype) @ v", "        with torch.autocast('cpu', enabled=False):\n            weights = (scores if scores.dtype == torch.float64 else scores.float()).softmax(-1)\n        mixed = weights.to(v.dtype) @ v"),)),
    ("encoder", "nnx", "attention by matrix products", (('jnp.einsum("bqhd,bkhd->bhqk", q, k)', "(q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1))"),)),
    ("encoder", "nnx", "norm by hand", (("return self.dropout(self.norm(x))", "return self.dropout(_norm(self.norm, x, 1e-12))"), ("class Embeddings", f"{_NNX_NORM}class Embeddings"))),
    ("encoder", "nnx", "softmax by the normaliser in float32", (("jax.nn.softmax(scores)", "jnp.exp(jax.nn.log_softmax(scores.astype(jnp.float32)))"),)),
    ("unet", "torch", "neighbours by an expansion", (('functional.interpolate(x, scale_factor=2.0, mode="nearest")', "x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2).reshape(*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3])"),)),
    ("unet", "torch", "mean of the rows' means", ((".square().mean()", ".square().mean((1, 2, 3)).mean()"),)),
    ("unet", "torch", "norm in an island", (("return self.out(functional.silu(self.norm(x)))", "with torch.autocast('cpu', enabled=False):\n            x = functional.silu(self.norm(x if x.dtype == torch.float64 else x.float()))\n        return self.out(x)"),)),
    ("unet", "nnx", "x times its sigmoid", (("return self.out(jax.nn.silu(self.norm(x)))", "x = self.norm(x)\n        return self.out(x * jax.nn.sigmoid(x))"),)),
    ("unet", "nnx", "neighbours by a broadcast", (("jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)", "jnp.broadcast_to(x[:, :, None, :, None], (x.shape[0], x.shape[1], 2, x.shape[2], 2, x.shape[3])).reshape(x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3])"),)),
    ("convnet", "torch", "mean by a pool", (("self.norm(x.mean((2, 3)))", "self.norm(functional.adaptive_avg_pool2d(x, 1).flatten(1))"),)),
    ("convnet", "torch", "scale behind the turn", (("(h * self.gamma).permute(0, 3, 1, 2)", "h.permute(0, 3, 1, 2) * self.gamma[:, None, None]"),)),
    ("convnet", "torch", "likelihood of the log-softmax", (('functional.cross_entropy(model(batch).float(), batch["labels"].long())', 'functional.nll_loss(model(batch).float().log_softmax(-1), batch["labels"].long())'),)),
    ("convnet", "nnx", "sum over places, divided", (("self.head(self.norm(x.mean((1, 2))))", "self.head(self.norm(x.sum((1, 2)) / (x.shape[1] * x.shape[2])))"),)),
    ("convnet", "nnx", "loss by the normaliser", (('-jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], -1).mean()', '(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch["labels"][:, None], -1)[:, 0]).mean()'),)),
    ("convnet", "keras", "Keras's loss", (("losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch[\"labels\"], logits=logits)", "losses = keras.losses.sparse_categorical_crossentropy(batch[\"labels\"], logits, from_logits=True)"),)),
    ("tagger", "torch", "loss by log-softmax", (('losses = functional.cross_entropy(logits.transpose(1, 2), tags, reduction="none")', "losses = -logits.log_softmax(-1).gather(-1, tags[..., None])[..., 0]"),)),
    ("tagger", "torch", "both gates in one sigmoid", (("r, z = torch.sigmoid(r_in + r_h), torch.sigmoid(z_in + z_h)", "r, z = torch.sigmoid(torch.cat([r_in + r_h, z_in + z_h], -1)).chunk(2, -1)"),)),
    ("tagger", "nnx", "one-hot for the tags", (("-jnp.take_along_axis(jax.nn.log_softmax(logits), tags[..., None], -1)[..., 0]", "-(jax.nn.one_hot(tags, TAGS) * jax.nn.log_softmax(logits)).sum(-1)"),)),
    ("tagger", "nnx", "joined place by place", (("jnp.concatenate([jnp.stack(ahead, 1), jnp.stack(behind, 1)], -1)", "jnp.stack([jnp.concatenate(each, -1) for each in zip(ahead, behind, strict=True)], 1)"),)),
    ("vae", "torch", "divergence by torch's distributions", (("divergence = -0.5 * (1.0 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()", "ours = torch.distributions.Normal(mean, (0.5 * log_variance).exp())\n    unit = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))\n    divergence = torch.distributions.kl_divergence(ours, unit).sum(-1).mean()"),)),
    ("vae", "torch", "norm by hand", (("torch.tanh(self.norm(self.encoder(batch[\"x\"])))", "torch.tanh(_norm(self.norm, self.encoder(batch[\"x\"]), 1e-5))"), ("class Model", f"{_NORM.replace('apart = x', 'x = x if x.dtype == torch.float64 else x.float()' + chr(10) + '    apart = x')}class Model"))),
    ("vae", "nnx", "ELU by expm1", (("jax.nn.elu(self.decoder1(code))", "_elu(self.decoder1(code))"), ("class Model", "def _elu(x: Any) -> Any:\n    return jnp.where(x > 0, x, jnp.expm1(jnp.minimum(x, 0.0)))\n\n\nclass Model"))),
    ("vae", "nnx", "bits by both logarithms", (("(jax.nn.softplus(logits) - logits * batch[\"x\"])", "-(batch[\"x\"] * jax.nn.log_sigmoid(logits) + (1.0 - batch[\"x\"]) * jax.nn.log_sigmoid(-logits))"),)),
    ("vae", "keras", "activation as a layer", (('    h = layers.Dense(HIDDEN, activation="elu", name="decoder1")(code)\n', '    h = layers.Dense(HIDDEN, name="decoder1")(code)\n    h = layers.Activation("elu", name="elu")(h)\n'),)),
    ("recommender", "torch", "products by bmm", (("stacked @ stacked.mT", "torch.bmm(stacked, stacked.transpose(1, 2))"),)),
    ("recommender", "torch", "bits by softplus", (('functional.binary_cross_entropy_with_logits(model(batch).float(), batch["clicked"])', '_bits(model(batch).float(), batch["clicked"])'), ("def loss_fn", "def _bits(logits: Any, clicked: Any) -> Any:\n    return (functional.softplus(logits) - logits * clicked).mean()\n\n\ndef loss_fn"))),
    ("recommender", "nnx", "pairs by a stack", (("products[:, rows, columns].astype(x.dtype)", "jnp.stack([products[:, r, c] for r, c in zip(rows, columns, strict=True)], 1).astype(x.dtype)"),)),
    ("recommender", "keras", "products by einsum", (("ops.matmul(stacked, ops.transpose(stacked, (0, 2, 1)))", 'ops.einsum("bid,bjd->bij", stacked, stacked)'),)),
)  # fmt: skip
"""Family, framework, words and edits that mean the same, under every policy."""
FLOAT32: Final[tuple[tuple[str, str, str, tuple[Edit, ...]], ...]] = (
    ("decoder", "torch", "one-hot for the lookup", (('self.embed(batch["tokens"])', 'functional.one_hot(batch["tokens"].long(), WORDS).to(self.embed.weight.dtype) @ self.embed.weight'),)),
    ("recommender", "nnx", "one-hot for the lookup", (('table(batch["categories"][:, number])', 'jax.nn.one_hot(batch["categories"][:, number], TABLES[number], dtype=table.embedding[...].dtype) @ table.embedding[...]'),)),
    ("recommender", "torch", "products as sums", (("stacked @ stacked.mT", "(stacked[:, :, None] * stacked[:, None]).sum(-1)"),)),
    ("encoder", "torch", "torch's own attention", (("        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5\n        scores = scores + (1.0 - mask[:, None, None, :]) * -1e4\n        mixed = scores.softmax(-1).to(v.dtype) @ v", "        mask = ((1.0 - mask[:, None, None, :]) * -1e4).to(q.dtype)\n        mixed = functional.scaled_dot_product_attention(q, k, v, mask)"),)),
    ("seq2seq", "torch", "torch's own attention, not scaled", (("        scores = q @ k.mT\n", "        mask = q.new_zeros(q.shape[2], k.shape[2])\n"), ("            scores = scores + bias", "            mask = mask + bias"), ("            scores = scores + torch.full(scores.shape[-2:], -1e4).triu(1)", "            mask = mask + torch.full(mask.shape[-2:], -1e4).triu(1)"), ("        weights = functional.softmax(scores.float(), -1).type_as(v)\n", "        mixed = functional.scaled_dot_product_attention(q, k, v, mask.to(q.dtype), scale=1.0)\n"), ("(weights @ v)", "mixed"))),
    ("unet", "torch", "shortcut as a product", (("self.shortcut(x) + h", 'torch.einsum("bchw,oc->bohw", x, self.shortcut.weight[:, :, 0, 0]) + self.shortcut.bias[:, None, None] + h'),)),
)  # fmt: skip
"""The same in float32; under a policy the other words round elsewhere."""
