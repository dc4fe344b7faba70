"""Table of flax's classes: the maker of each form, or the reason why there is none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from polyamp.errors import PortError
from polyamp.porting.layouts.layer_layout import Form
from polyamp_jax.porting.libraries import flax_cells as cells
from polyamp_jax.porting.libraries import flax_layers as forms
from polyamp_jax.porting.libraries.flax_layers import FormMaker, RefusedError

FORM_MAKERS: Final[Mapping[str, FormMaker]] = {
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
COMPOSITE_MAKERS: Final = (cells.lstm, cells.gru, cells.simple_rnn, cells.attention)
"""Makers of layers that consist of several modules and include the arrays of all of them."""

ARRAY_NAMES: Final = frozenset(("kernel", "bias", "scale", "mean", "var", "embedding", "negative_slope"))
"""Array names of flax's layers that consist of one module. A subclass's other arrays are parameters of no layer."""

ARRAYLESS_CLASSES: Final = ("Dropout", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")
"""Classes that may have no arrays."""

CELL_KINDS: Final = ("lstm", "gru", "simple_rnn")
"""Kinds of recurrent layers."""

UNSUPPORTED: Final[Mapping[str, str]] = {
    "ConvLocal": "its kernel differs from place to place",
    "ConvLSTMCell": "the canonical layout has no convolutional LSTM",
    "MGUCell": "no other framework has a minimal gated unit",
    "SpectralNorm": "it divides the kernel of the layer inside it by a number that it learns from the batches",
    "WeightNorm": "it computes the kernel of the layer inside it",
    "LoRA": "it adds a product of two matrices to another layer; merge it into that layer's kernel first",
    "LoRALinear": "it adds a product of two matrices to its kernel; merge that into the kernel first",
}


def flax_class(module: Any) -> type | None:
    """Return the nearest class of a module in this table; None for a custom class."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("flax.") and (kind.__name__ in FORM_MAKERS or kind.__name__ in UNSUPPORTED):
            return kind
    return None


def make_form(module: Any, shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any], path: str) -> Form:
    """Return the form of a module of one of flax's classes.

    Args:
        module: the module.
        shapes: shapes of its arrays by name.
        settings: settings by name.
        path: path of the module, for the message.

    Raises:
        PortError: the layer, or one of its settings, has no canonical equivalent.
    """
    kind = flax_class(module)
    assert kind is not None
    try:
        if kind.__name__ in UNSUPPORTED:
            raise RefusedError(UNSUPPORTED[kind.__name__])
        _check_axes(kind.__name__, shapes, settings)
        return FORM_MAKERS[kind.__name__](shapes, settings)
    except RefusedError as error:
        raise refusal_error(path, f"{'.'.join(kind.__module__.split('.')[:2])}.{kind.__name__}: {error}") from None


def _check_axes(name: str, shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]) -> None:
    """Raise if an array stacks those of several layers, as `nnx.vmap` and `nnx.scan` do."""
    array, axes = _EXPECTED_AXES.get(name, ("kernel", 0))
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


_EXPECTED_AXES: Final = {
    "Dense": ("kernel", 2),
    "Linear": ("kernel", 2),
    "Embed": ("embedding", 2),
    "GroupNorm": ("scale", 1),
    "BatchNorm": ("mean", 1),
}
"""Class -> one of its arrays, and the number of axes of that array."""


def refusal_error(path: str, why: str) -> PortError:
    """Return the error for a layer that cannot be moved; `why` starts with its class."""
    return PortError(
        f"{path or 'the model'!r} cannot be moved: {why}. Give it a form with polyamp.porting.register, or port the "
        "model without it."
    )


def attribute_lines(module: Any, form: Form, path: str) -> dict[str, Callable[[Any], str]]:
    """Return canonical attribute -> the line of code that sets it. In nnx it is an attribute; in linen, whose modules
    are immutable, an argument of the class."""
    kind = flax_class(module)
    if kind is None:
        return {}
    return {
        attribute: functools.partial(_attribute_line, kind, path, setting)
        for attribute, setting in SETTING_NAMES.items()
        if attribute in form.attributes
    }


def _attribute_line(kind: type, path: str, setting: str, value: Any) -> str:
    written = repr(value.upper() if setting == "padding" and isinstance(value, str) else value)
    if kind.__module__.startswith("flax.linen"):
        return f"nn.{kind.__name__}({setting}={written}) for {path!r}"
    steps = "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in path.split("/"))
    return f"model{steps}.{setting} = {written}"


SETTING_NAMES: Final[Mapping[str, str]] = {
    "epsilon": "epsilon",
    "momentum": "momentum",
    "padding": "padding",
    "strides": "strides",
    "rate": "rate",
    "dropout": "dropout_rate",
}
"""Canonical attribute -> flax's setting of the same meaning."""
