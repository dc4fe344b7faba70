"""Copies of Keras models."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import keras

from polyamp_keras.models.layers import is_container


def copy_model(model: Any) -> Any:
    """Return a copy of a Keras model, or of another model; its variables may have other values."""
    if isinstance(model, keras.Model) and is_container(model):
        return keras.models.clone_model(model)  # copies layers of classes that are not registered too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Keras's own copy, through a file in memory
        return copy.deepcopy(model)
