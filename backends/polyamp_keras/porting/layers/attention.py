"""Readers of Keras's attention layers. Their projections are separate, as in the canonical layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from polyamp.porting.layouts.layer_kinds import default_attention_scale
from polyamp.porting.layouts.layer_layout import Rule, same
from polyamp_keras.compat import child_layers
from polyamp_keras.porting.layers.layer_record import (
    LayerRecord,
    LayerRow,
    inner_layers,
    opaque_kind,
    own_variables,
    plain_form,
    refuse_modified_kernel,
)

_PROJECTION_NAMES: Final = {"query": "query", "key": "key", "value": "value", "attention_output": "output"}


def _attention(layer: Any) -> list[LayerRecord]:
    said = layer.get_config()
    size = said.get("key_dim") or said["head_dim"]
    arrays = _named_variables(layer)
    told = {"scale": default_attention_scale(size), "dropout": float(layer.dropout), "mask": "keep"}
    reason = _unsupported_feature(layer, said, arrays)
    if reason:
        return [
            LayerRecord(
                plain_form(opaque_kind(layer, reason), same(*arrays), **told), arrays, inner_layers=inner_layers(layer)
            )
        ]
    names = [
        (f"{native}/{array}", f"{canonical}_{array}")
        for native, canonical in _PROJECTION_NAMES.items()
        for array in _ARRAY_NAMES
    ]
    rules = tuple(Rule((native,), (canonical,)) for native, canonical in names if native in arrays)
    return [LayerRecord(plain_form("attention", rules, **told), arrays, inner_layers=inner_layers(layer))]


_ARRAY_NAMES: Final = ("kernel", "bias")


def _named_variables(layer: Any) -> dict[str, Any]:
    """Return "query/kernel" -> variable, after the names of the inner layers."""
    found = {}
    for projection in child_layers(layer):
        refuse_modified_kernel(projection, f"{layer.name}/{projection.name}")
        found.update({f"{projection.name}/{name}": variable for name, variable in own_variables(projection).items()})
    return found


def _unsupported_feature(layer: Any, said: Mapping[str, Any], arrays: Mapping[str, Any]) -> str:
    """Return the feature of an attention that its canonical kind lacks; "" if there is none."""
    if said.get("use_gate"):
        return "use_gate: its output is gated"
    if len(arrays["attention_output/kernel"].shape) != 3:
        return f"output_shape={said['output_shape']}"
    axes = said.get("attention_axes")  # the argument, or the value that `build` set for None
    if axes is not None and tuple(axes) != (1,):
        return f"attention_axes={tuple(axes)}"
    return ""


ROWS: Final[Mapping[str, LayerRow]] = dict.fromkeys(("MultiHeadAttention", "GroupQueryAttention"), LayerRow(_attention))
"""Name in `keras.layers` -> its row."""
