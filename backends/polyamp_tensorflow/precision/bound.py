"""The model as `loss_fn` sees it, and outputs in the policy's dtype (S1).

Called by the step, and by whatever gives a layer's or a model's result another dtype.
"""

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
from polyamp.rules.plan import Plan
from polyamp_tensorflow.arrays import cast, dtype_name, is_floating, raw
from polyamp_tensorflow.compat import keep_mask
from polyamp_tensorflow.models.layers import is_built, is_layer
from polyamp_tensorflow.models.variables import variables_of

ASKED: Final[ContextVar[list[Any] | None]] = ContextVar("asked", default=None)
"""The layers of whose own losses `loss_fn` has asked so far; None outside of a step. See `additions`."""
TRAINING: Final[ContextVar[bool]] = ContextVar("training", default=True)
"""What `training` is in `loss_fn` where a call does not say."""
Region = Callable[[Any, Plan], AbstractContextManager[Plan]]
"""A policy that `loss_fn` opens: of a model and its own plan a block in which its layers follow that policy."""
REGIONS: Final[ContextVar[tuple[Region, ...]]] = ContextVar("regions", default=())
"""Those that are open, the innermost last."""
_UNROUNDED: Final = "_polyamp_unrounded"  # as Keras keeps logits on a softmax's result


class BoundModel:
    """The model as `loss_fn` sees it: in training mode unless told otherwise, outputs in the policy's dtype (S1).

    Attributes that it does not have are the model's own, such as `model.losses`. A layer among them is bound likewise,
    and a method that takes `training` gets it; of one that the model's class defines the output is in the policy's
    dtype too (S29).

    Args:
        model: the model, or a layer of it.
        plan: the policy.
        parameters: the model's trainable variables by name, where they are known: while casts stand in the places of a
            `tf.Module`'s variables, it finds none itself.
        whole: of a layer the bound model that it is a part of.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        parameters: Mapping[str, Any] | None = None,
        whole: BoundModel | None = None,
    ) -> None:
        self._model = model
        self._plan = plan
        self._parameters = parameters
        self._whole: BoundModel = self if whole is None else whole
        self._around = len(REGIONS.get())  # what stands around a step touches nothing in it (S3)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_layer(self._model):
            kwargs.setdefault("training", TRAINING.get())
        return self._under_policy(self._model, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        asked = ASKED.get() if name == "losses" else None
        if asked is not None:
            asked.append(self._model)
        if is_layer(value):
            return BoundModel(value, self._plan, whole=self._whole)
        if not inspect.ismethod(value):
            return value
        if not is_layer(self._model):
            return lambda *args, **kwargs: self._under_policy(value, args, kwargs)
        if "training" in inspect.signature(value).parameters:
            value = functools.partial(value, training=TRAINING.get())
        if hasattr(keras.Model, name):
            return value
        return lambda *args, **kwargs: self._under_policy(value, args, kwargs)

    def _under_policy(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call under the innermost policy, its results in that one's output dtype."""
        whole = self._whole
        inside = REGIONS.get()[whole._around :]
        with inside[-1](whole._model, self._plan) if inside else contextlib.nullcontext(self._plan) as plan:
            if not is_layer(self._model):
                args, kwargs = cast((args, kwargs), plan.compute, float64=plan.float64)
            return as_output(function(*args, **kwargs), plan.output, float64=plan.float64)


def parameters_of(model: Any) -> dict[str, Any]:
    """The trainable variables of a model, bound or native, as tensors by name (S29).

    Raises:
        ModelError: it is not built.
    """
    known = model._parameters if isinstance(model, BoundModel) else None
    if known is None:
        model = native_of(model)
        if not is_built(model):
            raise ModelError("polyamp.parameters: the model is not built, so it has no parameters yet. Call it once.")
        known = variables_of(model).parameters
    return {name: tf.convert_to_tensor(raw(variable)) for name, variable in known.items()}


def native_of(model: Any) -> Any:
    """The model that a `BoundModel` is made of; another one as it is."""
    return model._model if isinstance(model, BoundModel) else model


def whole_of(model: BoundModel) -> Any:
    """The native model that a bound one is, or is a part of."""
    return model._whole._model


def as_output(tree: Any, dtype: str, *, float64: bool) -> Any:
    """A model's output in the dtype that it is to have (S1), taken from the unrounded tensor where `in_dtype` rounded
    one."""

    def one(leaf: Any) -> Any:
        wide = getattr(leaf, _UNROUNDED, leaf)
        return keep_mask(leaf, cast(wide, dtype, float64=float64))

    return keras.tree.map_structure(one, tree)


def is_rounded(leaf: Any) -> bool:
    """True for a tensor that `in_dtype` made of a wider one, which it remembers."""
    return hasattr(leaf, _UNROUNDED)


def in_dtype(tree: Any, dtype: str) -> Any:
    """The tree's floating tensors in `dtype`; one that loses digits remembers the tensor it was made from."""

    def one(leaf: Any) -> Any:
        if not tf.is_tensor(leaf) or not is_floating(leaf) or dtype_name(leaf) in (dtype, "float64"):
            return leaf
        narrow = keep_mask(leaf, tf.cast(leaf, dtype))
        if isinstance(narrow, tf.Tensor) and narrow.dtype.size < leaf.dtype.size:
            setattr(narrow, _UNROUNDED, leaf)
        return narrow

    return keras.tree.map_structure(one, tree)
