"""Detection of the layers and operations that output a model's probabilities or logits.

Probabilities are in float32 in every mode, logits only with `apply_policy(heads=True)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import keras

from polyamp_tensorflow.compat import inbound_nodes, keras_history
from polyamp_tensorflow.models.layers import LayerEntry, is_container
from polyamp_tensorflow.precision.op_list import has_probability_output, is_dense

_HEAD_NAMES: Final = frozenset({"head", "logits", "predictions", "probabilities", "classifier"})


def find_output_heads(found: list[LayerEntry]) -> dict[int, str]:
    """Map the id of each layer or operation that produces a model's output to "probabilities" or "logits".

    Those of a functional or sequential model are found by following its outputs back, others by their name.
    """
    ending: list[Any] = []
    for module in found:
        named = bool(module.path) and _last_word(module.layer.name) in _HEAD_NAMES
        if is_container(module.layer) and (named or not module.path):
            ending += _output_sources(module.layer)
        elif (named and is_dense(module.layer)) or (
            (named or len(found) == 1) and has_probability_output(module.layer)
        ):
            ending.append(module.layer)
    ending += [layer.layer for layer in ending if isinstance(layer, keras.layers.Wrapper)]
    return {id(last): "probabilities" if has_probability_output(last) else "logits" for last in ending}


def _last_word(name: str) -> str:
    """ "lm_head_1" -> "head" """
    return name.rstrip("0123456789_").rpartition("_")[2]


def _output_sources(container: Any) -> list[Any]:
    """Return the operations before a functional model's outputs, back to the last layer with weights if it is dense."""
    ending = []
    for tensor in keras.tree.flatten(getattr(container, "outputs", None) or []):  # an unbuilt model has none
        walked = list(_upstream_operations(tensor))
        keep = not walked or not getattr(walked[-1], "weights", None) or is_dense(walked[-1])
        ending += walked if keep else walked[:-1]
    return ending


def _upstream_operations(tensor: Any) -> Iterator[Any]:
    operation, node_index, output_index = keras_history(tensor)
    if isinstance(operation, keras.layers.InputLayer):
        return
    if is_container(operation):
        yield from _upstream_operations(keras.tree.flatten(operation.outputs)[output_index])
        return
    yield operation
    inputs = inbound_nodes(operation)[node_index].input_tensors
    if not getattr(operation, "weights", None) and len(inputs) == 1:
        yield from _upstream_operations(inputs[0])
