"""One call of `KerasLossScaleOptimizer.apply`: measure, decide, commit; without a wait for the device.

    measure: [the accumulated sum] -> unscale -> finite flag                 (S7 to S10)
    commit:  [norm] clip -> the inner optimizer; scale, accumulation         (S11 to S15)

`polyamp.rules.update_decision.decide` makes the decision. Where reading a flag waits, the inner optimizer runs and each
variable that it may write is chosen between its old and its new value; a program of JAX for a CPU branches.
"""

from __future__ import annotations

from typing import Any

import keras

from polyamp.rules import clip
from polyamp.rules.update_decision import GradStats, decide
from polyamp_keras.arrays import native_variable, read_value
from polyamp_keras.compat import moving_averages
from polyamp_keras.engine import ENGINE
from polyamp_keras.own_loop.gradients import add_to_sums, divide_by_scale
from polyamp_keras.own_loop.optimizer_checks import optimizer_members
from polyamp_keras.own_loop.scaler_state import ApplyCall, is_last_micro_batch, next_rows, variable_indices
from polyamp_keras.own_loop.spec_optimizer import SpecOptimizer


def apply_or_accumulate(call: ApplyCall, gradients: list[Any]) -> None:
    """Apply an update, or accumulate a micro-step. `gradients` of `call.variables` are dense and scaled."""
    optimizer, state = call.optimizer, call.state
    sums, rows = add_to_sums(call, gradients), next_rows(call)
    unscaled, weight = divide_by_scale(call, sums)
    by_norm = clip.gradient_clip(optimizer.clip).factor is not None
    measures = optimizer.scaler.checks or by_norm or optimizer.figures is not None
    flags = ENGINE.finite_flags(unscaled) if measures else None
    finite = keras.ops.all(flags) if measures else None
    norm = None if optimizer.figures is None else ENGINE.global_norm(unscaled)  # a clip computes its own
    stats = GradStats(norm, finite, weight)
    step = read_value(optimizer.iterations)
    decision = decide(optimizer.scaler, optimizer.scale_state, step, stats, [finite], "all", ENGINE.XP)
    figures = None if optimizer.figures is None else optimizer.figures.begin(call, unscaled, decision.result(stats))
    last = is_last_micro_batch(call) if state.sums else None
    applies = decision.finite if last is None else last if decision.finite is None else last & decision.finite
    _run_inner_if(applies, call, unscaled)
    if decision.finite is not None:
        skips = decision.skipped if last is None else last & decision.skipped
        for variable, value in zip(state.scale, decision.scale_state, strict=True):
            variable.assign(value if last is None else keras.ops.where(last, value, native_variable(variable)))
        state.skipped.assign(keras.ops.cast(skips, "int32"))
        if measures:
            _write_not_finite(call, skips, flags)
    if last is not None:
        _accumulate(call, sums, rows, last)
    if figures is not None:
        figures.write()


def _run_inner_if(applies: Any, call: ApplyCall, unscaled: list[Any]) -> None:
    """Run the inner optimizer if a flag, a boolean scalar, is true or None; else no variable changes a bit."""
    known = True if applies is None else ENGINE.read_without_wait(applies)
    inner = call.optimizer.inner_optimizer
    if known is None:
        written = [*call.all_variables, *inner.variables]
        ENGINE.update_if(applies, written, call.optimizer.variables, lambda: _run_inner(call, unscaled))
    elif known:
        _run_inner(call, unscaled)


def _run_inner(call: ApplyCall, unscaled: list[Any]) -> None:
    """Clip the gradients and run the inner optimizer. Unused variables and their state do not change (S23)."""
    optimizer, inner = call.optimizer, call.optimizer.inner_optimizer
    unused = {id(variable) for variable in _never_used(call)}
    known = {id(v): g for v, g in zip(call.variables, unscaled, strict=True) if id(v) not in unused}
    variables = call.all_variables
    gradients = [known.get(id(variable)) for variable in variables]  # Keras warns of those that are None
    if isinstance(inner, SpecOptimizer):
        sets = inner.clip_sets(variables, optimizer.clip)
    else:
        sets = clip.clip_sets([(None, optimizer.clip)] * len(variables))

    def norm_of(places: list[int]) -> Any:
        return ENGINE.global_norm([gradients[place] for place in places])

    averages = [
        (average, ENGINE.copy_value(average), keras.ops.equal(native_variable(member.iterations), 0))
        for member in optimizer_members(inner)
        if unused and getattr(member, "use_ema", False)
        for variable, average in moving_averages(member)
        if id(variable) in unused
    ]
    inner.apply(clip.clip_gradients(sets, gradients, None, norm_of, ENGINE.XP), variables)
    for average, value, is_first in averages:  # the first update sets an average to the parameter
        average.assign(keras.ops.where(is_first, native_variable(average), value))


def _never_used(call: ApplyCall) -> list[Any]:
    """Return the variables without a gradient in this update. In an accumulation a gradient at any of its micro-batches
    counts, which is read on the host; in a trace, where it cannot be, all of the variables count as used."""
    if not call.unused or not call.state.sums:
        return call.unused
    used = ENGINE.read_vector(native_variable(call.state.used))
    if used is None:
        return []
    places = variable_indices(call, call.unused)
    return [variable for variable, place in zip(call.unused, places, strict=True) if not used[place]]


def _write_not_finite(call: ApplyCall, skips: Any, flags: Any) -> None:
    if ENGINE.read_without_wait(skips) is False:
        return
    variable, places = call.state.not_finite, variable_indices(call, call.variables)
    counts = keras.ops.cast(keras.ops.logical_not(flags), "int32")
    new = keras.ops.zeros_like(native_variable(variable))
    new = keras.ops.scatter_update(new, keras.ops.array(places)[:, None], counts)
    variable.assign(keras.ops.where(skips, new, native_variable(variable)))


def _accumulate(call: ApplyCall, sums: list[Any], rows: Any, last: Any) -> None:
    """Write the sums of a micro-step, or zeros at the end of an accumulation."""
    state = call.state
    for index, total in zip(variable_indices(call, call.variables), sums, strict=True):
        state.sums[index].assign(keras.ops.where(last, keras.ops.zeros_like(total), total))
    unused = set(variable_indices(call, call.unused))
    now = keras.ops.array([int(index not in unused) for index in range(len(state.sums))], "int32")
    used = keras.ops.maximum(native_variable(state.used), now)
    state.used.assign(keras.ops.where(last, keras.ops.zeros_like(used), used))
    if rows is not None:
        state.rows.assign(keras.ops.where(last, keras.ops.zeros_like(rows), rows))
    step = native_variable(state.micro_step)
    state.micro_step.assign(keras.ops.where(last, keras.ops.zeros_like(step), step + 1))
