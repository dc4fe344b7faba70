"""A gradient penalty: the loss itself holds a gradient, that of the outputs with respect to the inputs.

Only the inner derivative is the framework's own; scaling, unscaling and skipping are the step's.

    python examples/gradient_penalty.py --framework torch
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import arguments, batches, mlp, report

import polyamp

recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.adamw(1e-2))


def torch_input_gradient(model: Any, x: Any) -> Any:
    """d sum(model(x)) / dx."""
    import torch

    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient


def tensorflow_input_gradient(model: Any, x: Any) -> Any:
    """d sum(model(x)) / dx."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(model(x))
    return tape.gradient(total, x)


def jax_input_gradient(model: Any, x: Any) -> Any:
    """d sum(model(x)) / dx."""
    import jax

    return jax.grad(lambda inputs: model(inputs).sum())(x)


INPUT_GRADIENT: dict[str, Callable[[Any, Any], Any]] = {
    "torch": torch_input_gradient,
    "tensorflow": tensorflow_input_gradient,
    "jax": jax_input_gradient,
}


def main() -> None:
    """Train and report."""
    args = arguments(__doc__)
    input_gradient = INPUT_GRADIENT[args.framework]

    def loss_fn(model: Any, batch: Any) -> Any:
        gradient = input_gradient(model, batch["x"])
        penalty = polyamp.losses.mean_squared_error(gradient, gradient * 0.0)
        fit = polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])
        return fit + 0.1 * penalty, {"penalty": penalty}

    state = polyamp.init(mlp(args.framework), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    results = []
    for batch in batches(args.steps):
        state, result = step(state, batch)
        results.append(result)
    report(results[0].loss, results[-1].loss, penalty=f"{float(results[-1].aux['penalty']):.5f}")


if __name__ == "__main__":
    main()
