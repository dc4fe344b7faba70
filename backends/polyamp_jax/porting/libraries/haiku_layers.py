"""Table of haiku's layers, with the makers of their forms."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import haiku as hk

from polyamp.porting.layouts.layer_kinds import default_attention_scale
from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.negate import Negate
from polyamp.porting.layouts.operations import Blocks, Flip, Merge, Operation, Reshape, Shape, Split, Transpose
from polyamp_jax.porting.layers.convolution_rules import check_unmasked, per_axis, same_output_crop
from polyamp_jax.porting.layers.refusal import RefusedError
from polyamp_jax.porting.libraries.haiku_layer_spec import (
    FormMaker,
    HaikuCall,
    HaikuLayerSpec,
    PossibleForms,
    Shapes,
    fitting_forms,
    flat_array_rule,
)


def _bias_rules(shapes: Shapes) -> tuple[Rule, ...]:
    return (flat_array_rule("b", "bias", shapes["b"]),) if "b" in shapes else ()


def dense(shapes: Shapes, call: HaikuCall | None) -> Form:
    """Return the form of `hk.Linear`, which has the canonical layout."""
    return Form(
        "dense", (Rule(("w",), ("kernel",)), *_bias_rules(shapes)), {} if call is None else {"activation": "linear"}
    )


def conv(shapes: Shapes, call: HaikuCall | None) -> Form:
    """Return the form of `hk.ConvND` and `hk.DepthwiseConvND`, which have the canonical layout."""
    rules = (Rule(("w",), ("kernel",)), *_bias_rules(shapes))
    if call is None:
        return Form("conv", rules)
    module, rank = call.module, len(shapes["w"]) - 2
    check_unmasked(vars(module))
    depthwise = hasattr(module, "channel_multiplier")
    padding = module.padding
    if not isinstance(padding, str):
        padding = [list(pair) for pair in padding] if any(map(any, padding)) else "valid"
    attributes = {
        "activation": "linear",
        "strides": per_axis(module.stride, rank),
        "dilation": per_axis(module.rhs_dilation if depthwise else module.kernel_dilation, rank),
        "padding": padding.lower() if isinstance(padding, str) else padding,
        "padding_mode": "zeros",
        "groups": shapes["w"][-1] // module.channel_multiplier if depthwise else module.feature_group_count,
        "channels": _channel_position(module),
    }
    return Form("conv", rules, attributes)


def conv_transpose(shapes: Shapes, call: HaikuCall | None) -> Form:
    """Return the form of `hk.ConvNDTranspose`. Its kernel (features before inputs) slides over the dilated input."""
    rank = len(shapes["w"]) - 2
    turn = (Transpose((*range(rank), rank + 1, rank)), Flip(tuple(range(rank))))
    rules = (Rule(("w",), ("kernel",), turn), *_bias_rules(shapes))
    if call is None:
        return Form("conv_transpose", rules, {"groups": 1})
    module = call.module
    check_unmasked(vars(module))
    strides = per_axis(module.stride, rank)
    attributes = {
        "activation": "linear",
        "strides": strides,
        "dilation": [1] * rank,
        "padding": _output_crop(module, shapes["w"][:rank], strides, call.inputs),
        "padding_mode": "zeros",
        "groups": 1,
        "channels": _channel_position(module),
    }
    return Form("conv_transpose", rules, attributes)


def _output_crop(module: Any, kernel: Shape, strides: Sequence[int], inputs: Shape) -> list[list[int]]:
    """Return what is cropped from the full output. haiku defines the padding around the dilated input."""
    if not isinstance(module.padding, str):
        return [[k - 1 - before, k - 1 - behind] for k, (before, behind) in zip(kernel, module.padding, strict=True)]
    found = []
    spatial = inputs[-len(kernel) :] if module.channel_index == 1 else inputs[-len(kernel) - 1 : -1]
    for axis, (k, s) in enumerate(zip(kernel, strides, strict=True)):
        same = module.padding == "SAME"
        if module.output_shape is not None:  # as in haiku's compute_adjusted_padding
            length, made = spatial[axis], module.output_shape[axis]
            before = max(0, (length - 1) * s + k - made) // 2 if same else 0
            behind = (length - 1) * s + k - made - before
        elif same:
            before, behind = same_output_crop(k - 1, s)
        else:
            before, behind = 0, -max(s - k, 0)
        found.append([before, behind])
    return found


def embedding(shapes: Shapes, call: HaikuCall | None) -> Form:
    """Return the form of `hk.Embed`."""
    return Form("embedding", (Rule(("embeddings",), ("table",)),))


def _scale_and_offset_rules(shapes: Shapes) -> tuple[Rule, ...]:
    return tuple(flat_array_rule(name, _ROLES[name], shapes[name]) for name in _ROLES if name in shapes)


_ROLES: Final = {"scale": "scale", "offset": "bias", "mean": "mean", "variance": "variance"}


def norm(shapes: Shapes, call: HaikuCall | None, kind: str = "layer_norm") -> Form:
    """Return the form of `hk.LayerNorm`, `hk.InstanceNorm` and `hk.RMSNorm`, according to their axes.

    - A layer norm over all axes but the batch's, with a scale for each channel, is a group norm with one group.
    - A layer norm over all axes but those of the batch and the channels is an instance norm.
    """
    rules = _scale_and_offset_rules(shapes)
    if call is None:
        return Form(kind, rules)
    module, rank = call.module, len(call.inputs)
    axis = module.axis
    axes = tuple(range(rank)[axis]) if isinstance(axis, slice) else tuple(sorted({each % rank for each in axis}))
    attributes: dict[str, Any] = {"epsilon": float(module.eps)}
    channel = rank - 1
    if any(channel_first := [rule for rule in rules if len(shapes[rule.native[0]]) > 1]):
        shape = shapes[channel_first[0].native[0]]
        channel = next((number for number, length in enumerate(shape) if length != 1), rank - 1)
    if axes == (rank - 1,) and channel == rank - 1:
        return Form(kind, rules, {**attributes, **({"axes": 1} if kind == "layer_norm" else {})})
    if kind == "layer_norm" and axes == tuple(range(1, rank)):
        return Form("group_norm", rules, {**attributes, "groups": 1})
    if kind == "layer_norm" and axes == tuple(each for each in range(1, rank) if each != channel):
        return Form("group_norm", rules, {**attributes, "groups": call.inputs[channel]})
    raise RefusedError(f"its axis={axis} of {rank} axes is neither the last one, nor all but the batch's")


def rms_norm(shapes: Shapes, call: HaikuCall | None) -> Form:
    """Return the form of `hk.RMSNorm`."""
    return norm(shapes, call, "rms_norm")


def group_norm(shapes: Shapes, call: HaikuCall | None) -> Form:
    """Return the form of `hk.GroupNorm`."""
    attributes = {} if call is None else {"epsilon": float(call.module.eps), "groups": call.module.groups}
    return Form("group_norm", _scale_and_offset_rules(shapes), attributes)


def instance_norm(shapes: Shapes, call: HaikuCall | None) -> Form:
    """Return the form of `hk.InstanceNorm`, if only its name is known."""
    return Form("group_norm", _scale_and_offset_rules(shapes), {"groups": math.prod(next(iter(shapes.values()), (0,)))})


def batch_norm(shapes: Shapes, call: HaikuCall | None) -> Form:
    """Return the form of `hk.BatchNorm`, with its averages under the names "mean" and "variance"."""
    attributes: dict[str, Any] = {"unbiased": False}
    if call is not None:
        attributes |= {"epsilon": float(call.module.eps), "momentum": float(call.module.mean_ema.decay)}
    return Form("batch_norm", _scale_and_offset_rules(shapes), attributes)


_CELL_ACTIVATIONS: Final = {"activation": "tanh", "recurrent_activation": "sigmoid"}
_LSTM_GATE_ORDER: Final = Blocks((0, 2, 1, 3))
"""Order of haiku's gates: input, candidate, forget, output."""


