"""Selection of the reader of a model, by its kind. The one of Keras models is imported only for one."""

from __future__ import annotations

from typing import Any

from torch import nn

from polyamp.errors import ModelError
from polyamp_torch.precision.torch_only.keras_layers import is_keras_layer
from polyamp_torch.step.torch_only.model_readers import ModuleReader


def model_reader(model: Any) -> ModuleReader:
    """Return the reader of a model.

    Raises:
        ModelError: it is no `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"the torch backend trains an nn.Module. Received: {type(model).__name__}.")
    if is_keras_layer(model):
        from polyamp_torch.step.torch_only.keras_models import KerasReader

        return KerasReader(model)
    return ModuleReader(model)
