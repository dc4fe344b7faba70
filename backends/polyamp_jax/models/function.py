"""Adapter for a plain function with its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Final

from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.model_parts import OpaqueValue, RandomKeys, RunningState, parameter_owners
from polyamp_jax.models.submodule_path import ModulePath

NO_ATTRIBUTE: Final = object()
"""Marker returned instead of a module: a plain function has no attributes."""


@dataclasses.dataclass(frozen=True)
class FunctionAdapter:
    """Adapter for `(apply_fn, params)`.

    Calls `apply_fn(params, *args, **kwargs)`. Each random stream is a keyword argument.
    """

    apply_fn: OpaqueValue
    stream: str | None = "rng"
    pinned: frozenset[str] = frozenset()
    mutable: ClassVar[bool] = False
    module: ClassVar[type | tuple[type, ...]] = ()

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
        return self.apply_fn.value(params, *args, **{**keys, **kwargs}), running

    def view(self, params: Any, running: RunningState) -> Any:
        return NO_ATTRIBUTE

    def bound(self, engine: Any) -> Any:
        return None

    def params_of(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        return params

    def state_of(self, running: RunningState) -> Any:
        return None

    def tree(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        return self.params_of(part, route, params, running)

    def modules(self, params: Any, running: RunningState) -> Iterable[str]:
        return parameter_owners(params)

    def join(self, params: Any, running: RunningState) -> Any:
        return self.apply_fn.value, params

    def check_streams(self, names: Collection[str]) -> None:
        """Accept any name, because every stream is passed as a keyword argument."""