def lstm(shapes: Shapes, call: HaikuCall | None) -> Form:
    """Return the form of `hk.LSTM`. It has one kernel for inputs and state, and adds 1 to the forget gate."""
    rows, columns = shapes["w"]
    units = columns // 4
    if columns % 4 or rows <= units or shapes.get("b") != (columns,):
        raise RefusedError(f"a kernel of {[rows, columns]} is not one of inputs and {units} units")
    kernels = (Split((rows - units, units), 0), _LSTM_GATE_ORDER)
    biases = (_LSTM_GATE_ORDER, Merge(blocks=4, added=(0, 1, 0, 0)))
    rules = (Rule(("w",), ("input_kernel", "recurrent_kernel"), kernels), Rule(("b",), _BIASES, biases))
    return Form("lstm", rules, _CELL_ACTIVATIONS)


_BIASES: Final = ("bias", "recurrent_bias")


def gru(shapes: Shapes, call: HaikuCall | None) -> Form:
    """Return the form of `hk.GRU`. Its gates are update, reset, candidate; its update gate is the complement of other
    frameworks'."""
    order: tuple[Operation, ...] = (Blocks((1, 0, 2)), Negate((1,), 3))
    rules = (
        Rule(("w_i",), ("input_kernel",), order),
        Rule(("w_h",), ("recurrent_kernel",), order),
        Rule(("b",), _BIASES, (*order, Merge())),
    )
    return Form("gru", rules, {**_CELL_ACTIVATIONS, "reset": "before"})


