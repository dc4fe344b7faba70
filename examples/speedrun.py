"""nanoGPT's speed-run recipe on the GPT of `nanogpt.py`: Muon and AdamW, warmup-stable-decay, averaged weights.

python examples/speedrun.py --framework torch

The recipe is `speedrun.toml`. Muon's matrices are those of the blocks in every framework, whatever the order of their
axes; embeddings, norms, biases and the head take AdamW's update.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from common import arguments, report
from nanogpt import batches, loss_fn, train

import polyamp

RECIPE = Path(__file__).with_name("speedrun.toml")


def evaluate(framework: str, model: Any) -> float:
    """The loss of a model, in float32, on 64 rows."""
    (batch,) = batches(1, size=64)
    if framework == "torch":
        import torch

        batch = {name: torch.from_numpy(array) for name, array in batch.items()}
    found = loss_fn(polyamp.Policy("float32").autocast(model), batch)
    return float(found.detach() if framework == "torch" else found)


def main() -> None:
    """Train, and say which parameter takes which method, and what the averages are worth."""
    args = arguments(__doc__)
    state, losses = train(args.framework, polyamp.Recipe.load(RECIPE), args.steps)
    with polyamp.averaged(state) as model:
        averaged = evaluate(args.framework, model)
    methods = Counter(member.spec.method for member in state.groups.each())
    report(
        losses[0],
        losses[-1],
        muon=f"{methods['muon']} matrices",
        adamw=methods["adamw"],
        trained=f"{evaluate(args.framework, state.model):.3f}",
        averaged=f"{averaged:.3f}",
    )


if __name__ == "__main__":
    main()
