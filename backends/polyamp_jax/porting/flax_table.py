"""Class of flax -> what makes its form, or why it has none. Called by `linen` and `nnx`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from polyamp.errors import PortError
from polyamp.porting.layouts.forms import Form
from polyamp_jax.porting import flax_cells as cells
from polyamp_jax.porting import flax_forms as forms
from polyamp_jax.porting.flax_forms import Maker, RefusedError

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
COMPOSITE: Final = (cells.lstm, cells.gru, cells.simple_rnn, cells.attention)
"""Makers of layers that are several modules: the arrays of all of them are theirs."""

ARRAYS: Final = frozenset(("kernel", "bias", "scale", "mean", "var", "embedding", "negative_slope"))
"""Names of the arrays of flax's layers that are one module; what else a subclass has is a parameter of no layer."""

BARE: Final = ("Dropout", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")
"""Classes that may have no arrays."""

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


def made(module: Any, shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any], path: str) -> Form:
    """The form of a module of one of flax's classes.

    Args:
        module: the module.
        shapes: of its arrays by name.
        settings: by name.
        path: of the module, for the message.

    Raises:
        PortError: the layer, or one of its settings, has no place in the canonical layout.
    """
    kind = class_of(module)
    assert kind is not None
    try:
        if kind.__name__ in REFUSED:
            raise RefusedError(REFUSED[kind.__name__])
        _check_axes(kind.__name__, shapes, settings)
        return MAKERS[kind.__name__](shapes, settings)
    except RefusedError as error:
        raise refusal(path, f"{'.'.join(kind.__module__.split('.')[:2])}.{kind.__name__}: {error}") from None


def _check_axes(name: str, shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]) -> None:
    """Refuse several layers' arrays in one, as `nnx.vmap` and `nnx.scan` make them."""
    array, axes = _AXES.get(name, ("kernel", 0))
    if name in ("Conv", "ConvTranspose"):
        size = settings["kernel_size"]
        axes = 2 + (1 if isinstance(size, int) else len(size))
    elif name == "LinearGeneral":
        axes = sum(len(settings[each]) for each in ("batch_axis", "in_features", "out_features"))
    if axes and array in shapes and len(shapes[array]) != axes:
        raise RefusedError(
            f"its {array} of {list(shapes[array])} has an axis too many: a stack of layers, as vmap and scan make "
            "them; linen's alone are moved, along the first axis and with a batch"
        )


_AXES: Final = {
    "Dense": ("kernel", 2),
    "Linear": ("kernel", 2),
    "Embed": ("embedding", 2),
    "GroupNorm": ("scale", 1),
    "BatchNorm": ("mean", 1),
}
"""Class -> an array of it, and how many axes that has."""


def refusal(path: str, why: str) -> PortError:
    """The error about a layer that cannot be moved; `why` names its class first."""
    return PortError(
        f"{path or 'the model'!r} cannot be moved: {why}. Give it a form with polyamp.porting.register, or port the "
        "model without it."
    )


def lines(module: Any, form: Form, path: str) -> dict[str, Callable[[Any], str]]:
    """Canonical attribute -> the line of code that gives a layer another value: in nnx an attribute, in linen, whose
    modules do not change, an argument of the class."""
    kind = class_of(module)
    if kind is None:
        return {}
    return {
        attribute: functools.partial(_line, kind, path, setting)
        for attribute, setting in SETTINGS.items()
        if attribute in form.attributes
    }


def _line(kind: type, path: str, setting: str, value: Any) -> str:
    written = repr(value.upper() if setting == "padding" and isinstance(value, str) else value)
    if kind.__module__.startswith("flax.linen"):
        return f"nn.{kind.__name__}({setting}={written}) for {path!r}"
    steps = "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in path.split("/"))
    return f"model{steps}.{setting} = {written}"


SETTINGS: Final[Mapping[str, str]] = {
    "epsilon": "epsilon",
    "momentum": "momentum",
    "padding": "padding",
    "strides": "strides",
    "rate": "rate",
    "dropout": "dropout_rate",
}
"""Canonical attribute -> flax's setting, where both have one meaning."""
