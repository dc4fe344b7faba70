"""Keras models on torch among modules, without an import of Keras: each Keras layer is an `nn.Module` there."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def is_keras_layer(model: Any) -> bool:
    """Return whether an object is a Keras layer or model. Without Keras in the process nothing is."""
    return isinstance(model, getattr(sys.modules.get("keras"), "Layer", ()))


def is_keras_model(model: Any) -> bool:
    """Return whether an object is a Keras layer or model, or one bound to a policy."""
    bound = getattr(sys.modules.get("polyamp_torch.precision.torch_only.keras_policy_module"), "KerasPolicyModule", ())
    return is_keras_layer(model) or isinstance(model, bound)


def is_keras_optimizer(optimizer: Any) -> bool:
    """Return whether an object is an optimizer of Keras."""
    optimizers = getattr(sys.modules.get("keras"), "optimizers", None)
    return isinstance(optimizer, getattr(optimizers, "Optimizer", ()))


def has_keras_layer(model: nn.Module) -> bool:
    """Return whether a module is a Keras layer, or has one inside."""
    return any(map(is_keras_layer, model.modules()))
