"""Float32 evaluation of a model: Keras's (`polyamp_keras.porting.evaluate`), unless TensorFlow's kernels forbid it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Sequence
from typing import Any, Final

from polyamp.errors import UnsupportedError
from polyamp.porting.layouts.converter import Evaluation
from polyamp_keras.porting import evaluate as keras_evaluate
from polyamp_keras.porting.inventory import KerasInventory, read_keras_model
from polyamp_tensorflow.arrays import Array
from polyamp_tensorflow.precision.policy_module import native_model

_CONVOLUTIONS: Final = {"conv", "conv_transpose"}


def evaluate(
    model: Any, batch: Any, cotangents: Callable[[Sequence[Array]], Sequence[Array]], inputs: Container[str] = ()
) -> Evaluation:
    """Return outputs, gradients and the outputs of layers (see `Converter.evaluate`).

    Raises:
        UnsupportedError: the model has convolutions and torch is loaded; their gradient could end the process.
    """
    model = native_model(model)
    refuse_with_torch(read_keras_model(model), "check", "port without check=")
    return keras_evaluate.evaluate(model, batch, cotangents, inputs)


def refuse_with_torch(found: KerasInventory, call: str, instead: str) -> None:
    """Raise if the model has convolutions and torch is loaded in the process.

    TensorFlow's oneDNN kernels for the gradient of a convolution abort once torch has run its own in the process. This
    was seen with TensorFlow 2.21 and torch 2.13 on the CPU. Without these kernels there is no problem.

    Args:
        found: the model.
        call: the call that would run it.
        instead: the alternative to the environment variable.
    """
    kinds = {layer.forms[0].kind for layer in found.inventory.layers}
    if "torch" not in sys.modules or os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0" or not kinds & _CONVOLUTIONS:
        return
    raise UnsupportedError(
        f"{call}: the gradient of TensorFlow's convolutions can end the process once torch runs in it too: their "
        "oneDNN libraries do not agree. Set the environment variable TF_ENABLE_ONEDNN_OPTS=0 before the program "
        f"starts; or {instead}."
    )
