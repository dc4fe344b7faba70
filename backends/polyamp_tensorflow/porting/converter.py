"""Entry module of Keras porting: `KerasConverter`, which lists, fills, evaluates, reads and writes Keras models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from polyamp.porting.layouts.converter import Converter, Evaluation
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_tensorflow.porting import evaluate, files, fill
from polyamp_tensorflow.porting.inventory import read_keras_model
from polyamp_tensorflow.precision.policy_module import native_model

Array = np.ndarray[Any, Any]


class KerasConverter:
    """`Converter` for Keras layers and models, and for other models with variables, of which only names are known.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
        >>> [(layer.path, layer.forms[0].kind) for layer in KerasConverter().inventory(model).layers]
        [('head', 'dense')]
    """

    in_place: Final = True

    def inventory(self, model: Any, batch: Any = None) -> Inventory:
        return read_keras_model(native_model(model)).inventory

    def open_file(self, path: Path) -> Inventory:
        return files.open_file(path)

    def write_file(self, path: Path, leaves: Mapping[str, Lazy], like: Path) -> None:
        files.write_file(path, leaves, like)

    def write_model(self, path: Path, model: Any) -> None:
        files.write_model(path, native_model(model))

    def fill(self, model: Any, leaves: Mapping[str, Lazy]) -> Any:
        native = native_model(model)
        fill.fill(native, read_keras_model(native), leaves)
        return model

    def evaluate(self, model: Any, batch: Any, cotangents: Callable[[Sequence[Array]], Sequence[Array]]) -> Evaluation:
        native = native_model(model)
        return evaluate.evaluate(native, read_keras_model(native), batch, cotangents)


CONVERTER: Final[Converter] = KerasConverter()
