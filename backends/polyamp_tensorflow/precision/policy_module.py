"""The model as passed to `loss_fn`, with the policies that `loss_fn` puts around its calls (S1, S3)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final

import tensorflow as tf

from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.arrays import cast, native_variable
from polyamp_keras.models.layers import is_layer
from polyamp_keras.precision import bound_model
from polyamp_keras.precision.bound_model import BoundKerasModel
from polyamp_keras.precision.output_casts import cast_output

TRAINING_MODE: Final = bound_model.TRAINING_MODE
"""Default of `training` for calls in `loss_fn`."""
PolicyRegion = Callable[[Any, ResolvedPolicy], AbstractContextManager[ResolvedPolicy]]
"""A policy that `loss_fn` applies: maps a model and its plan to a context manager in which its layers follow it."""
POLICY_REGIONS: Final[ContextVar[tuple[PolicyRegion, ...]]] = ContextVar("regions", default=())
"""Active policy regions, the innermost last."""

native_model: Final[Callable[[Any], Any]] = bound_model.native_model
root_model: Final[Callable[[BoundKerasModel], Any]] = bound_model.root_model


class PolicyModule(BoundKerasModel):
    """The model as passed to `loss_fn` (`BoundKerasModel`), which may be a `tf.Module` too.

    While casts replace the variables of a `tf.Module`, it does not find its `parameters` itself.
    """

    def __init__(
        self,
        model: Any,
        plan: ResolvedPolicy,
        parameters: Mapping[str, Any] | None = None,
        whole: PolicyModule | None = None,
    ) -> None:
        super().__init__(model, plan, parameters, whole)
        self._around = len(POLICY_REGIONS.get())  # regions around a step have no effect in it (S3)

    def _under_policy(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function under the innermost policy, and cast its results to that policy's output dtype."""
        with self._policy_region() as plan:
            if not is_layer(self._model):
                args, kwargs = cast((args, kwargs), plan.compute, float64=plan.float64)
            return cast_output(function(*args, **kwargs), plan.output, float64=plan.float64)

    def _policy_region(self) -> AbstractContextManager[ResolvedPolicy]:
        """Return a context manager in which the model follows the innermost policy; it yields that policy."""
        regions = POLICY_REGIONS.get()[self._whole._around :]
        return regions[-1](root_model(self), self._plan) if regions else contextlib.nullcontext(self._plan)


def module_parameters(model: Any) -> dict[str, Any]:
    """Return the trainable variables of a model or `PolicyModule`, as tensors by name (S29).

    Raises:
        ModelError: the model is not built.
    """
    found = bound_model.bound_parameters(model)
    return {name: tf.convert_to_tensor(native_variable(variable)) for name, variable in found.items()}
