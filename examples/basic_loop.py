"""The basic loop: one recipe, one loss function, any framework.

python examples/basic_loop.py --framework torch
"""

from __future__ import annotations

from typing import Any

from common import arguments, batches, mlp, report

import polyamp

recipe = polyamp.Recipe(
    policy=polyamp.Policy("mixed_float16"),
    optimizer=polyamp.adamw(learning_rate=1e-2),
    clip_norm=1.0,
)


def loss_fn(model: Any, batch: Any) -> Any:
    """The same in every framework."""
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def main() -> None:
    """Train and report."""
    args = arguments(__doc__)
    state = polyamp.init(mlp(args.framework), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    results = []
    for batch in batches(args.steps):
        state, result = step(state, batch)
        results.append(result)
    print(state)
    skipped = sum(bool(result.skipped) for result in results)
    report(results[0].loss, results[-1].loss, skipped_steps=skipped, scale=float(results[-1].scale))


if __name__ == "__main__":
    main()
