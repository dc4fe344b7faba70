"""Adapter of plain functions with their parameters."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from polyamp_jax.models.adapter import ModelAdapter, ModelParts, OpaqueValue
from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.module_path import ModulePath
from polyamp_jax.models.module_proxy import NO_ATTRIBUTE
from polyamp_jax.models.running_state import ModelInputs, RunningState


@dataclasses.dataclass(frozen=True)
class FunctionAdapter(ModelAdapter):
    """Adapter of `(apply_fn, params)`.

    Calls `apply_fn(params, *args, **kwargs)`. Each random stream is a keyword argument.
    """

    apply_fn: OpaqueValue
    stream: ClassVar[str | None] = "rng"

    def call(self, inputs: ModelInputs, casts: CallCasts, route: ModulePath) -> tuple[Any, RunningState]:
        output = self.apply_fn.value(inputs.params, *inputs.args, **{**inputs.keys, **inputs.kwargs})
        return output, inputs.running

    def view(self, params: Any, running: RunningState) -> Any:
        return NO_ATTRIBUTE

    def join(self, params: Any, running: RunningState) -> Any:
        return self.apply_fn.value, params


def split_model(model: Any) -> ModelParts:
    """Split a function with its parameters into parts."""
    apply_fn, params = model
    return ModelParts(FunctionAdapter(OpaqueValue(apply_fn)), params, RunningState((), ()))
