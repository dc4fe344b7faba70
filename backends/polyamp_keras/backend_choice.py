"""The backend of polyamp for the framework that Keras runs on: the entry `keras` of `polyamp.backend_choices`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import keras

from polyamp.errors import UnsupportedError

_BACKENDS: Final = ("tensorflow", "torch", "jax")
"""Keras backends that polyamp supports. polyamp's backends have the same names."""


def backend_name() -> str:
    """Return the name of the backend that Keras runs on, which is that of polyamp for it.

    Raises:
        UnsupportedError: polyamp does not support it.
    """
    name = str(keras.config.backend())
    if name not in _BACKENDS:
        raise UnsupportedError(
            f"polyamp supports Keras on {_joined(_BACKENDS)}. Received: Keras on its {name!r} backend. Set "
            "KERAS_BACKEND to one of these before Keras is imported."
        )
    return name


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
