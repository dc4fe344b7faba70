"""Faults in the code of the tagger, of the variational autoencoder and of the recommender."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.planted import plant, policy, wrong_array
from tests.porting.faults.changes import gates

_T: Final = "tagger"
_V: Final = "vae"
_R: Final = "recommender"
TAGGER: Final = (
    plant(_T, "torch torch", "formula", "reset before the product", "forwards forwards/candidate forwards/gates", ("n_in + r * self.candidate(h)", "n_in + self.candidate(r * h)")),
    plant(_T, "torch nnx", "formula", "update gate the other way round", "forwards forwards/gates forwards/candidate", ("(1.0 - z) * n + z * h", "z * n + (1.0 - z) * h")),
    plant(_T, "torch torch", "formula", "gates in the order update, reset", "forwards forwards/candidate forwards/gates", ("r_in, z_in, n_in = self.inputs(x).chunk(3, -1)", "z_in, r_in, n_in = self.inputs(x).chunk(3, -1)")),
    plant(_T, "torch nnx", "formula", "hard sigmoid in the reset gate", "forwards forwards/candidate forwards/gates", ("r, z = jax.nn.sigmoid(r_in + r_h)", "r, z = jax.nn.hard_sigmoid(r_in + r_h)")),
    plant(_T, "torch torch", "formula", "ReLU for tanh", "forwards forwards/candidate forwards/gates", ("n = torch.tanh(", "n = torch.relu(")),
    plant(_T, "nnx torch", "formula", "backward states not turned round", "norm", ("behind.insert(0, h)", "behind.append(h)"), says="formula|layout"),
    plant(_T, "torch nnx", "formula", "backward cell runs forwards", "backwards backwards/inputs", ("for place in reversed(range(length)):", "for place in range(length):"), says="formula|layout"),
    plant(_T, "torch torch", "formula", "state carried over to the backward cell", "backwards backwards/gates backwards/candidate", ("        h = x.new_zeros(len(x), UNITS)\n        for place in reversed", "        for place in reversed")),
    plant(_T, "torch nnx", "formula", "halves exchanged", "norm", ("[jnp.stack(ahead, 1), jnp.stack(behind, 1)]", "[jnp.stack(behind, 1), jnp.stack(ahead, 1)]"), says="formula|layout"),
    plant(_T, "torch torch", "formula", "one cell for both directions", "backwards backwards/inputs backwards/* forwards/* norm", ("h = self.backwards(x[:, place], h)", "h = self.forwards(x[:, place], h)"), says="formula|missing"),
    plant(_T, "torch nnx", "epsilon", "flax's own", "norm", ("epsilon=1e-5", "epsilon=1e-6")),
    plant(_T, "torch torch", "epsilon", "1e-3 for 1e-5", "norm", ("eps=1e-5", "eps=1e-3")),
    plant(_T, "torch torch", "halved", "truncated after two places", "forwards forwards/*", ("            h = self.forwards(x[:, place], h)\n", "            h = self.forwards(x[:, place], h.detach() if place == 2 else h)\n"), stage="backward"),
    plant(_T, "torch nnx", "stopped", "embedding frozen", "embed", ('x = self.embed(batch["tokens"])', 'x = jax.lax.stop_gradient(self.embed(batch["tokens"]))'), stage="backward"),
    plant(_T, "torch torch", "dtype", "state rounded to bfloat16", "forwards forwards/gates forwards/candidate", ("return (1.0 - z) * n + z * h", "return ((1.0 - z) * n + z * h).bfloat16().to(x.dtype)")),
    plant(_T, "torch torch", "loss", "padding counted", "loss", ("counted = (tags > 0).float()", "counted = (tags > -1).float()"), says="formula"),
    plant(_T, "torch nnx", "loss", "mean of the rows' means", "loss", ("return (losses * counted).sum() / counted.sum()", "return ((losses * counted).sum(1) / counted.sum(1)).mean()"), says="formula"),
    plant(_T, "torch nnx", "loss", "divided by all places", "loss", ("/ counted.sum()", "/ tags.size"), says="factor|formula"),
    wrong_array(_T, "torch nnx", "reset and update exchanged", "forwards/gates", r"forwards/gates/kernel", gates(None, 2, [1, 0], 1)),
    wrong_array(_T, "torch torch", "forward and backward cells exchanged", "forwards/inputs backwards/inputs", r"(forwards|backwards)/inputs/weight", lambda a, b: (b, a)),
)  # fmt: skip
VAE: Final = (
    plant(_V, "torch nnx", "formula", "variance for the deviation", "decoder1", ("jnp.exp(0.5 * log_variance) *", "jnp.exp(log_variance) *")),
    plant(_V, "torch torch", "formula", "softplus for exp", "decoder1", ("torch.exp(0.5 * log_variance) *", "functional.softplus(log_variance) *")),
    plant(_V, "torch keras", "formula", "no noise", "decoder1", ("code = mean + ops.exp(0.5 * log_variance) * noise", "code = mean + 0.0 * ops.exp(0.5 * log_variance) * noise")),
    plant(_V, "torch torch", "formula", "ReLU for ELU", "decoder2", ("functional.elu(", "functional.relu(")),
    plant(_V, "nnx torch", "formula", "ELU with alpha 0.5", "decoder2", ("functional.elu(self.decoder1(code))", "functional.elu(self.decoder1(code), 0.5)")),
    plant(_V, "torch keras", "formula", "SELU for ELU", "decoder1 decoder2", ('activation="elu"', 'activation="selu"')),
    plant(_V, "torch nnx", "epsilon", "1e-6 for 1e-5", "norm", ("epsilon=1e-5", "epsilon=1e-6")),
    plant(_V, "torch keras", "epsilon", "Keras's 1e-3", "norm", ("epsilon=1e-5", "epsilon=1e-3")),
    plant(_V, "torch torch", "formula", "norm behind tanh", "norm mean log_variance", ("torch.tanh(self.norm(self.encoder(", "self.norm(torch.tanh(self.encoder(")),
    plant(_V, "torch nnx", "formula", "log-variance from the mean's layer", "log_variance decoder1", ("mean, log_variance = self.mean(h), self.log_variance(h)", "mean, log_variance = self.mean(h), self.log_variance(self.norm(self.encoder(batch[\"x\"])))")),
    plant(_V, "torch torch", "stopped", "code's log-variance detached", "log_variance encoder norm", ("code = mean + torch.exp(0.5 * log_variance) *", "log_variance = log_variance.detach()\n        code = mean + torch.exp(0.5 * log_variance) *"), stage="backward"),
    plant(_V, "torch nnx", "halved", "gradient only through the divergence", "mean log_variance decoder1", ("code = mean + jnp.exp(0.5 * log_variance) * batch[\"noise\"]", "code = jax.lax.stop_gradient(mean + jnp.exp(0.5 * log_variance) * batch[\"noise\"])"), stage="backward", says="missing|formula|factor"),
    plant(_V, "torch torch", "loss", "divergence's sign of 1 forgotten", "loss", ("(1.0 + log_variance -", "(log_variance -"), says="formula"),
    plant(_V, "torch nnx", "loss", "divergence over all, bits over pixels", "loss", ("jnp.exp(log_variance)).sum(-1).mean()", "jnp.exp(log_variance)).mean()"), says="formula"),
    plant(_V, "torch keras", "loss", "mean over pixels", "loss", ("tf.reduce_mean(tf.reduce_sum(bits, -1))", "tf.reduce_mean(bits)"), says="formula"),
    plant(_V, "torch torch", "loss", "probabilities clipped at 1e-3", "loss", ("functional.binary_cross_entropy_with_logits(logits, batch[\"x\"], reduction=\"none\")", "functional.binary_cross_entropy(logits.sigmoid().clamp(0.03, 0.97), batch[\"x\"], reduction=\"none\")"), says="formula"),
    plant(_V, "torch torch", "loss", "weight of 0.5 for the divergence", "loss", ("return bits + divergence", "return bits + 0.5 * divergence"), says="formula"),
    plant(_V, "torch torch", "dtype", "code in float16", "decoder1", ("self.decoder1(code)", "self.decoder1(code.half().float())")),
    policy(_V, "torch nnx", "encoder asks for the highest precision", "encoder", "mixed_bfloat16", ("self.encoder = nnx.Linear(PIXELS, HIDDEN, rngs=rngs)", 'self.encoder = nnx.Linear(PIXELS, HIDDEN, precision="highest", rngs=rngs)')),
    wrong_array(_V, "torch keras", "mean and log-variance exchanged", "mean log_variance", r"^(mean|log_variance)/kernel", lambda a, b: (b, a)),
)  # fmt: skip
RECOMMENDER: Final = (
    plant(_R, "torch nnx", "formula", "log for log1p", "bottom1", ("jnp.log1p(batch[\"dense\"])", "jnp.log(batch[\"dense\"] + 1e-1)")),
    plant(_R, "torch torch", "formula", "products of the upper triangle", "top1", ("torch.tril_indices(4, 4, -1)", "torch.triu_indices(4, 4, 1)"), says="formula|layout"),
    plant(_R, "torch nnx", "formula", "products with themselves", "top1", ("np.tril_indices(4, -1)", "(np.array([0, 1, 1, 2, 2, 3]), np.array([0, 0, 1, 0, 2, 3]))"), says="formula|layout"),
    plant(_R, "torch keras", "formula", "dense vector not among the products", "top1", ("parts = [x]", "parts = [0.0 * x]"), says="formula"),
    plant(_R, "torch torch", "formula", "products before the dense vector", "top1", ("torch.cat([x, products[:, rows, columns].to(x.dtype)], 1)", "torch.cat([products[:, rows, columns].to(x.dtype), x], 1)"), says="formula|layout"),
    plant(_R, "torch nnx", "formula", "products divided by the root of the width", "top1", ("products = jnp.einsum(\"bid,bjd->bij\", stacked, stacked)", "products = jnp.einsum(\"bid,bjd->bij\", stacked, stacked) / WIDTH**0.5")),
    plant(_R, "torch torch", "formula", "no ReLU between the top layers", "top2 top3", ("y = functional.relu(self.top1(y))", "y = self.top1(y)")),
    plant(_R, "torch keras", "formula", "leaky ReLU", "bottom2 top1 tables/0", ('layers.Dense(WIDTH, activation="relu", name="bottom2")', 'layers.Dense(WIDTH, activation="leaky_relu", name="bottom2")')),
    plant(_R, "nnx torch", "formula", "categories of two tables exchanged", "tables/0 tables/1", ('batch["categories"][:, number])', 'batch["categories"][:, [2, 1, 0][number]] % TABLES[number])'), says="formula|layout"),
    plant(_R, "torch torch", "formula", "ReLU bounded at 0.5", "bottom2 bottom1", ("functional.relu(self.bottom1(dense))", "functional.relu(self.bottom1(dense)).clamp(max=0.5)")),
    plant(_R, "torch nnx", "stopped", "tables frozen", "tables/2 tables/1 tables/0", ('*(table(batch["categories"][:, number])', '*(jax.lax.stop_gradient(table(batch["categories"][:, number]))'), stage="backward"),
    plant(_R, "torch torch", "halved", "products detached", "bottom2 tables/0 tables/1 tables/2", ("products[:, rows, columns].to(x.dtype)", "products[:, rows, columns].detach()"), stage="backward"),
    plant(_R, "torch torch", "dtype", "products in bfloat16", "top1", ("products = stacked @ stacked.mT", "products = (stacked.bfloat16() @ stacked.bfloat16().mT).to(stacked.dtype)")),
    plant(_R, "torch nnx", "loss", "labels of -1 and 1", "loss", ("(jax.nn.softplus(logits) - logits * batch[\"clicked\"])", "jax.nn.softplus(-logits * (2.0 * batch[\"clicked\"]))"), says="formula"),
    plant(_R, "torch keras", "loss", "positives weigh twice", "loss", ("return tf.reduce_mean(losses)", "return tf.reduce_mean(losses * (1.0 + batch[\"clicked\"]))"), says="formula"),
    plant(_R, "torch torch", "loss", "sum for the mean", "loss", ('batch["clicked"])', 'batch["clicked"], reduction="sum")'), says="factor"),
    policy(_R, "torch torch", "a factor that overflows", "top3 top2", "mixed_float16", ("y = functional.relu(self.top2(y))", "y = functional.relu(self.top2(y)) * 2.0**18 * 2.0**-18")),
    policy(_R, "torch torch", "first layer in float32", "bottom1", "mixed_bfloat16", ("dense = torch.log1p(batch[\"dense\"])", "dense = torch.log1p(batch[\"dense\"])\n        with torch.autocast('cpu', enabled=False):\n            first = self.bottom1(dense.float())"), ("functional.relu(self.bottom1(dense))", "functional.relu(first)")),
    wrong_array(_R, "torch nnx", "rows of a table shifted by one", "tables/1", r"tables/1/embedding", lambda x: x[[*range(1, 17), 0]]),
    wrong_array(_R, "torch keras", "columns of the top layer as if the products came first", "top1", r"^top1/kernel", lambda x: x[[*range(8, 14), *range(8)]]),
)  # fmt: skip
PLANTS: Final = (*TAGGER, *VAE, *RECOMMENDER)
"""All of them."""
