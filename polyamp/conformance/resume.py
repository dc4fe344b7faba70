"""The second half of S22's test, in a process of its own: restore a checkpoint, continue, write what came out.

python -m polyamp.conformance.resume BACKEND KIND CHECKPOINT OUTPUT.npz
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import polyamp
from polyamp.conformance.problems import batch, layers, loss_fn, recipe
from polyamp.contract import registry

KINDS = ("mlp", "normalized_mlp")


def made() -> polyamp.Recipe:
    """A recipe with every kind of state: schedule, moments, accumulation, a moving scale."""
    return recipe(
        "mixed_float16",
        optimizer=polyamp.adamw(polyamp.schedules.warmup_cosine(1e-2, 3, 30)),
        scaler=polyamp.LossScaler(init_scale=2.0**10, growth_interval=3, hysteresis=2),
        clip_norm=1.0,
        accumulate_steps=2,
    )


def fresh(backend: str, kind: str, seed: int) -> Any:
    """A new state; the seed changes the initial weights, which a restore must replace."""
    model = getattr(registry.get(backend).testing(), kind)(layers(seed=seed))
    return polyamp.init(model, made())


def advance(state: Any, first: int, last: int) -> Any:
    """Steps `first` to `last` of the run; every fourth overflows."""
    step = polyamp.train_step(loss_fn, made())
    for i in range(first, last):
        state, _ = step(state, batch(i, gain=np.inf if i % 4 == 3 else 1.0))
    return state


def main(backend: str, kind: str, checkpoint: str, output: str) -> None:
    """Restore into a state with other weights, continue, export."""
    state = advance(polyamp.restore(fresh(backend, kind, seed=1), checkpoint), 6, 12)
    arrays: dict[str, Any] = registry.get(backend).export_state(state)
    np.savez(output, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
