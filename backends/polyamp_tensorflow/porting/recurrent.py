"""Keras's recurrent layers as canonical cells. Called by `layers`.

A layer of one cell is one canonical layer at its own path; a stack of cells is "layer_0", "layer_1", ... in it, and a
bidirectional one "forward" and "backward".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import keras

from polyamp.porting.layouts.forms import Form, Rule
from polyamp.porting.layouts.operations import Blocks, Merge, Operation, Reshape, Split
from polyamp_tensorflow.porting.activations import name_of
from polyamp_tensorflow.porting.parts import Part, Reader, form, inside, own

_UPDATE_FIRST: Final = Blocks((1, 0, 2))
"""Keras's GRU has update, reset, candidate; the canonical one reset, update, candidate."""


def _cell(layer: Any) -> list[Part]:
    return [_part(layer, "", reverse=False)]


def _recurrent(layer: Any) -> list[Part]:
    cells = _parts(layer, "")
    return [] if cells is None else cells


def _bidirectional(layer: Any) -> list[Part]:
    pairs = ((layer.forward_layer, "forward"), (layer.backward_layer, "backward"))
    found = [_parts(inner, suffix) for inner, suffix in pairs]
    return [part for parts in found for part in parts or []]


def _parts(layer: Any, suffix: str) -> list[Part] | None:
    """The cells of an RNN layer; None where one of them is a user's own, which is then listed as any layer."""
    cells = list(layer.cell.cells) if isinstance(layer.cell, keras.layers.StackedRNNCells) else [layer.cell]
    if not all(isinstance(cell, _CELLS) for cell in cells):
        return None
    stacked = isinstance(layer.cell, keras.layers.StackedRNNCells)
    paths = [f"{suffix}/layer_{number}".strip("/") if stacked else suffix for number in range(len(cells))]
    reverse = bool(layer.go_backwards)
    found = [_part(cell, path, reverse=reverse) for cell, path in zip(cells, paths, strict=True)]
    return [found[0]._replace(inside=(layer, *inside(layer))), *found[1:]]


def _part(cell: Any, suffix: str, *, reverse: bool) -> Part:
    arrays = own(cell)
    said = {
        "activation": name_of(cell.activation),
        "reverse": reverse,
        "dropout": float(cell.dropout),
        "recurrent_dropout": float(cell.recurrent_dropout),
    }
    if isinstance(cell, keras.layers.SimpleRNNCell):
        return Part(_form("simple_rnn", arrays, (), **said), arrays, suffix, cell)
    said["recurrent_activation"] = name_of(cell.recurrent_activation)
    if isinstance(cell, keras.layers.LSTMCell):
        return Part(_form("lstm", arrays, (), **said), arrays, suffix, cell)
    said["reset"] = "after" if cell.reset_after else "before"
    return Part(_form("gru", arrays, (_UPDATE_FIRST,), **said), arrays, suffix, cell)


def _form(kind: str, arrays: Mapping[str, Any], gates: tuple[Operation, ...], **said: Any) -> Form:
    rules = [Rule(("kernel",), ("input_kernel",), gates), Rule(("recurrent_kernel",), ("recurrent_kernel",), gates)]
    if "bias" in arrays:
        shape = tuple(arrays["bias"].shape)
        both = (Split((1, 1), 0), Reshape((1, *shape[1:]), shape[1:]))  # a GRU that resets after has two, in two rows
        apart: tuple[Operation, ...] = both if len(shape) == 2 else (Merge(),)
        rules.append(Rule(("bias",), ("bias", "recurrent_bias"), (*apart, *gates)))
    return form(kind, tuple(rules), **said)


_CELLS: Final = (keras.layers.LSTMCell, keras.layers.GRUCell, keras.layers.SimpleRNNCell)
TABLE: Final[Mapping[str, Reader]] = {
    **dict.fromkeys(("LSTMCell", "GRUCell", "SimpleRNNCell"), _cell),
    **dict.fromkeys(("LSTM", "GRU", "SimpleRNN", "RNN"), _recurrent),
    "Bidirectional": _bidirectional,
}
"""Name in `keras.layers` -> what reads it."""
