"""Entry module of TensorFlow porting: `TensorFlowConverter`, the converter of models with variables."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from polyamp.porting.layouts.converter import Converter, Evaluation
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy_array import Array, Lazy
from polyamp_keras.porting import evaluate, files, fill, inventory
from polyamp_tensorflow.precision.policy_module import native_model


class TensorFlowConverter:
    """`Converter` and `FileConverter` for Keras layers and models, and for other models with variables.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
        >>> [(layer.path, layer.forms[0].kind) for layer in TensorFlowConverter().inventory(model).layers]
        [('head', 'dense')]
    """

    in_place: Final = True

    open_file = staticmethod(files.open_file)
    write_file = staticmethod(files.write_file)

    def inventory(self, model: Any, batch: Any = None) -> Inventory:
        return inventory.inventory(native_model(model), batch)

    def fill(self, model: Any, leaves: Mapping[str, Lazy]) -> Any:
        fill.fill(native_model(model), leaves)
        return model

    def evaluate(
        self,
        model: Any,
        batch: Any,
        cotangents: Callable[[Sequence[Array]], Sequence[Array]],
        inputs: Container[str] = (),
    ) -> Evaluation:
        return evaluate.evaluate(native_model(model), batch, cotangents, inputs)

    def write_model(self, path: Path, model: Any) -> None:
        files.write_model(path, native_model(model))


CONVERTER: Final[Converter] = TensorFlowConverter()
