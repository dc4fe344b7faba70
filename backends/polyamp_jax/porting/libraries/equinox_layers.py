"""Forms of equinox's layers, by class.

equinox has channels first, kernels as (features, inputs), and one sample at a time. The arrays of a layer may be shapes
without values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from polyamp.porting.layouts.layer_kinds import default_attention_scale
from polyamp.porting.layouts.layer_layout import Form, Rule, same
from polyamp.porting.layouts.operations import Flip, Merge, Operation, Reshape, Transpose
from polyamp_jax.porting.input_orders import ChainRole
from polyamp_jax.porting.layers.activations import activation_attributes

nn: Final = eqx.nn


class EquinoxLayerSpec(NamedTuple):
    """Table row of a class of layers.

    Attributes:
        form: function from a layer to its form.
        array: returns its first array and the expected number of axes; a stack of layers has more axes. None if it has
            no array, or an array of any shape.
        words: attribute -> the class's argument of the same meaning.
        role: what it is in a Sequential.
    """

    form: Callable[[Any], Form]
    array: Callable[[Any], tuple[Any, int]] | None = None
    words: Mapping[str, str] = {}
    role: ChainRole = "unknown"


def find_layer_spec(layer: Any) -> EquinoxLayerSpec | None:
    """Return the row of a layer's class, or of its nearest base class."""
    for kind in type(layer).__mro__:
        if kind in LAYER_SPECS:
            return LAYER_SPECS[kind]
    return None


def attribute_lines(layer: Any, path: str, row: EquinoxLayerSpec) -> dict[str, Callable[[Any], str]]:
    """Return the code lines that set a layer's attributes. Most fields are static and so constructor arguments."""
    name = f"eqx.nn.{type(layer).__name__}"
    place = path or "the root"

    def line(word: str) -> Callable[[Any], str]:
        return lambda value: f"{name}(..., {word}={_argument(word, value)!r})  # at {place}"

    return {attribute: line(word) for attribute, word in row.words.items()}


def _argument(word: str, value: Any) -> Any:
    if word == "padding" and isinstance(value, str):
        return value.upper()
    return [tuple(pair) for pair in value] if word == "padding" else value


def _bias_rules(layer: Any, rule: Rule) -> tuple[Rule, ...]:
    return () if layer.bias is None else (rule,)


def _linear(layer: Any) -> Form:
    rules = (Rule(("weight",), ("kernel",), (Transpose((1, 0)),)), *_bias_rules(layer, Rule(("bias",), ("bias",))))
    return Form("dense", rules, {"activation": "linear"})


def _channel_bias_rules(layer: Any) -> tuple[Rule, ...]:
    features = layer.out_channels
    flat = Reshape((features, *(1,) * layer.num_spatial_dims), (features,))
    return _bias_rules(layer, Rule(("bias",), ("bias",), (flat,)))


def _convolution_attributes(layer: Any, padding: Any) -> dict[str, Any]:
    return {
        "activation": "linear",
        "strides": list(layer.stride),
        "dilation": list(layer.dilation),
        "groups": layer.groups,
        "padding_mode": layer.padding_mode.lower(),
        "channels": "first",
        **({} if padding is None else {"padding": padding}),
    }


