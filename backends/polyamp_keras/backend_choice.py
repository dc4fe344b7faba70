"""The backend of polyamp for the framework that Keras runs on: the entry `keras` of `polyamp.backend_choices`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import keras

from polyamp.errors import UnsupportedError

_BACKENDS: Final = ("tensorflow", "torch", "jax")
"""Keras backends that polyamp supports. polyamp's backends have the same names."""
_FIT_ONLY: Final = ("jax",)
"""Those among them on which models train by `fit` and loops of one's own alone, and not by `polyamp.init`."""


def backend_name() -> str:
    """Return the name of the polyamp backend for Keras objects in this process.

    Raises:
        UnsupportedError: Keras runs on something that polyamp does not support, or supports in `fit` alone.
    """
    name = check_keras_backend()
    if name in _FIT_ONLY:
        raise UnsupportedError(
            "polyamp.init, train_step, value_and_grad, autocast and refresh are for Keras on "
            f"{_joined([each for each in _BACKENDS if each not in _FIT_ONLY])}. Received: Keras on its {name!r} "
            "backend. There use fit or a loop of your own, with polyamp_keras.compile, guard, LossScaleOptimizer and "
            "apply_policy; or set KERAS_BACKEND=tensorflow before Keras is imported."
        )
    return name


def check_keras_backend() -> str:
    """Return the name of the Keras backend.

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
