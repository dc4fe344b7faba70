"""The step and its halves as compiled functions, and the host's side of their calls.

A `JaxState` is a pytree and a compiled function sees its arrays alone. Around such a function the host hands on which
parameters have missed an update, and how far the random streams of one state have come (S12). Called by `backend`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyamp.errors import StateError
from polyamp.results import Gradients, LossFunction, StepResult
from polyamp.rules.decide import Skip
from polyamp.rules.weights import WeightFunction
from polyamp_jax.arrays import entering, is_key, made_first
from polyamp_jax.step import differentiate
from polyamp_jax.step.layouts import Layout, shards_of_rows, usable
from polyamp_jax.step.replicas import AxisName
from polyamp_jax.step.state import JaxState
from polyamp_jax.step.update import applied


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Fixed:
    """A result of a compiled function that is known when it is traced."""

    value: Any


class Known(NamedTuple):
    """What the host knows of a state and its batch, and a compiled step depends on.

    Attributes:
        lagging: the parameters that have missed an update.
        layout: where the state's arrays lie.
        rows: of a batch that is split into micro-batches: into how many shards each array is divided along axis 0.
    """

    lagging: frozenset[int] | None
    layout: Layout | None
    rows: tuple[int, ...] | None


class Step:
    """`(state, batch) -> (state, result)`.

    Args:
        loss_fn: the loss.
        compiled: whether the step is wrapped in `jax.jit`.
        donate: whether the compiled step consumes its state.
        axis_name: the axes of replicas, where JAX does not say which they are.
        weight: what a batch counts, or None.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        *,
        compiled: bool,
        donate: bool,
        axis_name: AxisName = None,
        weight: WeightFunction | None = None,
    ) -> None:
        self._axis_name = axis_name
        self._weight = weight
        self._loss_fn = loss_fn
        self._compiled = compiled
        self._donate = compiled and donate
        run: Callable[..., Any] = self._run
        self._call = jax.jit(run, static_argnums=2, donate_argnums=(0,) if donate else ()) if compiled else run

    def __call__(self, state: JaxState, batch: Any) -> tuple[JaxState, StepResult]:
        batch = entering(batch, state.setup.plan, compiled=self._compiled)
        try:
            known = self._known(state, batch)
            state, result, lagging = self._call(state, batch, known)
        except Exception as error:
            refuse_gone([state], error)
            raise
        return state.knowing(lagging.value, known.layout), result

    def lower(self, state: JaxState, batch: Any) -> Any:
        """The compiled step's program for these arguments, as `jax.jit(...).lower` gives it."""
        call: Any = self._call
        return call.lower(state, batch, self._known(state, batch))

    def _known(self, state: JaxState, batch: Any) -> Known:
        return Known(state.lagging, state.layout, shards_of_rows(batch) if state.recipe.accumulate_steps > 1 else None)

    def _run(self, state: JaxState, batch: Any, known: Known) -> tuple[JaxState, StepResult, Fixed]:
        state = state.knowing(known.lagging, usable(known.layout))
        loss, aux, gradients = differentiate.accumulated(
            self._loss_fn, state, batch, self._axis_name, known.rows, self._weight
        )
        (new,), (result,) = applied([state], [gradients], "all")
        if not self._donate:
            new = _own(new, state)
        return new, result._replace(loss=loss, aux=aux), Fixed(new.lagging)


def value_and_grad(
    loss_fn: LossFunction, *, compiled: bool, axis_name: AxisName = None, weight: WeightFunction | None = None
) -> Callable[..., tuple[Any, list[Gradients]]]:
    """`(states, batch) -> (value, gradients)`; a second call on one state goes on where the first left the streams."""

    def run(states: Sequence[JaxState], batch: Any, layouts: tuple[Layout | None, ...]) -> tuple[Any, list[Gradients]]:
        states = [s.knowing(s.lagging, usable(layout)) for s, layout in zip(states, layouts, strict=True)]
        return differentiate.separate(loss_fn, states, batch, axis_name, weight=weight)

    call: Any = jax.jit(run, static_argnums=2) if compiled else run

    def go_on(states: Sequence[JaxState], batch: Any) -> tuple[Any, list[Gradients]]:
        batch = entering(batch, states[0].setup.plan, compiled=compiled)
        try:
            value, gradients = call([s.continued() for s in states], batch, tuple(s.layout for s in states))
        except Exception as error:
            refuse_gone(states, error)
            raise
        for state, item in zip(states, gradients, strict=True):
            state.note(item.running)
        return value, gradients

    return go_on


def apply_gradients(
    states: Sequence[JaxState], grads: Sequence[Gradients], skip: Skip
) -> tuple[list[JaxState], list[StepResult]]:
    """`update.applied`, compiled; the model's own streams go on from the furthest call on each state."""
    latest = [state.continued().running.streams for state in states]
    try:
        known = tuple(Known(state.lagging, state.layout, None) for state in states)
        made, results, lagging = _applied(list(states), list(grads), latest, skip, known)
    except Exception as error:
        refuse_gone(states, error)
        raise
    after = zip(made, lagging.value, known, strict=True)
    return [state.knowing(own, before.layout) for state, own, before in after], results


def _apply(
    states: list[JaxState], grads: list[Gradients], latest: list[Any], skip: Skip, known: Sequence[Known]
) -> tuple[list[JaxState], list[StepResult], Fixed]:
    states = [s.knowing(own.lagging, usable(own.layout)) for s, own in zip(states, known, strict=True)]
    grads = [
        item._replace(running=item.running._replace(streams=jax.tree.map(_further, item.running.streams, streams)))
        for item, streams in zip(grads, latest, strict=True)
    ]
    made, results = applied(states, grads, skip)
    made = [_own(new, old) for new, old in zip(made, states, strict=True)]
    return made, results, Fixed(tuple(state.lagging for state in made))


_applied: Any = jax.jit(_apply, static_argnums=(3, 4))


def _further(one: Any, other: Any) -> Any:
    """Of two states of one stream the one that has drawn more."""
    return one if is_key(one) else jnp.maximum(one, other)


def refuse_gone(states: Sequence[Any], error: Exception) -> None:
    """After a call failed: say so where a state's arrays are gone.

    Raises:
        StateError: they were donated or deleted.
    """
    for leaf in jax.tree.leaves(list(states)):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
            raise StateError(
                "the state's arrays are gone: a compiled train_step consumes the state that it is given, also when it "
                "is interrupted (Ctrl-C) before it returns. Go on with the state that the step returned, or with "
                "polyamp.restore(polyamp.init(...), path) from the last polyamp.save; train_step(..., donate=False) "
                "keeps every state, at the price of a second copy in memory."
            ) from error


def _own(new: JaxState, old: JaxState) -> JaxState:
    """The new state with copies of what it would share with the old one, which may be donated apart from it."""

    def one(after: Any, before: Any) -> Any:
        return made_first(after) if after is before else after

    mine: JaxState = jax.tree.map(one, new, old)
    return mine.knowing(new.lagging, new.layout)
