"""Forms of flax's layers: dense, convolutions, embedding, norms, PReLU, recurrent cells and attention.

linen's and nnx's layers have the same arrays and names of settings, so one function returns the form of both.

Each function takes the shapes of the layer's arrays by name, and its settings. These are a linen module's fields or an
nnx module's attributes, or empty if only the name of the class is known. Unknown attributes are left out.

Recurrent cells and attention consist of several modules; the names of their arrays are paths in the layer
("hi/kernel"). linen has a kernel for each gate; nnx's optimised cells have one kernel for all gates, in the canonical
order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from polyamp.porting.layouts.layer_layout import Form, Rule, same
from polyamp.porting.layouts.operations import First, Flip, Join, Merge, Operation, Reshape, Shape, Transpose

Shapes = Mapping[str, Shape]
LayerSettings = Mapping[str, Any]
FormMaker = Callable[[Shapes, LayerSettings], Form]


_MODES: Final = {"CIRCULAR": "circular", "REFLECT": "reflect"}
"""flax's paddings that use values of the input -> the canonical mode."""

LSTM_GATES: Final = ("i", "f", "g", "o")
GRU_GATES: Final = ("r", "z", "n")
"""The letters of the gates in flax's names, in canonical order."""


class RefusedError(Exception):
    """Error for a layer or setting without a canonical equivalent; the text gives the reason."""


