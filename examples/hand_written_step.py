"""A loop of one's own with only `scale`, `unscale` and `update`; everything else is the framework's.

python examples/hand_written_step.py --framework jax
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import arguments, batches, mlp, report

import polyamp

policy = polyamp.Policy("mixed_float16")
scaler = polyamp.LossScaler(growth_interval=20)


def torch_loop(steps: int) -> list[float]:
    """`torch.optim` and `backward`, without a GradScaler."""
    import torch

    model = mlp("torch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scale_state = scaler.init("torch")
    forward = policy.autocast(model)
    losses = []
    for batch in batches(steps):
        x, y = torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])
        loss = polyamp.losses.softmax_cross_entropy(forward(x), y)
        optimizer.zero_grad()
        scaler.scale(loss, scale_state).backward()
        grads, finite = scaler.unscale([p.grad for p in model.parameters()], scale_state)
        if finite:
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad
            optimizer.step()
        scale_state = scaler.update(scale_state, finite)
        losses.append(loss.item())
    return losses


def tensorflow_loop(steps: int) -> list[float]:
    """A Keras optimizer and `GradientTape`, without a LossScaleOptimizer."""
    import keras
    import tensorflow as tf

    model = mlp("tensorflow")
    optimizer = keras.optimizers.AdamW(1e-2)
    optimizer.build(model.trainable_variables)
    scale_state = scaler.init("tensorflow")
    forward = policy.autocast(model)

    @tf.function(jit_compile=True)  # float16 outside XLA is some 300 times slower on TensorFlow's CPU
    def step(x: Any, y: Any, scale_state: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = polyamp.losses.softmax_cross_entropy(forward(x), y)
            scaled = scaler.scale(loss, scale_state)
        grads, finite = scaler.unscale(tape.gradient(scaled, model.trainable_variables), scale_state)
        tf.cond(finite, lambda: optimizer.apply(grads), lambda: None)
        return loss, scaler.update(scale_state, finite)

    losses = []
    for batch in batches(steps):
        loss, scale_state = step(tf.constant(batch["x"]), tf.constant(batch["y"]), scale_state)
        losses.append(float(loss))
    return losses


def jax_loop(steps: int) -> list[float]:
    """optax and `jax.value_and_grad`."""
    import jax
    import optax

    import polyamp_jax

    module, variables = mlp("jax")
    optimizer = optax.adamw(1e-2)

    @jax.jit
    def step(variables: Any, opt_state: Any, scale_state: Any, batch: Any) -> Any:
        def scaled_loss(masters: Any) -> Any:
            logits = module.apply(policy.cast_to_compute(masters), policy.cast_to_compute(batch["x"]))
            loss = polyamp.losses.softmax_cross_entropy(logits, batch["y"])
            return scaler.scale(loss, scale_state), loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(variables)
        grads, finite = scaler.unscale(grads, scale_state)
        updates, new_opt_state = optimizer.update(grads, opt_state, variables)
        new = (optax.apply_updates(variables, updates), new_opt_state)
        kept = polyamp_jax.select(finite, new, (variables, opt_state))
        return *kept, scaler.update(scale_state, finite), loss

    opt_state, scale_state, losses = optimizer.init(variables), scaler.init("jax"), []
    for batch in batches(steps):
        variables, opt_state, scale_state, loss = step(variables, opt_state, scale_state, batch)
        losses.append(float(loss))
    return losses


LOOPS: dict[str, Callable[[int], list[float]]] = {"torch": torch_loop, "tensorflow": tensorflow_loop, "jax": jax_loop}


def main() -> None:
    """Train and report."""
    args = arguments(__doc__)
    losses = LOOPS[args.framework](args.steps)
    report(losses[0], losses[-1])


if __name__ == "__main__":
    main()
