"""The model as passed to `loss_fn`, and casts of outputs to the policy's dtype (S1)."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final

import keras
import tensorflow as tf

from polyamp.errors import ModelError
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.arrays import cast, native_variable
from polyamp_keras.models.layers import is_built, is_layer
from polyamp_keras.models.variables import model_variables
from polyamp_keras.precision.output_casts import LOSSES_READ, cast_output

TRAINING_MODE: Final[ContextVar[bool]] = ContextVar("training", default=True)
"""Default of `training` for calls in `loss_fn`."""
PolicyRegion = Callable[[Any, ResolvedPolicy], AbstractContextManager[ResolvedPolicy]]
"""A policy that `loss_fn` applies: maps a model and its plan to a context manager in which its layers follow it."""
POLICY_REGIONS: Final[ContextVar[tuple[PolicyRegion, ...]]] = ContextVar("regions", default=())
"""Active policy regions, the innermost last."""


class PolicyModule:
    """The model as passed to `loss_fn`: in training mode by default, with outputs in the policy's dtype (S1).

    Other attributes are those of the model, such as `model.losses`. A layer among them is wrapped too, and a method
    with a `training` argument gets it. Outputs of methods that the model's class defines are also in the policy's dtype
    (S29).

    Args:
        model: the model, or a layer of it.
        plan: the resolved policy.
        parameters: the model's trainable variables by name, if known. While casts replace the variables of a
            `tf.Module`, it does not find them itself.
        whole: for a layer, the `PolicyModule` of its model.
    """

    def __init__(
        self,
        model: Any,
        plan: ResolvedPolicy,
        parameters: Mapping[str, Any] | None = None,
        whole: PolicyModule | None = None,
    ) -> None:
        self._model = model
        self._plan = plan
        self._parameters = parameters
        self._whole: PolicyModule = self if whole is None else whole
        self._around = len(POLICY_REGIONS.get())  # regions around a step have no effect in it (S3)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_layer(self._model):
            kwargs.setdefault("training", TRAINING_MODE.get())
        return self._under_policy(self._model, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        layers_read = LOSSES_READ.get() if name == "losses" else None
        if layers_read is not None:
            layers_read.append(self._model)
        if is_layer(value):
            return PolicyModule(value, self._plan, whole=self._whole)
        if not inspect.ismethod(value):
            return value
        if not is_layer(self._model):
            return lambda *args, **kwargs: self._under_policy(value, args, kwargs)
        if "training" in inspect.signature(value).parameters:
            value = functools.partial(value, training=TRAINING_MODE.get())
        if hasattr(keras.Model, name):
            return value
        return lambda *args, **kwargs: self._under_policy(value, args, kwargs)

    def _under_policy(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function under the innermost policy, and cast its results to that policy's output dtype."""
        whole = self._whole
        regions = POLICY_REGIONS.get()[whole._around :]
        with regions[-1](whole._model, self._plan) if regions else contextlib.nullcontext(self._plan) as plan:
            if not is_layer(self._model):
                args, kwargs = cast((args, kwargs), plan.compute, float64=plan.float64)
            return cast_output(function(*args, **kwargs), plan.output, float64=plan.float64)


def module_parameters(model: Any) -> dict[str, Any]:
    """Return the trainable variables of a model or `PolicyModule`, as tensors by name (S29).

    Raises:
        ModelError: the model is not built.
    """
    known = model._parameters if isinstance(model, PolicyModule) else None
    if known is None:
        model = native_model(model)
        if not is_built(model):
            raise ModelError("polyamp.parameters: the model is not built, so it has no parameters yet. Call it once.")
        known = model_variables(model).parameters
    return {name: tf.convert_to_tensor(native_variable(variable)) for name, variable in known.items()}


def native_model(model: Any) -> Any:
    """Return the model inside a `PolicyModule`; any other model unchanged."""
    return model._model if isinstance(model, PolicyModule) else model


def root_model(model: PolicyModule) -> Any:
    """Return the native model of a `PolicyModule`; of a layer, the model that contains it."""
    return model._whole._model
