"""Table of layer kinds and their canonical layouts, the common target of every framework's forms.

The guide's table is generated from this one. Channels are last, kernels are (inputs, features), and each attribute has
one meaning. A form of a backend names a kind and these arrays. A third party may use a kind that is not in the table;
its arrays are then compared by name and shape alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class LayerKind(NamedTuple):
    """One row of the table.

    Attributes:
        arrays: name -> its axes; "..." stands for the spatial axes, or for any. Arrays in `optional` may be missing.
        attributes: name -> its meaning and unit.
        optional: arrays that a layer of this kind may lack.
        structural: attributes that change the function of the arrays, so that a difference is an error.
    """

    arrays: Mapping[str, tuple[str, ...]]
    attributes: Mapping[str, str] = {}
    optional: tuple[str, ...] = ()
    structural: tuple[str, ...] = ()


_ACTIVATION: Final = {"activation": 'what follows at once, by its name ("relu", "gelu", "gelu_tanh"); "linear" if none'}
_CONVOLUTION: Final = {
    **_ACTIVATION,
    "strides": "a list of one int per spatial axis",
    "padding": '"valid", "same" (as TensorFlow and XLA divide it: the odd one behind), "causal", or [[before, after]] '
    'per spatial axis; zero padding that is no padding is "valid"',
    "padding_mode": '"zeros", "reflect", "replicate" or "circular"',
    "dilation": "a list of one int per spatial axis",
    "groups": "number of groups of channels; as many as inputs in a depthwise one",
    "channels": '"first" or "last": where the layer has the channels of what it is given',
}
_NORM: Final = {"epsilon": "added to the variance (to the mean square) before the root"}
_RECURRENT: Final = {
    "activation": 'of the candidate and the output: "tanh"',
    "recurrent_activation": 'of the gates: "sigmoid"',
    "reverse": "true where it reads the sequence from its end",
    "dropout": "rate at its inputs",
    "recurrent_dropout": "rate at its state",
}
_GATES: Final = {
    "input_kernel": ("inputs", "gates * units"),
    "recurrent_kernel": ("units", "gates * units"),
    "bias": ("gates * units",),
    "recurrent_bias": ("gates * units",),
}

KINDS: Final[dict[str, LayerKind]] = {
    "dense": LayerKind(
        {"kernel": ("inputs", "features"), "bias": ("features",)},
        {
            **_ACTIVATION,
            "inputs": "shape of what the input axes were flattened from, if several",
            "outputs": "the same",
        },
        optional=("bias",),
    ),
    "conv": LayerKind(
        {"kernel": ("...", "inputs / groups", "features"), "bias": ("features",)},
        _CONVOLUTION,
        optional=("bias",),
        structural=("groups", "dilation"),
    ),
    "conv_transpose": LayerKind(
        {"kernel": ("...", "inputs", "features / groups"), "bias": ("features",)},
        {
            **_CONVOLUTION,
            "padding": "[[before, after]] per spatial axis, of what is cut off the full output "
            "(input - 1) * stride + dilation * (kernel - 1) + 1; a negative number adds zeros",
        },
        optional=("bias",),
        structural=("groups", "dilation"),
    ),
    "embedding": LayerKind(
        {"table": ("tokens", "features")},
        {"padding_index": "the token whose row is zero and is not trained", "scale": "factor on what is looked up"},
    ),
    "layer_norm": LayerKind(
        {"scale": ("...",), "bias": ("...",)},
        {**_NORM, "axes": "number of last axes that it is over"},
        optional=("scale", "bias"),
    ),
    "rms_norm": LayerKind({"scale": ("...",), "bias": ("...",)}, _NORM, optional=("scale", "bias")),
    "group_norm": LayerKind(
        {"scale": ("channels",), "bias": ("channels",), "mean": ("channels",), "variance": ("channels",)},
        {**_NORM, "groups": "number of groups; as many as channels in an instance norm"},
        optional=("scale", "bias", "mean", "variance"),
        structural=("groups",),
    ),
    "batch_norm": LayerKind(
        {"scale": ("channels",), "bias": ("channels",), "mean": ("channels",), "variance": ("channels",)},
        {
            **_NORM,
            "momentum": "weight of the old running statistic: 0.9 where torch says 0.1",
            "unbiased": "true where the running variance is divided by n - 1, as torch's",
        },
        optional=("scale", "bias", "mean", "variance"),
    ),
    "lstm": LayerKind(
        {**_GATES, "projection_kernel": ("units", "projection")},
        {**_RECURRENT, "projection": "size that the state is projected to, which is then that of the recurrent kernel"},
        ("bias", "recurrent_bias", "projection_kernel"),
    ),
    "gru": LayerKind(
        _GATES,
        {
            **_RECURRENT,
            "reset": '"after": candidate = tanh(x W + b + r * (h U + c)), torch; "before": tanh(x W + b + (r * h) U)',
        },
        ("bias", "recurrent_bias"),
        structural=("reset",),
    ),
    "simple_rnn": LayerKind(_GATES, _RECURRENT, ("bias", "recurrent_bias"), structural=("activation",)),
    "attention": LayerKind(
        {
            "query_kernel": ("features", "heads", "head size"),
            "query_bias": ("heads", "head size"),
            "key_kernel": ("key features", "key heads", "head size"),
            "key_bias": ("key heads", "head size"),
            "value_kernel": ("value features", "key heads", "value size"),
            "value_bias": ("key heads", "value size"),
            "output_kernel": ("heads", "value size", "features"),
            "output_bias": ("features",),
        },
        {
            "scale": "factor on the products of queries and keys, 1 / sqrt(head size) if nothing else is said",
            "dropout": "rate at the attention's weights",
            "mask": 'what a true in a boolean mask means: "keep" or "drop"',
        },
        optional=("query_bias", "key_bias", "value_bias", "output_bias"),
    ),
    "prelu": LayerKind({"slope": ("channels",)}),
    "parameter": LayerKind({"value": ("...",)}),
    "rotary": LayerKind(
        {}, {"base": "of the wave lengths", "pairs": '"halves" (x and x + size / 2 turn together) or "neighbours"'}
    ),
    "activation": LayerKind(
        {},
        {"activation": "its name", "negative_slope": "of a leaky ReLU", "alpha": "of an ELU", "axis": "of a softmax"},
    ),
    "dropout": LayerKind({}, {"rate": "share that is dropped"}),
    "pooling": LayerKind(
        {},
        {
            "operation": '"max" or "average"',
            "window": "a list of one int per spatial axis; empty where it is global",
            "strides": "the same",
            "padding": "as of a convolution",
            "counts_padding": "true where an average counts the padding",
        },
    ),
    "flatten": LayerKind({}, {"channels": '"first" or "last": where the channels of what it flattens are'}),
    "resize": LayerKind(
        {},
        {
            "method": '"nearest", "linear", "cubic"',
            "size": "factors, a list",
            "align_corners": "true where the corners' centres are kept",
        },
    ),
}
"""Kind -> its canonical layout. Gates are in the order input, forget, candidate, output (lstm) and reset, update,
candidate (gru). A transposed convolution's kernel multiplies each input value as it is spread over the output, as in
torch and Keras. XLA's kernel slides over a dilated input and is therefore flipped. A shared slope has length 1."""


def find_kind(kind: str) -> LayerKind | None:
    """Return the row of a kind; None for a third party's kind.

    >>> find_kind("dense").arrays["kernel"]
    ('inputs', 'features')
    """
    return KINDS.get(kind)


def default_attention_scale(head_size: int) -> float:
    """Return the scale of an attention without an explicit one.

    >>> default_attention_scale(16)
    0.25
    """
    return 1.0 / math.sqrt(head_size)


def to_json_value(value: Any) -> Any:
    """Return an attribute as JSON data: tuples become lists.

    >>> to_json_value({"strides": (2, 2)})
    {'strides': [2, 2]}
    """
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return value
