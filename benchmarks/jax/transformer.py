"""A small GPT in flax linen, its data, and the same training step written by hand without a library.

`step` and `peers` train it. `Transformer` is ordinary float32 code, without a cast in it: what polyamp and the
peers get. `forward` and `handwritten_step` are what an expert writes instead: every cast spelled out, a loss scale of
its own, one `jax.jit` with donation. Both read one parameter tree, that of `Transformer().init`, so every variant
starts from the same weights.
"""

# flax has no types for mypy: its base class is Any and its decorators are untyped.
# mypy: disable-error-code="misc, untyped-decorator, no-any-return"

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY: Final = 256
LENGTH: Final = 64
BATCH: Final = 16
WIDTH: Final = 128
HEADS: Final = 4
HIDDEN: Final = 512
LAYERS: Final = 2
EPSILON: Final = 1e-6

LEARNING_RATE: Final = 1e-3
BETA1: Final = 0.9
BETA2: Final = 0.999
ADAM_EPSILON: Final = 1e-8
WEIGHT_DECAY: Final = 1e-2
CLIP_NORM: Final = 1.0

INITIAL_SCALE: Final = 2.0**15
GROWTH_INTERVAL: Final = 2000
MIN_SCALE: Final = 2.0**-14
MAX_SCALE: Final = 2.0**24

Batch = dict[str, jax.Array]
StepOf = Callable[[Any, Batch], tuple[Any, Any]]


# --- the model as a user of a library writes it


class Attention(nn.Module):
    """Causal self-attention with `HEADS` heads; (batch, length, WIDTH) to the same shape."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        qkv = nn.Dense(3 * width, name="qkv")(x).reshape(batch, length, 3, HEADS, width // HEADS)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // HEADS) ** -0.5
        scores = jnp.where(causal_mask(length), scores, jnp.finfo(scores.dtype).min)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), value)
        return nn.Dense(width, name="out")(mixed.reshape(batch, length, width))


class Block(nn.Module):
    """One pre-norm layer: attention and a gelu MLP, each added to the residual stream."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + Attention(name="attention")(nn.LayerNorm(EPSILON, name="norm1")(x))
        hidden = nn.gelu(nn.Dense(HIDDEN, name="up")(nn.LayerNorm(EPSILON, name="norm2")(x)))
        return x + nn.Dense(x.shape[-1], name="down")(hidden)


class Transformer(nn.Module):
    """Integer tokens (batch, length) to logits (batch, length, VOCABULARY)."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x = nn.Embed(VOCABULARY, WIDTH, embedding_init=nn.initializers.normal(0.02), name="tokens")(tokens) + positions
        for number in range(LAYERS):
            x = Block(name=f"block{number}")(x)
        return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm(EPSILON, name="norm")(x))


def causal_mask(length: int) -> jax.Array:
    """Boolean (length, length): True where the query (row) may see the key (column)."""
    return jnp.tril(jnp.ones((length, length), bool))


@functools.cache
def initial_variables(seed: int = 0) -> Any:
    """The variables that every variant starts from, as `Transformer.init` makes them (float32); they are shared."""
    return Transformer().init(jax.random.key(seed), jnp.zeros((1, LENGTH), jnp.int32))


def batches(count: int, *, seed: int = 0, noise: float = 0.1) -> list[Batch]:
    """Token sequences that follow a fixed random permutation: after `t` comes `rule[t]`, or with `noise` any token.

    Args:
        count: batches.
        seed: of the rule and of the sequences.
        noise: probability of a random token; it leaves a loss of about 0.88 nats at noise=0.1.

    Returns:
        `count` dicts of int32 arrays "x" and "y", both (BATCH, LENGTH), on the default device.
    """
    rng = np.random.default_rng(seed)
    rule = rng.permutation(VOCABULARY)
    return [_batch(rng, rule, noise) for _ in range(count)]


def _batch(rng: np.random.Generator, rule: np.ndarray[Any, Any], noise: float) -> Batch:
    tokens = rng.integers(VOCABULARY, size=(BATCH, LENGTH + 1), dtype=np.int32)
    follows = rng.random(tokens.shape) >= noise
    for place in range(1, LENGTH + 1):
        tokens[:, place] = np.where(follows[:, place], rule[tokens[:, place - 1]], tokens[:, place])
    return {"x": jnp.asarray(tokens[:, :-1]), "y": jnp.asarray(tokens[:, 1:])}


# --- the same by hand


def forward(params: Any, tokens: jax.Array, *, compute: Any, residual: Any) -> jax.Array:
    """Logits of `Transformer` in float32, with every cast written out.

    Matrix products with their biases run in `compute`; layer norm, softmax and gelu in float32. These are the dtypes
    that `torch.autocast` gives the same model when `residual` is float32.

    Args:
        params: the "params" collection of `initial_variables`, float32.
        tokens: int32, shape (batch, length).
        compute: dtype of matrix products.
        residual: dtype of the residual stream.
    """
    x = (params["tokens"]["embedding"][tokens] + params["positions"]).astype(residual)
    for number in range(LAYERS):
        block = params[f"block{number}"]
        x = x + _attention(block["attention"], _norm(block["norm1"], x), compute).astype(residual)
        hidden = _dense(block["up"], _norm(block["norm2"], x), compute).astype(jnp.float32)
        x = x + _dense(block["down"], jax.nn.gelu(hidden), compute).astype(residual)
    return _dense(params["head"], _norm(params["norm"], x), compute).astype(jnp.float32)


def _attention(params: Any, x: jax.Array, compute: Any) -> jax.Array:
    batch, length, width = x.shape
    qkv = _dense(params["qkv"], x, compute).reshape(batch, length, 3, HEADS, width // HEADS)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = (jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // HEADS) ** -0.5).astype(jnp.float32)
    scores = jnp.where(causal_mask(length), scores, jnp.finfo(jnp.float32).min)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(compute), value)
    return _dense(params["out"], mixed.reshape(batch, length, width), compute)


def _dense(params: Any, x: jax.Array, compute: Any) -> jax.Array:
    return x.astype(compute) @ params["kernel"].astype(compute) + params["bias"].astype(compute)


def _norm(params: Any, x: jax.Array) -> jax.Array:
    """flax's formula, var = E[x^2] - E[x]^2, in float32."""
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    variance = jnp.maximum(jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean), 0.0)
    return (x - mean) * (jax.lax.rsqrt(variance + EPSILON) * params["scale"]) + params["bias"]


