"""A model taken apart: parameters, what runs with the step, and the adapter that calls the model and joins it again.

Each library's adapter has a file of its own in this room; `adapt` chooses among them. Called by all of the backend.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from polyamp_jax.arrays import path_name
from polyamp_jax.models.routes import Route
from polyamp_jax.models.scopes import Casts

Keys = Mapping[str, Any]
"""Stream name -> PRNG key."""


class Running(NamedTuple):
    """What a forward pass changes in a model.

    Attributes:
        statistics: running statistics and other buffers; dropped when a step is skipped (S12).
        streams: the random-number state that the model keeps itself (nnx); it moves on at skipped steps too, or a
            dropout mask that overflows would come back for ever.
        draws: passes made since the last update was tried, int32 scalar; the keys given to `init` are folded with it,
            so that every micro-batch and every call of `value_and_grad` has masks of its own (S12).
        written: the parameters that passes since the last update wrote, path -> array, or None if there are none; a
            state holds none, its parameters are what was written (S12).
    """

    statistics: Any
    streams: Any
    draws: Any = np.int32(0)
    written: Mapping[str, Any] | None = None


class Collected(NamedTuple):
    """What a call left in a model that is a value, where `Running` has the statistics.

    Attributes:
        kept: the statistics, which run with the step.
        more: what the call collected beside them (linen's `sow`), for `loss_fn` to read until the next call.
    """

    kept: Any
    more: Any


class Adapter(Protocol):
    """One library's way of calling a model; static, hashable, without arrays."""

    @property
    def stream(self) -> str | None:
        """Name of the random stream when `rngs` is a bare seed or key; None where the streams must be named."""

    @property
    def pinned(self) -> frozenset[str]:
        """Paths of modules that the library lets run only in the dtype of their parameters' masters."""

    @property
    def module(self) -> type | tuple[type, ...]:
        """The library's class of modules; nothing where a model has none."""

    @property
    def mutable(self) -> bool:
        """Whether the library's models change in place."""

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, route: Route, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        """The output of what `route` leads to, the model itself or a part of it, and what the call changed: `written`
        holds the parameters that it wrote, in the dtypes of `params`."""

    def view(self, params: Any, running: Running) -> Any:
        """What the attributes of the model are read from: parameters and running state are those given."""

    def bound(self, engine: Any) -> Any:
        """The model that `loss_fn` gets, where that is a module of the library's own; else None."""

    def params_of(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        """The parameters of a part of the model, out of all of them: of a view's module at the end of `route`."""

    def state_of(self, running: Running) -> Any:
        """What the library calls the state of a model; None where it has no such thing."""

    def tree(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        """The same as the pytree that the library's own functions look through."""

    def modules(self, params: Any, running: Running) -> Iterable[str]:
        """Paths of the model's modules, as far as they are known before it runs: of linen and haiku those that own
        parameters."""

    def join(self, params: Any, running: Running) -> Any:
        """The model in its native form."""

    def check_streams(self, names: Collection[str]) -> None:
        """Refuse random streams that the library has no use for. Raises `UnsupportedError`."""


class Parts(NamedTuple):
    """A model taken apart."""

    adapter: Adapter
    params: Any
    running: Running


class Opaque:
    """A static value that compares by equality if it can be hashed and by identity if not."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._hash: int | None = hash(value)
        except TypeError:
            self._hash = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Opaque):
            return NotImplemented
        if self.value is other.value:
            return True
        return self._hash is not None and self._hash == other._hash and bool(self.value == other.value)

    def __hash__(self) -> int:
        return id(self.value) if self._hash is None else self._hash


def module_paths(parts: Parts) -> frozenset[str]:
    """The path of every module of a model, those around them and the model's own, "", included."""
    segments = [path.split("/") for path in parts.adapter.modules(parts.params, parts.running)]
    return frozenset({"", *("/".join(some[: n + 1]) for some in segments for n in range(len(some)))})


def owners(params: Any) -> list[str]:
    """Paths of the modules that own parameters."""
    return [path_name(keys).rpartition("/")[0] for keys, _ in jax.tree_util.tree_leaves_with_path(params)]


def inside(params: Any, keys: Iterable[Any]) -> Any:
    """The subtree of nested mappings at some keys; an empty one where a module has no parameters."""
    for key in keys:
        params = params.get(key, {})
    return params
