"""Adapter of nnx models whose modules tag their outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyamp_jax import compat
from polyamp_jax.models.flax import NnxAdapter
from polyamp_jax.models.model_parts import RunningState
from polyamp_jax.observe.jax_only.tagged_calls import tagging_class


@dataclasses.dataclass(frozen=True)
class NnxTagAdapter(NnxAdapter):
    """`NnxAdapter` whose models tag the output of every module."""

    def inside(self, params: Any, running: RunningState) -> Any:
        model = super().inside(params, running)
        for keys, module in list(compat.walk_nnx_modules(model)):
            if keys and callable(module):
                kind: Any = type(module)
                object.__setattr__(module, "__class__", tagging_class(kind, "/".join(map(str, keys))))
        return model
