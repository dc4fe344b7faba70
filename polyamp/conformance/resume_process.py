"""Second half of S22's test, in a separate process: restore checkpoints, continue, write the resulting arrays.

python -m polyamp.conformance.resume_process SUBJECT FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import polyamp
from polyamp.conformance.problems import advance, batch, layers, recipe
from polyamp.conformance.subjects import find_subject
from polyamp.contract.harness import Harness

KINDS = ("mlp", "normalized_mlp")


def resume_recipe() -> polyamp.Recipe:
    """Return a recipe with every kind of state: schedule, moments, accumulation, a moving scale."""
    return recipe(
        "mixed_float16",
        optimizer=polyamp.adamw(polyamp.schedules.warmup_cosine(1e-2, 3, 30)),
        scaler=polyamp.LossScaler(init_scale=2.0**10, growth_interval=3, hysteresis=2),
        clip_norm=1.0,
        accumulate_steps=2,
    )


def fresh_state(harness: Harness, kind: str, seed: int) -> Any:
    """Return a new state; the seed changes the initial weights, which a restore must replace."""
    model = getattr(harness, kind)(layers(seed=seed))
    return polyamp.init(model, resume_recipe())


def advance_state(state: Any, first: int, last: int) -> Any:
    """Run steps `first` to `last`; every fourth overflows."""
    return advance(state, [batch(i, gain=np.inf if i % 4 == 3 else 1.0) for i in range(first, last)])[0]


def main(name: str, folder: str) -> None:
    """Restore `KIND.safetensors` of each kind into a state with other weights, continue, export to `KIND.npz`."""
    subject = find_subject(name)
    for kind in KINDS:
        fresh = fresh_state(subject.harness, kind, seed=1)
        state = advance_state(polyamp.restore(fresh, Path(folder, f"{kind}.safetensors")), 6, 12)
        arrays: dict[str, Any] = subject.backend.export_state(state)
        np.savez(Path(folder, f"{kind}.npz"), **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
