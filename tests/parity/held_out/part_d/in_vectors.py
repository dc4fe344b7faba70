"""Faults of part D in the code of the tagger, of the variational autoencoder and of the recommender."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.part_c.variants import BRAIN, HALF
from tests.parity.held_out.part_d.variants import carried, fault

_T: Final = "tagger"
_V: Final = "vae"
_R: Final = "recommender"
_CELL: Final = "forwards forwards/candidate forwards/gates forwards/inputs"
TAGGER: Final = (
    fault(_T, "torch torch", "formula", "reset of the input too", _CELL, ("torch.tanh(n_in + r * self.candidate(h))", "torch.tanh(r * (n_in + self.candidate(h)))"), under=BRAIN),
    fault(_T, "torch nnx", "formula", "embeddings times the root of the width", "forwards forwards/inputs", ('x = self.embed(batch["tokens"])', 'x = self.embed(batch["tokens"]) * WIDTH**0.5'), says="factor|formula"),
    fault(_T, "torch torch", "halved", "reset gate without a gradient", "forwards forwards/* backwards backwards/*", ("n_in + r * self.candidate(h)", "n_in + r.detach() * self.candidate(h)"), stage="backward"),
    carried(_T, "torch nnx", "candidate's kernel transposed", "backwards/candidate", r"backwards/candidate/kernel", lambda x: x.T),
)  # fmt: skip
VAE: Final = (
    fault(_V, "torch torch", "formula", "probabilities for logits", "-", ("return self.decoder2(functional.elu(self.decoder1(code))), mean", "return torch.sigmoid(self.decoder2(functional.elu(self.decoder1(code)))), mean")),
    fault(_V, "torch keras", "formula", "ReLU for tanh behind the norm", "mean log_variance", ('layers.Activation("tanh", name="tanh")', 'layers.Activation("relu", name="tanh")')),
    fault(_V, "nnx nnx", "formula", "noise taken away", "decoder1", ("code = mean + jnp.exp(", "code = mean - jnp.exp(")),
    fault(_V, "torch nnx", "loss", "divergence not halved", "loss", ("divergence = -0.5 * (", "divergence = -1.0 * ("), says="formula", under=HALF),
    fault(_V, "torch torch", "halved", "mean without a gradient in the code", "mean -", ("code = mean + torch.exp", "code = mean.detach() + torch.exp"), stage="backward"),
)  # fmt: skip
RECOMMENDER: Final = (
    fault(_R, "torch nnx", "loss", "logits of a column beside clicks of a row", "loss", ("logits = model(batch).astype(jnp.float32)", "logits = model(batch).astype(jnp.float32)[:, None]"), says="formula"),
    fault(_R, "torch torch", "formula", "category 0 taken for padding", "tables/0 tables/1 tables/2 top1", ('*(table(batch["categories"][:, number])', '*(table(batch["categories"][:, number]) * (batch["categories"][:, number, None] > 0)'), says="formula|missing"),
    fault(_R, "torch keras", "formula", "logarithm to base 10", "bottom1", ("dense = ops.log1p(given)", "dense = ops.log10(1.0 + given)"), says="factor|formula"),
    fault(_R, "nnx torch", "halved", "dense vector without a gradient beside the products", "bottom2 top1", ("y = torch.cat([x, products", "y = torch.cat([x.detach(), products"), stage="backward", under=BRAIN),
)  # fmt: skip
PLANTS: Final = (*TAGGER, *VAE, *RECOMMENDER)
"""All of them."""
