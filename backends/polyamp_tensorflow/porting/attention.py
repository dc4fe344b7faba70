"""Keras's multi-head attentions as canonical ones: their projections are there already. Called by `layers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from polyamp.porting.layouts.forms import Rule, same
from polyamp.porting.layouts.kinds import default_scale
from polyamp_tensorflow.compat import layers_inside
from polyamp_tensorflow.porting.parts import Part, Reader, form, inside, only, own, refuse_rewritten

_NAMES: Final = {"query": "query", "key": "key", "value": "value", "attention_output": "output"}


def _attention(layer: Any) -> list[Part]:
    said = layer.get_config()
    size = said.get("key_dim") or said["head_dim"]
    arrays = _arrays(layer)
    told = {"scale": default_scale(size), "dropout": float(layer.dropout), "mask": "keep"}
    reason = _unsaid(layer, said, arrays)
    if reason:
        return [Part(form(only(layer, reason), same(*arrays), **told), arrays, inside=inside(layer))]
    names = [(f"{native}/{array}", f"{canonical}_{array}") for native, canonical in _NAMES.items() for array in _ARRAYS]
    rules = tuple(Rule((native,), (canonical,)) for native, canonical in names if native in arrays)
    return [Part(form("attention", rules, **told), arrays, inside=inside(layer))]


_ARRAYS: Final = ("kernel", "bias")


def _arrays(layer: Any) -> dict[str, Any]:
    """ "query/kernel" -> variable; the layers inside have these names."""
    found = {}
    for projection in layers_inside(layer):
        refuse_rewritten(projection, f"{layer.name}/{projection.name}")
        found.update({f"{projection.name}/{name}": variable for name, variable in own(projection).items()})
    return found


def _unsaid(layer: Any, said: Mapping[str, Any], arrays: Mapping[str, Any]) -> str:
    """What of an attention its canonical kind cannot say; "" if nothing."""
    if said.get("use_gate"):
        return "use_gate: its output is gated"
    if len(arrays["attention_output/kernel"].shape) != 3:
        return f"output_shape={said['output_shape']}"
    axes = said.get("attention_axes")  # what was given, or what `build` made of None
    if axes is not None and tuple(axes) != (1,):
        return f"attention_axes={tuple(axes)}"
    return ""


TABLE: Final[Mapping[str, Reader]] = {"MultiHeadAttention": _attention, "GroupQueryAttention": _attention}
"""Name in `keras.layers` -> what reads it."""
