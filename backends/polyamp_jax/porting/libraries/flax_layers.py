"""Rows of flax's dense layers, embeddings, norms, PReLU and dropout."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from polyamp.porting.layouts.layer_layout import Form, Rule, same
from polyamp.porting.layouts.operations import Operation, Reshape, Transpose
from polyamp_jax.porting.layers.refusal import RefusedError
from polyamp_jax.porting.libraries.flax_layer_spec import (
    KERNEL_AND_BIAS,
    FlaxLayerSpec,
    FormMaker,
    LayerSettings,
    Shapes,
    makers_by_array,
    stacked_array,
)


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


def _tuple(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _trailing_axis_count(axes: Any) -> int:
    """Return the number of axes if they are the last ones, else 0."""
    found = sorted(_tuple(axes))
    return len(found) if found == list(range(-len(found), 0)) else 0


def _select_settings(settings: LayerSettings, *names: str) -> dict[str, Any]:
    return {name: float(settings[name]) for name in names if name in settings}


def _dense_makers(shapes: Shapes) -> Iterator[FormMaker]:
    kernel = shapes.get("kernel", ())
    if len(kernel) == 2 and shapes.get("bias") in (None, kernel[1:]):
        yield dense


def _dense_general_makers(shapes: Shapes) -> Iterator[FormMaker]:
    kernel = shapes.get("kernel", ())
    for inputs in range(1, len(kernel)):
        if len(kernel) > 2 and shapes.get("bias") in (None, kernel[inputs:]):
            yield functools.partial(dense_general, inputs=inputs)


def _general_kernel(settings: LayerSettings) -> tuple[str, int]:
    return "kernel", sum(len(settings[each]) for each in ("batch_axis", "in_features", "out_features"))


_SCALE_AND_BIAS: Final = ("scale", "bias")
_group_norm_makers: Final = makers_by_array(group_norm, "scale", absent=("mean",))
ROWS: Final[Mapping[str, FlaxLayerSpec]] = {
    **dict.fromkeys(
        ("Dense", "Linear"),
        FlaxLayerSpec(dense, KERNEL_AND_BIAS, stacked_array("kernel", 2), _dense_makers, role="dense"),
    ),
    "DenseGeneral": FlaxLayerSpec(
        dense_general, KERNEL_AND_BIAS, None, _dense_general_makers, ("query", "key", "value", "qkv")
    ),
    "LinearGeneral": FlaxLayerSpec(dense_general, KERNEL_AND_BIAS, _general_kernel),
    "Einsum": FlaxLayerSpec(einsum, KERNEL_AND_BIAS, None, _dense_general_makers),
    "RMSNorm": FlaxLayerSpec(
        rms_norm,
        ("scale",),
        None,
        makers_by_array(rms_norm, "scale", absent=("bias", "mean")),
        ("rms",),
        role="norm",
        can_be_arrayless=True,
    ),
    "LayerNorm": FlaxLayerSpec(
        layer_norm,
        _SCALE_AND_BIAS,
        None,
        makers_by_array(layer_norm, "scale", absent=("mean",)),
        ("layer",),
        role="norm",
        can_be_arrayless=True,
    ),
    "GroupNorm": FlaxLayerSpec(
        group_norm,
        _SCALE_AND_BIAS,
        stacked_array("scale", 1),
        _group_norm_makers,
        ("group",),
        role="norm",
        can_be_arrayless=True,
    ),
    "InstanceNorm": FlaxLayerSpec(
        instance_norm, _SCALE_AND_BIAS, None, _group_norm_makers, role="norm", can_be_arrayless=True
    ),
    "BatchNorm": FlaxLayerSpec(
        batch_norm,
        ("scale", "bias", "mean", "var"),
        stacked_array("mean", 1),
        makers_by_array(batch_norm, "mean"),
        role="norm",
    ),
    "Embed": FlaxLayerSpec(
        embedding,
        ("embedding",),
        stacked_array("embedding", 2),
        makers_by_array(embedding, "embedding"),
    ),
    "PReLU": FlaxLayerSpec(prelu, ("negative_slope",), None, makers_by_array(prelu, "negative_slope")),
    "Dropout": FlaxLayerSpec(dropout, role="elementwise", can_be_arrayless=True),
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
