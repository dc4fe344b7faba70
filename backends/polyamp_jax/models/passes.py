"""The model of one pass through `loss_fn`, as the calls so far have left it. Used by the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import jax

from polyamp_jax.arrays import conform
from polyamp_jax.models.parameter_writes import Leaves
from polyamp_jax.models.parts import Adapter, Collected, Running
from polyamp_jax.models.routes import Route

WHAT: Final = "the model's running state"

Outward = Callable[[Any], Any]
"""Casts the floating leaves of a pytree to the policy's output dtype."""


class Pass(Protocol):
    """The model of one pass."""

    @property
    def masters(self) -> Any:
        """The master weights, as the calls so far have left them."""

    @property
    def running(self) -> Running:
        """The running state at the end of the pass, with the structure that it had before.

        Raises:
            TraceError: the pass changed what cannot be kept.
        """

    def view(self) -> Any:
        """What the model's attributes are read from."""

    def inputs(self) -> tuple[Any, Running]:
        """Parameters and running state for the next call."""

    def moved(self, after: Running, before: Running, outward: Outward) -> tuple[Running, bool]:
        """What a call made of the running state, in its dtypes, and whether it changed; what it collected is cast
        `outward`, as its output is."""

    def take(self, after: Running, route: Route, written: Leaves | None = None) -> None:
        """Go on with what `moved` gave, and with what the call wrote to parameters, as masters."""

    def computed(self, route: Route) -> Any:
        """What a route leads to, around the parameters that the model computes with."""


class ValuePass:
    """The pass of a model that is a value: every call gives the next running state.

    Args:
        adapter: of the model's library.
        params: what the model computes with.
        masters: the master weights, which may be the same.
        running: its running state.
    """

    def __init__(self, adapter: Adapter, params: Any, masters: Any, running: Running) -> None:
        self._adapter = adapter
        self._params = params
        self.masters = masters
        self._running = running
        self._more: Any = None
        self._view: Any = None

    @property
    def running(self) -> Running:
        return self._running

    def view(self) -> Any:
        if self._view is None:
            running = self._running
            if self._more:
                running = running._replace(statistics={**running.statistics, **self._more})
            self._view = (self._adapter.view(self._params, running),)
        return self._view[0]

    def inputs(self) -> tuple[Any, Running]:
        return self._params, self._running

    def moved(self, after: Running, before: Running, outward: Outward) -> tuple[Running, bool]:
        more = None
        if isinstance(after.statistics, Collected):
            more = outward(after.statistics.more)
            after = after._replace(statistics=after.statistics.kept)
        after = conform(after, before, what=WHAT)
        leaves = zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
        return after._replace(statistics=Collected(after.statistics, more)), any(a is not b for a, b in leaves)

    def take(self, after: Running, route: Route, written: Leaves | None = None) -> None:
        assert not written  # a model that is a value has nowhere to write to
        self._more = after.statistics.more
        self._running = after._replace(statistics=after.statistics.kept)
        self._view = None

    def computed(self, route: Route) -> Any:
        return route.walked(self.view())
