"""A training loop over optax with casts, masks, schedules and flax's dynamic scale; `loss_fn` and the constants are set
by `harness`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

import polyamp

RATE = 1e-2
BETAS = (0.9, 0.999)
EPSILON = 1e-8
DECAY = 0.1
MOMENTUM = 0.9
KIND = "adamw"
GROUPS = ""
CLIP = 0.0
PARTS = 1
SCHEDULE = ""
TOTAL = 4
WARMUP = 0
END = 0.0
DTYPE = ""
SCALE = 2.0**10
loss_fn: Any = None


def rate_at(step: Any) -> Any:
    rate = RATE
    if SCHEDULE == "linear":
        rate = END + (RATE - END) * jnp.maximum(0.0, (TOTAL - step) / (TOTAL - WARMUP))
    if SCHEDULE == "cosine":
        rate = END + (RATE - END) * 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.minimum(step / TOTAL, 1.0)))
    if SCHEDULE == "exponential":
        rate = RATE * 0.5**step
    return jnp.where(step < WARMUP, RATE * step / max(WARMUP, 1), rate)


def is_decayed(parameters: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim >= 2 or GROUPS != "vectors", parameters)


def make_optimizer() -> Any:
    rate = rate_at if SCHEDULE or WARMUP else RATE
    if KIND == "sgd":
        return optax.chain(optax.add_decayed_weights(DECAY, is_decayed), optax.sgd(rate, momentum=MOMENTUM))
    if KIND == "adam":
        return optax.chain(optax.add_decayed_weights(DECAY), optax.adam(rate, *BETAS, EPSILON))
    if KIND == "lion":
        return optax.lion(rate, *BETAS, weight_decay=DECAY)
    return optax.adamw(rate, *BETAS, EPSILON, weight_decay=DECAY, mask=is_decayed if GROUPS else None)


def begin(model: Any) -> Any:
    optimizer = make_optimizer()
    state = optimizer.init(nnx.state(model, nnx.Param))
    scaler = DynamicScale(scale=jnp.float32(SCALE)) if DTYPE == "float16" else None
    return polyamp.porting.training(model, (optimizer, state), scaler, step=0)


def clip(gradients: Any) -> Any:
    norm = optax.global_norm(gradients)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / (norm + 1e-6)), gradients)


def cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def loss_of(graph: Any, parameters: Any, rest: Any, rows: Any) -> Any:
    """The loss of a pass in `DTYPE`, whose parameters stay float32, and what the pass made of the rest."""
    if not DTYPE:
        model = nnx.merge(graph, parameters, rest, copy=True)
        return loss_fn(model, rows), nnx.state(model, nnx.Not(nnx.Param))
    model = nnx.merge(graph, cast(parameters, DTYPE), rest, copy=True)
    loss = loss_fn(lambda given: cast(model(cast(given, DTYPE)), "float32"), rows)
    return loss, nnx.state(model, nnx.Not(nnx.Param))


@functools.partial(jax.jit, static_argnums=0)
def gradients_of(graph: Any, parameters: Any, rest: Any, rows: Any, scale: Any) -> Any:
    def scaled(given: Any) -> Any:
        loss, after = loss_of(graph, given, rest, rows)
        return loss * scale, (loss, after)

    return jax.grad(scaled, has_aux=True)(parameters)


@jax.jit
def update_of(gradients: Any, state: Any, parameters: Any) -> Any:
    updates, after = make_optimizer().update(gradients, state, parameters)
    applied = optax.apply_updates(parameters, updates)
    return applied, after


def step(training: Any, batch: Any) -> Any:
    graph, parameters, rest = nnx.split(training.model, nnx.Param, ...)
    optimizer, state = training.optimizer
    scaler = training.scaler
    scale = 1.0 if scaler is None else scaler.scale
    total, gradients = 0.0, None
    for part in range(PARTS):
        rows = {name: jnp.asarray(np.ascontiguousarray(a[part::PARTS])) for name, a in batch.items()}
        found, (loss, rest) = gradients_of(graph, parameters, rest, rows, scale)
        found = jax.tree.map(lambda g: g / PARTS, found)
        gradients = found if gradients is None else jax.tree.map(jnp.add, gradients, found)
        total = total + loss / PARTS
    gradients = jax.tree.map(lambda g: g / scale, gradients)
    finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]))
    if CLIP:
        gradients = clip(gradients)
    applied, after = update_of(gradients, state, parameters)
    if scaler is not None:
        applied = jax.tree.map(lambda new, old: jnp.where(finite, new, old), applied, parameters)
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
        scaler = scaler.replace(
            scale=jnp.where(finite, scale, 0.5 * scale), fin_steps=jnp.where(finite, scaler.fin_steps + 1, 0)
        )
    model = nnx.merge(graph, applied, rest)
    counted = training.step + (1 if scaler is None else int(finite))
    return polyamp.porting.training(model, (optimizer, after), scaler, step=counted), total
