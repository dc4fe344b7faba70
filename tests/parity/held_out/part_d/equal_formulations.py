"""Equal formulations of part D: the same function in other words, and islands in float32 on one side."""

from __future__ import annotations

from typing import Final

from tests.porting.faults.planting import Edit

_OFF: Final = "with torch.autocast('cpu', enabled=False):"
_WIDE: Final = "def _wide(x: Any) -> Any:\n    return x if x.dtype == torch.float64 else x.float()\n\n\n"
_SOFTMAX: Final = "def _softmax(x: Any) -> Any:\n    x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)\n    e = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))\n    return e / e.sum(-1, keepdims=True)\n\n\n"  # fmt: skip
ALL_POLICIES: Final[tuple[tuple[str, str, str, tuple[Edit, ...]], ...]] = (
    ("decoder", "torch", "half of the scale in queries and keys", (("scores = q @ k.transpose(2, 3) / SIZE**0.5", "scores = (q * SIZE**-0.25) @ (k * SIZE**-0.25).transpose(2, 3)"),)),
    ("decoder", "torch", "heads repeated by an expansion", (("k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)", "k, v = (each[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for each in (k, v))"),)),
    ("decoder", "torch", "mask added", (("scores = scores.masked_fill(~mask, -1e4)", "scores = scores + torch.zeros_like(scores).masked_fill(~mask, -1e4)"),)),
    ("decoder", "torch", "softmax in a float32 island", (("        weights = scores.softmax(-1).to(v.dtype)", f"        {_OFF}\n            weights = _wide(scores).softmax(-1)\n        weights = weights.to(v.dtype)"), ("class Attention", f"{_WIDE}class Attention"))),
    ("decoder", "nnx", "softmax by exp and sum", (("jax.nn.softmax(scores, -1)", "_softmax(scores)"), ("class Attention", f"{_SOFTMAX}class Attention"))),
    ("decoder", "nnx", "heads repeated by a broadcast", (("k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)", "k, v = (jnp.broadcast_to(each[:, :, :, None], (rows, length, 2, 2, SIZE)).reshape(rows, length, 4, SIZE) for each in (k, v))"),)),
    ("seq2seq", "torch", "mask by a fill", (("scores = scores + torch.full(scores.shape[-2:], -1e4).triu(1)", "scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -1e4)"),)),
    ("seq2seq", "torch", "squares added up and divided", (("x.to(torch.float32).pow(2).mean(-1, keepdim=True)", "x.to(torch.float32).square().sum(-1, keepdim=True) / WIDTH"),)),
    ("seq2seq", "nnx", "loss by the normaliser", (("picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]", "picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0] - jax.nn.logsumexp(logits, -1)"),)),
    ("seq2seq", "nnx", "attention by matrix products", (('jnp.einsum("bqhd,bkhd->bhqk", q, k)', "(q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1))"), ('jnp.einsum("bhqk,bkhd->bqhd", weights, v)', "(weights @ v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)"))),
    ("encoder", "torch", "mask by a fill", (("scores = scores + (1.0 - mask[:, None, None, :]) * -1e4", "scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e4)"),)),
    ("encoder", "torch", "smooth labels written out", (('functional.cross_entropy(model(batch).float(), batch["labels"].long(), label_smoothing=0.1)', '-((0.9 * functional.one_hot(batch["labels"].long(), CLASSES) + 0.1 / CLASSES) * model(batch).float().log_softmax(-1)).sum(-1).mean()'),)),
    ("encoder", "torch", "norm of the embeddings in a float32 island", (("        return self.dropout(self.norm(x))", f"        {_OFF}\n            x = self.norm(_wide(x))\n        return self.dropout(x)"), ("class Embeddings", f"{_WIDE}class Embeddings"))),
    ("encoder", "nnx", "mask by where", (("scores = scores + (1.0 - mask[:, None, None, :]) * -1e4", "scores = jnp.where(mask[:, None, None, :] > 0, scores, -1e4)"),)),
    ("unet", "torch", "padding named same", (("self.stem = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)", 'self.stem = nn.Conv2d(CHANNELS, WIDTH, 3, padding="same")'),)),
    ("unet", "torch", "sum of the squares, divided", (('(model(batch).float() - batch["noise"]).square().mean()', '(model(batch).float() - batch["noise"]).pow(2).sum() / batch["noise"].numel()'),)),
    ("unet", "nnx", "padding in pairs", (("padding=size // 2", "padding=((size // 2,) * 2,) * 2"),)),
    ("convnet", "torch", "channels last in memory", (('self.stem(batch["images"])', 'self.stem(batch["images"].contiguous(memory_format=torch.channels_last))'),)),
    ("convnet", "nnx", "places in one axis", (("self.norm(x.mean((1, 2)))", "self.norm(x.reshape(len(x), -1, WIDTH).mean(1))"),)),
    ("convnet", "keras", "gates reshaped by an operation", (('layers.Reshape((1, 1, WIDTH), name="mbconv_gates")(s)', "ops.reshape(s, (-1, 1, 1, WIDTH))"),)),
    ("tagger", "torch", "states joined by cat", (("torch.stack(ahead, 1), torch.stack(behind, 1)", "torch.cat([h[:, None] for h in ahead], 1), torch.cat([h[:, None] for h in behind], 1)"),)),
    ("tagger", "nnx", "average with weights", (("(losses * counted).sum() / counted.sum()", "jnp.average(losses, weights=counted)"),)),
    ("vae", "torch", "bits by log-sigmoid", (('functional.binary_cross_entropy_with_logits(logits, batch["x"], reduction="none")', '(-batch["x"] * functional.logsigmoid(logits) - (1.0 - batch["x"]) * functional.logsigmoid(-logits))'),)),
    ("vae", "torch", "norm in a float32 island", (('        h = torch.tanh(self.norm(self.encoder(batch["x"])))', f'        h = self.encoder(batch["x"])\n        {_OFF}\n            h = torch.tanh(self.norm(_wide(h)))'), ("class Model", f"{_WIDE}class Model"))),
    ("vae", "nnx", "divergence with its signs turned", (("-0.5 * (1.0 + log_variance - jnp.square(mean) - jnp.exp(log_variance))", "0.5 * (jnp.square(mean) + jnp.exp(log_variance) - 1.0 - log_variance)"),)),
    ("vae", "keras", "Keras's loss", (('bits = tf.nn.sigmoid_cross_entropy_with_logits(labels=batch["x"], logits=logits)', 'bits = ops.binary_crossentropy(batch["x"], logits, from_logits=True)'),)),
    ("recommender", "torch", "pairs by a mask", (("        rows, columns = torch.tril_indices(4, 4, -1)\n", "        lower = torch.ones(4, 4).tril(-1) > 0\n"), ("products[:, rows, columns]", "products[:, lower]"))),
    ("recommender", "nnx", "optax's loss", (("from flax import nnx\n", "import optax\nfrom flax import nnx\n"), ('(jax.nn.softplus(logits) - logits * batch["clicked"]).mean()', 'optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]).mean()'))),
)  # fmt: skip
"""Family, framework, words and edits that mean the same, under every policy."""
FLOAT32: Final[tuple[tuple[str, str, str, tuple[Edit, ...]], ...]] = (
    ("seq2seq", "torch", "one-hot for the lookup of the distances", (("self.relative(apart)", "(functional.one_hot(apart, 2 * DISTANCES + 1).to(self.relative.weight.dtype) @ self.relative.weight)"),)),
    ("encoder", "torch", "queries, keys and values in one product", (("q, k, v = (each(x).view(shape).transpose(1, 2) for each in (self.query, self.key, self.value))", "three = (self.query, self.key, self.value)\n        joined = functional.linear(x, torch.cat([each.weight for each in three]), torch.cat([each.bias for each in three]))\n        q, k, v = (each.reshape(shape).transpose(1, 2) for each in joined.chunk(3, -1))"),)),
    ("encoder", "nnx", "GELU by the error function", (("jax.nn.gelu(self.up(x), approximate=False)", "_gelu(self.up(x))"), ("class Layer", "def _gelu(x: Any) -> Any:\n    return 0.5 * x * (1.0 + jax.lax.erf(x / 2.0**0.5))\n\n\nclass Layer"))),
    ("tagger", "nnx", "sigmoid by its formula", (("r, z = jax.nn.sigmoid(r_in + r_h), jax.nn.sigmoid(z_in + z_h)", "r, z = (1.0 / (1.0 + jnp.exp(-each)) for each in (r_in + r_h, z_in + z_h))"),)),
    ("tagger", "torch", "state moved by its distance", (("(1.0 - z) * n + z * h", "h + (1.0 - z) * (n - h)"),)),
)  # fmt: skip
"""The same in float32; under a policy the other words round elsewhere."""
