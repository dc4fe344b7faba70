"""Clean pairs: equal formulations of one thing, explicit float32 islands, loops by hand beside recipes, and every
family under every policy and optimizer. Nothing may be said of one of them.
"""

from __future__ import annotations

import itertools
from typing import Any, Final, NamedTuple

from polyamp import Policy, adam, adamw, lion, no_decay, rmsprop, schedules, sgd
from tests.parity.held_out.harness import FAMILIES, Side
from tests.parity.held_out.in_training import _set
from tests.porting.faults.planting import Edit

KERAS: Final = ("convnet", "vae", "recommender")
POLICIES: Final = (
    "float32",
    "mixed_bfloat16",
    "mixed_float16",
    Policy(param="float32", compute="bfloat16", output="float32", mode="cast"),
)
_OPTIMIZERS: Final[tuple[dict[str, Any], ...]] = (
    {"optimizer": sgd(0.1, momentum=0.9)},
    {"optimizer": adamw(1e-3, weight_decay=0.1, groups=no_decay("bias", "norm"))},
    {"optimizer": adam(schedules.linear_warmup(1e-2, 4, start=1e-3)), "clip_norm": 0.5},
    {"optimizer": sgd(0.05, momentum=0.9, nesterov=True, weight_decay=1e-3), "accumulate_steps": 2},
    {"optimizer": rmsprop(1e-3)},
    {"optimizer": lion(1e-4, weight_decay=0.1), "clip_norm": 1.0},
    {"optimizer": adamw(schedules.cosine(1e-2, 4)), "accumulate_steps": 4},
)
EQUAL: Final[tuple[tuple[str, str, str, tuple[Edit, ...]], ...]] = (
    ("decoder", "torch", "x / sqrt for rsqrt", (("wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)", "wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)"),)),
    ("decoder", "torch", "torch's own attention", (("scores = q @ k.transpose(2, 3) / SIZE**0.5", "scores = None"), ("scores = scores.masked_fill(~mask, -1e4)", "del mask"), ("weights = scores.softmax(-1).to(v.dtype)", "mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)"), ("(weights @ v)", "mixed"))),
    ("decoder", "torch", "mask of -inf", (("~mask, -1e4", '~mask, float("-inf")'),)),
    ("decoder", "torch", "softmax in float32", (("scores.softmax(-1)", "scores.float().softmax(-1)"),)),
    ("decoder", "torch", "scale on the queries", (("scores = q @ k.transpose(2, 3) / SIZE**0.5", "scores = (q * SIZE**-0.5) @ k.transpose(2, 3)"),)),
    ("decoder", "torch", "rotary by complex numbers", (("return x * angles.cos().to(x.dtype) + torch.cat([-two, one], -1) * angles.sin().to(x.dtype)", "z = torch.complex(one.float(), two.float()) * torch.polar(torch.ones(()), angles[:, : SIZE // 2])\n    return torch.cat([z.real, z.imag], -1).to(x.dtype)"),)),
    ("decoder", "torch", "loss by log-softmax", (("functional.cross_entropy(logits.flatten(0, 1), labels.flatten())", "-logits.log_softmax(-1).gather(-1, labels[..., None]).mean()"),)),
    ("decoder", "nnx", "sigmoid times x", (("jax.nn.silu(self.gate(x))", "_silu(self.gate(x))"), ("class MLP", "def _silu(x: Any) -> Any:\n    return x * jax.nn.sigmoid(x)\n\n\nclass MLP"))),
    ("decoder", "nnx", "softmax in float32", (("jax.nn.softmax(scores, -1)", "jax.nn.softmax(scores.astype(jnp.float32), -1)"),)),
    ("decoder", "nnx", "softmax by hand", (("jax.nn.softmax(scores, -1)", "jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True))"),)),
    ("decoder", "nnx", "x / sqrt for rsqrt", (("wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)", "wide / jnp.sqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)"),)),
    ("decoder", "nnx", "queries grouped, keys not repeated", (("k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)", "q = q.reshape(rows, length, 2, 2, SIZE)"), ('jnp.einsum("bqhd,bkhd->bhqk", q, k)', 'jnp.einsum("bqghd,bkgd->bghqk", q, k).reshape(rows, 4, length, length)'), ('jnp.einsum("bhqk,bkhd->bqhd", weights, v)', 'jnp.einsum("bghqk,bkgd->bqghd", weights.reshape(rows, 2, 2, length, length), v)'))),
    ("seq2seq", "torch", "mean of x times x", (("x.to(torch.float32).pow(2).mean(-1, keepdim=True)", "(x.float() * x.float()).mean(-1, keepdim=True)"),)),
    ("seq2seq", "torch", "bias added to the mask first", (("            scores = scores + torch.full(scores.shape[-2:], -1e4).triu(1)", "            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -1e4)"),)),
    ("seq2seq", "torch", "tanh GELU by hand", (('functional.gelu(self.wi(x), approximate="tanh")', "_gelu(self.wi(x))"), ("class FeedForward", "def _gelu(x: Any) -> Any:\n    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))\n\n\nclass FeedForward"))),
    ("seq2seq", "torch", "head as a product", (("functional.linear(out * WIDTH**-0.5, self.shared.weight)", "(out * WIDTH**-0.5) @ self.shared.weight.T"),)),
    ("seq2seq", "nnx", "einsum of the head", (("self.shared.attend(out * WIDTH**-0.5)", 'jnp.einsum("bld,vd->blv", out * WIDTH**-0.5, self.shared.embedding[...].astype(out.dtype))'),)),
    ("seq2seq", "nnx", "softmax by exp and sum", (("jax.nn.softmax(scores.astype(jnp.float32), -1)", "_softmax(scores.astype(jnp.float32))"), ("class Attention", "def _softmax(x: Any) -> Any:\n    e = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))\n    return e / e.sum(-1, keepdims=True)\n\n\nclass Attention"))),
    ("encoder", "torch", "erf GELU by hand", (("functional.gelu(self.up(x))", "_gelu(self.up(x))"), ("class Layer(", "def _gelu(x: Any) -> Any:\n    return x * 0.5 * (1.0 + torch.erf(x / 2**0.5))\n\n\nclass Layer("))),
    ("encoder", "torch", "mask by masked_fill", (("scores + (1.0 - mask[:, None, None, :]) * -1e4", "scores.masked_fill(mask[:, None, None, :] < 0.5, -1e4)"),)),
    ("encoder", "torch", "smoothing by hand", (("functional.cross_entropy(model(batch).float(), batch[\"labels\"].long(), label_smoothing=0.1)", "_smoothed(model(batch).float().log_softmax(-1), batch[\"labels\"].long())"), ("def loss_fn", "def _smoothed(logs: Any, labels: Any) -> Any:\n    return (-0.9 * logs.gather(1, labels[:, None])[:, 0] - 0.1 * logs.mean(-1)).mean()\n\n\ndef loss_fn"))),
    ("encoder", "torch", "norm in float32", (("return self.dropout(self.norm(x))", "return self.dropout(functional.layer_norm(x.float(), (WIDTH,), self.norm.weight, self.norm.bias, 1e-12))"),)),
    ("encoder", "nnx", "GELU by erf", (("jax.nn.gelu(self.up(x), approximate=False)", "_gelu(self.up(x))"), ("class Layer(", "def _gelu(x: Any) -> Any:\n    return x * 0.5 * (1.0 + jax.lax.erf(x / 2**0.5))\n\n\nclass Layer("))),
    ("encoder", "nnx", "softmax in float32", (("jax.nn.softmax(scores)", "jax.nn.softmax(scores.astype(jnp.float32))"),)),
    ("unet", "torch", "repeated twice for interpolated", (('functional.interpolate(x, scale_factor=2.0, mode="nearest")', "x.repeat_interleave(2, 2).repeat_interleave(2, 3)"),)),
    ("unet", "torch", "x times its sigmoid", (("return self.out(functional.silu(self.norm(x)))", "x = self.norm(x)\n        return self.out(x * torch.sigmoid(x))"),)),
    ("unet", "torch", "library's squared error", (('(model(batch).float() - batch["noise"]).square().mean()', 'functional.mse_loss(model(batch).float(), batch["noise"])'),)),
    ("unet", "nnx", "resized for repeated", (("jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)", '_larger(x)'), ("class Model", 'def _larger(x: Any) -> Any:\n    return jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")\n\n\nclass Model'))),
    ("unet", "nnx", "frequencies by powers", (("jnp.exp(-jnp.arange(WIDTH // 2, dtype=jnp.float32) * (9.210340371976184 / (WIDTH // 2)))", "10000.0 ** (-jnp.arange(WIDTH // 2, dtype=jnp.float32) / (WIDTH // 2))"),)),
    ("convnet", "torch", "pooled by the library", (("self.head(self.norm(x.mean((2, 3))))", "self.head(self.norm(functional.adaptive_avg_pool2d(x, 1).flatten(1)))"),)),
    ("convnet", "torch", "scale as a product of views", (("return x + (h * self.gamma).permute(0, 3, 1, 2)", "return x + h.permute(0, 3, 1, 2) * self.gamma[:, None, None]"),)),
    ("convnet", "torch", "pointwise convolutions as products", (("self.project(self.squeeze(h))", "_pointwise(self.project, self.squeeze(h))"), ("class MBConv", "def _pointwise(layer: Any, x: Any) -> Any:\n    return functional.conv2d(x.contiguous(memory_format=torch.channels_last), layer.weight)\n\n\nclass MBConv"))),
    ("convnet", "nnx", "sigmoid by tanh", (("gates = jax.nn.sigmoid(self.expand(", "gates = _sigmoid(self.expand("), ("class Squeeze", "def _sigmoid(x: Any) -> Any:\n    return 0.5 * (1.0 + jnp.tanh(0.5 * x))\n\n\nclass Squeeze"))),
    ("convnet", "nnx", "loss by one-hot", (('-jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], -1).mean()', '-(jax.nn.one_hot(batch["labels"], CLASSES) * jax.nn.log_softmax(logits)).sum(-1).mean()'),)),
    ("convnet", "keras", "mean by ops", (('x = layers.GlobalAveragePooling2D(name="pool")(x)', "x = ops.mean(x, axis=(1, 2))"),)),
    ("tagger", "torch", "state as a sum of differences", (("(1.0 - z) * n + z * h", "n + z * (h - n)"),)),
    ("tagger", "torch", "ignored by the library", (('losses = functional.cross_entropy(logits.transpose(1, 2), tags, reduction="none")', 'losses = functional.cross_entropy(logits.transpose(1, 2), tags, reduction="none", ignore_index=0)'),)),
    ("tagger", "nnx", "stacked and turned", (("behind.insert(0, h)", "behind.append(h)"), ("jnp.stack(behind, 1)]", "jnp.flip(jnp.stack(behind, 1), 1)]"))),
    ("vae", "torch", "expm1 for ELU", (("functional.elu(self.decoder1(code))", "_elu(self.decoder1(code))"), ("class Model", "def _elu(x: Any) -> Any:\n    return torch.where(x > 0, x, torch.expm1(x.clamp(max=0.0)))\n\n\nclass Model"))),
    ("vae", "torch", "bits by softplus", (('functional.binary_cross_entropy_with_logits(logits, batch["x"], reduction="none")', '(functional.softplus(logits) - logits * batch["x"])'),)),
    ("vae", "nnx", "deviation by the root", (("jnp.exp(0.5 * log_variance)", "jnp.sqrt(jnp.exp(log_variance))"),)),
    ("vae", "keras", "root of the variance", (("ops.exp(0.5 * log_variance)", "ops.sqrt(ops.exp(log_variance))"),)),
    ("recommender", "torch", "products by einsum", (("stacked @ stacked.mT", 'torch.einsum("bid,bjd->bij", stacked, stacked)'),)),
    ("recommender", "torch", "products by sums", (("stacked @ stacked.mT", "(stacked[:, :, None] * stacked[:, None]).sum(-1)"),)),
    ("recommender", "nnx", "products by matmul", (('jnp.einsum("bid,bjd->bij", stacked, stacked)', "stacked @ stacked.swapaxes(1, 2)"),)),
    ("recommender", "nnx", "maximum for ReLU", (("y = jax.nn.relu(self.top1(y))", "y = jnp.maximum(self.top1(y), 0.0)"),)),
)  # fmt: skip
"""Family, framework and words; and edits that mean the same."""
LOOPS: Final[tuple[tuple[str, dict[str, Any], tuple[Edit, ...], str], ...]] = (
    ("AdamW", {"optimizer": adamw(1e-2, weight_decay=0.1)}, (), "float32"),
    ("SGD", {"optimizer": sgd(1e-2, momentum=0.9, weight_decay=0.1)}, (_set(KIND="sgd"),), "float32"),
    ("clipped", {"optimizer": adamw(1e-2, weight_decay=0.1), "clip_norm": 0.1}, (_set(CLIP=0.1),), "float32"),
    ("accumulated", {"optimizer": adamw(1e-2, weight_decay=0.1), "accumulate_steps": 2}, (_set(PARTS=2),), "float32"),
    ("cosine", {"optimizer": sgd(schedules.cosine(1e-2, 4), momentum=0.9, weight_decay=0.1)}, (_set(KIND="cosine"),), "float32"),
    ("warm-up", {"optimizer": adamw(schedules.linear_warmup(1e-2, 4, start=1e-3), weight_decay=0.1)}, (_set(WARMUP=4),), "float32"),
    ("AdamW in bfloat16", {"optimizer": adamw(1e-2, weight_decay=0.1)}, (_set(DTYPE="bfloat16"),), "mixed_bfloat16"),
)  # fmt: skip
"""Words, recipe, edits of the loop, policy."""


