"""Parts of a model (parameters, running state, adapter) and the protocol of the adapters.

An adapter calls the model and rebuilds it from its parts. Each library's adapter is in a separate file of this
package; `adapt` selects one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from polyamp_jax.arrays import path_name
from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.submodule_path import ModulePath

RandomKeys = Mapping[str, Any]
"""Stream name -> PRNG key."""


class RunningState(NamedTuple):
    """Values of a model that a forward pass changes.

    Attributes:
        statistics: running statistics and other buffers; dropped when a step is skipped (S12).
        streams: the random-number state stored in the model (nnx). It advances at skipped steps too; otherwise a
            dropout mask that overflows would be drawn again at every step.
        draws: number of passes since the last attempted update, int32 scalar. The keys given to `init` are folded with
            it, so that every micro-batch and every call of `value_and_grad` draws different masks (S12).
        written: the parameters written by passes since the last update, path -> array, or None if there are none.
            Always None in a state, whose parameters already include the writes (S12).
    """

    statistics: Any
    streams: Any
    draws: Any = np.int32(0)
    written: Mapping[str, Any] | None = None


class CollectedState(NamedTuple):
    """Result of a call of an immutable model, in place of `RunningState.statistics`.

    Attributes:
        kept: the statistics, which are part of the running state.
        more: values that the call collected (linen's `sow`), for `loss_fn` to read until the next call.
    """

    kept: Any
    more: Any


class ModelAdapter(Protocol):
    """Adapter that calls the models of one library. Static and hashable, without arrays."""

    @property
    def stream(self) -> str | None:
        """Name of the random stream if `rngs` is a bare seed or key; None if the streams must be named."""

    @property
    def pinned(self) -> frozenset[str]:
        """Paths of modules that the library can run only in the dtype of their master parameters."""

    @property
    def module(self) -> type | tuple[type, ...]:
        """Module class or classes of the library; empty if its models have no modules."""

    @property
    def mutable(self) -> bool:
        """Whether the library's models change in place."""

    def call(
        self,
        params: Any,
        running: RunningState,
        keys: RandomKeys,
        casts: CallCasts,
        route: ModulePath,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, RunningState]:
        """Call the model or the part at `route`, and return its output and the changed running state.

        `written` contains the parameters that the call wrote, in the dtypes of `params`.
        """

    def view(self, params: Any, running: RunningState) -> Any:
        """Return the object that attributes are read from, with the given parameters and running state."""

    def bound(self, engine: Any) -> Any:
        """Return the model for `loss_fn` if it is a module of the library, else None."""

    def params_of(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        """Return the parameters of `part`, the view's module at `route`, selected from all parameters."""

    def state_of(self, running: RunningState) -> Any:
        """Return the model's state as the library defines it, or None if the library has no such state."""

    def tree(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        """Return the parameters of `part` as the pytree that the library's own functions traverse."""

    def modules(self, params: Any, running: RunningState) -> Iterable[str]:
        """Return the paths of the modules known before the model runs. For linen and haiku: those with parameters."""

    def join(self, params: Any, running: RunningState) -> Any:
        """Return the model in its native form."""

    def check_streams(self, names: Collection[str]) -> None:
        """Reject random streams that the library cannot use. Raises `UnsupportedError`."""


class ModelParts(NamedTuple):
    """Adapter, parameters and running state of a model."""

    adapter: ModelAdapter
    params: Any
    running: RunningState


class OpaqueValue:
    """Static value that compares by equality if it is hashable, and by identity otherwise."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._hash: int | None = hash(value)
        except TypeError:
            self._hash = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpaqueValue):
            return NotImplemented
        if self.value is other.value:
            return True
        return self._hash is not None and self._hash == other._hash and bool(self.value == other.value)

    def __hash__(self) -> int:
        return id(self.value) if self._hash is None else self._hash


def module_paths(parts: ModelParts) -> frozenset[str]:
    """Return the path of every module of a model, including all parent paths and the root path ""."""
    segments = [path.split("/") for path in parts.adapter.modules(parts.params, parts.running)]
    return frozenset({"", *("/".join(some[: n + 1]) for some in segments for n in range(len(some)))})


def parameter_owners(params: Any) -> list[str]:
    """Return the paths of the modules that own parameters."""
    return [path_name(keys).rpartition("/")[0] for keys, _ in jax.tree_util.tree_leaves_with_path(params)]


def subtree_at(params: Any, keys: Iterable[Any]) -> Any:
    """Return the subtree of nested mappings at `keys`; empty if the module has no parameters."""
    for key in keys:
        params = params.get(key, {})
    return params
