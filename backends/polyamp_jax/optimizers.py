"""Optimizer specs as optax transformations with PyTorch's formulas. Called by `state` and `step`.

A native optax optimizer passes as it is. Where optax has torch's formula it is used as it stands. Two differ, and there
a small transformation runs the spec's own formula: Adagrad (epsilon inside the root, no decay of the rate) and Adam,
whose bias correction optax computes as `1 - b2**count` in float32, 1e-5 off at the first steps. That alone put the
digits transformer 3e-3 away from torch within 100 steps; with the formula it stays within 1e-6.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from polyamp.errors import UnsupportedError
from polyamp.optimizers import SGD, SPECS, Adagrad, Adam, AdamW, Lion, OptimizerSpec, RMSprop, is_spec
from polyamp_jax.arrays import XP


def transformation(optimizer: Any) -> Any:
    """The `optax.GradientTransformation` of a spec, or a native one as it is.

    Raises:
        UnsupportedError: neither.
    """
    if is_spec(optimizer):
        return _from_spec(optimizer)
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return optimizer
    names = ", ".join(spec.__name__.lower() for spec in SPECS)
    raise UnsupportedError(
        f"optimizer must be one of polyamp's specs ({names}) or an optax.GradientTransformation on the jax backend. "
        f"Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}."
    )


def widened(params: Any) -> Any:
    """Parameters as the optimizer sees them: at least float32, so that 16-bit parameters have float32 moments."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), params)


@functools.cache
def _from_spec(spec: OptimizerSpec) -> Any:
    match spec:
        case SGD():
            parts = [_l2(spec.weight_decay), _momentum(spec.momentum, nesterov=spec.nesterov)]
        case RMSprop():
            scaled = optax.scale_by_stddev if spec.centered else optax.scale_by_rms
            root = scaled(decay=spec.alpha, eps=spec.eps, eps_in_sqrt=False)
            parts = [_l2(spec.weight_decay), root, _momentum(spec.momentum)]
        case Lion():
            parts = [optax.scale_by_lion(*spec.betas), optax.add_decayed_weights(spec.weight_decay)]
        case Adam() | AdamW() | Adagrad():
            return _by_formula(spec)
    return optax.chain(*parts, optax.scale_by_learning_rate(lambda count: spec.rate(count, XP)))


def _l2(weight_decay: float) -> Any:
    return optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity()


def _momentum(momentum: float, *, nesterov: bool = False) -> Any:
    return optax.trace(momentum, nesterov=nesterov) if momentum else optax.identity()


class FormulaState(NamedTuple):
    """State of a transformation that runs `spec.update`.

    Attributes:
        count: applied updates, int32 scalar.
        slots: the spec's slot name -> pytree of arrays like the parameters.
    """

    count: Any
    slots: dict[str, Any]


def _by_formula(spec: OptimizerSpec) -> Any:
    """The spec's own formula as a gradient transformation."""

    def init(params: Any) -> FormulaState:
        slots = {
            slot: jax.tree.map(functools.partial(jnp.full_like, fill_value=spec.initial(slot)), params)
            for slot in spec.slots
        }
        return FormulaState(jnp.zeros([], jnp.int32), slots)

    def update(grads: Any, state: FormulaState, params: Any) -> tuple[Any, FormulaState]:
        rate = spec.rate(state.count, XP)
        number = (state.count + 1).astype(jnp.float32)
        updates: list[Any] = []
        slots: dict[str, list[Any]] = {slot: [] for slot in spec.slots}
        columns = [jax.tree.leaves(state.slots[slot]) for slot in spec.slots]
        for param, grad, *row in zip(jax.tree.leaves(params), jax.tree.leaves(grads), *columns, strict=True):
            new, own = spec.update(XP, param, grad, dict(zip(spec.slots, row, strict=True)), rate, number)
            updates.append(new - param)
            for slot in spec.slots:
                slots[slot].append(own[slot])
        structure = jax.tree.structure(params)
        return jax.tree.unflatten(structure, updates), FormulaState(
            state.count + 1, {slot: jax.tree.unflatten(structure, own) for slot, own in slots.items()}
        )

    return optax.GradientTransformation(init, update)
