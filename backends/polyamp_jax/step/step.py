"""The step and its halves as compiled functions, and the host's side of their calls.

A `JaxState` is a pytree and a compiled function sees its arrays alone. Around such a function the host hands on which
parameters have missed an update, and how far the random streams of one state have come (S12). Called by `backend`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.errors import StateError
from polyamp.results import Gradients, LossFunction, StepResult
from polyamp.rules.decide import Skip
from polyamp_jax.arrays import entering, is_key, made_first
from polyamp_jax.step import differentiate
from polyamp_jax.step.state import JaxState
from polyamp_jax.step.update import applied


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Fixed:
    """A result of a compiled function that is known when it is traced."""

    value: Any


class Step:
    """`(state, batch) -> (state, result)`.

    Args:
        loss_fn: the loss.
        compiled: whether the step is wrapped in `jax.jit`.
        donate: whether the compiled step consumes its state.
    """

    def __init__(self, loss_fn: LossFunction, *, compiled: bool, donate: bool) -> None:
        self._loss_fn = loss_fn
        self._compiled = compiled
        self._donate = compiled and donate
        run: Callable[..., Any] = self._run
        self._call = jax.jit(run, static_argnums=2, donate_argnums=(0,) if donate else ()) if compiled else run

    def __call__(self, state: JaxState, batch: Any) -> tuple[JaxState, StepResult]:
        batch = entering(batch, state.setup.plan, compiled=self._compiled)
        try:
            state, result, lagging = self._call(state, batch, state.lagging)
        except Exception as error:
            refuse_gone([state], error)
            raise
        return state.knowing(lagging.value), result

    def lower(self, state: JaxState, batch: Any) -> Any:
        """The compiled step's program for these arguments, as `jax.jit(...).lower` gives it."""
        call: Any = self._call
        return call.lower(state, batch, state.lagging)

    def _run(self, state: JaxState, batch: Any, lagging: frozenset[int] | None) -> tuple[JaxState, StepResult, Fixed]:
        loss, aux, gradients = differentiate.accumulated(self._loss_fn, state.knowing(lagging), batch)
        (new,), (result,) = applied([state], [gradients], "all")
        if not self._donate:
            new = _own(new, state)
        return new, result._replace(loss=loss, aux=aux), Fixed(new.lagging)


def value_and_grad(loss_fn: LossFunction, *, compiled: bool) -> Callable[..., tuple[Any, list[Gradients]]]:
    """`(states, batch) -> (value, gradients)`; a second call on one state goes on where the first left the streams."""

    def run(states: Sequence[JaxState], batch: Any) -> tuple[Any, list[Gradients]]:
        return differentiate.separate(loss_fn, states, batch)

    call = jax.jit(run) if compiled else run

    def go_on(states: Sequence[JaxState], batch: Any) -> tuple[Any, list[Gradients]]:
        batch = entering(batch, states[0].setup.plan, compiled=compiled)
        try:
            value, gradients = call([state.continued() for state in states], batch)
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
        made, results, lagging = _applied(list(states), list(grads), latest, skip, tuple(s.lagging for s in states))
    except Exception as error:
        refuse_gone(states, error)
        raise
    return [state.knowing(own) for state, own in zip(made, lagging.value, strict=True)], results


def _apply(
    states: list[JaxState], grads: list[Gradients], latest: list[Any], skip: Skip, lagging: Sequence[Any]
) -> tuple[list[JaxState], list[StepResult], Fixed]:
    states = [state.knowing(own) for state, own in zip(states, lagging, strict=True)]
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
    return mine.knowing(new.lagging)
