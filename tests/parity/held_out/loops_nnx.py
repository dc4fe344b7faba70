"""A training loop written by hand over optax; `loss_fn` and the constants are set by `harness`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import polyamp

RATE, DECAY, CLIP, PARTS, STEPS, WARMUP, KIND, DTYPE = 1e-2, 0.1, 0.0, 1, 4, 0, "adamw", ""
loss_fn: Any = None


def rate_at(step: Any) -> Any:
    if KIND == "cosine":
        return RATE * 0.5 * (1.0 + jnp.cos(jnp.pi * step / STEPS))
    if WARMUP:
        return RATE * jnp.minimum(1.0, 0.1 + 0.9 * step / WARMUP)
    return RATE


def make_optimizer() -> Any:
    scheduled = KIND == "cosine" or WARMUP
    rate = rate_at if scheduled else RATE
    if KIND == "adamw":
        return optax.adamw(rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=DECAY)
    return optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(rate, momentum=0.9))


def begin(model: Any) -> Any:
    optimizer = make_optimizer()
    return polyamp.porting.training(model, (optimizer, optimizer.init(nnx.state(model, nnx.Param))), step=0)


def clipped(gradients: Any) -> Any:
    norm = optax.global_norm(gradients)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / (norm + 1e-6)), gradients)


def step(training: Any, batch: Any) -> Any:
    model = nnx.clone(training.model)
    optimizer, state = training.optimizer
    total, gradients = 0.0, None
    for part in range(PARTS):
        rows = {name: jnp.asarray(np.ascontiguousarray(a[part::PARTS])) for name, a in batch.items()}
        loss, found = nnx.value_and_grad(loss_fn)(model, rows)
        found = jax.tree.map(lambda g: g / PARTS, found)
        gradients = found if gradients is None else jax.tree.map(jnp.add, gradients, found)
        total = total + loss / PARTS
    if CLIP:
        gradients = clipped(gradients)
    parameters = nnx.state(model, nnx.Param)
    updates, state = optimizer.update(gradients, state, parameters)
    nnx.update(model, optax.apply_updates(parameters, updates))
    return polyamp.porting.training(model, (optimizer, state), step=training.step + 1), total