def dense(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `Dense` and `Linear`."""
    return Form("dense", same(*shapes))


def dense_general(shapes: Shapes, settings: LayerSettings, inputs: int | None = None) -> Form:
    """Return the form of `DenseGeneral` and `LinearGeneral`.

    The kernel has the contracted axes first, in the order of `axis`, then the features.

    Args:
        shapes: shapes of the arrays.
        settings: settings of the layer.
        inputs: number of contracted axes, if the settings do not contain it.
    """
    if settings.get("batch_dims") or settings.get("batch_axis"):
        raise RefusedError("its kernel has batch axes")
    axes = _tuple(settings.get("axis", -1)) if inputs is None else tuple(range(-inputs, 0))
    if len({axis < 0 for axis in axes}) > 1:
        raise RefusedError(f"its axis={axes} counts from both ends")
    count = len(axes)
    order = sorted(range(count), key=axes.__getitem__)  # the kernel's first axes have the order of `axis`
    return _flat_dense(shapes, (*order, *range(count, len(shapes["kernel"]))), count)


def einsum(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `Einsum`. Its string determines which axes of the kernel are summed over."""
    equation = settings.get("einsum_str")
    if not isinstance(equation, str):
        raise RefusedError("its einsum_str is given where it is called")
    operands, _, result = equation.replace(" ", "").replace("...", "").partition("->")
    given, _, kernel = operands.partition(",")
    summed = [letter for letter in given if letter in kernel and letter not in result]
    made = [letter for letter in result if letter in kernel and letter not in given]
    if len(summed) + len(made) != len(kernel):
        raise RefusedError(f"in {equation!r} an axis of the kernel is neither summed over nor made")
    return _flat_dense(shapes, tuple(kernel.index(letter) for letter in (*summed, *made)), len(summed))


def _flat_dense(shapes: Shapes, order: tuple[int, ...], count: int) -> Form:
    """Return the form of a dense layer whose kernel, with its axes in `order`, has `count` input axes, then feature
    axes."""
    kernel = tuple(shapes["kernel"][axis] for axis in order)
    inputs, features = kernel[:count], kernel[count:]
    turn: tuple[Operation, ...] = () if order == tuple(range(len(order))) else (Transpose(order),)
    flat = (math.prod(inputs), math.prod(features))
    rules = [Rule(("kernel",), ("kernel",), (*turn, Reshape(kernel, flat)) if kernel != flat else turn)]
    if "bias" in shapes:
        bias = shapes["bias"]
        if tuple(length for length in bias if length != 1) != tuple(length for length in features if length != 1):
            raise RefusedError(f"its bias of {list(bias)} is not one of its features {list(features)}")
        rules.append(Rule(("bias",), ("bias",), (Reshape(bias, flat[1:]),) if bias != flat[1:] else ()))
    several = {"inputs": list(inputs)} if len(inputs) > 1 else {}
    return Form("dense", tuple(rules), {**several, **({"outputs": list(features)} if len(features) > 1 else {})})


def conv(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `Conv`, which has the canonical layout."""
    check_unmasked(settings)
    rank = len(shapes["kernel"]) - 2
    if any(length != 1 for length in per_axis(settings.get("input_dilation"), rank)):
        raise RefusedError("input_dilation= spreads its input; a transposed convolution is ConvTranspose")
    attributes: dict[str, Any] = {"channels": "last"}
    if settings:
        dilation = per_axis(settings["kernel_dilation"], rank)
        padding, mode = _canonical_padding(settings["padding"], shapes["kernel"][:rank], dilation)
        attributes |= {
            "strides": per_axis(settings["strides"], rank),
            "padding": padding,
            "padding_mode": mode,
            "dilation": dilation,
            "groups": settings["feature_group_count"],
        }
    return Form("conv", same(*shapes), attributes)


def conv_transpose(shapes: Shapes, settings: LayerSettings, *, transposed: bool | None = None) -> Form:
    """Return the form of `ConvTranspose`.

    Its kernel slides over the dilated input, so it is the flipped canonical kernel, unless it is transposed.

    Args:
        shapes: shapes of the arrays.
        settings: settings of the layer.
        transposed: `transpose_kernel`, if the settings do not contain it.
    """
    check_unmasked(settings)
    kernel = shapes["kernel"]
    rank = len(kernel) - 2
    spatial = tuple(range(rank))
    swapped = bool(settings.get("transpose_kernel", transposed))
    turn: Operation = Transpose((*spatial, rank + 1, rank)) if swapped else Flip(spatial)
    attributes: dict[str, Any] = {"channels": "last", "groups": 1}
    if settings:
        strides, dilation = (per_axis(settings[name], rank) for name in ("strides", "kernel_dilation"))
        reach = [every * (length - 1) for length, every in zip(kernel[:rank], dilation, strict=True)]
        padding = settings["padding"]
        if padding == "CIRCULAR":
            raise RefusedError("padding='CIRCULAR' folds its output")
        attributes |= {"strides": strides, "dilation": dilation, "padding": _output_crop(padding, reach, strides)}
    return Form(
        "conv_transpose",
        (Rule(("kernel",), ("kernel",), (turn,)), *same(*(name for name in shapes if name != "kernel"))),
        attributes,
    )


def embedding(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `Embed`."""
    return Form("embedding", (Rule(("embedding",), ("table",)),))


def layer_norm(shapes: Shapes, settings: LayerSettings, kind: str = "layer_norm") -> Form:
    """Return the form of `LayerNorm`, or of `RMSNorm` if `kind` is "rms_norm"."""
    attributes = _select_settings(settings, "epsilon")
    axes = settings.get("reduction_axes", -1)
    if settings and (over := _trailing_axis_count(axes)):
        features = _trailing_axis_count(settings.get("feature_axes", -1))
        if features != over:
            raise RefusedError(f"reduction_axes={axes} are not its feature_axes={settings['feature_axes']}")
        attributes |= {"axes": over} if kind == "layer_norm" else {}
    elif settings:
        raise RefusedError(f"reduction_axes={axes} are not the last ones, counted from the end")
    return Form(kind, same(*shapes), attributes)


def rms_norm(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `RMSNorm`."""
    return layer_norm(shapes, settings, "rms_norm")


def group_norm(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `GroupNorm`."""
    if settings.get("reduction_axes") is not None:
        raise RefusedError(f"reduction_axes={settings['reduction_axes']} are its own")
    channels = next(iter(shapes.values()), (0,))[0]
    groups = settings.get("num_groups") or (channels // settings["group_size"] if settings.get("group_size") else 0)
    return Form(
        "group_norm", same(*shapes), {**_select_settings(settings, "epsilon"), **({"groups": groups} if groups else {})}
    )


def instance_norm(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `InstanceNorm`, a group norm with a group for each channel."""
    if _tuple(settings.get("feature_axes", -1)) != (-1,):
        raise RefusedError(f"feature_axes={settings['feature_axes']} are not the last one")
    channels = next(iter(shapes.values()), (0,))[0]
    attributes = {**_select_settings(settings, "epsilon"), **({"groups": channels} if channels else {})}
    return Form("group_norm", same(*shapes), attributes)


def batch_norm(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `BatchNorm`. As in the canonical layout, momentum is the weight of the old statistic, and the
    variance is divided by n."""
    if _tuple(settings.get("axis", -1)) not in ((-1,), (len(next(iter(shapes.values()))) - 1,)):
        raise RefusedError(f"axis={settings['axis']} is not the last one")
    names = {"scale": "scale", "bias": "bias", "mean": "mean", "var": "variance"}
    rules = tuple(Rule((name,), (names[name],)) for name in shapes)
    return Form("batch_norm", rules, {**_select_settings(settings, "epsilon", "momentum"), "unbiased": False})


def prelu(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `PReLU`, which has one slope for all channels."""
    shape = shapes["negative_slope"]
    return Form("prelu", (Rule(("negative_slope",), ("slope",), () if shape else (Reshape((), (1,)),)),))


def dropout(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `Dropout`."""
    return Form("dropout", (), _select_settings(settings, "rate"))


def check_unmasked(settings: LayerSettings) -> None:
    """Raise `RefusedError` if the kernel is multiplied with a mask."""
    if settings.get("mask") is not None:
        raise RefusedError("its kernel is multiplied with mask=")


def _canonical_padding(padding: Any, kernel: Shape, dilation: Sequence[int]) -> tuple[Any, str]:
    """Return the canonical padding and mode for flax's `padding` of a convolution."""
    reach = [every * (length - 1) for length, every in zip(kernel, dilation, strict=True)]
    if isinstance(padding, str):
        if padding in _MODES:
            return [[length // 2, (length + 1) // 2] for length in reach], _MODES[padding]
        return padding.lower(), "zeros"
    pairs = _padding_pairs(padding, len(kernel))
    return (pairs if any(map(any, pairs)) else "valid"), "zeros"


def _output_crop(padding: Any, reach: Sequence[int], strides: Sequence[int]) -> list[list[int]]:
    """Return what the `padding` of a transposed convolution crops from the full output.

    flax defines the padding around the dilated input; the kernel's reach on each side yields the full output.
    """
    if padding == "SAME":
        return [same_output_crop(*pair) for pair in zip(reach, strides, strict=True)]
    if padding == "VALID":
        return [[0, min(0, length - stride + 1)] for length, stride in zip(reach, strides, strict=True)]
    if isinstance(padding, str):
        raise RefusedError(f"padding={padding!r} of a transposed convolution")
    pairs = _padding_pairs(padding, len(reach))
    return [[length - before, length - behind] for length, (before, behind) in zip(reach, pairs, strict=True)]


def same_output_crop(reach: int, stride: int) -> list[int]:
    """Return what padding "SAME" of `jax.lax.conv_transpose` crops at the start and end of an axis of the full output.

    Args:
        reach: the number of elements by which the kernel reaches beyond the dilated input on each side.
        stride: the stride.
    """
    total = reach + stride - 1
    before = reach if stride > reach else -(-total // 2)
    return [reach - before, reach - (total - before)]


def _padding_pairs(padding: Any, rank: int) -> list[list[int]]:
    if isinstance(padding, int):
        return [[padding, padding]] * rank
    return [[item, item] if isinstance(item, int) else [int(length) for length in item] for item in padding]


def per_axis(value: Any, rank: int) -> list[int]:
    """Return a setting as one int per axis, from one int for all axes or one for each; None is 1."""
    return [value or 1] * rank if value is None or isinstance(value, int) else [int(item) for item in value]


def _tuple(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _trailing_axis_count(axes: Any) -> int:
    """Return the number of axes if they are the last ones, else 0."""
    found = sorted(_tuple(axes))
    return len(found) if found == list(range(-len(found), 0)) else 0


def _select_settings(settings: LayerSettings, *names: str) -> dict[str, Any]:
    return {name: float(settings[name]) for name in names if name in settings}


def lstm(shapes: Shapes, settings: LayerSettings) -> Form:
    """Return the form of `LSTMCell` and `OptimizedLSTMCell`. Only the recurrent half has a bias."""
    if "dense_i/kernel" in shapes:
        rules = [*_cell_kernel_rules(), Rule(("dense_h/bias",), ("bias", "recurrent_bias"), (Merge(),))]
    else:
        forget = "if_" if "if_/kernel" in shapes else "if"  # nnx: `if` is a reserved word in Python
        inputs = tuple(f"{name}/kernel" for name in ("ii", forget, "ig", "io"))
        hidden = tuple(f"h{gate}/kernel" for gate in LSTM_GATES)
        biases = tuple(f"h{gate}/bias" for gate in LSTM_GATES)
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
        inputs = tuple(f"i{gate}/kernel" for gate in GRU_GATES)
        hidden = tuple(f"h{gate}/kernel" for gate in GRU_GATES)
        biases = tuple(f"i{gate}/bias" for gate in GRU_GATES)
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
