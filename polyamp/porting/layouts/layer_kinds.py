"""Table of layer kinds and their canonical layouts, the common target of every framework's forms.

The guide's table is generated from this one. Channels are last, kernels are (inputs, features), and each attribute has
one meaning. A form of a backend names a kind and these arrays. A third party may use a kind that is not in the table;
its arrays are then compared by name and shape alone.

A class of layers is one row of its library's table: torch's `READERS`, Keras's `ROWS`, and in JAX the tables of
`flax_layers` and the files beside it, `haiku_layers` and `equinox_layers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple


class Attribute(NamedTuple):
    """Setting of a layer that the weights do not carry.

    Attributes:
        meaning: its meaning and unit.
        neutral: value that is equivalent to a missing attribute, or a function that returns it for the shapes of the
            canonical arrays; None if there is none.
        structural: whether it changes the function of the arrays, so that a difference is an error.
        convention: for an attribute that is the same for every layer of a framework: value -> the sentence about a
            difference.
        compared: False if it describes the layout of values, which the converters handle.
    """

    meaning: str
    neutral: Any = None
    structural: bool = False
    convention: Callable[[Any], str] | None = None
    compared: bool = True


class LayerKind(NamedTuple):
    """One row of the table.

    Attributes:
        arrays: name -> its axes; "..." stands for the spatial axes, or for any. Arrays in `optional` may be missing.
        attributes: name -> attribute.
        optional: arrays that a layer of this kind may lack.
        related: another kind that may contain the same single array under another name.
        has_channels: whether it takes and returns images, whose channels its arrays count.
        paired_in_order: for a kind without arrays: whether the layers of two models are compared in their order.
    """

    arrays: Mapping[str, tuple[str, ...]]
    attributes: Mapping[str, Attribute] = {}
    optional: tuple[str, ...] = ()
    related: str = ""
    has_channels: bool = False
    paired_in_order: bool = False

    @property
    def is_convolution(self) -> bool:
        """Whether its kernel has spatial axes."""
        return self.arrays.get("kernel", ())[:1] == ("...",)

    @property
    def is_recurrent(self) -> bool:
        """Whether its activation is internal, so that it does not follow the layer."""
        return "recurrent_kernel" in self.arrays


def default_attention_scale(head_size: int) -> float:
    """Return the scale of an attention without an explicit one.

    >>> default_attention_scale(16)
    0.25
    """
    return 1.0 / math.sqrt(head_size)


def _describe_mask(value: str) -> str:
    return f"attention masks: a true means {value!r} in the source, and the opposite in the target"


def _describe_variance(is_unbiased: bool) -> str:
    source, target = ("n - 1", "n") if is_unbiased else ("n", "n - 1")
    return f"running variances: the source divides by {source}, the target by {target}, as it trains"


_ACTIVATION: Final = {
    "activation": Attribute('what follows at once, by its name ("relu", "gelu", "gelu_tanh"); "linear" if none')
}
_CONVOLUTION: Final = {
    **_ACTIVATION,
    "strides": Attribute("a list of one int per spatial axis"),
    "padding": Attribute(
        '"valid", "same" (as TensorFlow and XLA divide it: the odd one behind), "causal", or [[before, after]] '
        'per spatial axis; zero padding that is no padding is "valid"'
    ),
    "padding_mode": Attribute('"zeros", "reflect", "replicate" or "circular"', "zeros"),
    "dilation": Attribute("a list of one int per spatial axis", structural=True),
    "groups": Attribute("number of groups of channels; as many as inputs in a depthwise one", 1, structural=True),
    "channels": Attribute('"first" or "last": where the layer has the channels of what it is given', compared=False),
}
_NORM: Final = {"epsilon": Attribute("added to the variance (to the mean square) before the root")}
_RECURRENT: Final = {
    "activation": Attribute('of the candidate and the output: "tanh"'),
    "recurrent_activation": Attribute('of the gates: "sigmoid"'),
    "reverse": Attribute("true where it reads the sequence from its end", False),
    "dropout": Attribute("rate at its inputs", 0.0),
    "recurrent_dropout": Attribute("rate at its state", 0.0),
}
_GATES: Final = {
    "input_kernel": ("inputs", "gates * units"),
    "recurrent_kernel": ("units", "gates * units"),
    "bias": ("gates * units",),
    "recurrent_bias": ("gates * units",),
}
_CHANNEL_ARRAYS: Final = dict.fromkeys(("scale", "bias", "mean", "variance"), ("channels",))

KINDS: Final[dict[str, LayerKind]] = {
    "dense": LayerKind(
        {"kernel": ("inputs", "features"), "bias": ("features",)},
        {
            **_ACTIVATION,
            "inputs": Attribute("shape of what the input axes were flattened from, if several", compared=False),
            "outputs": Attribute("the same", compared=False),
        },
        optional=("bias",),
    ),
    "conv": LayerKind(
        {"kernel": ("...", "inputs / groups", "features"), "bias": ("features",)},
        _CONVOLUTION,
        optional=("bias",),
        related="dense",
        has_channels=True,
    ),
    "conv_transpose": LayerKind(
        {"kernel": ("...", "inputs", "features / groups"), "bias": ("features",)},
        {
            **_CONVOLUTION,
            "padding": Attribute(
                "[[before, after]] per spatial axis, of what is cut off the full output "
                "(input - 1) * stride + dilation * (kernel - 1) + 1; a negative number adds zeros"
            ),
        },
        optional=("bias",),
        has_channels=True,
    ),
    "embedding": LayerKind(
        {"table": ("tokens", "features")},
        {
            "padding_index": Attribute("the token whose row is zero and is not trained"),
            "scale": Attribute("factor on what is looked up", 1.0),
        },
        related="dense",
    ),
    "layer_norm": LayerKind(
        {"scale": ("...",), "bias": ("...",)},
        {**_NORM, "axes": Attribute("number of last axes that it is over")},
        optional=("scale", "bias"),
    ),
    "rms_norm": LayerKind({"scale": ("...",), "bias": ("...",)}, _NORM, optional=("scale", "bias")),
    "group_norm": LayerKind(
        _CHANNEL_ARRAYS,
        {
            **_NORM,
            "groups": Attribute("number of groups; as many as channels in an instance norm", 1, structural=True),
        },
        optional=tuple(_CHANNEL_ARRAYS),
        has_channels=True,
    ),
    "batch_norm": LayerKind(
        _CHANNEL_ARRAYS,
        {
            **_NORM,
            "momentum": Attribute("weight of the old running statistic: 0.9 where torch says 0.1"),
            "unbiased": Attribute(
                "true where the running variance is divided by n - 1, as torch's", convention=_describe_variance
            ),
        },
        optional=tuple(_CHANNEL_ARRAYS),
        has_channels=True,
    ),
    "lstm": LayerKind(
        {**_GATES, "projection_kernel": ("units", "projection")},
        {
            **_RECURRENT,
            "projection": Attribute("size that the state is projected to, which is then that of the recurrent kernel"),
        },
        ("bias", "recurrent_bias", "projection_kernel"),
    ),
    "gru": LayerKind(
        _GATES,
        {
            **_RECURRENT,
            "reset": Attribute(
                '"after": candidate = tanh(x W + b + r * (h U + c)), torch; "before": tanh(x W + b + (r * h) U)',
                structural=True,
            ),
        },
        ("bias", "recurrent_bias"),
    ),
    "simple_rnn": LayerKind(
        _GATES,
        {**_RECURRENT, "activation": _RECURRENT["activation"]._replace(structural=True)},
        ("bias", "recurrent_bias"),
    ),
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
            "scale": Attribute(
                "factor on the products of queries and keys, 1 / sqrt(head size) if nothing else is said",
                lambda shapes: default_attention_scale(shapes["query_kernel"][-1]),
            ),
            "dropout": Attribute("rate at the attention's weights", 0.0),
            "mask": Attribute('what a true in a boolean mask means: "keep" or "drop"', convention=_describe_mask),
        },
        optional=("query_bias", "key_bias", "value_bias", "output_bias"),
    ),
    "prelu": LayerKind({"slope": ("channels",)}),
    "parameter": LayerKind({"value": ("...",)}),
    "rotary": LayerKind(
        {},
        {
            "base": Attribute("of the wave lengths"),
            "pairs": Attribute('"halves" (x and x + size / 2 turn together) or "neighbours"'),
        },
    ),
    "activation": LayerKind(
        {},
        {
            "activation": Attribute("its name"),
            "negative_slope": Attribute("of a leaky ReLU"),
            "alpha": Attribute("of an ELU"),
            "axis": Attribute("of a softmax"),
        },
    ),
    "dropout": LayerKind({}, {"rate": Attribute("share that is dropped")}, paired_in_order=True),
    "pooling": LayerKind(
        {},
        {
            "operation": Attribute('"max" or "average"'),
            "window": Attribute("a list of one int per spatial axis; empty where it is global"),
            "strides": Attribute("the same"),
            "padding": Attribute("as of a convolution"),
            "counts_padding": Attribute("true where an average counts the padding"),
        },
        paired_in_order=True,
    ),
    "flatten": LayerKind(
        {}, {"channels": Attribute('"first" or "last": where the channels of what it flattens are', compared=False)}
    ),
    "resize": LayerKind(
        {},
        {
            "method": Attribute('"nearest", "linear", "cubic"'),
            "size": Attribute("factors, a list"),
            "align_corners": Attribute("true where the corners' centres are kept"),
        },
        paired_in_order=True,
    ),
}
"""Kind -> its canonical layout. Gates are in the order input, forget, candidate, output (lstm) and reset, update,
candidate (gru). A transposed convolution's kernel multiplies each input value as it is spread over the output, as in
torch and Keras. XLA's kernel slides over a dilated input and is therefore flipped. A shared slope has length 1."""
BIASED_KINDS: Final = tuple(kind for kind, row in KINDS.items() if {*row.arrays} == {"kernel", "bias"})
"""Kinds with a kernel and a bias that may be absent."""
RECURRENT_KINDS: Final = tuple(kind for kind, row in KINDS.items() if row.is_recurrent)
_ATTRIBUTES: Final = {name: each for row in reversed(KINDS.values()) for name, each in row.attributes.items()}
"""Attributes by name alone."""


def find_kind(kind: str) -> LayerKind:
    """Return the row of a kind; for a third party's kind, an empty row.

    >>> find_kind("dense").arrays["kernel"]
    ('inputs', 'features')
    """
    return KINDS.get(kind, _NO_ROW)


_NO_ROW: Final = LayerKind({})


def find_attribute(kind: str, name: str) -> Attribute:
    """Return an attribute of a kind; if the kind does not have it, one of the same name, which is not structural.

    >>> find_attribute("gru", "reset").structural
    True
    """
    known = find_kind(kind).attributes.get(name)
    return known or _ATTRIBUTES.get(name, Attribute(""))._replace(structural=False)


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
