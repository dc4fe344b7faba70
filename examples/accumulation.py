"""Gradient accumulation: four micro-batches make one update, that of one batch four times as large (to rounding).

python examples/accumulation.py --framework tensorflow
"""

from __future__ import annotations

from typing import Any

from common import arguments, batches, mlp, report

import polyamp

recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(1e-2), clip_norm=1.0, accumulate_steps=4)


def loss_fn(model: Any, batch: Any) -> Any:
    """Cross-entropy, and as aux the loss of each micro-batch."""
    loss = polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])
    return loss, {"micro_batch_loss": loss}


def main() -> None:
    """Train and report: the batch is split along axis 0; a list of four micro-batches would do as well."""
    args = arguments(__doc__)
    state = polyamp.init(mlp(args.framework), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    results = []
    for batch in batches(args.steps, size=128):
        state, result = step(state, batch)
        results.append(result)
    shape = tuple(results[-1].aux["micro_batch_loss"].shape)
    report(results[0].loss, results[-1].loss, updates=int(results[-1].step), aux_shape=shape)


if __name__ == "__main__":
    main()