class Pair(NamedTuple):
    """A comparison of equal trainings; `words` say what is other on purpose."""

    family: str
    words: str
    first: Side
    second: Side
    seed: int
    options: dict[str, Any] = {}


def _policy(number: int, family: str, words: str = "") -> Any:
    """A policy. Casts do not take it where a model keeps float32 numbers by itself (its code fails there), or where the
    words say that one side alone does, which is then another thing."""
    if number % 4 == 3 and (family in ("unet", "seq2seq") or "float32" in words):
        return "mixed_bfloat16"
    return POLICIES[number % 4]


def _plain() -> list[Pair]:
    """Every family in every pair of frameworks, policies and optimizers in turn."""
    pairs, found = list(itertools.product(("torch", "nnx", "keras"), repeat=2)), []
    seed = 0
    for family in FAMILIES:
        for one, other in pairs:
            if "keras" in (one, other) and family not in KERAS:
                continue
            for _ in range(2 if one == other else 3 if family not in KERAS else 1):
                settings = {"policy": _policy(seed, family), **_OPTIMIZERS[seed % len(_OPTIMIZERS)]}
                found.append(
                    Pair(
                        family,
                        str(settings["policy"])[:24],
                        Side(one, recipe=settings),
                        Side(other, recipe=settings),
                        seed,
                    )
                )
                seed += 1
    return found


