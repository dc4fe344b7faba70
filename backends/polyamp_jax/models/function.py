"""Adapter for a plain function with its parameters. Loaded by `models.adapt`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Final

from polyamp_jax.models.parts import Keys, Opaque, Running, owners
from polyamp_jax.models.routes import Route
from polyamp_jax.models.scopes import Casts

NOTHING: Final = object()
"""A function has no parts."""


@dataclasses.dataclass(frozen=True)
class FunctionAdapter:
    """`(apply_fn, params)`: called as `apply_fn(params, *args, **kwargs)`; each random stream is a keyword argument."""

    apply_fn: Opaque
    stream: str | None = "rng"
    pinned: frozenset[str] = frozenset()
    mutable: ClassVar[bool] = False
    module: ClassVar[type | tuple[type, ...]] = ()

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, route: Route, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        return self.apply_fn.value(params, *args, **{**keys, **kwargs}), running

    def view(self, params: Any, running: Running) -> Any:
        return NOTHING

    def bound(self, engine: Any) -> Any:
        return None

    def params_of(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        return params

    def state_of(self, running: Running) -> Any:
        return None

    def tree(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        return self.params_of(part, route, params, running)

    def modules(self, params: Any, running: Running) -> Iterable[str]:
        return owners(params)

    def join(self, params: Any, running: Running) -> Any:
        return self.apply_fn.value, params

    def check_streams(self, names: Collection[str]) -> None:
        """Every stream is a keyword argument, so any name will do."""
