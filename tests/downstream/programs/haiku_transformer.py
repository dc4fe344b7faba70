"""dm-haiku: its transformer example, on the text of its own README."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax
import numpy as np

SOURCE = Path(os.environ["DOWNSTREAM_SOURCE"])
sys.path.insert(0, str(SOURCE))

from examples.transformer import dataset, train  # noqa: E402  # found in the source distribution


def test_loss_falls() -> None:
    text = (SOURCE / "README.md").read_text(encoding="utf-8").encode("ascii", "ignore").decode()
    batches = dataset.load_ascii_dataset(text, batch_size=2, sequence_length=32)
    train.NUM_LAYERS = 2  # of six
    state, losses = train.init(jax.random.PRNGKey(0), next(batches)), []
    for _ in range(60):
        state, metrics = train.update(state, next(batches))
        losses.append(float(metrics["loss"]))
    assert int(state.step) == 60
    assert np.mean(losses[-10:]) < 0.8 * losses[0]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
