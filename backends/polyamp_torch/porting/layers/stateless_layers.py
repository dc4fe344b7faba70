"""Readers of torch's layers without arrays: activations, dropout, pooling, flatten, resize.

They are listed so that their attributes can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn
from torch.nn import functional

from polyamp_torch.porting.layers.layer_record import (
    AttributeLine,
    LayerReader,
    LayerRecord,
    assignment_line,
    one_layer,
)
from polyamp_torch.porting.layers.padding_rules import canonical_padding

_NAME_BY_CLASS: Final[dict[type, str]] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.Sigmoid: "sigmoid",
    nn.LogSigmoid: "log_sigmoid",
    nn.Tanh: "tanh",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.SELU: "selu",
    nn.Softsign: "soft_sign",
    nn.Hardsigmoid: "hard_sigmoid",
    nn.Hardswish: "hard_silu",
    nn.Identity: "linear",
}
_NAME_BY_CLASS_NAME: Final = {
    "NewGELU": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
    "QuickGELU": "quick_gelu",
    "QuickGELUActivation": "quick_gelu",
    "SiLUActivation": "silu",
    "Swish": "silu",
    "ReLUSquaredActivation": "relu_squared",
}
"""Class names of activations in transformers, timm and other packages."""
_TIMM_NAMES: Final = {"GELU": "gelu", "Sigmoid": "sigmoid", "Tanh": "tanh", "Mish": "mish"}
"""timm's activations that share torch's class names."""
_NAME_BY_FUNCTION: Final = {
    functional.relu: "relu",
    functional.gelu: "gelu",
    functional.silu: "silu",
    functional.elu: "elu",
    functional.leaky_relu: "leaky_relu",
}


def _activation(
    name: str, attributes: Mapping[str, Any] | None = None, lines: Mapping[str, AttributeLine] | None = None
) -> list[LayerRecord]:
    return one_layer("activation", (), {"activation": name, **(attributes or {})}, lines)


def activation(module: Any) -> list[LayerRecord]:
    """Read an activation without attributes."""
    return _activation(next(_NAME_BY_CLASS[kind] for kind in type(module).__mro__ if kind in _NAME_BY_CLASS))


def _gelu(module: Any) -> list[LayerRecord]:
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}
    line = assignment_line("approximate", lambda name: approximate.get(name, name))
    return _activation("gelu_tanh" if module.approximate == "tanh" else "gelu", None, {"activation": line})


def _leaky_relu(module: Any) -> list[LayerRecord]:
    lines = {"negative_slope": assignment_line("negative_slope")}
    return _activation("leaky_relu", {"negative_slope": module.negative_slope}, lines)


def _elu(module: Any) -> list[LayerRecord]:
    name = "celu" if isinstance(module, nn.CELU) else "elu"
    return _activation(name, {"alpha": module.alpha}, {"alpha": assignment_line("alpha")})


def _softmax(module: Any) -> list[LayerRecord]:
    name = "log_softmax" if isinstance(module, nn.LogSoftmax) else "softmax"
    lines = {"axis": assignment_line("dim")}
    return _activation(name, {} if module.dim is None else {"axis": module.dim}, lines)


def _softplus(module: Any) -> list[LayerRecord]:
    return _activation("softplus" if module.beta == 1 else f"softplus of beta {module.beta:g}")


def _hardtanh(module: Any) -> list[LayerRecord]:
    usual = (module.min_val, module.max_val) == (-1.0, 1.0)
    return _activation("hard_tanh" if usual else f"clip to [{module.min_val:g}, {module.max_val:g}]")


def activation_by_name(module: nn.Module) -> list[LayerRecord]:
    """Read an activation of another package, recognised by its class name; [] if it is none."""
    kind = type(module)
    name = _NAME_BY_CLASS_NAME.get(kind.__name__)
    if kind.__module__.startswith("timm.layers.activations"):
        name = _TIMM_NAMES.get(kind.__name__, name)
    return [] if name is None else _activation(name)


def activation_name(function: Any) -> str | None:
    """Return the canonical name of an activation function; None if it is unknown."""
    return _NAME_BY_FUNCTION.get(function) if callable(function) else None


def dropout(module: Any) -> list[LayerRecord]:
    """Read a dropout of values, or of whole channels."""
    return one_layer("dropout", (), {"rate": module.p}, {"rate": assignment_line("p")})


def _per_axis(value: Any, rank: int) -> list[int]:
    return list(value) if isinstance(value, tuple | list) else [value] * rank


def _spatial_rank(module: Any) -> int:
    return next(
        int(kind.__name__[-2]) for kind in type(module).__mro__ if kind.__name__.endswith("d") and kind in READERS
    )


def pooling(module: Any) -> list[LayerRecord]:
    """Read a pooling. With `ceil_mode` the trailing zeros depend on the input's size, so its padding is left out."""
    rank, average = _spatial_rank(module), "Avg" in type(module).__name__
    window = _per_axis(module.kernel_size, rank)
    strides = window if module.stride is None else _per_axis(module.stride, rank)
    attributes: dict[str, Any] = {
        "operation": "average" if average else "max",
        "window": window,
        "strides": strides,
    }
    pads = [[pad, pad] for pad in _per_axis(module.padding, rank)]
    if not module.ceil_mode:
        dilation = [1] * rank if average else _per_axis(module.dilation, rank)
        attributes["padding"] = canonical_padding(pads, window, strides, dilation)
    if average and any(map(any, pads)):
        attributes["counts_padding"] = module.count_include_pad
    lines: dict[str, AttributeLine] = {
        "window": assignment_line("kernel_size", tuple),
        "strides": assignment_line("stride", tuple),
    }
    if average:
        lines["counts_padding"] = assignment_line("count_include_pad")
    return one_layer("pooling", (), attributes, lines)


