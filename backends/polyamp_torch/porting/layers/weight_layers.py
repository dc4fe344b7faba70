"""Readers of torch's layers with arrays: dense, convolutions, embeddings, norms and slopes. One reader per class.

`READERS` is keyed by class and `READERS_BY_NAME` by qualified class name; base classes are looked up too. A torch
kernel has the features first, (features, inputs, ...); all other arrays are canonical as they are.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from polyamp.porting.layouts.layer_layout import Form, Rule, parameter_form
from polyamp.porting.layouts.operations import Shift, Transpose
from polyamp_torch.porting.layers.layer_record import (
    AttributeLine,
    LayerLeaves,
    LayerReader,
    LayerRecord,
    array_rules,
    assignment_line,
    has_own_forward,
    one_layer,
)
from polyamp_torch.porting.layers.padding_rules import canonical_padding, convolution_padding, padding_line

EPSILON_LINE: Final[Mapping[str, AttributeLine]] = {"epsilon": assignment_line("eps")}


def dense(module: Any) -> list[LayerRecord]:
    """Read a dense layer."""
    return one_layer("dense", dense_rules(module))


def dense_rules(owner: Any) -> tuple[Rule, ...]:
    """Return the rules of a dense layer: (features, inputs) -> (inputs, features)."""
    return Rule(("weight",), ("kernel",), (Transpose((1, 0)),)), *array_rules(owner, bias="bias")


def untransposed_dense(module: Any) -> list[LayerRecord]:
    """Read the dense layer of GPT-2 in transformers, whose weight is (inputs, features)."""
    return one_layer("dense", untransposed_dense_rules(module))


def untransposed_dense_rules(owner: Any) -> tuple[Rule, ...]:
    """Return the rules of a dense layer whose weight is (inputs, features)."""
    return array_rules(owner, weight="kernel", bias="bias")


def convolution(module: Any) -> list[LayerRecord]:
    """Read a convolution."""
    attributes = _convolution_attributes(module)
    if not has_own_forward(module, _base_class(module)):  # a custom forward may pad differently from `padding`
        attributes["padding"] = canonical_padding(
            convolution_padding(module), module.kernel_size, module.stride, module.dilation
        )
    return _convolution("conv", module, attributes, padding_line)


def same_convolution(module: Any) -> list[LayerRecord]:
    """Read timm's convolutions that pad as TensorFlow does, depending on the input's size."""
    return _convolution("conv", module, {**_convolution_attributes(module), "padding": "same"}, padding_line)


def transposed_convolution(module: Any) -> list[LayerRecord]:
    """Read a transposed convolution."""
    cut = [[pad, pad - more] for pad, more in zip(module.padding, module.output_padding, strict=True)]
    return _convolution("conv_transpose", module, {**_convolution_attributes(module), "padding": cut}, _crop_line)


def convolution_rules(kind: str, rank: int, owner: Any) -> tuple[Rule, ...]:
    """Return the rules of a convolution with `rank` spatial axes, (features, inputs / groups, *spatial) -> (*spatial,
    inputs / groups, features), or of a transposed one, (inputs, features / groups, *spatial) -> (*spatial, inputs,
    features / groups). Nothing is flipped."""
    axes = (*range(2, rank + 2), *((1, 0) if kind == "conv" else (0, 1)))
    return Rule(("weight",), ("kernel",), (Transpose(axes),)), *array_rules(owner, bias="bias")


def _convolution_attributes(module: Any) -> dict[str, Any]:
    return {
        "strides": list(module.stride),
        "padding_mode": module.padding_mode,
        "dilation": list(module.dilation),
        "groups": module.groups,
        "channels": "first",
    }


def _convolution(kind: str, module: Any, attributes: dict[str, Any], write_padding: AttributeLine) -> list[LayerRecord]:
    lines = {"strides": assignment_line("stride", tuple), "padding": write_padding}
    return one_layer(kind, convolution_rules(kind, len(module.kernel_size), module), attributes, lines)


def _crop_line(module: str, value: Any) -> str:
    if value == "valid":
        value = [[0, 0]]
    cut, more = tuple(before for before, _ in value), tuple(before - after for before, after in value)
    return f"{module}.padding, {module}.output_padding = {cut}, {more}"


def embedding(module: Any) -> list[LayerRecord]:
    """Read an embedding: (tokens, features) as it is. With `max_norm` the forward pass writes to the table: that is a
    separate kind, for which no other framework has a layer."""
    attributes: dict[str, Any] = {"padding_index": module.padding_idx}
    if not has_own_forward(module, nn.Embedding):
        attributes["scale"] = 1.0
    elif isinstance(scale := getattr(module, "embed_scale", None), int | float):  # scaled embeddings of transformers
        attributes["scale"] = float(scale)
    return _embedding_table(module, attributes)


def embedding_bag(module: Any) -> list[LayerRecord]:
    """Read a table whose rows are summed or averaged; other frameworks do that without a layer."""
    return _embedding_table(module, {"padding_index": module.padding_idx})


def _embedding_table(module: Any, attributes: dict[str, Any]) -> list[LayerRecord]:
    kind = "embedding"
    if module.max_norm is not None:
        kind, attributes = "embedding of rows no longer than max_norm", {"max_norm": float(module.max_norm)}
    lines = {"padding_index": assignment_line("padding_idx")}
    return one_layer(kind, array_rules(module, weight="table"), attributes, lines)


def layer_norm(module: Any) -> list[LayerRecord]:
    """Read a layer norm over as many last axes as its arrays have."""
    attributes = {"epsilon": module.eps, "axes": len(module.normalized_shape)}
    return one_layer("layer_norm", array_rules(module, weight="scale", bias="bias"), attributes, EPSILON_LINE)


def rms_norm(module: Any) -> list[LayerRecord]:
    """Read an RMS norm. Its default epsilon is the machine epsilon of the computation's dtype, which is float32's."""
    epsilon = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return one_layer("rms_norm", array_rules(module, weight="scale"), {"epsilon": epsilon}, EPSILON_LINE)


def group_norm(module: Any) -> list[LayerRecord]:
    """Read a group norm, which is canonical as it is."""
    attributes = {"epsilon": module.eps, "groups": module.num_groups}
    return one_layer("group_norm", array_rules(module, weight="scale", bias="bias"), attributes, EPSILON_LINE)


_BATCH_NORM_ARRAYS: Final = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "variance"}


def instance_norm(module: Any) -> list[LayerRecord]:
    """Read an instance norm: a group norm with as many groups as channels."""
    attributes = {"epsilon": module.eps, "groups": module.num_features}
    return one_layer("group_norm", array_rules(module, **_BATCH_NORM_ARRAYS), attributes, EPSILON_LINE)


def batch_norm(module: Any) -> list[LayerRecord]:
    """Read a batch norm. `momentum` is the weight of new values, None an average over all batches; variance is
    unbiased."""
    attributes: dict[str, Any] = {"epsilon": module.eps}
    if module.running_mean is not None:
        attributes["unbiased"] = True
        if module.momentum is not None:
            attributes["momentum"] = _complement(module.momentum)
    lines = {**EPSILON_LINE, "momentum": assignment_line("momentum", _complement)}
    return one_layer("batch_norm", array_rules(module, **_BATCH_NORM_ARRAYS), attributes, lines)


def file_layers(own: LayerLeaves) -> Iterator[LayerRecord]:
    """Yield the batch norm of a module in a file."""
    if "running_mean" in own and "running_var" in own:
        yield LayerRecord((Form("batch_norm", array_rules(own, **_BATCH_NORM_ARRAYS), {"unbiased": True}),))


def norm_forms(path: str, scale: str, biases: tuple[Rule, ...]) -> list[Form]:
    """Return the possible forms of a scale of channels in a file, with its bias or without.

    Args:
        path: path of the module.
        scale: name of the scale in it.
        biases: rules of the bias, if there is one.
    """
    rules = (Rule((scale,), ("scale",)), *biases)
    layer, group = Form("layer_norm", rules, {"axes": 1}), Form("group_norm", rules)
    if biases:
        return [layer, group]
    rms, slope = Form("rms_norm", rules), Form("prelu", (Rule((scale,), ("slope",)),))
    named = any(word in path.lower().rpartition("/")[2] for word in ("ln", "layernorm", "layer_norm"))
    value = parameter_form(scale)
    return [layer, rms, value] if named and "rms" not in path.lower() else [rms, layer, slope, value]


def frozen_batch_norm(module: Any) -> list[LayerRecord]:
    """Read a frozen batch norm, such as torchvision's, whose arrays are all buffers."""
    known, lines = _find_epsilon(module)
    return one_layer("batch_norm", array_rules(module, **_BATCH_NORM_ARRAYS), known, lines)


