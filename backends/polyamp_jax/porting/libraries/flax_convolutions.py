"""Rows of flax's convolutions."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from polyamp.porting.layouts.layer_layout import Form, Rule, same
from polyamp.porting.layouts.operations import Flip, Operation, Shape, Transpose
from polyamp_jax.porting.layers.convolution_rules import check_unmasked, per_axis, same_output_crop
from polyamp_jax.porting.layers.refusal import RefusedError
from polyamp_jax.porting.libraries.flax_layer_spec import (
    KERNEL_AND_BIAS,
    FlaxLayerSpec,
    FormMaker,
    LayerSettings,
    Shapes,
)

_MODES: Final = {"CIRCULAR": "circular", "REFLECT": "reflect"}
"""flax's paddings that use values of the input -> the canonical mode."""


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


def _padding_pairs(padding: Any, rank: int) -> list[list[int]]:
    if isinstance(padding, int):
        return [[padding, padding]] * rank
    return [[item, item] if isinstance(item, int) else [int(length) for length in item] for item in padding]


def _conv_makers(shapes: Shapes) -> Iterator[FormMaker]:
    kernel = shapes.get("kernel", ())
    if 3 <= len(kernel) <= 5 and shapes.get("bias") in (None, kernel[-1:]):
        yield conv


def _conv_transpose_makers(shapes: Shapes) -> Iterator[FormMaker]:
    kernel = shapes.get("kernel", ())
    for transposed, features in ((False, kernel[-1:]), (True, kernel[-2:-1])):
        if 3 <= len(kernel) <= 5 and shapes.get("bias") in (None, features):
            yield functools.partial(conv_transpose, transposed=transposed)


def _stacked_kernel(settings: LayerSettings) -> tuple[str, int]:
    size = settings["kernel_size"]
    return "kernel", 2 + (1 if isinstance(size, int) else len(size))


ROWS: Final[Mapping[str, FlaxLayerSpec]] = {
    "Conv": FlaxLayerSpec(conv, KERNEL_AND_BIAS, _stacked_kernel, _conv_makers, ("conv",), role="convolution"),
    "ConvTranspose": FlaxLayerSpec(
        conv_transpose,
        KERNEL_AND_BIAS,
        _stacked_kernel,
        _conv_transpose_makers,
        ("convtrans", "conv_trans", "deconv"),
        role="convolution",
    ),
    "ConvLocal": FlaxLayerSpec(refusal="its kernel differs from place to place"),
}
"""Class name -> row."""