def adaptive_pooling(module: Any) -> list[LayerRecord]:
    """Read a global pooling if the output size is 1. Else the window depends on the input's size and is left out."""
    attributes: dict[str, Any] = {"operation": "average" if "Avg" in type(module).__name__ else "max"}
    if set(_per_axis(module.output_size, 1)) == {1}:
        attributes["window"] = []
    return one_layer("pooling", (), attributes)


def flatten(module: Any) -> list[LayerRecord]:
    """Read a flatten of inputs with channels first."""
    return one_layer("flatten", (), {"channels": "first"})


_METHODS: Final = {
    "nearest": ("nearest", 0),
    "nearest-exact": ("nearest", 0),
    "linear": ("linear", 1),
    "bilinear": ("linear", 2),
    "trilinear": ("linear", 3),
    "bicubic": ("cubic", 2),
    "area": ("area", 0),
}
"""torch's mode -> the canonical method and the number of axes; 0 if the mode accepts any number."""


def resize(module: Any) -> list[LayerRecord]:
    """Read a resize with its factors, if it has factors and not a size."""
    method, rank = _METHODS[module.mode]
    rank = 2 if isinstance(module, nn.UpsamplingNearest2d) else rank
    attributes: dict[str, Any] = {"method": method}
    if method in ("linear", "cubic"):
        attributes["align_corners"] = bool(module.align_corners)
    factor = module.scale_factor
    if isinstance(factor, tuple | list) or (factor is not None and rank):
        attributes["size"] = [_int_if_integral(number) for number in _per_axis(factor, rank)]
    elif factor is not None:
        attributes["size"] = _int_if_integral(factor)  # `inventory` knows the number of axes
    return one_layer("resize", (), attributes, {"align_corners": assignment_line("align_corners")})


def _int_if_integral(factor: float) -> int | float:
    return int(factor) if float(factor).is_integer() else factor


READERS: Final[dict[type, LayerReader]] = {
    **dict.fromkeys(_NAME_BY_CLASS, activation),
    nn.GELU: _gelu,
    nn.LeakyReLU: _leaky_relu,
    **dict.fromkeys((nn.ELU, nn.CELU), _elu),
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax), _softmax),
    nn.Softplus: _softplus,
    nn.Hardtanh: _hardtanh,
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout), dropout),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), pooling),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), pooling),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), adaptive_pooling),
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), adaptive_pooling),
    nn.Flatten: flatten,
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), resize),
}
