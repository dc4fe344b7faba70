"""The forms of torch's layers with arrays: dense, convolutions, embeddings, norms, slopes. One reader per class.

`READERS` and `NAMED` are looked up by `walk` along a module's classes. A kernel of torch's has the features in front,
(features, inputs, ...); but for that the arrays are canonical as they are.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from polyamp.porting.layouts.forms import Form, Rule
from polyamp.porting.layouts.operations import Shift, Transpose
from polyamp_torch.porting.found import Found, Line, Reader, overridden, setting
from polyamp_torch.porting.paddings import canonical, line, of_convolution

EPSILON: Final[Mapping[str, Line]] = {"epsilon": setting("eps")}


def rules(module: nn.Module, /, **canonical_names: str) -> tuple[Rule, ...]:
    """Rules of the arrays that a module has of these, native name = canonical name."""
    return tuple(
        Rule((native,), (name,))
        for native, name in canonical_names.items()
        if getattr(module, native, None) is not None
    )


def dense(module: Any) -> list[Found]:
    """(features, inputs) -> (inputs, features)."""
    kernel = Rule(("weight",), ("kernel",), (Transpose((1, 0)),))
    return [Found((Form("dense", (kernel, *rules(module, bias="bias"))),))]


def dense_as_it_is(module: Any) -> list[Found]:
    """The dense layer of GPT-2 in transformers, whose weight is (inputs, features)."""
    return [Found((Form("dense", rules(module, weight="kernel", bias="bias")),))]


def convolution(module: Any) -> list[Found]:
    """(features, inputs / groups, *spatial) -> (*spatial, inputs / groups, features)."""
    rank = len(module.kernel_size)
    kernel = Rule(("weight",), ("kernel",), (Transpose((*range(2, rank + 2), 1, 0)),))
    attributes = _window(module)
    if not overridden(module, _base(module)):  # what pads in its own way is not known by `padding`
        attributes["padding"] = canonical(of_convolution(module), module.kernel_size, module.stride, module.dilation)
    return [_convolution("conv", module, kernel, attributes)]


def convolution_same(module: Any) -> list[Found]:
    """timm's convolutions that pad as TensorFlow does, by the input's size."""
    (found,) = convolution(module)
    (form,) = found.forms
    return [Found((Form(form.kind, form.rules, {**form.attributes, "padding": "same"}),), lines=found.lines)]


def transposed(module: Any) -> list[Found]:
    """(inputs, features / groups, *spatial) -> (*spatial, inputs, features / groups); nothing is flipped."""
    rank = len(module.kernel_size)
    kernel = Rule(("weight",), ("kernel",), (Transpose((*range(2, rank + 2), 0, 1)),))
    cut = [[pad, pad - more] for pad, more in zip(module.padding, module.output_padding, strict=True)]
    return [_convolution("conv_transpose", module, kernel, {**_window(module), "padding": cut})]


def _window(module: Any) -> dict[str, Any]:
    return {
        "strides": list(module.stride),
        "padding_mode": module.padding_mode,
        "dilation": list(module.dilation),
        "groups": module.groups,
        "channels": "first",
    }


def _convolution(kind: str, module: Any, kernel: Rule, attributes: dict[str, Any]) -> Found:
    lines: dict[str, Line] = {"strides": setting("stride", tuple)}
    lines["padding"] = line if kind == "conv" else _cut_line
    return Found((Form(kind, (kernel, *rules(module, bias="bias")), attributes),), lines=lines)


def _cut_line(module: str, value: Any) -> str:
    if value == "valid":
        value = [[0, 0]]
    cut, more = tuple(before for before, _ in value), tuple(before - after for before, after in value)
    return f"{module}.padding, {module}.output_padding = {cut}, {more}"


def embedding(module: Any) -> list[Found]:
    """(tokens, features) as it is. One with `max_norm`, which writes to its table in the forward pass, is of a kind of
    its own, for which no other framework has a layer."""
    attributes: dict[str, Any] = {"padding_index": module.padding_idx}
    if not overridden(module, nn.Embedding):
        attributes["scale"] = 1.0
    elif isinstance(scale := getattr(module, "embed_scale", None), int | float):  # transformers' scaled ones
        attributes["scale"] = float(scale)
    return [_table(module, attributes)]


def embedding_bag(module: Any) -> list[Found]:
    """A table whose rows are summed or averaged; others do that by hand."""
    return [_table(module, {"padding_index": module.padding_idx})]


def _table(module: Any, attributes: dict[str, Any]) -> Found:
    kind = "embedding"
    if module.max_norm is not None:
        kind, attributes = "embedding of rows no longer than max_norm", {"max_norm": float(module.max_norm)}
    return Found((Form(kind, rules(module, weight="table"), attributes),), lines=_EMBEDDING)


_EMBEDDING: Final[Mapping[str, Line]] = {"padding_index": setting("padding_idx")}


def layer_norm(module: Any) -> list[Found]:
    """Over the last axes, as many as its arrays have."""
    attributes = {"epsilon": module.eps, "axes": len(module.normalized_shape)}
    return [Found((Form("layer_norm", rules(module, weight="scale", bias="bias"), attributes),), lines=EPSILON)]


def rms_norm(module: Any) -> list[Found]:
    """Without an epsilon of its own it takes the smallest step of what it computes in, which is float32's."""
    epsilon = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return [Found((Form("rms_norm", rules(module, weight="scale"), {"epsilon": epsilon}),), lines=EPSILON)]


