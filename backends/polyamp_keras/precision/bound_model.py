"""The model as passed to `loss_fn`: Keras models in training mode, with outputs in the policy's dtype (S1)."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final, Self

import keras

from polyamp.errors import ModelError
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.models.layers import is_built, is_layer
from polyamp_keras.models.variables import model_variables
from polyamp_keras.precision.output_casts import LOSSES_READ, cast_output

TRAINING_MODE: Final[ContextVar[bool]] = ContextVar("training", default=True)
"""Default of `training` for calls in `loss_fn`."""


class BoundKerasModel:
    """The model as passed to `loss_fn`: in training mode by default, with outputs in the policy's dtype (S1).

    Other attributes are those of the model, such as `model.losses`. A layer among them is wrapped too, and a method
    with a `training` argument gets it. Outputs of methods that the model's class defines are also in the policy's dtype
    (S29).

    Args:
        model: the model, or a layer of it.
        plan: the resolved policy.
        parameters: the model's trainable variables by name, if known.
        whole: for a layer, the bound model that contains it.
    """

    def __init__(
        self,
        model: Any,
        plan: ResolvedPolicy,
        parameters: Mapping[str, Any] | None = None,
        whole: Self | None = None,
    ) -> None:
        self._model = model
        self._plan = plan
        self._parameters = parameters
        self._whole: Self = self if whole is None else whole

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_layer(self._model):
            kwargs.setdefault("training", TRAINING_MODE.get())
        return self._under_policy(self._model, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_model" not in vars(self):  # a copy that is being made
            raise AttributeError(name)
        value = getattr(self._model, name)
        layers_read = LOSSES_READ.get() if name == "losses" else None
        if layers_read is not None:
            layers_read.append(self._model)
        if is_layer(value):
            return self._bound_layer(value)
        if not inspect.ismethod(value):
            return value
        if not is_layer(self._model):
            return lambda *args, **kwargs: self._under_policy(value, args, kwargs)
        if "training" in inspect.signature(value).parameters:
            value = functools.partial(value, training=TRAINING_MODE.get())
        if hasattr(keras.Model, name):
            return value
        return lambda *args, **kwargs: self._under_policy(value, args, kwargs)

    def _bound_layer(self, layer: Any) -> Self:
        """Return a layer of the model, bound as the model is."""
        return type(self)(layer, self._plan, whole=self._whole)

    def _under_policy(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function under the innermost policy, and cast its results to that policy's output dtype."""
        with self._policy_region() as plan:
            return cast_output(function(*args, **kwargs), plan.output, float64=plan.float64)

    def _policy_region(self) -> AbstractContextManager[ResolvedPolicy]:
        """Return a context manager in which the layers follow the innermost policy; it yields that policy."""
        return contextlib.nullcontext(self._plan)


def bound_parameters(model: Any) -> dict[str, Any]:
    """Return the trainable variables of a bound or native model, by name (S29).

    Raises:
        ModelError: the model is not built.
    """
    known = model._parameters if isinstance(model, BoundKerasModel) else None
    if known is None:
        model = native_model(model)
        if not is_built(model):
            raise ModelError("polyamp.parameters: the model is not built, so it has no parameters yet. Call it once.")
        known = model_variables(model).parameters
    return dict(known)


def native_model(model: Any) -> Any:
    """Return the model inside a `BoundKerasModel`; any other model unchanged."""
    return model._model if isinstance(model, BoundKerasModel) else model


def root_model(model: BoundKerasModel) -> Any:
    """Return the native model of a `BoundKerasModel`; of a layer, the model that contains it."""
    return model._whole._model
