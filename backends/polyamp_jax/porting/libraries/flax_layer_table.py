"""Table of flax's classes of layers: a row each, with the maker of its form or the reason why there is none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from polyamp.errors import PortError
from polyamp.porting.layouts.layer_layout import Form
from polyamp_jax.porting.libraries import flax_layers as forms
from polyamp_jax.porting.libraries.flax_layers import FormMaker, LayerSettings, RefusedError


class FlaxLayerSpec(NamedTuple):
    """Table row of a class of layers, which linen and nnx share by its name.

    Attributes:
        form: maker of its form; None if the layer cannot be moved.
        array: function from its settings to the name of one of its arrays and the expected number of axes; a stack of
            layers has more axes. None if the array may have any shape.
        is_composite: whether it consists of several modules and includes the arrays of all of them.
        can_be_arrayless: whether it may have no arrays.
        refusal: why it cannot be moved.
    """

    form: FormMaker | None = None
    array: Callable[[LayerSettings], tuple[str, int]] | None = None
    is_composite: bool = False
    can_be_arrayless: bool = False
    refusal: str = ""


def _array(name: str, axes: int) -> Callable[[LayerSettings], tuple[str, int]]:
    return lambda settings: (name, axes)


def _conv_kernel(settings: LayerSettings) -> tuple[str, int]:
    size = settings["kernel_size"]
    return "kernel", 2 + (1 if isinstance(size, int) else len(size))


def _general_kernel(settings: LayerSettings) -> tuple[str, int]:
    return "kernel", sum(len(settings[each]) for each in ("batch_axis", "in_features", "out_features"))


_dense = FlaxLayerSpec(forms.dense, _array("kernel", 2))
_lstm = FlaxLayerSpec(forms.lstm, is_composite=True)
_attention = FlaxLayerSpec(forms.attention, is_composite=True)
LAYER_SPECS: Final[Mapping[str, FlaxLayerSpec]] = {
    "Dense": _dense,
    "Linear": _dense,
    "DenseGeneral": FlaxLayerSpec(forms.dense_general),
    "LinearGeneral": FlaxLayerSpec(forms.dense_general, _general_kernel),
    "Einsum": FlaxLayerSpec(forms.einsum),
    "Conv": FlaxLayerSpec(forms.conv, _conv_kernel),
    "ConvTranspose": FlaxLayerSpec(forms.conv_transpose, _conv_kernel),
    "Embed": FlaxLayerSpec(forms.embedding, _array("embedding", 2)),
    "LayerNorm": FlaxLayerSpec(forms.layer_norm, can_be_arrayless=True),
    "RMSNorm": FlaxLayerSpec(forms.rms_norm, can_be_arrayless=True),
    "GroupNorm": FlaxLayerSpec(forms.group_norm, _array("scale", 1), can_be_arrayless=True),
    "InstanceNorm": FlaxLayerSpec(forms.instance_norm, can_be_arrayless=True),
    "BatchNorm": FlaxLayerSpec(forms.batch_norm, _array("mean", 1)),
    "PReLU": FlaxLayerSpec(forms.prelu),
    "Dropout": FlaxLayerSpec(forms.dropout, can_be_arrayless=True),
    "LSTMCell": _lstm,
    "OptimizedLSTMCell": _lstm,
    "GRUCell": FlaxLayerSpec(forms.gru, is_composite=True),
    "SimpleCell": FlaxLayerSpec(forms.simple_rnn, is_composite=True),
    "MultiHeadDotProductAttention": _attention,
    "MultiHeadAttention": _attention,
    "SelfAttention": _attention,
    "ConvLocal": FlaxLayerSpec(refusal="its kernel differs from place to place"),
    "ConvLSTMCell": FlaxLayerSpec(refusal="the canonical layout has no convolutional LSTM"),
    "MGUCell": FlaxLayerSpec(refusal="no other framework has a minimal gated unit"),
    "SpectralNorm": FlaxLayerSpec(
        refusal="it divides the kernel of the layer inside it by a number that it learns from the batches"
    ),
    "WeightNorm": FlaxLayerSpec(refusal="it computes the kernel of the layer inside it"),
    "LoRA": FlaxLayerSpec(
        refusal="it adds a product of two matrices to another layer; merge it into that layer's kernel first"
    ),
    "LoRALinear": FlaxLayerSpec(
        refusal="it adds a product of two matrices to its kernel; merge that into the kernel first"
    ),
}
"""Class name -> row."""

ARRAY_NAMES: Final = frozenset(("kernel", "bias", "scale", "mean", "var", "embedding", "negative_slope"))
"""Array names of flax's layers that consist of one module. A subclass's other arrays are parameters of no layer."""

CELL_KINDS: Final = ("lstm", "gru", "simple_rnn")
"""Kinds of recurrent layers."""


def flax_class(module: Any) -> type | None:
    """Return the nearest class of a module in this table; None for a custom class."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("flax.") and kind.__name__ in LAYER_SPECS:
            return kind
    return None


def find_layer_spec(module: Any) -> FlaxLayerSpec | None:
    """Return the row of a module's class, or of its nearest base class."""
    kind = flax_class(module)
    return None if kind is None else LAYER_SPECS[kind.__name__]


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
    spec = LAYER_SPECS[kind.__name__]
    try:
        if spec.form is None:
            raise RefusedError(spec.refusal)
        if spec.array is not None:
            _check_axes(*spec.array(settings), shapes)
        return spec.form(shapes, settings)
    except RefusedError as error:
        raise refusal_error(path, f"{'.'.join(kind.__module__.split('.')[:2])}.{kind.__name__}: {error}") from None


def _check_axes(array: str, axes: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if an array stacks those of several layers, as `nnx.vmap` and `nnx.scan` do."""
    if array in shapes and len(shapes[array]) != axes:
        raise RefusedError(
            f"its {array} of {list(shapes[array])} has an axis too many: a stack of layers, as vmap and scan make "
            "them; linen's alone are moved, along the first axis and with a batch"
        )


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
