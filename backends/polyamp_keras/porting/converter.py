"""Entry module of Keras porting: `KerasConverter`, the converter of Keras models on every Keras backend."""

from __future__ import annotations

from typing import Any, Final

from polyamp.porting.layouts.converter import Converter
from polyamp.porting.states.optimizer_layout import NativeTraining
from polyamp_keras.porting import evaluate, files, fill, inventory


class KerasConverter:
    """`Converter` and `FileConverter` for Keras layers and models, also bound to a policy; on TensorFlow
    for other models with variables too.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
        >>> [(layer.path, layer.forms[0].kind) for layer in KerasConverter().inventory(model).layers]
        [('head', 'dense')]
    """

    in_place: Final = True

    inventory = staticmethod(inventory.inventory)
    fill = staticmethod(fill.fill)
    evaluate = staticmethod(evaluate.evaluate)
    open_file = staticmethod(files.open_file)
    write_file = staticmethod(files.write_file)
    write_model = staticmethod(files.write_model)

    def native(self, model: Any, optimizer: Any, scaler: Any) -> NativeTraining:
        from polyamp_keras.porting.native_training import KerasTraining

        return KerasTraining.of(model, optimizer, scaler)


CONVERTER: Final[Converter] = KerasConverter()
