"""Observer of flax nnx models: their dropout, copies and float64. The step hooks the calls of their modules itself."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import jax
from flax import nnx

from polyamp.errors import ModelError
from polyamp.parity.trace.observer import DropoutCount
from polyamp_jax import compat
from polyamp_jax.observe.jax_only.library_observer import (
    LibraryObserver,
    float64_leaf,
    force_deterministic,
    identity_call,
    replace_attention,
    replace_attribute,
    set_float64,
)


class NnxObserver(LibraryObserver):
    """Observer of nnx models, which are mutable objects."""

    def disable_dropout(self, stack: contextlib.ExitStack, count: DropoutCount) -> None:
        attention = nnx.MultiHeadAttention
        replace_attribute(stack, nnx.Dropout, "__call__", identity_call("rate", "deterministic", count))
        replace_attribute(stack, attention, "__call__", force_deterministic(attention.__call__, count))
        replace_attention(stack, ("flax.nnx", "flax.nnx.nn.attention"), count)

    def copy_model(self, model: Any, *, wide: bool) -> Any:
        if not wide:
            try:
                return nnx.clone(model)
            except Exception as error:
                raise ModelError(f"the nnx model cannot be copied by nnx.clone, which says: {error}") from error
        graphdef, state = nnx.split(model)
        made = nnx.merge(graphdef, jax.tree.map(float64_leaf, state))
        for _, module in compat.walk_nnx_modules(made):
            set_float64(module)
        return made


OBSERVER: Final = NnxObserver()
