"""Adapter for a plain function with its parameters. Loaded by `models.adapt`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from polyamp_jax.models.parts import Keys, Opaque, Running, owners
from polyamp_jax.models.scopes import Casts


@dataclasses.dataclass(frozen=True)
class FunctionAdapter:
    """`(apply_fn, params)`: called as `apply_fn(params, *args, **kwargs)`; each random stream is a keyword argument."""

    apply_fn: Opaque
    stream: str | None = "rng"
    pinned: frozenset[str] = frozenset()

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        return self.apply_fn.value(params, *args, **{**keys, **kwargs}), running

    def modules(self, params: Any, running: Running) -> Iterable[str]:
        return owners(params)

    def join(self, params: Any, running: Running) -> Any:
        return self.apply_fn.value, params

    def write_back(self, model: Any, running: Running) -> None:
        """Nothing: a function holds no arrays."""

    def check_streams(self, names: Collection[str]) -> None:
        """Every stream is a keyword argument, so any name will do."""
