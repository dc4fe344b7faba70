"""torch's `Converter`: a model's layers, its filling, and one pass of it in float32. The door of this room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from polyamp.porting.converter import Converter, Evaluation
from polyamp.porting.inventory import Inventory
from polyamp.porting.lazy import Lazy
from polyamp_torch.porting import evaluate, fill, walk


class TorchConverter:
    """`Converter` over PyTorch. A model is an `nn.Module`, in wrappers or bound by polyamp or not."""

    in_place: Final = True

    def inventory(self, model: Any, batch: Any = None) -> Inventory:
        return walk.inventory(model)

    def fill(self, model: Any, leaves: Mapping[str, Lazy]) -> Any:
        return fill.fill(model, leaves)

    def evaluate(self, model: Any, batch: Any, cotangents: Callable[[Sequence[Any]], Sequence[Any]]) -> Evaluation:
        return evaluate.evaluate(model, batch, cotangents)


CONVERTER: Final[Converter] = TorchConverter()
