"""nnx models whose modules mark what they give. Loaded by `marking`."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyamp_jax import compat
from polyamp_jax.models.flax import NnxAdapter
from polyamp_jax.models.parts import Running
from polyamp_jax.observe.outputs import marking_class


@dataclasses.dataclass(frozen=True)
class MarkedNnx(NnxAdapter):
    """The same adapter, of whose models every module marks what it gives."""

    def inside(self, params: Any, running: Running) -> Any:
        model = super().inside(params, running)
        for keys, module in list(compat.nnx_modules(model)):
            if keys and callable(module):
                kind: Any = type(module)
                object.__setattr__(module, "__class__", marking_class(kind, "/".join(map(str, keys))))
        return model