def _complement(share: float) -> float:
    return round(1 - share, 12)


def prelu(module: Any) -> list[LayerRecord]:
    """Read a PReLU with one slope for each channel, or one slope."""
    return one_layer("prelu", array_rules(module, weight="slope"))


def opaque_parameters(module: Any) -> list[LayerRecord]:
    """Read each array as it is, as a layer that no other framework has."""
    return [LayerRecord((parameter_form(name),), suffix=name) for name, _ in module.named_parameters(recurse=False)]


def norm_by_name(module: nn.Module) -> list[LayerRecord]:
    """Read a custom norm, recognised by the names of its class and arrays; [] if it is none.

    A norm with only a scale may be an RMSNorm, whatever its name (T5's). The class's source decides, else the partner
    layer.
    """
    if type(module).__name__.endswith("FrozenBatchNorm2d") and not any(True for _ in module.children()):
        return frozen_batch_norm(module)
    kind: Any = type(module)
    name = _NORM_NAME.search(kind.__name__.lower())
    own = [array for array, _ in module.named_parameters()]
    scale = next((array for array in own if array in ("weight", "scale", "gamma", "g")), "")
    bias = next((array for array in own if array in ("bias", "beta", "b")), "")
    if name is None or not scale or set(own) != {scale, bias} - {""}:
        return []
    if any(True for _ in module.buffers()) or any(array.ndim != 1 for array in module.parameters()):
        return []
    known, lines = _find_epsilon(module)
    scales = Rule((scale,), ("scale",), (Shift(1.0),) if _has_words(kind, _ADDS_ONE) else ())
    layer = Form("layer_norm", (scales, *array_rules(module, **({bias: "bias"} if bias else {}))), {**known, "axes": 1})
    if bias:
        return [LayerRecord((layer,), lines=lines)]
    rms = Form("rms_norm", (scales,), known)
    if name[0].startswith("rms"):
        return [LayerRecord((rms,), lines=lines)]
    centred = _has_words(kind, _SUBTRACTS_MEAN)
    forms = (layer, rms) if centred is None else (layer,) if centred else (rms,)
    return [LayerRecord(forms, lines=lines)]


