"""The forms of torch's recurrent layers: a stack is as many layers as it has cells, one per depth and direction.

Gates lie as in the canonical layout: input, forget, candidate, output of an LSTM; reset, update, candidate of a GRU,
which is reset after the product. `READERS` is looked up by `walk`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from torch import nn

from polyamp.porting.layouts.forms import Form, Rule
from polyamp.porting.layouts.operations import Transpose
from polyamp_torch.porting.found import Found, Reader

_TURNED: Final = (Transpose((1, 0)),)
_KINDS: Final[dict[type, str]] = {
    nn.LSTM: "lstm",
    nn.GRU: "gru",
    nn.RNN: "simple_rnn",
    nn.LSTMCell: "lstm",
    nn.GRUCell: "gru",
    nn.RNNCell: "simple_rnn",
}


def _kind(module: nn.Module) -> str:
    return next(_KINDS[kind] for kind in type(module).__mro__ if kind in _KINDS)


def form_of_cell(kind: str, *, bias: bool, projection: int) -> Form:
    """The form of a cell, as far as its arrays tell."""
    rules = [
        Rule(("weight_ih",), ("input_kernel",), _TURNED),
        Rule(("weight_hh",), ("recurrent_kernel",), _TURNED),
    ]
    if bias:
        rules += [Rule(("bias_ih",), ("bias",)), Rule(("bias_hh",), ("recurrent_bias",))]
    attributes: dict[str, Any] = {"projection": projection} if projection else {}
    if projection:
        rules.append(Rule(("weight_hr",), ("projection_kernel",), _TURNED))
    if kind != "simple_rnn":
        attributes |= {"activation": "tanh", "recurrent_activation": "sigmoid"}
    if kind == "gru":
        attributes["reset"] = "after"
    return Form(kind, tuple(rules), attributes)


def _form(kind: str, module: Any, attributes: dict[str, Any], projection: int = 0) -> Form:
    form = form_of_cell(kind, bias=module.bias, projection=projection)
    return dataclasses.replace(form, attributes={**form.attributes, **attributes})


def stack(module: Any) -> list[Found]:
    """The cells of a stack: "layer_0/forward", "layer_0/backward", ...; what it has one of is not in their names."""
    kind = _kind(module)
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
            form = _form(kind, module, attributes, module.proj_size)
            found.append(Found((form,), names, "/".join(parts)))
    return found


def cell(module: Any) -> list[Found]:
    """One cell, which is called step by step."""
    kind = _kind(module)
    attributes = {"activation": module.nonlinearity} if kind == "simple_rnn" else {}
    return [Found((_form(kind, module, attributes),))]


READERS: Final[dict[type, Reader]] = {
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), stack),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), cell),
}
