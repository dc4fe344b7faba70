"""The training step: scaled gradients, accumulation, and the update, in the order of S9. Called by `backend`.

`train_step` is the two halves one after the other: `accumulated` (or `separate`, for several states) makes gradients of
the unscaled loss, `applied` decides, clips, updates and adjusts the scale. All of it is traceable and never waits for
the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.contract.backend import Gradients, LossFunction, Skip, StepResult
from polyamp.errors import GradientError, LossError, TraceError, UnsupportedError
from polyamp.recipe.scaler import update
from polyamp.rules import refusals
from polyamp.rules.batches import check_has_rows
from polyamp_jax import compat
from polyamp_jax.arrays import XP, dtype_name, is_array, is_key, matmul_precision, named_leaves, path_name
from polyamp_jax.models.parts import Keys, Running
from polyamp_jax.precision.bound import BoundModel, compute_params, conform
from polyamp_jax.step.dependence import gradients_made
from polyamp_jax.step.optimizers import like, updated, widened
from polyamp_jax.step.state import JaxState

_SMALL: Final = 2**14  # elements; on a 2-core CPU a pass of its own costs more than copying so few


class Pass(NamedTuple):
    """What one forward and backward pass over several models gives.

    Attributes:
        loss: unscaled loss, float32 scalar.
        aux: what `loss_fn` returned beside it.
        values: per model, gradients of the scaled loss in the dtypes of the computation; None for a parameter on which
            the loss does not depend (S23).
        running: per model, its running state afterwards.
    """

    loss: Any
    aux: Any
    values: list[Any]
    running: list[Running]


def separate(loss_fn: LossFunction, states: Sequence[JaxState], batch: Any) -> tuple[Any, list[Gradients]]:
    """The first half for one or several states: what `loss_fn` returned, and unscaled gradients (S6, S7)."""
    check_axes("value_and_grad")
    done = _differentiated(loss_fn, states, [_compute(s) for s in states], [s.running for s in states], batch)
    scale = _scale(states[0])
    gradients = [
        Gradients(_unscaled(values, scale, state.params), running)
        for values, running, state in zip(done.values, done.running, states, strict=True)
    ]
    return (done.loss if done.aux is None else (done.loss, done.aux)), gradients


def accumulated(loss_fn: LossFunction, state: JaxState, batch: Any) -> tuple[Any, Any, Gradients]:
    """The first half for one state over its micro-batches (S8): mean loss, stacked aux, unscaled mean gradients.

    In cast mode the parameters are cast once for all micro-batches; running state flows from one to the next.
    """
    check_axes("train_step")
    count = state.recipe.accumulate_steps
    if count == 1:
        value, (gradients,) = separate(loss_fn, [state], batch)
        return *(value if isinstance(value, tuple) else (value, None)), gradients
    params = _compute(state)
    idle: list[Any] = []  # what no micro-batch depends on: they are one program

    def one(carry: tuple[Running, Any], part: Any) -> tuple[tuple[Running, Any], tuple[Any, Any]]:
        running, total = carry
        done = _differentiated(loss_fn, [state], [params], [running], part)
        idle[:] = [jax.tree.map(lambda _, g: g is None, total, done.values[0])]
        total = jax.tree.map(lambda t, g: t if g is None else t + g.astype(t.dtype), total, done.values[0])
        return (done.running[0], total), (done.loss, done.aux)

    start = (state.running, jax.tree.map(jnp.zeros_like, widened(state.params)))
    (running, total), (losses, aux) = jax.lax.scan(one, start, _micro_batches(batch, count))
    mean = jax.tree.map(lambda t, none: None if none else t / count, total, idle[0])
    return jnp.mean(losses), aux, Gradients(_unscaled(mean, _scale(state), state.params), running)


def applied(
    states: Sequence[JaxState], grads: Sequence[Gradients], skip: Skip
) -> tuple[list[JaxState], list[StepResult]]:
    """The second half (S9 to S15): flags, clip, optimizer, and one scale adjustment on the AND of the flags (S14)."""
    check_axes("apply_gradients")
    values = [_fitted(state, item) for state, item in zip(states, grads, strict=True)]
    measured = [norm_and_finite(jax.tree.leaves(tree)) for tree in values]
    every = jnp.stack([finite for _, finite in measured]).all()
    outcomes = [
        _updated(state, tree, item.running, norm, every if skip == "all" else finite, every)
        for state, tree, item, (norm, finite) in zip(states, values, grads, measured, strict=True)
    ]
    return [state for state, _ in outcomes], [result for _, result in outcomes]


def check_axes(what: str) -> None:
    """Refuse to step inside `shard_map` or `pmap`: gradients would be summed, or replicas would part (S9).

    Raises:
        UnsupportedError: names the axes.
    """
    axes = compat.mapped_axes()
    if axes:
        named = ", ".join(map(repr, axes))
        raise UnsupportedError(
            f"{what} does not run inside shard_map or pmap: replicas would take different decisions, or gradients be "
            f"summed over them. Axes that are mapped here: {named}. Take the step out of the mapped function and give "
            "jax.jit a sharded batch (jax.device_put with a NamedSharding): JAX then divides the work by itself. "
            "loss_fn may use shard_map inside."
        )


def scaled_loss(loss: Any, scale: Any | None, *, what: str = "loss_fn") -> tuple[jax.Array, jax.Array]:
    """(scaled loss, loss), both float32 scalars (S6).

    Raises:
        LossError: not a floating scalar.
    """
    refusals.check_loss(jnp.shape(loss) if is_array(loss) else (), dtype_name(loss), what=what)
    wide = jnp.asarray(loss, jnp.float32).reshape(())
    return (wide if scale is None else wide * scale), wide


def norm_and_finite(leaves: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """Global L2 norm (float32) and finite flag (S10, S11) of float32 gradients, over the whole range of float32.

    A sum of squares overflows from 2^64 on and loses what is below 2^-63: there a sum over gradients times a power of
    two stands in. An accelerator makes all the sums in one pass (`_three_sums`). XLA's CPU backend gives every sum its
    own pass, so there a second one, with the power that the first asks for, is quicker (`_two_sums`). Measurements and
    the compiled programs: `docs/measurements/jax_loss_scaling.md`.
    """
    norm, finite = jax.lax.platform_dependent(list(leaves), cpu=_two_sums, default=_three_sums)
    return norm, finite


def _two_sums(leaves: list[Any]) -> tuple[jax.Array, jax.Array]:
    """The first sum picks a power of two for the second, which is finite exactly when every gradient is.

    Sums carry NaN on, a maximum under XLA does not. (Scaling by max |g| takes twice as long on a CPU, where maxima are
    not vectorised.) The power has to depend on the data: with a constant c, XLA turns (g * c) * (g * c) into
    (g * g) * (c * c), and c * c into 0 or inf. Small gradients are laid end to end, or the calls cost more than the
    sums.
    """
    parts = [g for g in leaves if g.size >= _SMALL]
    small = [jnp.ravel(g) for g in leaves if g.size < _SMALL]
    parts += [jnp.concatenate(small)] if small else []

    def squares(factor: Any) -> jax.Array:
        return _total([jnp.square(g * jnp.asarray(factor, g.dtype)) for g in parts])

    plain = squares(1.0)
    shrinking = jnp.where(jnp.isfinite(plain), 1.0, 2.0**-80)
    factor = jnp.where(plain < 2.0**-60, 2.0**63, shrinking)
    # the flag of the root, not of the sum: XLA would copy the chain of additions into every select on the flag
    root = jnp.sqrt(squares(factor))
    return (root / factor).astype(jnp.float32), jnp.isfinite(root)


def _three_sums(leaves: list[Any]) -> tuple[jax.Array, jax.Array]:
    """Sums of squares of the gradients, of the gradients times 2^63 and times 2^-80; then the one in range.

    They do not depend on one another, so XLA makes them in one multi-output pass. The bounds change no sum that is
    used. They keep the sum of the enlarged finite, and they keep XLA from multiplying the constants out of the
    squares, as above. NaN shows in the plain sum, whatever becomes of it at a bound.
    """
    plain = _total([jnp.square(g) for g in leaves])
    enlarged = _total([jnp.square(jnp.minimum(jnp.abs(g * 2.0**63), 2.0**40)) for g in leaves])
    shrunk = _total([jnp.square(jnp.maximum(jnp.abs(g * 2.0**-80), 2.0**-60)) for g in leaves])
    inner = jnp.where(plain < 2.0**-60, jnp.sqrt(enlarged) * 2.0**-63, jnp.sqrt(plain))
    norm = jnp.where(jnp.isinf(plain), jnp.sqrt(shrunk) * 2.0**80, inner)
    return norm.astype(jnp.float32), jnp.isfinite(shrunk) & ~jnp.isnan(plain)


def _total(arrays: Sequence[Any]) -> jax.Array:
    return jnp.stack([jnp.sum(array) for array in arrays]).sum()


def unscaled_leaf(leaf: Any, scale: Any | None, dtype: Any = jnp.float32) -> jax.Array:
    """A gradient in float32, divided by the scale (S7); converted first, or small quotients would be lost."""
    wide: jax.Array = leaf.astype(dtype)
    return wide if scale is None else wide / scale.astype(dtype)


def _differentiated(
    loss_fn: LossFunction, states: Sequence[JaxState], params: Sequence[Any], running: Sequence[Running], batch: Any
) -> Pass:
    """One forward and backward pass.

    Raises:
        LossError: not a floating scalar, or none of the parameters has a gradient (S23).
        TraceError: `loss_fn` changes an nnx object that it did not make.
    """
    check_has_rows(shape[0] for _, shape in _shapes(batch) if shape)
    keys = [_keys(state, own.draws) for state, own in zip(states, running, strict=True)]
    scale = _scale(states[0])

    def loss_of(params: Sequence[Any]) -> tuple[Any, Any]:
        models = tuple(
            BoundModel(state.plan.adapter, state.recipe.policy, *parts)
            for state, *parts in zip(states, params, running, keys, strict=True)
        )
        with matmul_precision(states[0].recipe.policy):
            loss, aux = refusals.split_result(loss_fn(models[0] if len(models) == 1 else models, batch))
        scaled, wide = scaled_loss(loss, scale)
        return scaled, (wide, aux, [model.running for model in models])

    try:
        scaled, backward, (loss, aux, after) = jax.vjp(loss_of, list(params), has_aux=True)
    except Exception as error:
        _refuse_changed_nnx(error)
        raise
    program = jax.make_jaxpr(backward)(scaled)
    made = gradients_made(program)
    if not any(made):
        raise LossError("loss_fn depends on none of the model's trainable parameters, so there is nothing to update.")
    flat = compat.jaxpr_as_fun(program)(np.ones((), np.float32))
    values = [gradient if depends else None for gradient, depends in zip(flat, made, strict=True)]
    moved = [own._replace(draws=own.draws + 1) for own in after]
    return Pass(loss, aux, jax.tree.unflatten(jax.tree.structure(list(params)), values), moved)


def _refuse_changed_nnx(error: BaseException) -> None:
    """Say what to do where flax found that `loss_fn` changes an nnx object of the world outside the step."""
    cause: BaseException | None = error
    while cause is not None and type(cause).__name__ != "TraceContextError":
        cause = cause.__cause__
    if cause is not None:
        raise TraceError(
            "loss_fn changes an nnx object that is not the model's: one that it closes over, or that is in the batch. "
            "A step is a traced function, and the change would be lost. Random streams: polyamp.init(model, recipe, "
            "rngs=nnx.Rngs(...)), and model(x) in loss_fn without them: the state keeps the streams and passes rngs= "
            "by itself. Metrics: return their values as aux and update them outside. Other modules (an average of the "
            f"weights, a teacher): call them in evaluation mode. Received from flax: {str(cause).splitlines()[0]}"
        ) from error


def _compute(state: JaxState) -> Any:
    return compute_params(state.params, state.plan.adapter, state.recipe.policy)


def _scale(state: JaxState) -> Any | None:
    return state.scale_state.scale if state.recipe.loss_scaler.scales else None


def _keys(state: JaxState, draws: Any) -> Keys:
    """The random keys of one pass of one attempt: skipped steps and micro-batches all have others."""
    return {
        name: jax.random.fold_in(jax.random.fold_in(key, state.attempts), draws) for name, key in state.rngs.items()
    }


def _unscaled(values: Any, scale: Any | None, params: Any) -> Any:
    return jax.tree.map(
        lambda p, g: None if g is None else unscaled_leaf(g, scale, jnp.promote_types(p.dtype, jnp.float32)),
        params,
        values,
    )


def _micro_batches(batch: Any, count: int) -> Any:
    """The batch with a leading axis of `count` micro-batches (S8)."""
    if isinstance(batch, list):
        refusals.check_micro_batches([_shapes(part) for part in batch], count)
        return jax.tree.map(lambda *parts: jnp.stack(parts), *batch)
    size = refusals.micro_batch_size(_shapes(batch), count)
    return jax.tree.map(lambda leaf: jnp.reshape(leaf, (count, size, *jnp.shape(leaf)[1:])), batch)


def _shapes(batch: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(jax.tree_util.keystr(path), jnp.shape(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)]


def _fitted(state: JaxState, grads: Gradients) -> Any:
    """The gradients in the parameters' structure, at least float32.

    Raises:
        GradientError: they do not fit the parameters.
    """
    params, received = named_leaves(state.params), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads.values, is_leaf=lambda x: x is None):
        name = path_name(path)
        if leaf is not None or name in params:  # equinox keeps None where a module has no such parameter
            received[name] = leaf
    refusals.check_gradients(
        [(name, jnp.shape(leaf)) for name, leaf in params.items()],
        [(name, None if leaf is None else jnp.shape(leaf)) for name, leaf in received.items()],
    )
    for name, leaf in received.items():
        if leaf is not None and dtype_name(leaf) not in refusals.FLOATING:
            raise GradientError(f"the gradient of {name!r} must be a floating array. Received: {dtype_name(leaf)}.")
    leaves = [
        None if (grad := received[name]) is None
        else unscaled_leaf(jnp.asarray(grad), None, jnp.promote_types(leaf.dtype, jnp.float32))
        for name, leaf in params.items()
    ]  # fmt: skip
    return jax.tree.unflatten(jax.tree.structure(state.params), leaves)


def _updated(
    state: JaxState, values: Any, running: Running, norm: Any, finite: Any, every: Any
) -> tuple[JaxState, StepResult]:
    """Clip, update and, where `finite`, commit; `every` moves the scale.

    Old and new are chosen by elementwise select, not by a conditional: XLA fuses it into the update's own loop, which
    reads the old values anyway, while a conditional would make a GPU's host wait for the flag.
    """
    recipe, scaler = state.recipe, state.recipe.loss_scaler
    if recipe.clip_norm is not None:
        factor = refusals.clip_factor(norm, recipe.clip_norm, XP)
        values = jax.tree.map(lambda g: g * factor.astype(g.dtype), values)
    idle = frozenset(n for n, grad in enumerate(like(values, state.params)) if grad is None)
    even = state.lagging is not None and state.lagging <= idle
    params, opt_state = updated(recipe.optimizer, values, state.opt_state, state.params, even=even)
    old = (state.params, state.opt_state, state.running.statistics, state.step)
    opt_state = conform(opt_state, state.opt_state, what="the optimizer's state")
    new = (params, opt_state, running.statistics, state.step + 1)
    scale_state, skipped = state.scale_state, jnp.asarray(False)
    if scaler.checks:
        new = jax.tree.map(
            lambda after, before: after if is_key(before) else jnp.where(finite, after, before), new, old
        )
        scale_state, skipped = update(scaler, state.scale_state, every, XP), ~finite
    params, opt_state, statistics, step = new
    made = dataclasses.replace(
        state,
        params=params,
        opt_state=opt_state,
        scale_state=scale_state,
        running=Running(statistics, running.streams, jnp.zeros_like(running.draws)),
        step=step,
    )
    if state.lagging is not None:
        made = made.knowing(state.lagging | idle)
    return made, StepResult(None, None, norm, scale_state.scale, skipped, step)
