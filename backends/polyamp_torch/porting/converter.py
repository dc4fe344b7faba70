"""Entry module of torch porting: `TorchConverter`, the converter of torch models."""

from __future__ import annotations

from typing import Final

from polyamp.porting.layouts.converter import Converter
from polyamp_torch.porting import evaluate, files, fill, inventory


class TorchConverter:
    """`Converter` and `FileConverter` for PyTorch. Accepts an `nn.Module`, also in a wrapper or bound by polyamp."""

    in_place: Final = True

    inventory = staticmethod(inventory.inventory)
    fill = staticmethod(fill.fill)
    evaluate = staticmethod(evaluate.evaluate)
    open_file = staticmethod(files.open_file)
    write_file = staticmethod(files.write_file)
    write_model = staticmethod(files.write_model)


CONVERTER: Final[Converter] = TorchConverter()
