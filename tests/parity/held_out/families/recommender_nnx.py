"""A recommender as DLRM, in flax nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

DENSE, WIDTH, TABLES = 6, 8, (11, 17, 5)


class Model(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.tables = nnx.List([nnx.Embed(size, WIDTH, rngs=rngs) for size in TABLES])
        self.bottom1, self.bottom2 = nnx.Linear(DENSE, 16, rngs=rngs), nnx.Linear(16, WIDTH, rngs=rngs)
        self.top1, self.top2 = nnx.Linear(WIDTH + 6, 16, rngs=rngs), nnx.Linear(16, 12, rngs=rngs)
        self.top3 = nnx.Linear(12, 1, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        dense = jnp.log1p(batch["dense"])
        x = jax.nn.relu(self.bottom2(jax.nn.relu(self.bottom1(dense))))
        parts = [x, *(table(batch["categories"][:, number]) for number, table in enumerate(self.tables))]
        stacked = jnp.stack(parts, 1)
        products = jnp.einsum("bid,bjd->bij", stacked, stacked)
        rows, columns = np.tril_indices(4, -1)
        y = jnp.concatenate([x, products[:, rows, columns].astype(x.dtype)], 1)
        y = jax.nn.relu(self.top1(y))
        y = jax.nn.relu(self.top2(y))
        return self.top3(y)[:, 0]


def loss_fn(model: Any, batch: Any) -> Any:
    logits = model(batch).astype(jnp.float32)
    return (jax.nn.softplus(logits) - logits * batch["clicked"]).mean()
