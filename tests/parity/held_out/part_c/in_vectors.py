"""Faults of part C in the code of the tagger, of the variational autoencoder and of the recommender."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.part_c.variants import BRAIN, HALF, carried, fault

_T: Final = "tagger"
_V: Final = "vae"
_R: Final = "recommender"
_CELL: Final = "forwards forwards/candidate forwards/gates forwards/inputs"
TAGGER: Final = (
    fault(_T, "torch nnx", "formula", "sigmoid for tanh in the candidate", _CELL, ("n = jnp.tanh(", "n = jax.nn.sigmoid(")),
    fault(_T, "torch torch", "formula", "first state of ones", _CELL, ("        h = x.new_zeros(len(x), UNITS)\n        for place in range(length):", "        h = x.new_ones(len(x), UNITS)\n        for place in range(length):"), under=BRAIN),
    fault(_T, "nnx torch", "formula", "gates of the state in the other order", _CELL, ("r_h, z_h = self.gates(h).chunk(2, -1)", "z_h, r_h = self.gates(h).chunk(2, -1)"), says="formula|layout"),
    fault(_T, "torch torch", "formula", "candidate's bias outside of the reset", _CELL, ("n = torch.tanh(n_in + r * self.candidate(h))", "n = torch.tanh(n_in + r * functional.linear(h, self.candidate.weight) + self.candidate.bias)"), says="formula|missing"),
    fault(_T, "torch torch", "formula", "last state for all places", "norm", ("torch.stack(behind, 1)]", "torch.stack(behind[:1] * length, 1)]"), says="formula|layout"),
    fault(_T, "torch nnx", "formula", "norm left out", "norm head", ("self.head(self.norm(states))", "self.head(states)"), says="formula|missing"),
    fault(_T, "torch torch", "halved", "no gradient from place to place backwards", "backwards backwards/*", ("h = self.backwards(x[:, place], h)", "h = self.backwards(x[:, place], h.detach())"), stage="backward"),
    fault(_T, "nnx torch", "epsilon", "1e-8 for 1e-5", "norm", ("eps=1e-5", "eps=1e-8")),
    fault(_T, "torch torch", "dtype", "logits rounded to float16", "- head", ("return self.head(self.norm(states))", "return self.head(self.norm(states)).half().float()")),
    fault(_T, "torch torch", "loss", "divided by the rows", "loss", ("/ counted.sum()", "/ len(tags)"), says="factor|formula"),
    fault(_T, "torch nnx", "loss", "padding's losses set to 0, then the mean", "loss", ("return (losses * counted).sum() / counted.sum()", "return (losses * counted).mean()"), says="factor|formula", under=HALF),
    carried(_T, "torch torch", "input kernel in the order update, reset, candidate", "backwards/inputs", r"backwards/inputs/weight", lambda x: x.reshape(3, 12, 10)[[1, 0, 2]].reshape(36, 10)),
)  # fmt: skip
VAE: Final = (
    fault(_V, "torch nnx", "formula", "code bounded at 1", "decoder1", ("jax.nn.elu(self.decoder1(code))", "jax.nn.elu(self.decoder1(jnp.clip(code, -1.0, 1.0)))")),
    fault(_V, "torch torch", "formula", "leaky ReLU for ELU", "decoder2", ("functional.elu(", "functional.leaky_relu("), under=BRAIN),
    fault(_V, "torch keras", "formula", "tanh before the norm", "norm mean log_variance", ('    h = layers.LayerNormalization(epsilon=1e-5, name="norm")(h)\n    h = layers.Activation("tanh", name="tanh")(h)\n', '    h = layers.Activation("tanh", name="tanh")(h)\n    h = layers.LayerNormalization(epsilon=1e-5, name="norm")(h)\n')),
    fault(_V, "torch nnx", "formula", "log-variance bounded at 0", "- decoder1", ("self.mean(h), self.log_variance(h)", "self.mean(h), jnp.minimum(self.log_variance(h), 0.0)")),
    fault(_V, "nnx torch", "formula", "bias of the last layer forgotten", "- decoder2", ("self.decoder2(functional.elu(self.decoder1(code)))", "functional.linear(functional.elu(self.decoder1(code)), self.decoder2.weight)"), says="formula|missing", under=HALF),
    fault(_V, "torch torch", "formula", "one noise for all of the code", "decoder1", ('* batch["noise"]', '* batch["noise"][:, :1]')),
    fault(_V, "torch keras", "loss", "divergence left out", "loss", ("return tf.reduce_mean(tf.reduce_sum(bits, -1)) + tf.reduce_mean(tf.reduce_sum(divergence, -1))", "return tf.reduce_mean(tf.reduce_sum(bits, -1))"), says="formula"),
    fault(_V, "torch nnx", "loss", "0.3 free in each dimension", "loss", ("divergence = -0.5 * (1.0 + log_variance - jnp.square(mean) - jnp.exp(log_variance)).sum(-1).mean()", "divergence = jnp.maximum(-0.5 * (1.0 + log_variance - jnp.square(mean) - jnp.exp(log_variance)), 0.3).sum(-1).mean()"), says="formula"),
    fault(_V, "torch torch", "loss", "squared errors for bits", "loss", ('functional.binary_cross_entropy_with_logits(logits, batch["x"], reduction="none")', '(logits.sigmoid() - batch["x"]).square()'), says="formula"),
    fault(_V, "torch torch", "halved", "no gradient of the divergence by the mean", "- mean", ("mean.square()", "mean.detach().square()"), stage="backward"),
    fault(_V, "torch keras", "epsilon", "1e-6 for 1e-5", "norm", ("epsilon=1e-5", "epsilon=1e-6")),
    fault(_V, "torch nnx", "dtype", "encoder's output rounded to bfloat16", "norm encoder mean log_variance", ('self.norm(self.encoder(batch["x"]))', 'self.norm(self.encoder(batch["x"]).astype(jnp.bfloat16).astype(jnp.float32))')),
    carried(_V, "torch nnx", "rows of the last kernel shifted", "decoder2", r"decoder2/kernel", lambda x: x[[*range(1, 24), 0]]),
)  # fmt: skip
RECOMMENDER: Final = (
    fault(_R, "torch nnx", "formula", "root for the logarithm", "bottom1", ('jnp.log1p(batch["dense"])', 'jnp.sqrt(batch["dense"])')),
    fault(_R, "torch torch", "formula", "vectors of length 1 in the products", "top1", ("products = stacked @ stacked.mT", "unit = functional.normalize(stacked, dim=-1)\n        products = unit @ unit.mT"), under=BRAIN),
    fault(_R, "torch keras", "formula", "products column by column", "top1", ("rows, columns = np.tril_indices(4, -1)", "columns, rows = np.triu_indices(4, 1)"), says="formula|layout"),
    fault(_R, "nnx torch", "formula", "last ReLU forgotten", "top3", ("y = functional.relu(self.top2(y))", "y = self.top2(y)")),
    fault(_R, "torch nnx", "formula", "categories modulo one less", "tables/0 tables/1 tables/2 top1", ('batch["categories"][:, number])', 'batch["categories"][:, number] % (TABLES[number] - 1))'), says="formula|layout"),
    fault(_R, "torch torch", "formula", "dense vector twice in place of one table's", "top1", ("stacked = torch.stack(parts, 1)", "stacked = torch.stack([parts[0], parts[0], *parts[2:]], 1)"), says="formula|layout|missing"),
    fault(_R, "torch torch", "loss", "sigmoid taken twice", "loss", ("model(batch).float(),", "model(batch).float().sigmoid(),"), says="formula", under=HALF),
    fault(_R, "torch nnx", "loss", "clicks weighed by their share", "loss", ('(jax.nn.softplus(logits) - logits * batch["clicked"]).mean()', '((jax.nn.softplus(logits) - logits * batch["clicked"]) * (1.0 + batch["clicked"].mean() * batch["clicked"])).mean()'), says="formula"),
    fault(_R, "torch keras", "halved", "no gradient from the products to the dense vector", "bottom2", ("parts = [x]", "parts = [ops.stop_gradient(x)]"), stage="backward"),
    fault(_R, "torch torch", "stopped", "one table frozen", "tables/1", ("*(table(batch", "*((lambda i: table(i) if len(table.weight) != 17 else table(i).detach())(batch"), stage="backward"),
    carried(_R, "torch torch", "columns of the first top kernel the other way round", "top1", r"top1/weight", lambda x: x[:, ::-1]),
    carried(_R, "torch nnx", "table's rows in the other order", "tables/2", r"tables/2/embedding", lambda x: x[::-1]),
)  # fmt: skip
PLANTS: Final = (*TAGGER, *VAE, *RECOMMENDER)
"""All of them."""
