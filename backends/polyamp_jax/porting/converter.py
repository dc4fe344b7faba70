"""Entry module of JAX porting: `JaxConverter`, the converter of models of flax, equinox, haiku and plain functions."""

from __future__ import annotations

from typing import Final

from polyamp.porting.layouts.converter import Converter
from polyamp_jax.porting import evaluate, files, fill, inventory


class JaxConverter:
    """`Converter` and `FileConverter` for JAX."""

    in_place: Final = False

    inventory = staticmethod(inventory.inventory)
    fill = staticmethod(fill.fill)
    evaluate = staticmethod(evaluate.evaluate)
    open_file = staticmethod(files.open_file)
    write_file = staticmethod(files.write_file)
    write_model = staticmethod(files.write_model)


CONVERTER: Final[Converter] = JaxConverter()
