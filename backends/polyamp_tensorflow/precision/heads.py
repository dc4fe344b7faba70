"""Which layers and operations give a model's output, and whether as probabilities or logits.

Called by `layer_choice`: probabilities come in float32 in every mode, and logits where `apply_policy` is asked for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import keras

from polyamp_tensorflow.compat import calls_of, came_from
from polyamp_tensorflow.models.layers import Module, only_contains
from polyamp_tensorflow.precision.op_list import gives_probabilities, is_dense

_HEAD_NAMES: Final = frozenset({"head", "logits", "predictions", "probabilities", "classifier"})


def heads_of(found: list[Module]) -> dict[int, str]:
    """id -> "probabilities" or "logits" of the layers and operations that give a model's output.

    Those of a functional or sequential model are found by going back from its outputs; elsewhere a name tells.
    """
    ending: list[Any] = []
    for module in found:
        named = bool(module.path) and _last_word(module.layer.name) in _HEAD_NAMES
        if only_contains(module.layer) and (named or not module.path):
            ending += _ending(module.layer)
        elif (named and is_dense(module.layer)) or ((named or len(found) == 1) and gives_probabilities(module.layer)):
            ending.append(module.layer)
    ending += [layer.layer for layer in ending if isinstance(layer, keras.layers.Wrapper)]
    return {id(last): "probabilities" if gives_probabilities(last) else "logits" for last in ending}


def _last_word(name: str) -> str:
    """ "lm_head_1" -> "head" """
    return name.rstrip("0123456789_").rpartition("_")[2]


def _ending(container: Any) -> list[Any]:
    """What a functional model's outputs come from, back to the last layer with weights if that is a dense one."""
    ending = []
    for tensor in keras.tree.flatten(getattr(container, "outputs", None) or []):  # one that is not built has none
        walked = list(_back(tensor))
        keep = not walked or not getattr(walked[-1], "weights", None) or is_dense(walked[-1])
        ending += walked if keep else walked[:-1]
    return ending


def _back(tensor: Any) -> Iterator[Any]:
    operation, node, place = came_from(tensor)
    if isinstance(operation, keras.layers.InputLayer):
        return
    if only_contains(operation):
        yield from _back(keras.tree.flatten(operation.outputs)[place])
        return
    yield operation
    inputs = calls_of(operation)[node].input_tensors
    if not getattr(operation, "weights", None) and len(inputs) == 1:
        yield from _back(inputs[0])