def _conv(layer: Any) -> Form:
    axes = tuple(range(2, layer.num_spatial_dims + 2))
    rules = (Rule(("weight",), ("kernel",), (Transpose((*axes, 1, 0)),)), *_channel_bias_rules(layer))
    if layer.padding == "SAME_LOWER":  # the odd zero comes first; with strides the number depends on the input
        total = [dilation * (size - 1) for size, dilation in zip(layer.kernel_size, layer.dilation, strict=True)]
        padding: Any = [[n - n // 2, n // 2] for n in total] if set(layer.stride) == {1} else None
    elif isinstance(layer.padding, str):
        padding = layer.padding.lower()
    else:
        padding = [list(pair) for pair in layer.padding] if any(map(any, layer.padding)) else "valid"
    return Form("conv", rules, _convolution_attributes(layer, padding))


def _conv_transpose(layer: Any) -> Form:
    size = layer.num_spatial_dims
    spatial, groups = tuple(layer.kernel_size), layer.groups
    inputs, features = layer.in_channels, layer.out_channels
    axes = tuple(range(3, size + 3))
    # from (features, inputs / groups) of one group to (inputs, features / groups)
    operations: tuple[Operation, ...] = (
        Reshape(
            (features, inputs // groups, *spatial),
            (groups, features // groups, inputs // groups, *spatial),
        ),
        Transpose((*axes, 0, 2, 1)),
        Reshape((*spatial, groups, inputs // groups, features // groups), (*spatial, inputs, features // groups)),
        Flip(tuple(range(size))),
    )
    if groups == 1:
        operations = (Transpose((*range(2, size + 2), 1, 0)), Flip(tuple(range(size))))
    rules = (Rule(("weight",), ("kernel",), operations), *_channel_bias_rules(layer))
    cut = [_output_crop(layer, axis) for axis in range(size)]
    return Form("conv_transpose", rules, _convolution_attributes(layer, cut))


def _output_crop(layer: Any, axis: int) -> list[int]:
    """Return what is cropped from the full output at the start and end of an axis."""
    added = layer.output_padding[axis]
    if layer.padding == "VALID":
        return [0, -added]
    if not isinstance(layer.padding, str):
        before, after = layer.padding[axis]
        return [before, after - added]
    total = layer.dilation[axis] * (layer.kernel_size[axis] - 1) - layer.stride[axis] + added + 1
    added, total = max(-total, 0), max(total, 0)
    before = (total + (layer.padding == "SAME_LOWER")) // 2
    return [before, total - before - added]


def _embedding(layer: Any) -> Form:
    return Form("embedding", (Rule(("weight",), ("table",)),))


def _norm(kind: str, **attributes: Callable[[Any], Any]) -> Callable[[Any], Form]:
    def form(layer: Any) -> Form:
        rules = [Rule((name,), (role,)) for name, role in _SCALE_AND_BIAS if getattr(layer, name) is not None]
        values = {name: read(layer) for name, read in attributes.items()}
        return Form(kind, tuple(rules), {"epsilon": layer.eps, **values})

    return form


_SCALE_AND_BIAS: Final = (("weight", "scale"), ("bias", "bias"))


def _batch_norm(layer: Any) -> Form:
    form = _norm("batch_norm", momentum=lambda norm: norm.momentum, unbiased=lambda norm: False)(layer)
    return Form(form.kind, (*form.rules, *same("mean", "variance")), form.attributes)


_CELL_ACTIVATIONS: Final = {"activation": "tanh", "recurrent_activation": "sigmoid"}


def _cell_kernel_rules() -> tuple[Rule, ...]:
    turned = (Transpose((1, 0)),)
    return Rule(("weight_ih",), ("input_kernel",), turned), Rule(("weight_hh",), ("recurrent_kernel",), turned)


def _lstm(layer: Any) -> Form:
    return Form(
        "lstm",
        (*_cell_kernel_rules(), *_bias_rules(layer, Rule(("bias",), ("bias", "recurrent_bias"), (Merge(),)))),
        _CELL_ACTIVATIONS,
    )


def _gru(layer: Any) -> Form:
    both = Rule(("bias", "bias_n"), ("bias", "recurrent_bias"), (Merge(kept=(2,), blocks=3),))
    return Form("gru", (*_cell_kernel_rules(), *_bias_rules(layer, both)), {**_CELL_ACTIVATIONS, "reset": "after"})


def _attention(layer: Any) -> Form:
    heads, rules = layer.num_heads, []
    for linear, name, kernel, bias, inputs, size in (
        (layer.query_proj, "query_proj", "query_kernel", "query_bias", layer.query_size, layer.qk_size),
        (layer.key_proj, "key_proj", "key_kernel", "key_bias", layer.key_size, layer.qk_size),
        (layer.value_proj, "value_proj", "value_kernel", "value_bias", layer.value_size, layer.vo_size),
    ):
        split = Reshape((inputs, heads * size), (inputs, heads, size))
        rules.append(Rule((f"{name}/weight",), (kernel,), (Transpose((1, 0)), split)))
        if linear.bias is not None:
            rules.append(Rule((f"{name}/bias",), (bias,), (Reshape((heads * size,), (heads, size)),)))
    size, features = layer.vo_size, layer.output_size
    split = Reshape((heads * size, features), (heads, size, features))
    rules.append(Rule(("output_proj/weight",), ("output_kernel",), (Transpose((1, 0)), split)))
    if layer.output_proj.bias is not None:
        rules.append(Rule(("output_proj/bias",), ("output_bias",)))
    rate = layer.dropout.p
    attributes = {"scale": default_attention_scale(layer.qk_size), "mask": "keep"}
    return Form(
        "attention", tuple(rules), {**attributes, **({} if is_array_or_shape(rate) else {"dropout": float(rate)})}
    )


def _prelu(layer: Any) -> Form:
    shape = tuple(layer.negative_slope.shape)
    flat = (math.prod(shape),)
    # () for all channels; (channels, 1, 1) with channels first
    lone = sum(length > 1 for length in shape) <= 1 and shape != flat
    return Form("prelu", (Rule(("negative_slope",), ("slope",), (Reshape(shape, flat),) if lone else ()),))


def _dropout(layer: Any) -> Form:
    return Form("dropout", (), {} if is_array_or_shape(layer.p) else {"rate": float(layer.p)})


def _pool(layer: Any) -> Form:
    attributes: dict[str, Any] = {"window": list(layer.kernel_size), "strides": list(layer.stride)}
    if not layer.use_ceil:
        attributes["padding"] = [list(pair) for pair in layer.padding] if any(map(any, layer.padding)) else "valid"
    if layer.operation is lax.max:
        attributes["operation"] = "max"
    elif isinstance(layer, nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d):
        attributes |= {"operation": "average", "counts_padding": True}
    return Form("pooling", (), attributes)


def _adaptive_pool(layer: Any) -> Form:
    names = {jnp.mean: "average", jnp.max: "max"}
    attributes: dict[str, Any] = {"operation": names[layer.operation]} if layer.operation in names else {}
    return Form("pooling", (), {**attributes, **({"window": []} if math.prod(layer.target_shape) == 1 else {})})


def _lambda(layer: Any) -> Form:
    return Form("activation", (), activation_attributes(layer.fn))


def _rotary(layer: Any) -> Form:
    return Form("rotary", (), {"base": float(layer.theta), "pairs": "halves"})


def is_array_or_shape(value: Any) -> bool:
    """Return whether a value is a JAX array or the shape of one."""
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct)


def _weight_axes(axes: Callable[[Any], int]) -> Callable[[Any], tuple[Any, int]]:
    return lambda layer: (layer.weight, axes(layer))


_EPSILON_WORD: Final = {"epsilon": "eps"}
_CONVOLUTION_WORDS: Final = {
    "strides": "stride",
    "dilation": "dilation",
    "groups": "groups",
    "padding": "padding",
    "padding_mode": "padding_mode",
}
LAYER_SPECS: Final[Mapping[type, EquinoxLayerSpec]] = {
    nn.Linear: EquinoxLayerSpec(_linear, _weight_axes(lambda layer: 2), role="dense"),
    nn.Conv: EquinoxLayerSpec(
        _conv, _weight_axes(lambda layer: layer.num_spatial_dims + 2), _CONVOLUTION_WORDS, "convolution"
    ),
    nn.ConvTranspose: EquinoxLayerSpec(
        _conv_transpose, _weight_axes(lambda layer: layer.num_spatial_dims + 2), _CONVOLUTION_WORDS, "convolution"
    ),
    nn.Embedding: EquinoxLayerSpec(_embedding, _weight_axes(lambda layer: 2)),
    nn.LayerNorm: EquinoxLayerSpec(
        _norm("layer_norm", axes=lambda norm: len(norm.shape)),
        _weight_axes(lambda layer: len(layer.shape)),
        _EPSILON_WORD,
    ),
    nn.RMSNorm: EquinoxLayerSpec(_norm("rms_norm"), _weight_axes(lambda layer: len(layer.shape)), _EPSILON_WORD),
    nn.GroupNorm: EquinoxLayerSpec(
        _norm("group_norm", groups=lambda norm: norm.groups),
        _weight_axes(lambda layer: 1),
        {**_EPSILON_WORD, "groups": "groups"},
        "norm",
    ),
    nn.BatchNorm: EquinoxLayerSpec(
        _batch_norm, _weight_axes(lambda layer: 1), {**_EPSILON_WORD, "momentum": "momentum"}, "norm"
    ),
    nn.LSTMCell: EquinoxLayerSpec(_lstm, lambda layer: (layer.weight_ih, 2)),
    nn.GRUCell: EquinoxLayerSpec(_gru, lambda layer: (layer.weight_ih, 2)),
    nn.MultiheadAttention: EquinoxLayerSpec(
        _attention, lambda layer: (layer.query_proj.weight, 2), {"dropout": "dropout_p"}
    ),
    nn.PReLU: EquinoxLayerSpec(_prelu),
    nn.Dropout: EquinoxLayerSpec(_dropout, None, {"rate": "p"}, "elementwise"),
    nn.Pool: EquinoxLayerSpec(
        _pool, None, {"window": "kernel_size", "strides": "stride", "padding": "padding"}, "function"
    ),
    nn.AdaptivePool: EquinoxLayerSpec(_adaptive_pool, role="function"),
    nn.Lambda: EquinoxLayerSpec(_lambda),
    nn.RotaryPositionalEmbedding: EquinoxLayerSpec(_rotary, None, {"base": "theta"}),
}
