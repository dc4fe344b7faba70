"""Where a Keras model holds its layers and weights, so that a step sees that others lie there now.

Called by the state.
"""

from __future__ import annotations

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

    def changed(self) -> str | None:
        """The first layer that holds others now, as the beginning of a sentence; None where all is as it was."""
        if all(map(operator.is_, self._now(), self._members)):  # as objects; the marks tell their number
            return None
        before = iter(self._members)
        for module in self._modules:
            for held, word in ((layers_held(module.layer), "layers"), (own_trainable(module.layer), "weights")):
                if any(member is not next(before, None) for member in (*held, _END)):
                    name = f"layer {module.path!r}" if module.path else "the model"
                    return f"{name} has other {word}"
        return "the model has other layers"

    def _now(self) -> Iterator[Any]:
        for layer in self._layers:
            yield from layers_held(layer)
            yield _END
            yield from own_trainable(layer)
            yield _END