def group_norm(module: Any) -> list[Found]:
    """Canonical as it is."""
    attributes = {"epsilon": module.eps, "groups": module.num_groups}
    return [Found((Form("group_norm", rules(module, weight="scale", bias="bias"), attributes),), lines=EPSILON)]


_STATISTICS: Final = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "variance"}


def instance_norm(module: Any) -> list[Found]:
    """As many groups as channels."""
    attributes = {"epsilon": module.eps, "groups": module.num_features}
    return [Found((Form("group_norm", rules(module, **_STATISTICS), attributes),), lines=EPSILON)]


def batch_norm(module: Any) -> list[Found]:
    """`momentum` is the weight of what is new, and None an average over all batches; the variance is unbiased."""
    attributes: dict[str, Any] = {"epsilon": module.eps}
    if module.running_mean is not None:
        attributes["unbiased"] = True
        if module.momentum is not None:
            attributes["momentum"] = _other(module.momentum)
    lines = {**EPSILON, "momentum": setting("momentum", _other)}
    return [Found((Form("batch_norm", rules(module, **_STATISTICS), attributes),), lines=lines)]


def frozen_batch_norm(module: Any) -> list[Found]:
    """torchvision's and others', whose arrays are all buffers."""
    known, lines = _epsilon(module)
    return [Found((Form("batch_norm", rules(module, **_STATISTICS), known),), lines=lines)]


def _other(share: float) -> float:
    return round(1 - share, 12)


def prelu(module: Any) -> list[Found]:
    """A slope for each channel, or one."""
    return [Found((Form("prelu", rules(module, weight="slope")),))]


def parameters(module: Any) -> list[Found]:
    """Each array on its own, of a layer that no other framework has."""
    return [
        Found((Form("parameter", (Rule((name,), ("value",)),)),), suffix=name)
        for name, _ in module.named_parameters(recurse=False)
    ]


def norm_by_names(module: nn.Module) -> list[Found]:
    """A norm of somebody's own, known by its class's name and by what its arrays are called; [] if it is none.

    A scale alone may be an RMSNorm's whatever the name says (T5's): the source tells, else the partner.
    """
    if type(module).__name__.endswith("FrozenBatchNorm2d") and not any(True for _ in module.children()):
        return frozen_batch_norm(module)
    kind: Any = type(module)
    name = _NORM.search(kind.__name__.lower())
    own = [array for array, _ in module.named_parameters()]
    scale = next((array for array in own if array in ("weight", "scale", "gamma", "g")), "")
    bias = next((array for array in own if array in ("bias", "beta", "b")), "")
    if name is None or not scale or set(own) != {scale, bias} - {""}:
        return []
    if any(True for _ in module.buffers()) or any(array.ndim != 1 for array in module.parameters()):
        return []
    known, lines = _epsilon(module)
    scales = Rule((scale,), ("scale",), (Shift(1.0),) if _says(kind, _ONE) else ())
    layer = Form("layer_norm", (scales, *rules(module, **({bias: "bias"} if bias else {}))), {**known, "axes": 1})
    if bias:
        return [Found((layer,), lines=lines)]
    rms = Form("rms_norm", (scales,), known)
    if name[0].startswith("rms"):
        return [Found((rms,), lines=lines)]
    centred = _says(kind, _CENTRED)
    forms = (layer, rms) if centred is None else (layer,) if centred else (rms,)
    return [Found(forms, lines=lines)]


def _epsilon(module: nn.Module) -> tuple[dict[str, float], dict[str, Line]]:
    """The epsilon of a norm of somebody's own, if it has one under a usual name, and how it is set."""
    for attribute in ("eps", "epsilon", "variance_epsilon", "norm_eps"):
        if isinstance(value := getattr(module, attribute, None), float):
            return {"epsilon": value}, {"epsilon": setting(attribute)}
    return {}, {}


@functools.cache
def _says(kind: Any, words: re.Pattern[str]) -> bool | None:
    """Whether the source of a class has such words; None of a class without one, written at a prompt."""
    try:
        return words.search(inspect.getsource(kind)) is not None
    except (OSError, TypeError):
        return None


_NORM: Final = re.compile(r"(layer|rms)_?norm(act)?(fp32)?([23]d)?$")
"""The end of such a class's name, in small letters."""
_SCALE: Final = r"self\.(weight|scale|gamma|g)\b"
_ONE: Final = re.compile(rf"\b1(\.0)?\s*\+\s*{_SCALE}|{_SCALE}(\.\w+\(\))?\s*\+\s*1\b")
"""A norm that multiplies with 1 + weight, as Gemma's do."""
_CENTRED: Final = re.compile(r"layer_norm\(|-\s*(\w+\.)?(mean|mu|u)\b")
"""A norm that subtracts the mean."""

READERS: Final[dict[type, Reader]] = {
    nn.Linear: dense,
    nn.Bilinear: parameters,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), transposed),
    nn.Embedding: embedding,
    nn.EmbeddingBag: embedding_bag,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), instance_norm),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), batch_norm),
    nn.PReLU: prelu,
}

NAMED: Final[dict[str, Reader]] = {
    "transformers.pytorch_utils.Conv1D": dense_as_it_is,
    "timm.layers.conv2d_same.Conv2dSame": convolution_same,
    "torchvision.ops.misc.FrozenBatchNorm2d": frozen_batch_norm,
    "timm.layers.norm_act.FrozenBatchNormAct2d": frozen_batch_norm,
}
"""Classes of packages that need not be there, by their qualified names."""


def _base(module: nn.Module) -> type:
    return next(kind for kind in type(module).__mro__ if kind in READERS)
