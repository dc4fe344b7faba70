"""Record of a Keras model at `init`: a step refuses a model whose layers, weights or `trainable` have changed since."""

from __future__ import annotations

import operator
from typing import Any, Final

from polyamp.errors import ModelError
from polyamp_keras.models.layers import StructureSnapshot, is_layer
from polyamp_keras.models.variables import ModelVariables

_TRAINABLE: Final = operator.attrgetter("trainable")


class ModelSnapshot:
    """Layers, weights and `trainable` flags of a built model, recorded at construction.

    Args:
        model: the model; of one that is not Keras's nothing is recorded.
        variables: its variables.
        refresh: the call of `polyamp.refresh`, for messages.
    """

    def __init__(self, model: Any, variables: ModelVariables, refresh: str) -> None:
        self._model = model
        self._refresh = refresh
        self._named = {**variables.parameters, **variables.frozen, **variables.running}
        self._structure = StructureSnapshot(model)
        self._flags = self._trainable()

    def check(self) -> None:
        """Raise if layers or weights, or which of them are trainable, have changed.

        Raises:
            ModelError: names the first parameter that was frozen or unfrozen, or the first changed layer.
        """
        changed = self._structure.changed()
        if changed is not None:
            raise ModelError(
                f"{changed} than at init, of which the traced step does not know. Go on with state = "
                f"{self._refresh}: what stayed keeps its optimizer state."
            )
        now = self._trainable()
        if now == self._flags:
            return
        name, frozen = next((n, was) for n, was, new in zip(self._named, self._flags, now, strict=True) if was != new)
        raise ModelError(
            f"parameter {name!r} was frozen after init. To train the others, state = {self._refresh}: what "
            "stayed keeps its optimizer state. Or set trainable back."
            if frozen
            else f"parameter {name!r} was unfrozen after init, so no optimizer holds it. To train it too, state = "
            f"{self._refresh}: what stayed keeps its optimizer state. Or set trainable back."
        )

    def _trainable(self) -> list[bool]:
        if not is_layer(self._model):
            return []
        return list(map(_TRAINABLE, self._named.values())) if self._model.trainable else [False] * len(self._named)