def _find_epsilon(module: nn.Module) -> tuple[dict[str, float], dict[str, AttributeLine]]:
    """Return the epsilon of a custom norm, if it has a usual name, and the line that sets it."""
    for attribute in ("eps", "epsilon", "variance_epsilon", "norm_eps"):
        if isinstance(value := getattr(module, attribute, None), float):
            return {"epsilon": value}, {"epsilon": assignment_line(attribute)}
    return {}, {}


@functools.cache
def _has_words(kind: Any, words: re.Pattern[str]) -> bool | None:
    """Return whether the source of a class matches the pattern; None if it has no source file."""
    try:
        return words.search(inspect.getsource(kind)) is not None
    except (OSError, TypeError):
        return None


_NORM_NAME: Final = re.compile(r"(layer|rms)_?norm(act)?(fp32)?([23]d)?$")
"""Suffix of a custom norm's class name, in lower case."""
_SCALE_WORDS: Final = r"self\.(weight|scale|gamma|g)\b"
_ADDS_ONE: Final = re.compile(rf"\b1(\.0)?\s*\+\s*{_SCALE_WORDS}|{_SCALE_WORDS}(\.\w+\(\))?\s*\+\s*1\b")
"""Source pattern of a norm that multiplies by 1 + weight, as Gemma's do."""
_SUBTRACTS_MEAN: Final = re.compile(r"layer_norm\(|-\s*(\w+\.)?(mean|mu|u)\b")
"""Source pattern of a norm that subtracts the mean."""

READERS: Final[dict[type, LayerReader]] = {
    nn.Linear: dense,
    nn.Bilinear: opaque_parameters,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), transposed_convolution),
    nn.Embedding: embedding,
    nn.EmbeddingBag: embedding_bag,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), instance_norm),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), batch_norm),
    nn.PReLU: prelu,
}

READERS_BY_NAME: Final[dict[str, LayerReader]] = {
    "transformers.pytorch_utils.Conv1D": untransposed_dense,
    "timm.layers.conv2d_same.Conv2dSame": same_convolution,
    "torchvision.ops.misc.FrozenBatchNorm2d": frozen_batch_norm,
    "timm.layers.norm_act.FrozenBatchNormAct2d": frozen_batch_norm,
}
"""Readers of classes from optional packages, by qualified name."""


def _base_class(module: nn.Module) -> type:
    return next(kind for kind in type(module).__mro__ if kind in READERS)
