"""Equal formulations of part E: the same function in other words, activations in a layer and outside of it, and islands
in float32 on one side."""

from __future__ import annotations

from typing import Final

from tests.porting.faults.planting import Edit

_OFF: Final = "with torch.autocast('cpu', enabled=False):"
_WIDE: Final = "def _wide(x: Any) -> Any:\n    return x if x.dtype == torch.float64 else x.float()\n\n\n"
_TORCH_SOFTMAX: Final = "def _softmax(x: Any) -> Any:\n    e = (x - x.amax(-1, keepdim=True).detach()).exp()\n    return e / e.sum(-1, keepdim=True)\n\n\n"  # fmt: skip
_NNX_SOFTMAX: Final = "def _softmax(x: Any) -> Any:\n    x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)\n    e = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))\n    return e / e.sum(-1, keepdims=True)\n\n\n"  # fmt: skip
_NNX_NORM: Final = "def _norm(norm: Any, x: Any, eps: float) -> Any:\n    apart = x - x.mean(-1, keepdims=True)\n    return apart / jnp.sqrt(jnp.square(apart).mean(-1, keepdims=True) + eps) * norm.scale[...] + norm.bias[...]\n\n\n"  # fmt: skip
ALL_POLICIES: Final[tuple[tuple[str, str, str, tuple[Edit, ...]], ...]] = (
    ("decoder", "torch", "softmax by its logarithm in float32", (("scores.softmax(-1)", "_wide(scores).log_softmax(-1).exp()"), ("class Attention", f"{_WIDE}class Attention"))),
    ("decoder", "torch", "squares by the length of the vector", (("wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)", "wide = wide * torch.rsqrt(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / WIDTH + 1e-5)"),)),
    ("decoder", "torch", "rotary by its halves", (("return x * angles.cos().to(x.dtype) + torch.cat([-two, one], -1) * angles.sin().to(x.dtype)", "cos, sin = (each.to(x.dtype)[:, : SIZE // 2] for each in (angles.cos(), angles.sin()))\n    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)"),)),
    ("decoder", "torch", "queries and keys rotated together", (("q, k = rotate(q), rotate(k)", "q, k = rotate(torch.cat([q, k], 1)).split([q.shape[1], k.shape[1]], 1)"),)),
    ("decoder", "torch", "activation as a layer of its own", (("        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)\n", "        self.down, self.act = nn.Linear(HIDDEN, WIDTH, bias=False), nn.SiLU()\n"), ("functional.silu(self.gate(x))", "self.act(self.gate(x))"))),
    ("decoder", "nnx", "squares by the length of the vector", (("jnp.mean(jnp.square(wide), -1, keepdims=True)", "jnp.square(jnp.linalg.norm(wide, axis=-1, keepdims=True)) / WIDTH"),)),
    ("decoder", "nnx", "mask added", (("scores = jnp.where(mask, scores, -1e4)", "scores = scores + jnp.where(mask, 0.0, -1e4).astype(scores.dtype)"),)),
    ("seq2seq", "torch", "softmax by exp and sum in float32", (("functional.softmax(scores.float(), -1)", "_softmax(scores.float())"), ("class Attention", f"{_TORCH_SOFTMAX}class Attention"))),
    ("seq2seq", "torch", "divided by the root", (("(x * torch.rsqrt(variance + 1e-6))", "(x / (variance + 1e-6).sqrt())"),)),
    ("seq2seq", "nnx", "optax's loss", (("from flax import nnx\n", "import optax\nfrom flax import nnx\n"), ("picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]", "picked = -optax.softmax_cross_entropy_with_integer_labels(logits, labels)"))),
    ("encoder", "torch", "norms behind the attention in float32 islands", (("        x = self.norm1(x + self.dropout1(self.attention(x, mask)))\n", f"        x = x + self.dropout1(self.attention(x, mask))\n        {_OFF}\n            x = self.norm1(_wide(x))\n"), ("class Layer", f"{_WIDE}class Layer"))),
    ("encoder", "torch", "attention by bmm", (("scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5", "scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).unflatten(0, (len(x), HEADS)) / (WIDTH // HEADS) ** 0.5"),)),
    ("encoder", "torch", "activation as a layer of its own", (("        self.dropout1, self.dropout2 = nn.Dropout(RATE), nn.Dropout(RATE)\n", "        self.dropout1, self.dropout2 = nn.Dropout(RATE), nn.Dropout(RATE)\n        self.act = nn.GELU()\n"), ("functional.gelu(self.up(x))", "self.act(self.up(x))"))),
    ("encoder", "nnx", "softmax by exp and sum in float32", (("jax.nn.softmax(scores)", "_softmax(scores)"), ("class Attention", f"{_NNX_SOFTMAX}class Attention"))),
    ("encoder", "nnx", "optax's smooth labels", (("from flax import nnx\n", "import optax\nfrom flax import nnx\n"), ("targets = jax.nn.one_hot(batch[\"labels\"], CLASSES) * (1 - 0.1) + 0.1 / CLASSES\n    return -(targets * jax.nn.log_softmax(logits)).sum(-1).mean()", "targets = optax.smooth_labels(jax.nn.one_hot(batch[\"labels\"], CLASSES), 0.1)\n    return optax.softmax_cross_entropy(logits, targets).mean()"))),
    ("unet", "torch", "second norms in float32 islands", (("        h = self.conv2(functional.silu(self.norm2(h)))\n", f"        {_OFF}\n            h = functional.silu(self.norm2(_wide(h)))\n        h = self.conv2(h)\n"), ("class Block", f"{_WIDE}class Block"))),
    ("unet", "torch", "angles by an outer product", (("angles = times[:, None] * rates", "angles = torch.outer(times, rates)"),)),
    ("unet", "nnx", "optax's squares, twice their half", (("from flax import nnx\n", "import optax\nfrom flax import nnx\n"), ('jnp.square(model(batch).astype(jnp.float32) - batch["noise"]).mean()', '2.0 * optax.l2_loss(model(batch).astype(jnp.float32), batch["noise"]).mean()'))),
    ("convnet", "torch", "places in one axis in the squeeze", (("self.reduce(x.mean((2, 3)))", "self.reduce(x.flatten(2).mean(-1))"),)),
    ("convnet", "torch", "activation as a layer of its own", (("        self.gamma = nn.Parameter(0.1 * torch.ones(WIDTH))\n", "        self.gamma, self.act = nn.Parameter(0.1 * torch.ones(WIDTH)), nn.GELU()\n"), ("functional.gelu(self.up(h))", "self.act(self.up(h))"))),
    ("convnet", "nnx", "optax's loss", (("from flax import nnx\n", "import optax\nfrom flax import nnx\n"), ('-jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], -1).mean()', 'optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()'))),
    ("convnet", "keras", "activations outside of the layers", (('h = layers.Dense(4 * WIDTH, activation="gelu", name="next_up")(h)', 'h = layers.Activation("gelu", name="next_gelu")(layers.Dense(4 * WIDTH, name="next_up")(h))'), ('s = layers.Dense(WIDTH, activation="sigmoid", name="mbconv_squeeze_expand")(s)', 's = ops.sigmoid(layers.Dense(WIDTH, name="mbconv_squeeze_expand")(s))'))),
    ("tagger", "torch", "likelihood of the log-softmax", (('functional.cross_entropy(logits.transpose(1, 2), tags, reduction="none")', 'functional.nll_loss(logits.log_softmax(-1).transpose(1, 2), tags, reduction="none")'),)),
    ("tagger", "nnx", "optax's loss", (("from flax import nnx\n", "import optax\nfrom flax import nnx\n"), ("losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), tags[..., None], -1)[..., 0]", "losses = optax.softmax_cross_entropy_with_integer_labels(logits, tags)"))),
    ("vae", "torch", "norm as a function", (("self.norm(self.encoder(batch[\"x\"]))", "functional.layer_norm(self.encoder(batch[\"x\"]), (HIDDEN,), self.norm.weight, self.norm.bias, 1e-5)"),)),
    ("recommender", "torch", "ReLU by a clamp", (("y = functional.relu(self.top1(y))", "y = self.top1(y).clamp(min=0.0)"),)),
    ("recommender", "nnx", "bits by both logarithms", (('(jax.nn.softplus(logits) - logits * batch["clicked"]).mean()', '-(batch["clicked"] * jax.nn.log_sigmoid(logits) + (1.0 - batch["clicked"]) * jax.nn.log_sigmoid(-logits)).mean()'),)),
    ("recommender", "keras", "activation outside of the layer", (('y = layers.Dense(16, activation="relu", name="top1")(y)', 'y = layers.ReLU(name="top1_relu")(layers.Dense(16, name="top1")(y))'),)),
)  # fmt: skip
"""Family, framework, words and edits that mean the same, under every policy."""
FLOAT32: Final[tuple[tuple[str, str, str, tuple[Edit, ...]], ...]] = (
    ("decoder", "nnx", "one-hot for the lookup", (('self.embed(batch["tokens"])', 'jax.nn.one_hot(batch["tokens"], WORDS, dtype=self.embed.embedding[...].dtype) @ self.embed.embedding[...]'),)),
    ("seq2seq", "nnx", "tanh GELU by hand", (("jax.nn.gelu(self.wi(x), approximate=True)", "_gelu(self.wi(x))"), ("class FeedForward", "def _gelu(x: Any) -> Any:\n    return 0.5 * x * (1.0 + jnp.tanh((2.0 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3)))\n\n\nclass FeedForward"))),
    ("tagger", "torch", "state by torch's own interpolation", (("return (1.0 - z) * n + z * h", "return torch.lerp(n, h, z)"),)),
    ("vae", "nnx", "norm by hand", (('self.norm(self.encoder(batch["x"]))', '_norm(self.norm, self.encoder(batch["x"]), 1e-5)'), ("class Model", f"{_NNX_NORM}class Model"))),
    ("vae", "keras", "tanh outside of a layer", (('h = layers.Activation("tanh", name="tanh")(h)', "h = ops.tanh(h)"),)),
    ("vae", "torch", "tanh by a sigmoid", (('h = torch.tanh(self.norm(self.encoder(batch["x"])))', 'h = 2.0 * torch.sigmoid(2.0 * self.norm(self.encoder(batch["x"]))) - 1.0'),)),
    ("recommender", "torch", "one-hot for the lookup", (('table(batch["categories"][:, number])', '(functional.one_hot(batch["categories"][:, number].long(), TABLES[number]).to(table.weight.dtype) @ table.weight)'),)),
)  # fmt: skip
"""The same in float32; under a policy the other words round elsewhere."""
