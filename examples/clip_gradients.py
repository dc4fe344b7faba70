"""Working with unscaled gradients: between the two halves of a step they are plain arrays in the masters' dtype,
float32 here, so any clipping goes.

`clip_norm` in the recipe clips by global norm. This clips each element instead, by hand.

    python examples/clip_gradients.py --framework jax
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import arguments, batches, mlp, report

import polyamp

LIMIT = 0.01
recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(1.0, momentum=0.9))


def loss_fn(model: Any, batch: Any) -> Any:
    """Cross-entropy of the digits."""
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def clipper(framework: str) -> Callable[[Any], Any]:
    """The framework's own elementwise clip."""
    if framework == "torch":
        import torch

        return lambda gradient: torch.clamp(gradient, -LIMIT, LIMIT)
    if framework == "tensorflow":
        import tensorflow as tf

        return lambda gradient: tf.clip_by_value(gradient, -LIMIT, LIMIT)
    import jax.numpy as jnp

    return lambda gradient: jnp.clip(gradient, -LIMIT, LIMIT)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` over a tree of dicts; None stays, the gradient of a parameter that the loss does not depend on."""
    if isinstance(tree, dict):
        return {name: mapped(function, part) for name, part in tree.items()}
    return None if tree is None else function(tree)


def main() -> None:
    """Train and report."""
    args = arguments(__doc__)
    clip = clipper(args.framework)
    state = polyamp.init(mlp(args.framework), recipe)
    value_and_grad = polyamp.value_and_grad(loss_fn)
    losses = []
    for batch in batches(args.steps):
        loss, gradients = value_and_grad(state, batch)
        gradients = gradients._replace(values=mapped(clip, gradients.values))
        state, result = polyamp.apply_gradients(state, gradients)
        losses.append(loss)
    report(losses[0], losses[-1], gradient_norm=f"{float(result.grad_norm):.4f}")


if __name__ == "__main__":
    main()
