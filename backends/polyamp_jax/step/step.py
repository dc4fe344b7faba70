"""Training step, `value_and_grad` and `apply_gradients` as compiled functions, with their host-side wrappers.

A `JaxState` is a pytree, and a compiled function receives only its arrays. The host passes two facts in and out of
such a function: which parameters have missed an update, and the position of the state's random streams (S12).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyamp.errors import StateError
from polyamp.monitor.slots import MonitorSelection
from polyamp.results import Gradients, LossFunction, StepResult
from polyamp.rules.loss_weights import WeightFunction
from polyamp.rules.update_decision import Skip
from polyamp_jax.arrays import is_key, materialize, prepare_batch
from polyamp_jax.distributed.jax_only.sharding_layout import ShardingLayout, row_shard_counts, usable_layout
from polyamp_jax.distributed.replicas import AxisName
from polyamp_jax.step import accumulation
from polyamp_jax.step.output_figures import OutputWatch, WatchedLoss, with_output_figures
from polyamp_jax.step.state import JaxState, is_donated
from polyamp_jax.step.update import update_states


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticResult:
    """Result of a compiled function that is known during tracing."""

    value: Any


class HostKnownInputs(NamedTuple):
    """Host-side facts about a state and its batch that a compiled step depends on.

    Attributes:
        lagging: the parameters that have missed an update.
        layout: the sharding layout of the state's arrays.
        rows: number of shards along axis 0 of each array of a batch that is split into micro-batches, else None.
    """

    lagging: frozenset[int] | None
    layout: ShardingLayout | None
    rows: tuple[int, ...] | None


class JaxTrainStep:
    """Training step with the signature `(state, batch) -> (state, result)`.

    Args:
        loss_fn: the loss.
        compiled: whether the step is wrapped in `jax.jit`.
        donate: whether the compiled step consumes its state.
        axis_name: the axes of the replicas, if JAX does not provide them.
        weight: function that returns the weight of a batch, or None.
        monitor: what the step collects for a monitor, or None.
        outputs: measures the outputs of modules for it, or None.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        *,
        compiled: bool,
        donate: bool,
        axis_name: AxisName = None,
        weight: WeightFunction | None = None,
        monitor: MonitorSelection | None = None,
        outputs: OutputWatch | None = None,
    ) -> None:
        self._monitor = monitor
        self._outputs = outputs
        self._axis_name = axis_name
        self._weight = weight
        self._loss_fn = loss_fn
        self._compiled = compiled
        self._donate = compiled and donate
        run: Callable[..., Any] = self._run
        self._call = jax.jit(run, static_argnums=2, donate_argnums=(0,) if donate else ()) if compiled else run

    def __call__(self, state: JaxState, batch: Any) -> tuple[JaxState, StepResult]:
        batch = prepare_batch(batch, state.setup.plan, compiled=self._compiled)
        try:
            known = self._host_inputs(state, batch)
            state, result, lagging = self._call(state, batch, known)
        except Exception as error:
            refuse_deleted_states([state], error)
            raise
        return state.with_host_facts(lagging.value, known.layout), result

    def lower(self, state: JaxState, batch: Any) -> Any:
        """Return the lowered program of the compiled step for these arguments, like `jax.jit(...).lower`."""
        call: Any = self._call
        return call.lower(state, batch, self._host_inputs(state, batch))

    def _host_inputs(self, state: JaxState, batch: Any) -> HostKnownInputs:
        state.setup.adapter.check_unchanged()
        return HostKnownInputs(
            state.lagging, state.layout, row_shard_counts(batch) if state.recipe.accumulate_steps > 1 else None
        )

    def _run(self, state: JaxState, batch: Any, known: HostKnownInputs) -> tuple[JaxState, StepResult, StaticResult]:
        state = state.with_host_facts(known.lagging, usable_layout(known.layout))
        loss_fn: Any = self._loss_fn
        if self._outputs is not None:
            every = 1 if self._monitor is None else self._monitor.every
            loss_fn = WatchedLoss(loss_fn, self._outputs, None if every == 1 else (state.attempts + 1) % every == 0)
        loss, aux, gradients = accumulation.accumulate_gradients(
            loss_fn, state, batch, self._axis_name, known.rows, self._weight
        )
        (new,), (result,) = update_states([state], [gradients], "all", self._monitor)
        if self._outputs is not None:
            aux, figures = aux
            slots = with_output_figures(result.monitor, figures, self._axis_name)
            result = result._replace(monitor=slots)
        if not self._donate:
            new = _copy_shared_arrays(new, state)
        return new, result._replace(loss=loss, aux=aux), StaticResult(new.lagging)


