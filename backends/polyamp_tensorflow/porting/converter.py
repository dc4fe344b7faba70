"""Entry module of TensorFlow porting: `TensorFlowConverter`, the converter of Keras models."""

from __future__ import annotations

from typing import Final

from polyamp.porting.layouts.converter import Converter
from polyamp_tensorflow.porting import evaluate, files, fill, inventory


class TensorFlowConverter:
    """`Converter` and `FileConverter` for Keras layers and models, and for other models with variables.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
        >>> [(layer.path, layer.forms[0].kind) for layer in TensorFlowConverter().inventory(model).layers]
        [('head', 'dense')]
    """

    in_place: Final = True

    inventory = staticmethod(inventory.inventory)
    fill = staticmethod(fill.fill)
    evaluate = staticmethod(evaluate.evaluate)
    open_file = staticmethod(files.open_file)
    write_file = staticmethod(files.write_file)
    write_model = staticmethod(files.write_model)


CONVERTER: Final[Converter] = TensorFlowConverter()