def _equal() -> list[Pair]:
    found = []
    for number, (family, framework, words, edits) in enumerate(EQUAL):
        for other, name in (("torch", "float32"), (framework, _policy(1 + number % 3, family, words))):
            recipe = {"policy": name, **_OPTIMIZERS[number % len(_OPTIMIZERS)]}
            found.append(
                Pair(family, words, Side(other, recipe=recipe), Side(framework, edits, recipe=recipe), 200 + number)
            )
    return found


def _by_hand() -> list[Pair]:
    found = []
    for number, (words, recipe, edits, name) in enumerate(LOOPS):
        for turn, framework in enumerate(("torch", "nnx") if name == "float32" else ("torch",)):
            for family in (FAMILIES[number % 8], FAMILIES[(number + 3 + turn) % 8]):
                if family == "convnet" and "accumulate_steps" in recipe:
                    family = "vae"  # whose rows are alike: micro-batches have statistics of their own
                if family in ("seq2seq", "tagger") and "accumulate_steps" in recipe:
                    family = "recommender"  # a loop divides by micro-batches, a mean over labels does not
                one = Side("torch", recipe={"policy": name, **recipe})
                other = Side(framework, loop=edits, recipe={"policy": name})
                found.append(Pair(family, f"a loop: {words}", one, other, 300 + number))
    return found


def _dropping() -> list[Pair]:
    """Dropout by masks that both sides share."""
    options = {"randomness": "shared", "steps": 1}
    found = []
    for seed, (one, other) in enumerate(itertools.product(("torch", "nnx"), repeat=2)):
        for name in POLICIES[:3]:
            settings = {"policy": name, "optimizer": adamw(1e-3)}
            found.append(
                Pair(
                    "encoder", "dropout", Side(one, recipe=settings), Side(other, recipe=settings), 400 + seed, options
                )
            )
    return found


PAIRS: Final = (*_plain(), *_equal(), *_by_hand(), *_dropping())
"""All of them."""
