"""Where a Keras model holds its layers and weights, so that a step sees that others lie there now.

Called by the state.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any, Final

from polyamp_tensorflow.compat import layers_held, own_trainable
from polyamp_tensorflow.models.layers import modules

_END: Final = object()


class Places:
    """The layers and weights that every layer of a model holds, as they are when this is made.

    Args:
        model: a built model; one without Keras layers has no places, and never changed.
    """

    def __init__(self, model: Any) -> None:
        self._modules = modules(model)
        self._layers = [module.layer for module in self._modules]
        self._members = list(self._now())
        self._held = [(list(layers_held(layer)), list(own_trainable(layer))) for layer in self._layers]

    def changed(self) -> str | None:
        """The first layer that holds others now, as the beginning of a sentence; None where all is as it was."""
        if all(map(operator.is_, self._now(), self._members)):  # as objects; the mark at the end tells their number
            return None
        for module, before in zip(self._modules, self._held, strict=True):
            now = (layers_held(module.layer), own_trainable(module.layer))
            for word, held, old in zip(("layers", "weights"), now, before, strict=True):
                if len(held) != len(old) or not all(map(operator.is_, held, old)):
                    return f"layer {module.path!r} has other {word}" if module.path else f"the model has other {word}"
        return None

    def _now(self) -> Iterator[Any]:
        """Every member, at the speed of C: a step looks at them."""
        layers, weights = map(layers_held, self._layers), map(own_trainable, self._layers)
        return itertools.chain(itertools.chain.from_iterable(itertools.chain(layers, weights)), (_END,))