def simple_rnn(shapes: Shapes, call: HaikuCall | None) -> Form:
    """Return the form of `hk.VanillaRNN`: two dense layers, the second without a bias if `double_bias=False`."""
    rules = [Rule(("linear/w",), ("input_kernel",)), Rule(("linear_1/w",), ("recurrent_kernel",))]
    if "linear_1/b" in shapes:
        rules += [Rule(("linear/b",), ("bias",)), Rule(("linear_1/b",), ("recurrent_bias",))]
    else:
        rules.append(Rule(("linear/b",), _BIASES, (Merge(),)))
    return Form("simple_rnn", tuple(rules), {"activation": "relu"})


def attention(shapes: Shapes, call: HaikuCall | None, heads: int = 0) -> Form:
    """Return the form of `hk.MultiHeadAttention`: four dense layers, whose shapes do not determine the number of
    heads."""
    heads = heads if call is None else call.module.num_heads
    rules = []
    for role, kernel, bias in _PROJECTIONS:
        inputs, columns = shapes[f"{role}/w"]
        size = columns // heads
        split = Reshape((inputs, columns), (inputs, heads, size))
        rules.append(Rule((f"{role}/w",), (kernel,), (split,)))
        if f"{role}/b" in shapes:
            rules.append(Rule((f"{role}/b",), (bias,), (Reshape((columns,), (heads, size)),)))
    rows, features = shapes["linear/w"]
    split = Reshape((rows, features), (heads, rows // heads, features))
    rules.append(Rule(("linear/w",), ("output_kernel",), (split,)))
    if "linear/b" in shapes:
        rules.append(Rule(("linear/b",), ("output_bias",)))
    attributes = {"scale": default_attention_scale(shapes["query/w"][1] // heads), "mask": "keep"}
    return Form("attention", tuple(rules), attributes)


_PROJECTIONS: Final = (
    ("query", "query_kernel", "query_bias"),
    ("key", "key_kernel", "key_bias"),
    ("value", "value_kernel", "value_bias"),
)


def attention_forms(shapes: Shapes) -> tuple[Form, ...]:
    """Return attention forms with every possible number of heads; 64 features per head are the likeliest."""
    keys, values = shapes["query/w"][1], shapes["value/w"][1]
    common = math.gcd(keys, values)
    heads = [number for number in range(1, common + 1) if common % number == 0]
    likeliest = sorted(heads, key=lambda number: abs(math.log(keys / number / 64)))
    return tuple(attention(shapes, None, number) for number in likeliest)


def pooling(operation: str) -> FormMaker:
    """Return the form maker of `hk.MaxPool` or `hk.AvgPool`."""

    def form(shapes: Shapes, call: HaikuCall | None) -> Form:
        if call is None or not call.inputs:
            return Form("pooling", (), {"operation": operation})
        module, rank = call.module, len(call.inputs)
        channel = None if module.channel_axis is None else module.channel_axis % rank
        window, strides = (_window(value, rank, channel) for value in (module.window_shape, module.strides))
        chosen = [axis for axis in range(1, rank) if axis != (channel or rank - 1)]
        attributes = {
            "operation": operation,
            "window": [window[axis] for axis in chosen],
            "strides": [strides[axis] for axis in chosen],
            "padding": module.padding.lower(),
        }
        return Form("pooling", (), {**attributes, **({"counts_padding": False} if operation == "average" else {})})

    return form


def _window(value: Any, rank: int, channel: int | None) -> list[int]:
    if isinstance(value, int):
        return [1, *(1 if axis == channel else value for axis in range(1, rank))]
    return [*(1,) * (rank - len(value)), *value]


def flatten(shapes: Shapes, call: HaikuCall | None) -> Form:
    """Return the form of `hk.Flatten`."""
    return Form("flatten", (), {"channels": "last"})


def _channel_position(module: Any) -> str:
    return "first" if module.channel_index == 1 else "last"


def _dense_makers(name: str, shapes: Shapes) -> Iterable[FormMaker]:
    return [dense] if _has_kernel(shapes, (2,), -1) else []


def _lstm_makers(name: str, shapes: Shapes) -> Iterable[FormMaker]:
    return [lstm] if name == "linear" and _has_kernel(shapes, (2,), -1) else []  # the dense layer in it


def _has_kernel(shapes: Shapes, ranks: Sequence[int], features: int) -> bool:
    """Return whether there is a kernel of one of these ranks, whose axis `features` has the length of the bias."""
    kernel, bias = shapes.get("w", ()), shapes.get("b")
    return len(kernel) in ranks and (bias is None or max(bias, default=1) == kernel[features])


def _norm_makers(shapes: Shapes, maker: FormMaker) -> Iterable[FormMaker]:
    return [maker] if ("scale" in shapes or "offset" in shapes) and not {"mean", "variance"} <= set(shapes) else []


def _whole_lstm(name: str, children: Mapping[str, Shapes]) -> PossibleForms | None:
    if not _RECURRENT.search(name) or not fitting_forms((lstm,), children["linear"]):
        return None
    return lambda shapes: fitting_forms((lstm, dense), shapes)


def _whole_simple_rnn(name: str, children: Mapping[str, Shapes]) -> PossibleForms | None:
    return (lambda shapes: (simple_rnn(shapes, None),)) if re.fullmatch(r"vanilla_rnn(_\d+)?", name) else None


_RECURRENT: Final = re.compile(r"lstm|rnn|cell|core|recurrent|forward|backward|fwd|bwd")
_SPATIAL: Final = (3, 4, 5)
"""Ranks of the kernels of convolutions."""
_KERNEL: Final = ("w", "b")
_SCALE: Final = ("scale", "offset")

LAYER_SPECS: Final[Mapping[type, HaikuLayerSpec]] = {
    hk.Linear: HaikuLayerSpec(dense, _KERNEL, _dense_makers),
    hk.ConvND: HaikuLayerSpec(conv, _KERNEL, lambda name, shapes: [conv] if _has_kernel(shapes, _SPATIAL, -1) else []),
    **dict.fromkeys((hk.DepthwiseConv1D, hk.DepthwiseConv2D, hk.DepthwiseConv3D), HaikuLayerSpec(conv, _KERNEL)),
    hk.ConvNDTranspose: HaikuLayerSpec(
        conv_transpose,
        _KERNEL,
        lambda name, shapes: [conv_transpose] if _has_kernel(shapes, _SPATIAL, -2) else [],
        ("transpose", "deconv"),
    ),
    hk.Embed: HaikuLayerSpec(
        embedding, ("embeddings",), lambda name, shapes: [embedding] if "embeddings" in shapes else []
    ),
    hk.RMSNorm: HaikuLayerSpec(
        rms_norm,
        ("scale",),
        lambda name, shapes: [] if "offset" in shapes else _norm_makers(shapes, rms_norm),
        ("rms",),
    ),
    hk.LayerNorm: HaikuLayerSpec(norm, _SCALE, lambda name, shapes: _norm_makers(shapes, norm), ("layer",)),
    hk.GroupNorm: HaikuLayerSpec(group_norm, _SCALE, lambda name, shapes: _norm_makers(shapes, group_norm), ("group",)),
    hk.InstanceNorm: HaikuLayerSpec(
        norm, _SCALE, lambda name, shapes: _norm_makers(shapes, instance_norm), ("instance",)
    ),
    hk.BatchNorm: HaikuLayerSpec(
        batch_norm,
        tuple(_ROLES),
        lambda name, shapes: [batch_norm] if {"mean", "variance"} <= set(shapes) else [],
    ),
    hk.GRU: HaikuLayerSpec(
        gru, ("w_i", "w_h", "b"), lambda name, shapes: [gru] if {"w_i", "w_h", "b"} <= set(shapes) else []
    ),
    hk.LSTM: HaikuLayerSpec(lstm, inferred=_lstm_makers, submodules=frozenset(("linear",)), whole=_whole_lstm),
    hk.VanillaRNN: HaikuLayerSpec(simple_rnn, submodules=frozenset(("linear", "linear_1")), whole=_whole_simple_rnn),
    hk.MultiHeadAttention: HaikuLayerSpec(
        attention,
        submodules=frozenset(("query", "key", "value", "linear")),
        whole=lambda name, children: attention_forms,
    ),
    hk.MaxPool: HaikuLayerSpec(pooling("max")),
    hk.AvgPool: HaikuLayerSpec(pooling("average")),
    hk.Flatten: HaikuLayerSpec(flatten),
}
"""Class -> row; of rows that may fit the same arrays, the likeliest first."""


def find_layer_spec(module: Any) -> HaikuLayerSpec | None:
    """Return the row of a module's class, or of its nearest base class."""
    return next((LAYER_SPECS[kind] for kind in type(module).__mro__ if kind in LAYER_SPECS), None)


ATTRIBUTE_WORDS: Final = {
    "epsilon": "eps",
    "momentum": "decay_rate",
    "strides": "stride",
    "padding": "padding",
    "dilation": "rate",
    "groups": "feature_group_count",
}
"""Canonical attribute -> haiku's argument of the same meaning."""
