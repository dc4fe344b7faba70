"""Faults of part E in the code of the tagger, of the variational autoencoder and of the recommender."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.part_c.variants import BRAIN, HALF
from tests.parity.held_out.part_e.variants import carried, fault

_T: Final = "tagger"
_V: Final = "vae"
_R: Final = "recommender"
_CELL: Final = "forwards forwards/candidate forwards/gates forwards/inputs"
TAGGER: Final = (
    fault(_T, "torch nnx", "formula", "states from before the step", "norm", ("            h = self.forwards(x[:, place], h)\n            ahead.append(h)\n", "            ahead.append(h)\n            h = self.forwards(x[:, place], h)\n"), says="formula|layout"),
    fault(_T, "torch torch", "formula", "update gate with a bias of 1", _CELL, ("torch.sigmoid(z_in + z_h)", "torch.sigmoid(z_in + z_h + 1.0)"), under=BRAIN),
    fault(_T, "nnx nnx", "formula", "update gate for the reset gate", _CELL, ("n_in + r * self.candidate(h)", "n_in + z * self.candidate(h)")),
    fault(_T, "torch torch", "stopped", "backward cell frozen", "backwards backwards/*", ("torch.stack(behind, 1)]", "torch.stack(behind, 1).detach()]"), stage="backward"),
    fault(_T, "torch nnx", "loss", "softmax over the places", "loss", ("jax.nn.log_softmax(logits)", "jax.nn.log_softmax(logits, 1)"), says="formula"),
    fault(_T, "nnx torch", "epsilon", "BERT's 1e-12 for 1e-5", "norm", ("eps=1e-5", "eps=1e-12")),
    carried(_T, "torch torch", "directions exchanged in the head's columns", "head", r"^head/weight", lambda x: x.reshape(7, 2, 7)[:, ::-1].reshape(7, 14)),
)  # fmt: skip
VAE: Final = (
    fault(_V, "torch nnx", "formula", "root of the precision for the deviation", "decoder1", ("jnp.exp(0.5 * log_variance) *", "jnp.exp(-0.5 * log_variance) *")),
    fault(_V, "torch keras", "formula", "sigmoid for tanh", "mean log_variance", ('layers.Activation("tanh", name="tanh")', 'layers.Activation("sigmoid", name="tanh")')),
    fault(_V, "nnx torch", "formula", "mean left out of the code", "decoder1", ("code = mean + torch.exp", "code = torch.exp"), under=BRAIN),
    fault(_V, "torch torch", "formula", "ELU of the code", "decoder1 decoder2", ("functional.elu(self.decoder1(code))", "self.decoder1(functional.elu(code))")),
    fault(_V, "torch nnx", "loss", "divergence the other way round", "loss", ("divergence = -0.5 * (1.0 + log_variance - jnp.square(mean) - jnp.exp(log_variance))", "divergence = 0.5 * (log_variance + (1.0 + jnp.square(mean)) * jnp.exp(-log_variance) - 1.0)"), says="formula", under=HALF),
    fault(_V, "torch keras", "halved", "log-variance's input without a gradient", "norm", ('layers.Dense(CODE, name="log_variance")(h)', 'layers.Dense(CODE, name="log_variance")(ops.stop_gradient(h))'), stage="backward"),
)  # fmt: skip
RECOMMENDER: Final = (
    fault(_R, "torch nnx", "formula", "features brought to mean 0 and deviation 1 of the batch", "bottom1", ('dense = jnp.log1p(batch["dense"])', 'dense = (batch["dense"] - batch["dense"].mean(0)) / batch["dense"].std(0)')),
    fault(_R, "torch torch", "formula", "sigmoid for the dense vector's ReLU", "top1", ("x = functional.relu(self.bottom2(", "x = torch.sigmoid(self.bottom2("), under=BRAIN),
    fault(_R, "torch keras", "formula", "first column for all tables", "tables/1 tables/2 top1", ('name=f"tables_{number}")(categories[:, number])', 'name=f"tables_{number}")(ops.mod(categories[:, 0], size))'), says="formula|layout"),
    fault(_R, "nnx torch", "formula", "logits not below 0", "- top3", ("return self.top3(y)[:, 0]", "return functional.relu(self.top3(y)[:, 0])"), under=HALF),
    fault(_R, "torch nnx", "stopped", "dense vector frozen", "bottom2", ("x = jax.nn.relu(self.bottom2(jax.nn.relu(self.bottom1(dense))))", "x = jax.lax.stop_gradient(jax.nn.relu(self.bottom2(jax.nn.relu(self.bottom1(dense)))))"), stage="backward"),
)  # fmt: skip
PLANTS: Final = (*TAGGER, *VAE, *RECOMMENDER)
"""All of them."""
