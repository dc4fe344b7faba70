"""Readers of Keras's recurrent layers, one canonical layer per cell.

- A layer with one cell is one canonical layer at its own path.
- A stack of cells is "layer_0", "layer_1", ... below that path.
- A bidirectional layer is "forward" and "backward" below that path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import keras

from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.operations import Blocks, Merge, Operation, Reshape, Split
from polyamp_tensorflow.porting.layers.activations import activation_name
from polyamp_tensorflow.porting.layers.layer_record import (
    LayerReader,
    LayerRecord,
    inner_layers,
    own_variables,
    plain_form,
)

_GRU_GATE_ORDER: Final = Blocks((1, 0, 2))
"""From Keras's GRU order (update, reset, candidate) to the canonical order (reset, update, candidate)."""


def _read_cell_layer(layer: Any) -> list[LayerRecord]:
    return [_read_cell(layer, "", reverse=False)]


def _recurrent(layer: Any) -> list[LayerRecord]:
    cells = _read_cells(layer, "")
    return [] if cells is None else cells


def _bidirectional(layer: Any) -> list[LayerRecord]:
    pairs = ((layer.forward_layer, "forward"), (layer.backward_layer, "backward"))
    found = [_read_cells(inner, suffix) for inner, suffix in pairs]
    return [part for parts in found for part in parts or []]


def _read_cells(layer: Any, suffix: str) -> list[LayerRecord] | None:
    """Read the cells of an RNN layer; None if one is a custom cell, which is then listed like any layer."""
    cells = list(layer.cell.cells) if isinstance(layer.cell, keras.layers.StackedRNNCells) else [layer.cell]
    if not all(isinstance(cell, _CELLS) for cell in cells):
        return None
    stacked = isinstance(layer.cell, keras.layers.StackedRNNCells)
    paths = [f"{suffix}/layer_{number}".strip("/") if stacked else suffix for number in range(len(cells))]
    reverse = bool(layer.go_backwards)
    found = [_read_cell(cell, path, reverse=reverse) for cell, path in zip(cells, paths, strict=True)]
    return [found[0]._replace(inside=(layer, *inner_layers(layer))), *found[1:]]


def _read_cell(cell: Any, suffix: str, *, reverse: bool) -> LayerRecord:
    arrays = own_variables(cell)
    said = {
        "activation": activation_name(cell.activation),
        "reverse": reverse,
        "dropout": float(cell.dropout),
        "recurrent_dropout": float(cell.recurrent_dropout),
    }
    if isinstance(cell, keras.layers.SimpleRNNCell):
        return LayerRecord(_cell_form("simple_rnn", arrays, (), **said), arrays, suffix, cell)
    said["recurrent_activation"] = activation_name(cell.recurrent_activation)
    if isinstance(cell, keras.layers.LSTMCell):
        return LayerRecord(_cell_form("lstm", arrays, (), **said), arrays, suffix, cell)
    said["reset"] = "after" if cell.reset_after else "before"
    return LayerRecord(_cell_form("gru", arrays, (_GRU_GATE_ORDER,), **said), arrays, suffix, cell)


def _cell_form(kind: str, arrays: Mapping[str, Any], gates: tuple[Operation, ...], **said: Any) -> Form:
    rules = [Rule(("kernel",), ("input_kernel",), gates), Rule(("recurrent_kernel",), ("recurrent_kernel",), gates)]
    if "bias" in arrays:
        shape = tuple(arrays["bias"].shape)
        both = (Split((1, 1), 0), Reshape((1, *shape[1:]), shape[1:]))  # a reset-after GRU has two biases in two rows
        apart: tuple[Operation, ...] = both if len(shape) == 2 else (Merge(),)
        rules.append(Rule(("bias",), ("bias", "recurrent_bias"), (*apart, *gates)))
    return plain_form(kind, tuple(rules), **said)


_CELLS: Final = (keras.layers.LSTMCell, keras.layers.GRUCell, keras.layers.SimpleRNNCell)
READERS: Final[Mapping[str, LayerReader]] = {
    **dict.fromkeys(("LSTMCell", "GRUCell", "SimpleRNNCell"), _read_cell_layer),
    **dict.fromkeys(("LSTM", "GRU", "SimpleRNN", "RNN"), _recurrent),
    "Bidirectional": _bidirectional,
}
"""Name in `keras.layers` -> its reader."""
