"""Model state during one pass through `loss_fn`, updated by each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from polyamp_jax.arrays import conform_tree, is_same_tree
from polyamp_jax.models.module_path import ModulePath
from polyamp_jax.models.parameter_writes import NamedLeaves
from polyamp_jax.models.running_state import CollectedState, RunningState

RUNNING_STATE_NAME: Final = "the model's running state"

OutputCast = Callable[[Any], Any]
"""Casts the floating leaves of a pytree to the policy's output dtype."""


class ModelPass:
    """State of a model during one pass through `loss_fn`. Every call of an immutable model returns the next one.

    Args:
        adapter: the adapter of the model's library.
        params: the parameters that the model computes with.
        masters: the master weights, which may be the same object.
        running: the model's running state.
    """

    def __init__(self, adapter: Any, params: Any, masters: Any, running: RunningState) -> None:
        self._adapter = adapter
        self._params = params
        self._masters = masters
        self._running = running
        self._collected: Any = None
        self._view: Any = None

    @property
    def masters(self) -> Any:
        """Master weights after the calls so far."""
        return self._masters

    @property
    def running(self) -> RunningState:
        """Running state at the end of the pass, with the same structure as before it.

        Raises:
            TraceError: the pass made a change that the state cannot carry.
        """
        return self._running

    def view(self) -> Any:
        """Return the object that the model's attributes are read from."""
        if self._view is None:
            running = self._running
            if self._collected:
                running = running._replace(statistics={**running.statistics, **self._collected})
            self._view = (self._adapter.view(self._params, running),)
        return self._view[0]

    def inputs(self) -> tuple[Any, RunningState]:
        """Return the parameters and the running state for the next call."""
        return self._params, self._running

    def conform_state(
        self, after: RunningState, before: RunningState, cast_output: OutputCast
    ) -> tuple[RunningState, bool]:
        """Return the running state after a call, in its own dtypes, and whether it changed.

        Collected values are cast with `cast_output`, as the output is.
        """
        collected = None
        if isinstance(after.statistics, CollectedState):
            collected = cast_output(after.statistics.collected)
            after = after._replace(statistics=after.statistics.state)
        after = conform_tree(after, before, what=RUNNING_STATE_NAME)
        changed = after._replace(statistics=CollectedState(after.statistics, collected))
        return changed, not is_same_tree(after, before)

    def advance(self, after: RunningState, route: ModulePath, written: NamedLeaves | None = None) -> None:
        """Store the result of `conform_state` and the call's parameter writes, given as masters, for the next call."""
        assert not written  # an immutable model cannot write to parameters
        self._collected = after.statistics.collected
        self._running = after._replace(statistics=after.statistics.state)
        self._view = None

    def compute_part(self, route: ModulePath) -> Any:
        """Return the object at `route`, with the parameters that a mutable model computes with."""
        raise NotImplementedError  # passes of mutable models define it, and no other is asked
