"""Class of flax -> what makes its form, or why it has none. Called by `linen` and `nnx`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from polyamp_jax.porting import flax_cells as cells
from polyamp_jax.porting import flax_forms as forms
from polyamp_jax.porting.flax_forms import Maker

MAKERS: Final[Mapping[str, Maker]] = {
    "Dense": forms.dense,
    "Linear": forms.dense,
    "DenseGeneral": forms.dense_general,
    "LinearGeneral": forms.dense_general,
    "Einsum": forms.einsum,
    "Conv": forms.conv,
    "ConvTranspose": forms.conv_transpose,
    "Embed": forms.embedding,
    "LayerNorm": forms.layer_norm,
    "RMSNorm": forms.rms_norm,
    "GroupNorm": forms.group_norm,
    "InstanceNorm": forms.instance_norm,
    "BatchNorm": forms.batch_norm,
    "PReLU": forms.prelu,
    "Dropout": forms.dropout,
    "LSTMCell": cells.lstm,
    "OptimizedLSTMCell": cells.lstm,
    "GRUCell": cells.gru,
    "SimpleCell": cells.simple_rnn,
    "MultiHeadDotProductAttention": cells.attention,
    "MultiHeadAttention": cells.attention,
    "SelfAttention": cells.attention,
}
CELLS: Final = ("lstm", "gru", "simple_rnn")
"""Kinds of recurrent layers."""

REFUSED: Final[Mapping[str, str]] = {
    "ConvLocal": "its kernel differs from place to place",
    "ConvLSTMCell": "the canonical layout has no convolutional LSTM",
    "MGUCell": "no other framework has a minimal gated unit",
    "SpectralNorm": "it divides the kernel of the layer inside it by a number that it learns from the batches",
    "WeightNorm": "it computes the kernel of the layer inside it",
    "LoRA": "it adds a product of two matrices to another layer; merge it into that layer's kernel first",
    "LoRALinear": "it adds a product of two matrices to its kernel; merge that into the kernel first",
}


def class_of(module: Any) -> type | None:
    """flax's own class that a module is of: the nearest one in this table; None for the user's own."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("flax.") and (kind.__name__ in MAKERS or kind.__name__ in REFUSED):
            return kind
    return None


def line(library: str, kind: type, path: str, setting: str, value: Any) -> str:
    """The line of code that gives a layer another setting: in nnx an attribute, in linen an argument of the class."""
    if library == "nnx":
        return f"model.{path.replace('/', '.')}.{setting} = {value!r}"
    return f"{path}: nn.{kind.__name__}({setting}={value!r})"


SETTINGS: Final[Mapping[str, str]] = {
    "epsilon": "epsilon",
    "momentum": "momentum",
    "padding": "padding",
    "strides": "strides",
    "rate": "rate",
    "dropout": "dropout_rate",
}
"""Canonical attribute -> flax's setting, where both have one meaning."""
