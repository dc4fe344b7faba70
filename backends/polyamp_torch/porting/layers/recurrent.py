"""Readers of torch's recurrent layers. A stack becomes one layer per cell, one for each depth and direction.

Gates are in canonical order: input, forget, candidate, output for an LSTM; reset, update, candidate for a GRU. torch's
GRU applies the reset gate after the product.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from polyamp.errors import PortError
from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.operations import Transpose
from polyamp_torch.porting.layers.layer_record import LayerLeaves, LayerReader, LayerRecord

_TRANSPOSED: Final = (Transpose((1, 0)),)
_STACKED_CELL: Final = re.compile(r"weight_hh_l(\d+)(_reverse)?$")
_KIND_BY_GATES: Final = {4: "lstm", 3: "gru", 1: "simple_rnn"}
"""Number of blocks of a recurrent kernel -> kind."""
_KIND_BY_CLASS: Final[dict[type, str]] = {
    nn.LSTM: "lstm",
    nn.GRU: "gru",
    nn.RNN: "simple_rnn",
    nn.LSTMCell: "lstm",
    nn.GRUCell: "gru",
    nn.RNNCell: "simple_rnn",
}


def _cell_kind(module: nn.Module) -> str:
    return next(_KIND_BY_CLASS[kind] for kind in type(module).__mro__ if kind in _KIND_BY_CLASS)


def cell_form(kind: str, *, bias: bool, projection: int) -> Form:
    """Return the form of a cell, as far as its arrays determine it."""
    rules = [
        Rule(("weight_ih",), ("input_kernel",), _TRANSPOSED),
        Rule(("weight_hh",), ("recurrent_kernel",), _TRANSPOSED),
    ]
    if bias:
        rules += [Rule(("bias_ih",), ("bias",)), Rule(("bias_hh",), ("recurrent_bias",))]
    attributes: dict[str, Any] = {"projection": projection} if projection else {}
    if projection:
        rules.append(Rule(("weight_hr",), ("projection_kernel",), _TRANSPOSED))
    if kind != "simple_rnn":
        attributes |= {"activation": "tanh", "recurrent_activation": "sigmoid"}
    if kind == "gru":
        attributes["reset"] = "after"
    return Form(kind, tuple(rules), attributes)


def _module_form(kind: str, module: Any, attributes: dict[str, Any], projection: int = 0) -> Form:
    form = cell_form(kind, bias=module.bias, projection=projection)
    return dataclasses.replace(form, attributes={**form.attributes, **attributes})


def recurrent_stack(module: Any) -> list[LayerRecord]:
    """Read the cells of a stack: "layer_0/forward", "layer_0/backward", ... A depth or direction that exists once is
    not named."""
    kind = _cell_kind(module)
    found = []
    for depth in range(module.num_layers):
        for reverse in (False, True) if module.bidirectional else (False,):
            arrays = ["weight_ih", "weight_hh"]
            arrays += ["bias_ih", "bias_hh"] if module.bias else []
            arrays += ["weight_hr"] if module.proj_size else []
            ends = [f"l{depth}", "reverse"] if reverse else [f"l{depth}"]
            names = {name: "_".join([name, *ends]) for name in arrays}
            parts = [f"layer_{depth}"] if module.num_layers > 1 else []
            parts += ["backward" if reverse else "forward"] if module.bidirectional else []
            attributes: dict[str, Any] = {"reverse": reverse, "dropout": float(module.dropout) if depth else 0.0}
            if kind == "simple_rnn":
                attributes["activation"] = module.nonlinearity
            form = _module_form(kind, module, attributes, module.proj_size)
            found.append(LayerRecord((form,), names, "/".join(parts)))
    return found


def recurrent_cell(module: Any) -> list[LayerRecord]:
    """Read one cell, which the model calls for each time step."""
    kind = _cell_kind(module)
    attributes = {"activation": module.nonlinearity} if kind == "simple_rnn" else {}
    return [LayerRecord((_module_form(kind, module, attributes),))]


def file_layers(own: LayerLeaves) -> Iterator[LayerRecord]:
    """Yield the cells of a module in a file."""
    for name in own:
        if name == "weight_hh" or _STACKED_CELL.match(name):
            yield _file_cell(name, own)


def _file_cell(name: str, own: LayerLeaves) -> LayerRecord:
    """Return a cell and its position in a stack, by its recurrent kernel's name."""
    end = name.removeprefix("weight_hh")
    names = {each: each + end for each in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")}
    names = {each: stored for each, stored in names.items() if stored in own}
    rows, width = own[name].array.shape
    units = own[names["weight_hr"]].array.shape[1] if "weight_hr" in names else width
    kind = _KIND_BY_GATES.get(rows // units)
    if kind is None or "weight_ih" not in names or rows % units:
        raise PortError(f"{own[name].name!r} {[rows, width]} is no recurrent kernel of an LSTM, a GRU or an RNN.")
    form = cell_form(kind, bias="bias_ih" in names, projection=width if "weight_hr" in names else 0)
    place = _STACKED_CELL.match(name)
    if place is None:
        return LayerRecord((form,), names)
    stacked = any(_STACKED_CELL.match(each) and not each.startswith("weight_hh_l0") for each in own)
    both = any(each.endswith("reverse") for each in own)
    several = stacked or place[1] != "0"
    parts = [f"layer_{place[1]}"] if several else []
    if place[2] or both:
        parts.append("backward" if place[2] else "forward")
    attributes = {**form.attributes, "reverse": bool(place[2])}
    return LayerRecord((Form(form.kind, form.rules, attributes),), names, "/".join(parts))


READERS: Final[dict[type, LayerReader]] = {
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), recurrent_stack),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), recurrent_cell),
}
