"""Entry module of torch porting: `TorchConverter`, which lists, fills, evaluates, reads and writes torch models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from polyamp.porting.layouts.converter import Converter, Evaluation
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_torch.porting import evaluate, fill, inventory


class TorchConverter:
    """`Converter` and `FileConverter` for PyTorch. Accepts an `nn.Module`, also in a wrapper or bound by polyamp."""

    in_place: Final = True

    def inventory(self, model: Any, batch: Any = None) -> Inventory:
        return inventory.inventory(model)

    def fill(self, model: Any, leaves: Mapping[str, Lazy]) -> Any:
        return fill.fill(model, leaves)

    def open_file(self, path: Path) -> Inventory:
        from polyamp_torch.porting import files

        return files.open_file(path)

    def write_file(self, path: Path, leaves: Mapping[str, Lazy], like: Path) -> None:
        from polyamp_torch.porting import files

        files.write_file(path, leaves, like)

    def write_model(self, path: Path, model: Any) -> None:
        from polyamp_torch.porting import files

        files.write_model(path, model)

    def evaluate(self, model: Any, batch: Any, cotangents: Callable[[Sequence[Any]], Sequence[Any]]) -> Evaluation:
        return evaluate.evaluate(model, batch, cotangents)


CONVERTER: Final[Converter] = TorchConverter()
