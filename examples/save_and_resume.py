"""Save, resume in a fresh state, continue: the same weights, bit for bit, as without stopping.

python examples/save_and_resume.py --framework torch
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import arguments, batches, mlp, report

import polyamp

recipe = polyamp.Recipe(
    policy="mixed_float16",
    optimizer=polyamp.adamw(polyamp.schedules.warmup_cosine(1e-2, warmup_steps=5, total_steps=60)),
    scaler=polyamp.LossScaler(growth_interval=20),
)


def loss_fn(model: Any, batch: Any) -> Any:
    """Cross-entropy of the digits."""
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def main() -> None:
    """Train half-way, save, finish; restore the half-way point into a new state, finish again, compare."""
    args = arguments(__doc__)
    every = list(batches(args.steps))
    half = len(every) // 2
    step = polyamp.train_step(loss_fn, recipe)
    state = polyamp.init(mlp(args.framework), recipe)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "half.safetensors"
        for number, batch in enumerate(every):
            if number == half:
                polyamp.save(state, checkpoint)
            state, result = step(state, batch)
            losses.append(result.loss)
        straight = state.backend.export_state(state)
        state = polyamp.restore(polyamp.init(mlp(args.framework), recipe), checkpoint)
    for batch in every[half:]:
        state, result = step(state, batch)
    resumed = state.backend.export_state(state)
    equal = all(np.array_equal(straight[name], resumed[name]) for name in straight)
    report(losses[0], losses[-1], bit_identical=equal)


if __name__ == "__main__":
    main()