class HandState(NamedTuple):
    """State of the handwritten step.

    Attributes:
        params: master weights, float32.
        opt_state: the optimizer's state.
        scale: loss scale, float32 scalar.
        good_steps: finite steps since the scale last moved, int32 scalar.
    """

    params: Any
    opt_state: Any
    scale: jax.Array
    good_steps: jax.Array


def adamw() -> optax.GradientTransformation:
    """AdamW by torch's formula, as short as it can be written by hand (no schedule, no masks)."""

    def init(params: Any) -> Any:
        return jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count, mean, square = state
        count = count + 1
        mean = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, mean, grads)
        square = jax.tree.map(lambda s, g: BETA2 * s + (1 - BETA2) * g * g, square, grads)
        rate = LEARNING_RATE / -jnp.expm1(count.astype(jnp.float32) * math.log(BETA1))
        root = jnp.sqrt(-jnp.expm1(count.astype(jnp.float32) * math.log(BETA2)))

        def one(param: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
            return -rate * (m / (jnp.sqrt(s) / root + ADAM_EPSILON)) - LEARNING_RATE * WEIGHT_DECAY * param

        return jax.tree.map(one, params, mean, square), (count, mean, square)

    return optax.GradientTransformation(init, update)


def optax_adamw() -> optax.GradientTransformation:
    """The same optimizer as optax has it."""
    return optax.adamw(LEARNING_RATE, BETA1, BETA2, ADAM_EPSILON, weight_decay=WEIGHT_DECAY)


def handwritten_state(variables: Any, optimizer: optax.GradientTransformation, *, compute: Any) -> HandState:
    """A fresh state, whose weights are copies, since the step consumes it. Float32 starts (and stays) at scale 1."""
    params = jax.tree.map(jnp.copy, variables["params"])
    scale = 1.0 if compute == jnp.float32 else INITIAL_SCALE
    return HandState(params, optimizer.init(params), jnp.float32(scale), jnp.int32(0))


def handwritten_step(optimizer: optax.GradientTransformation, *, compute: Any, residual: Any) -> Any:
    """A fresh jitted step: `state, (loss, finite) = step(state, batch)`.

    It skips on a norm that is not finite, which saves the pass over the gradients that `isfinite` on each takes: the
    leanest form, and so the hardest one to be compared with.
    """

    def step(state: HandState, batch: Batch) -> tuple[HandState, tuple[jax.Array, jax.Array]]:
        def scaled_loss(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = forward(params, batch["x"], compute=compute, residual=residual)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
            return loss * state.scale, loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(state.params)
        grads = jax.tree.map(lambda g: g / state.scale, grads)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        finite = jnp.isfinite(norm)
        factor = CLIP_NORM / jnp.maximum(norm, CLIP_NORM)
        grads = jax.tree.map(lambda g: g * factor, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params, opt_state = jax.tree.map(
            functools.partial(jnp.where, finite), (params, opt_state), (state.params, state.opt_state)
        )
        grow = state.good_steps + 1 == GROWTH_INTERVAL
        grown = jnp.where(grow, jnp.minimum(state.scale * 2, MAX_SCALE), state.scale)
        scale = jnp.where(finite, grown, jnp.maximum(state.scale / 2, MIN_SCALE))
        good_steps = jnp.where(finite & ~grow, state.good_steps + 1, 0)
        return HandState(params, opt_state, scale, good_steps), (loss, finite)

    return jax.jit(step, donate_argnums=0)