def value_and_grad(
    loss_fn: LossFunction, *, compiled: bool, axis_name: AxisName = None, weight: WeightFunction | None = None
) -> Callable[..., tuple[Any, list[Gradients]]]:
    """Return `(states, batch) -> (value, gradients)`. A repeated call on one state continues its random streams."""

    def run(
        states: Sequence[JaxState], batch: Any, layouts: tuple[ShardingLayout | None, ...]
    ) -> tuple[Any, list[Gradients]]:
        states = [
            s.with_host_facts(s.lagging, usable_layout(layout)) for s, layout in zip(states, layouts, strict=True)
        ]
        return accumulation.loss_and_gradients(loss_fn, states, batch, axis_name, weight=weight)

    call: Any = jax.jit(run, static_argnums=2) if compiled else run

    def go_on(states: Sequence[JaxState], batch: Any) -> tuple[Any, list[Gradients]]:
        batch = prepare_batch(batch, states[0].setup.plan, compiled=compiled)
        for state in states:
            state.setup.adapter.check_unchanged()
        try:
            value, gradients = call([s.resume_streams() for s in states], batch, tuple(s.layout for s in states))
        except Exception as error:
            refuse_deleted_states(states, error)
            raise
        for state, item in zip(states, gradients, strict=True):
            state.note(item.running)
        return value, gradients

    return go_on


def apply_gradients(
    states: Sequence[JaxState], grads: Sequence[Gradients], skip: Skip
) -> tuple[list[JaxState], list[StepResult]]:
    """Run compiled `update_states`. The model's own streams continue from the furthest call on each state."""
    latest = [state.resume_streams().running.streams for state in states]
    try:
        known = tuple(HostKnownInputs(state.lagging, state.layout, None) for state in states)
        made, results, lagging = _compiled_apply(list(states), list(grads), latest, skip, known)
    except Exception as error:
        refuse_deleted_states(states, error)
        raise
    after = zip(made, lagging.value, known, strict=True)
    return [state.with_host_facts(own, before.layout) for state, own, before in after], results


def _apply_states(
    states: list[JaxState], grads: list[Gradients], latest: list[Any], skip: Skip, known: Sequence[HostKnownInputs]
) -> tuple[list[JaxState], list[StepResult], StaticResult]:
    states = [s.with_host_facts(own.lagging, usable_layout(own.layout)) for s, own in zip(states, known, strict=True)]
    grads = [
        item._replace(
            running=item.running._replace(streams=jax.tree.map(_furthest_stream, item.running.streams, streams))
        )
        for item, streams in zip(grads, latest, strict=True)
    ]
    made, results = update_states(states, grads, skip)
    made = [_copy_shared_arrays(new, old) for new, old in zip(made, states, strict=True)]
    return made, results, StaticResult(tuple(state.lagging for state in made))


_compiled_apply: Any = jax.jit(_apply_states, static_argnums=(3, 4))


def _furthest_stream(one: Any, other: Any) -> Any:
    """Return the further advanced of two states of one stream."""
    return one if is_key(one) else jnp.maximum(one, other)


def refuse_deleted_states(states: Sequence[Any], error: Exception) -> None:
    """Raise after a failed call if a state's arrays no longer exist.

    Raises:
        StateError: the arrays were donated or deleted.
    """
    if any(is_donated(state) for state in states):
        raise StateError(
            "the state's arrays are gone: a compiled train_step consumes the state that it is given, also when it "
            "is interrupted (Ctrl-C) before it returns. Go on with the state that the step returned, or with "
            "polyamp.restore(polyamp.init(...), path) from the last polyamp.save; train_step(..., donate=False) "
            "keeps every state, at the price of a second copy in memory."
        ) from error


def _copy_shared_arrays(new: JaxState, old: JaxState) -> JaxState:
    """Return the new state with copies of the arrays shared with the old one, so that either can be donated."""

    def one(after: Any, before: Any) -> Any:
        return materialize(after) if after is before else after

    mine: JaxState = jax.tree.map(one, new, old)
    return mine.with_host_facts(new.lagging, new.layout)
