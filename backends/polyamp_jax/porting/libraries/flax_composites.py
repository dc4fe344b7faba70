"""Rows of flax's recurrent cells and attention, which consist of several modules.

The names of their arrays are paths in the layer ("hi/kernel"). linen has a kernel for each gate; nnx's optimised cells
have one kernel for all gates, in the canonical order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.operations import First, Join, Merge
from polyamp_jax.porting.layers.refusal import RefusedError
from polyamp_jax.porting.libraries.flax_layer_spec import FlaxLayerSpec, LayerSettings, Shapes

NORM_SUBMODULES: Final = frozenset(("query_ln", "key_ln"))
"""Norms inside an attention layer, which are separate layers."""
_LSTM_GATES: Final = ("i", "f", "g", "o")
_GRU_GATES: Final = ("r", "z", "n")
"""The letters of the gates in flax's names, in canonical order."""


def lstm(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `LSTMCell` and `OptimizedLSTMCell`. Only the recurrent half has a bias."""
    if "dense_i/kernel" in shapes:
        rules = [*_cell_kernel_rules(), Rule(("dense_h/bias",), ("bias", "recurrent_bias"), (Merge(),))]
    else:
        forget = "if_" if "if_/kernel" in shapes else "if"  # nnx: `if` is a reserved word in Python
        inputs = tuple(f"{name}/kernel" for name in ("ii", forget, "ig", "io"))
        hidden = tuple(f"h{gate}/kernel" for gate in _LSTM_GATES)
        biases = tuple(f"h{gate}/bias" for gate in _LSTM_GATES)
        rules = [
            Rule(inputs, ("input_kernel",), (_join_gates(shapes, inputs),)),
            Rule(hidden, ("recurrent_kernel",), (_join_gates(shapes, hidden),)),
            Rule(biases, ("bias", "recurrent_bias"), (_join_gates(shapes, biases), Merge())),
        ]
    return Form("lstm", tuple(rules), _activation_attributes(settings))


def gru(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `GRUCell`, which resets after the product. linen's has a recurrent bias for the candidate,
    nnx's has no recurrent bias."""
    if "dense_i/kernel" in shapes:
        merge = Merge(blocks=3, absent=(2,))
        rules = [*_cell_kernel_rules(), Rule(("dense_i/bias",), ("bias", "recurrent_bias"), (merge,))]
    else:
        inputs = tuple(f"i{gate}/kernel" for gate in _GRU_GATES)
        hidden = tuple(f"h{gate}/kernel" for gate in _GRU_GATES)
        biases = tuple(f"i{gate}/bias" for gate in _GRU_GATES)
        both = (First(3, _join_gates(shapes, biases)), Merge(kept=(2,), blocks=3))
        rules = [
            Rule(inputs, ("input_kernel",), (_join_gates(shapes, inputs),)),
            Rule(hidden, ("recurrent_kernel",), (_join_gates(shapes, hidden),)),
            Rule((*biases, "hn/bias"), ("bias", "recurrent_bias"), both),
        ]
    return Form("gru", tuple(rules), {**_activation_attributes(settings), "reset": "after"})


def simple_rnn(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `SimpleCell`."""
    if settings.get("residual"):
        raise RefusedError("residual=True adds the state before the activation")
    ours, state = ("dense_i", "dense_h") if "dense_i/kernel" in shapes else ("i", "h")
    rules = (*_cell_kernel_rules(ours, state), Rule((f"{ours}/bias",), ("bias", "recurrent_bias"), (Merge(),)))
    return Form("simple_rnn", rules, _activation_attributes(settings))


def attention(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `MultiHeadDotProductAttention` and `MultiHeadAttention`, which have the canonical layout."""
    if settings.get("decode"):
        raise RefusedError("decode=True: it keeps a cache of what it has read; port the model without it")
    rules = []
    for ours, name in (("query", "query"), ("key", "key"), ("value", "value"), ("out", "output")):
        rules += [
            Rule((f"{ours}/{array}",), (f"{name}_{array}",))
            for array in ("kernel", "bias")
            if f"{ours}/{array}" in shapes
        ]
    attributes: dict[str, Any] = {}
    if settings:
        attributes["dropout"] = float(settings["dropout_rate"])
        if getattr(settings["attention_fn"], "__name__", "") == "dot_product_attention":
            attributes |= {"scale": shapes["query/kernel"][-1] ** -0.5, "mask": "keep"}
    return Form("attention", tuple(rules), attributes)


def _cell_kernel_rules(inputs: str = "dense_i", hidden: str = "dense_h") -> tuple[Rule, ...]:
    return Rule((f"{inputs}/kernel",), ("input_kernel",)), Rule((f"{hidden}/kernel",), ("recurrent_kernel",))


def _join_gates(shapes: Shapes, names: tuple[str, ...]) -> Join:
    return Join(tuple(shapes[name][-1] for name in names))


def _activation_attributes(settings: LayerSettings) -> dict[str, Any]:
    """Return the activations that have a name."""
    wanted = {"activation": settings.get("activation_fn"), "recurrent_activation": settings.get("gate_fn")}
    named = {attribute: getattr(function, "__name__", "") for attribute, function in wanted.items()}
    return {attribute: name for attribute, name in named.items() if name}


def _cell_submodules(*names: str, gates: int | None = None) -> Callable[[Mapping[str, Shapes]], bool]:
    """Return the function for a cell with a submodule for each gate, by these names, or with one kernel for `gates`."""
    sets = [set(each.split()) for each in names]

    def fits(children: Mapping[str, Shapes]) -> bool:
        if set(children) == {"dense_i", "dense_h"}:
            state = children["dense_h"]["kernel"]
            return len(state) == 2 and state[1] // state[0] == gates
        return set(children) in sets

    return fits


def _has_projections(children: Mapping[str, Shapes]) -> bool:
    """Return whether the submodules are an attention's; one made by hand, of dense layers, has other kernels."""
    is_named = set(children) == {"query", "key", "value", "out"}
    return is_named and all(len(child["kernel"]) == 3 for child in children.values())


ROWS: Final[Mapping[str, FlaxLayerSpec]] = {
    **dict.fromkeys(
        ("LSTMCell", "OptimizedLSTMCell"),
        FlaxLayerSpec(
            lstm, submodules=_cell_submodules("ii if ig io hi hf hg ho", "ii if_ ig io hi hf hg ho", gates=4)
        ),
    ),
    "GRUCell": FlaxLayerSpec(gru, submodules=_cell_submodules("ir iz in hr hz hn", gates=3)),
    "SimpleCell": FlaxLayerSpec(simple_rnn, submodules=_cell_submodules("i h", gates=1)),
    **dict.fromkeys(
        ("MultiHeadDotProductAttention", "MultiHeadAttention", "SelfAttention"),
        FlaxLayerSpec(attention, submodules=_has_projections),
    ),
    "ConvLSTMCell": FlaxLayerSpec(
        submodules=_cell_submodules("ih hh"), refusal="the canonical layout has no convolutional LSTM"
    ),
    "MGUCell": FlaxLayerSpec(
        submodules=_cell_submodules("if in hf hn"), refusal="no other framework has a minimal gated unit"
    ),
}
"""Class name -> row."""
