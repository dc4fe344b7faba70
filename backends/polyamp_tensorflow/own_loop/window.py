"""An update of a `LossScaleOptimizer`, or a micro-step of a window of them, in three parts: numbers, decision, writes.

    measure: [the window's sum] -> unscale -> norm and finite flag                            (S7 to S10)
    commit:  clip -> the inner optimizer under one condition for all replicas; scale, window  (S11 to S15)

`polyamp.rules.decide` decides in between; inside a window nothing but the sums moves. Called by `LossScaleOptimizer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import tensorflow as tf

from polyamp.recipe.scaler import LossScaler
from polyamp.rules import decide
from polyamp.rules.decide import Decision, Measured
from polyamp.rules.scale import LossScaleState
from polyamp_tensorflow.arrays import XP, raw, write
from polyamp_tensorflow.own_loop.loop_memory import not_finite
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.measure import norm_and_flag
from polyamp_tensorflow.step.unused import leaving_alone
from polyamp_tensorflow.step.update import clipped


class Share(NamedTuple):
    """What a micro-batch weighs beside the largest of its window so far (S8), float32 scalars.

    Attributes:
        weight: its own; none is above 1, so that weighing makes nothing overflow.
        most: rows of the largest, itself included.
        earlier: what the sums of those before it are multiplied by, 1 unless it is larger than all of them.
    """

    weight: Any
    most: Any
    earlier: Any


class Held(NamedTuple):
    """What a `LossScaleOptimizer` holds and its settings, for an update.

    Attributes:
        inner: the optimizer inside.
        scaler, clip_norm, accumulate_steps: as it was given.
        owners: index of each variable among those that it was built for, by id.
        scale: the variables of the loss-scale state.
        skipped: 1 if the last call ended in a skipped update, else 0.
        not_finite: by variable, how many elements of its gradient were not finite at the last skipped update.
        micro_step: calls since the window began.
        sums: by variable, the sum of the window's gradients; empty without a window.
        used: by variable, 1 if it had a gradient in this window; None without one.
        rows: of the window's largest micro-batch so far, and the sum of what the shares differ from 1, float32 vector;
            None without a window.
        share: of this call's micro-batch; None where it weighs 1.
    """

    inner: Any
    scaler: LossScaler
    clip_norm: float | None
    accumulate_steps: int
    owners: dict[int, int]
    scale: LossScaleState
    skipped: Any
    not_finite: Any
    micro_step: Any
    sums: list[Any]
    used: Any
    rows: Any = None
    share: Share | None = None


class Call(NamedTuple):
    """One call of `apply`, as `decide` asks for it.

    Attributes:
        held: the optimizer's.
        variables: those that have a gradient now; in a window all.
        every: the variables of the call.
        unused: those of them whose gradient is None.
    """

    held: Held
    variables: list[Any]
    every: list[Any]
    unused: list[Any]

    @property
    def scale_state(self) -> LossScaleState:
        """The loss-scale state, as tensors."""
        return LossScaleState(*(tf.convert_to_tensor(raw(variable)) for variable in self.held.scale))

    @property
    def step(self) -> Any:
        """Applied updates: the inner optimizer counts them."""
        return tf.convert_to_tensor(raw(self.held.inner.iterations))


def update(call: Call, gradients: list[Any]) -> None:
    """The update, or a micro-step of it; `gradients` of `call.variables` are dense, scaled, and summed over replicas.

    In a window the unused variables have sums too: whether they were used before is known when it ends.
    """
    held = call.held
    if held.sums:
        sums = [raw(held.sums[owner]) for owner in _owners(held, call.variables)]
        if held.share is not None:
            sums = [total * tf.cast(held.share.earlier, total.dtype) for total in sums]
        gradients = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
    decide.update([call], [gradients], "all", _VERBS)


class _Verbs(decide.Verbs[Call, list[Any]]):
    xp = XP

    def scaler(self, state: Call) -> LossScaler:
        return state.held.scaler

    def measure(self, state: Call, grads: list[Any]) -> Measured:
        held = state.held
        if not held.sums:
            return _measured(held, grads)
        return Measured(
            *tf.cond(
                _window_ends(held),
                lambda: tuple(_measured(held, grads)),
                lambda: (tf.constant(1.0), tf.constant(True), grads, None if held.share is None else tf.constant(1.0)),
            )
        )

    def commit(self, state: Call, grads: list[Any], measured: Measured, decision: Decision) -> Call:
        held = state.held

        def write_all(
            run: replicas.Run, sums: Any, unscaled: Any, norm: Any, finite: Any, scale: Any, rows: Any
        ) -> None:
            def end() -> None:
                _end_window(run, state, unscaled, norm, finite, scale, may_skip=decision.finite is not None)

            if held.sums:
                tf.cond(_window_ends(held), end, lambda: _add(state, sums, rows))
            else:
                end()

        scale, finite = list(decision.scale_state), measured.finite if decision.finite is None else decision.finite
        replicas.together(write_all, grads, measured.more, measured.norm, finite, scale, _rows_after(held))
        return state


_VERBS: Final = _Verbs()


def _owners(held: Held, variables: Sequence[Any]) -> list[int]:
    return [held.owners[id(variable)] for variable in variables]


def _window_ends(held: Held) -> Any:
    return tf.equal(raw(held.micro_step), held.accumulate_steps - 1)


def share_of(held: Held | None, rows: Any) -> Share:
    """The share of a micro-batch of so many rows, or what else it counts by; of the first one where nothing is held
    yet."""
    one = tf.ones_like(rows)
    if held is None:
        return Share(tf.where(rows > 0.0, one, 0.0), rows, one)
    before = raw(held.rows)[0]
    before = tf.where(tf.equal(raw(held.micro_step), 0) | tf.equal(before, 0.0), rows, before)
    most = tf.maximum(before, rows)
    by = tf.where(most > 0.0, most, one)  # nothing has counted yet
    return Share(rows / by, most, before / by)


def _rows_after(held: Held) -> Any:
    """What `held.rows` is to be after this call; None where every micro-batch weighs 1."""
    if held.share is None:
        return None
    weight, most, earlier = held.share
    count = tf.cast(raw(held.micro_step), tf.float32)
    return tf.stack([most, raw(held.rows)[1] * earlier + count * (earlier - 1.0) + weight - 1.0])


def _measured(held: Held, gradients: list[Any]) -> Measured:
    """Norm, flag and the unscaled gradients; no norm where neither the flag nor a clip asks for it."""
    count: Any = float(held.accumulate_steps)
    scaler, weight = held.scaler, None
    if scaler.scales or held.sums:
        if held.sums:
            after = _rows_after(held)
            count = count + (raw(held.rows) if after is None else after)[1]
            if held.share is not None:
                weight = count
                count = tf.where(count > 0.0, count, 1.0)
        divisor = raw(held.scale.scale) * count if scaler.scales else tf.convert_to_tensor(count)
        gradients = [gradient / tf.cast(divisor, gradient.dtype) for gradient in gradients]
    if not scaler.checks and held.clip_norm is None:
        return Measured(tf.constant(1.0), tf.constant(True), gradients, weight)
    return Measured(*norm_and_flag(gradients), gradients, weight)


def _add(call: Call, sums: Sequence[Any], rows: Any) -> None:
    """A micro-step inside a window."""
    held = call.held
    if rows is not None:
        raw(held.rows).assign(replicas.shared(rows))
    write([held.sums[owner] for owner in _owners(held, call.variables)], sums)
    left = set(_owners(held, call.unused))
    now = tf.constant([int(owner not in left) for owner in range(len(held.sums))])
    raw(held.used).assign(tf.maximum(replicas.shared(raw(held.used)), now))
    raw(held.micro_step).assign_add(1)
    raw(held.skipped).assign(0)


def _end_window(
    run: replicas.Run, call: Call, unscaled: Any, norm: Any, finite: Any, scale: Any, *, may_skip: bool
) -> None:
    """The update of all replicas or none, and what the decision says of the scale."""
    held = call.held

    def update_all_but(left: list[Any]) -> None:
        without = {id(variable) for variable in left}

        def step(unscaled: Any, norm: Any) -> None:
            pairs = zip(call.variables, clipped(unscaled, norm, held.clip_norm), strict=True)
            known = {id(variable): gradient for variable, gradient in pairs if id(variable) not in without}
            held.inner.apply([known.get(id(variable)) for variable in call.every], call.every)

        with replicas.reduced_already(held.inner), leaving_alone(held.inner, left, warn=True):
            run(step, unscaled, norm)

    def apply() -> None:
        if not (call.unused and held.sums):
            update_all_but(call.unused)
            return
        before = tf.gather(replicas.shared(raw(held.used)), _owners(held, call.unused))
        tf.cond(tf.reduce_any(before > 0), lambda: update_all_but([]), lambda: update_all_but(call.unused))

    if not may_skip:
        apply()
    else:
        flag = replicas.shared(finite)
        tf.cond(flag, apply, lambda: _note_skip(call, unscaled))
        write(held.scale, [replicas.shared(value) for value in scale])
        raw(held.skipped).assign(tf.where(flag, 0, 1))
    if held.sums:
        write(held.sums, [tf.zeros(total.shape, total.dtype) for total in held.sums])
        raw(held.used).assign(tf.zeros(held.used.shape, tf.int32))
        raw(held.rows).assign(tf.zeros(2))
        raw(held.micro_step).assign(0)


def _note_skip(call: Call, gradients: Any) -> None:
    """How many elements of each gradient were not finite, for the report on a stuck scale."""
    counts = dict.fromkeys(range(call.held.not_finite.shape[0]), tf.constant(0))
    for owner, gradient in zip(_owners(call.held, call.variables), gradients, strict=True):
        counts[owner] = not_finite(replicas.shared(gradient))
    raw(call.held.not_finite).assign(tf.stack(list(counts.values())))
