"""Record of a Keras model's layers and weights, to detect that some were added or replaced."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any, Final

from polyamp_tensorflow.compat import own_trainable_variables, tracked_layers
from polyamp_tensorflow.models.layers import list_layers

_END: Final = object()


class WeightLocations:
    """Layers and weights of every layer of a model, recorded at construction.

    Args:
        model: a built model. Without Keras layers there is nothing to record, and `changed` returns None.
    """

    def __init__(self, model: Any) -> None:
        self._modules = list_layers(model)
        self._layers = [module.layer for module in self._modules]
        self._members = list(self._now())
        self._before = [(list(tracked_layers(layer)), list(own_trainable_variables(layer))) for layer in self._layers]

    def changed(self) -> str | None:
        """Return the start of a sentence that names the first changed layer; None if nothing changed."""
        if all(map(operator.is_, self._now(), self._members)):  # by identity; the end mark detects another length
            return None
        for module, before in zip(self._modules, self._before, strict=True):
            now = (tracked_layers(module.layer), own_trainable_variables(module.layer))
            for word, current, old in zip(("layers", "weights"), now, before, strict=True):
                if len(current) != len(old) or not all(map(operator.is_, current, old)):
                    return f"layer {module.path!r} has other {word}" if module.path else f"the model has other {word}"
        return None

    def _now(self) -> Iterator[Any]:
        """Iterate over all layers and weights at C speed, since every step compares them."""
        layers, weights = map(tracked_layers, self._layers), map(own_trainable_variables, self._layers)
        return itertools.chain(itertools.chain.from_iterable(itertools.chain(layers, weights)), (_END,))
