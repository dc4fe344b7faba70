"""Readers of Keras's recurrent layers, one canonical layer per cell.

- A layer with one cell is one canonical layer at its own path.
- A stack of cells is "layer_0", "layer_1", ... below that path.
- A bidirectional layer is "forward" and "backward" below that path.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import keras

from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.operations import Blocks, Merge, Operation, Reshape, Shape, Split
from polyamp_keras.compat import layer_classes
from polyamp_keras.porting.layers.activations import activation_name
from polyamp_keras.porting.layers.layer_record import LayerRecord, LayerRow, inner_layers, read_variables

_GRU_GATE_ORDER: Final = Blocks((1, 0, 2))
"""From Keras's GRU order (update, reset, candidate) to the canonical order (reset, update, candidate)."""


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
    if not all(isinstance(cell, layer_classes(" ".join(_CELLS))) for cell in cells):
        return None
    stacked = isinstance(layer.cell, keras.layers.StackedRNNCells)
    paths = [f"{suffix}/layer_{number}".strip("/") if stacked else suffix for number in range(len(cells))]
    reverse = bool(layer.go_backwards)
    found = [_read_cell(cell, path, reverse=reverse) for cell, path in zip(cells, paths, strict=True)]
    return [found[0]._replace(inner_layers=(layer, *inner_layers(layer))), *found[1:]]


def _read_cell(cell: Any, suffix: str, *, reverse: bool) -> LayerRecord:
    attributes = {
        "activation": activation_name(cell.activation),
        "reverse": reverse,
        "dropout": float(cell.dropout),
        "recurrent_dropout": float(cell.recurrent_dropout),
    }
    kind = next(known for name, known in _CELLS.items() if isinstance(cell, getattr(keras.layers, name)))
    if kind != "simple_rnn":
        attributes["recurrent_activation"] = activation_name(cell.recurrent_activation)
    if kind == "gru":
        attributes["reset"] = "after" if cell.reset_after else "before"
    (record,) = read_variables(cell, functools.partial(_cell_form, kind), attributes)
    return record._replace(suffix=suffix, owner=cell)


def _cell_form(kind: str, shapes: Mapping[str, Shape]) -> Form:
    gates: tuple[Operation, ...] = (_GRU_GATE_ORDER,) if kind == "gru" else ()
    rules = [Rule(("kernel",), ("input_kernel",), gates), Rule(("recurrent_kernel",), ("recurrent_kernel",), gates)]
    if "bias" not in shapes:
        return Form(kind, tuple(rules))
    shape = shapes["bias"]
    both = (Split((1, 1), 0), Reshape((1, *shape[1:]), shape[1:]))  # a reset-after GRU has two biases in two rows
    biases: tuple[Operation, ...] = both if len(shape) == 2 else (Merge(),)
    rules.append(Rule(("bias",), ("bias", "recurrent_bias"), (*biases, *gates)))
    return Form(kind, tuple(rules), {"reset": "after" if len(shape) == 2 else "before"} if kind == "gru" else {})


def _cell_row(kind: str) -> LayerRow:
    return LayerRow(
        lambda cell: [_read_cell(cell, "", reverse=False)],
        (("kernel", "recurrent_kernel", "bias"), ("kernel", "recurrent_kernel")),
        lambda shapes: [_cell_form(kind, shapes)],
        functools.partial(_fits_cell, gates=_GATES[kind]),
    )


def _fits_cell(shapes: Sequence[Shape], gates: int) -> bool:
    if len(shapes) not in (2, 3) or [len(shape) for shape in shapes[:2]] != [2, 2]:
        return False
    units, columns = shapes[1]
    return shapes[0][1] == columns == gates * units


_GATES: Final = {"lstm": 4, "gru": 3, "simple_rnn": 1}
_CELLS: Final = {"LSTMCell": "lstm", "GRUCell": "gru", "SimpleRNNCell": "simple_rnn"}
ROWS: Final[Mapping[str, LayerRow]] = {
    **{name: _cell_row(kind) for name, kind in _CELLS.items()},
    **dict.fromkeys(("LSTM", "GRU", "SimpleRNN", "RNN"), LayerRow(_recurrent)),
    "Bidirectional": LayerRow(_bidirectional),
}
"""Name in `keras.layers` -> its row."""
