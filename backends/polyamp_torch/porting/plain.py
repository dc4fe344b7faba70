"""The layers without arrays that torch has as modules: activations, dropout, pooling, flatten, resize.

They are listed so that what they are set to can be compared. `READERS` is looked up by `walk`.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn
from torch.nn import functional

from polyamp.porting.layouts.forms import Form
from polyamp_torch.porting.found import Found, Line, Reader, setting
from polyamp_torch.porting.paddings import canonical

_NAMES: Final[dict[type, str]] = {
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
_BY_NAME: Final = {
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
"""Activations of transformers, timm and others, by the names of their classes."""
_TIMM: Final = {"GELU": "gelu", "Sigmoid": "sigmoid", "Tanh": "tanh", "Mish": "mish"}
"""Those of timm whose names are torch's."""
_FUNCTIONS: Final = {
    functional.relu: "relu",
    functional.gelu: "gelu",
    functional.silu: "silu",
    functional.elu: "elu",
    functional.leaky_relu: "leaky_relu",
}


def _activation(name: str, attributes: dict[str, Any], lines: dict[str, Line] | None = None) -> list[Found]:
    return [Found((Form("activation", (), {"activation": name, **attributes}),), lines=lines or {})]


def activation(module: Any) -> list[Found]:
    """One that has nothing to set."""
    return _activation(next(_NAMES[kind] for kind in type(module).__mro__ if kind in _NAMES), {})


def _gelu(module: Any) -> list[Found]:
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}
    line = setting("approximate", lambda name: approximate.get(name, name))
    return _activation("gelu_tanh" if module.approximate == "tanh" else "gelu", {}, {"activation": line})


def _leaky_relu(module: Any) -> list[Found]:
    lines = {"negative_slope": setting("negative_slope")}
    return _activation("leaky_relu", {"negative_slope": module.negative_slope}, lines)


def _elu(module: Any) -> list[Found]:
    name = "celu" if isinstance(module, nn.CELU) else "elu"
    return _activation(name, {"alpha": module.alpha}, {"alpha": setting("alpha")})


def _softmax(module: Any) -> list[Found]:
    name = "log_softmax" if isinstance(module, nn.LogSoftmax) else "softmax"
    lines = {"axis": setting("dim")}
    return _activation(name, {} if module.dim is None else {"axis": module.dim}, lines)


def _softplus(module: Any) -> list[Found]:
    return _activation("softplus" if module.beta == 1 else f"softplus of beta {module.beta:g}", {})


def _hardtanh(module: Any) -> list[Found]:
    usual = (module.min_val, module.max_val) == (-1.0, 1.0)
    return _activation("hard_tanh" if usual else f"clip to [{module.min_val:g}, {module.max_val:g}]", {})


def activation_by_name(module: nn.Module) -> list[Found]:
    """An activation of another package, known by its class's name; [] if it is none."""
    kind = type(module)
    name = _BY_NAME.get(kind.__name__)
    if kind.__module__.startswith("timm.layers.activations"):
        name = _TIMM.get(kind.__name__, name)
    return [] if name is None else _activation(name, {})


def name_of(function: Any) -> str | None:
    """The name of an activation function; None of one that is not known."""
    return _FUNCTIONS.get(function) if callable(function) else None


def dropout(module: Any) -> list[Found]:
    """Of values, or of whole channels."""
    return [Found((Form("dropout", (), {"rate": module.p}),), lines={"rate": setting("p")})]


def _tuple(value: Any, rank: int) -> list[int]:
    return list(value) if isinstance(value, tuple | list) else [value] * rank


def _rank(module: Any) -> int:
    return next(
        int(kind.__name__[-2]) for kind in type(module).__mro__ if kind.__name__.endswith("d") and kind in READERS
    )


def pooling(module: Any) -> list[Found]:
    """With `ceil_mode` the zeros behind depend on the input's size, so that its padding has no word."""
    rank, average = _rank(module), "Avg" in type(module).__name__
    window = _tuple(module.kernel_size, rank)
    strides = window if module.stride is None else _tuple(module.stride, rank)
    attributes: dict[str, Any] = {
        "operation": "average" if average else "max",
        "window": window,
        "strides": strides,
    }
    pads = [[pad, pad] for pad in _tuple(module.padding, rank)]
    if not module.ceil_mode:
        dilation = [1] * rank if average else _tuple(module.dilation, rank)
        attributes["padding"] = canonical(pads, window, strides, dilation)
    if average and any(map(any, pads)):
        attributes["counts_padding"] = module.count_include_pad
    lines: dict[str, Line] = {"window": setting("kernel_size", tuple), "strides": setting("stride", tuple)}
    if average:
        lines["counts_padding"] = setting("count_include_pad")
    return [Found((Form("pooling", (), attributes),), lines=lines)]


def adaptive(module: Any) -> list[Found]:
    """Global where all that is left is one; else its window depends on the input's size, and is not told."""
    attributes: dict[str, Any] = {"operation": "average" if "Avg" in type(module).__name__ else "max"}
    if set(_tuple(module.output_size, 1)) == {1}:
        attributes["window"] = []
    return [Found((Form("pooling", (), attributes),))]


def flatten(module: Any) -> list[Found]:
    """Of what has its channels in front."""
    return [Found((Form("flatten", (), {"channels": "first"}),))]


_METHODS: Final = {
    "nearest": ("nearest", 0),
    "nearest-exact": ("nearest", 0),
    "linear": ("linear", 1),
    "bilinear": ("linear", 2),
    "trilinear": ("linear", 3),
    "bicubic": ("cubic", 2),
    "area": ("area", 0),
}
"""torch's mode -> the canonical method, and the number of axes; 0 where the mode takes any."""


def resize(module: Any) -> list[Found]:
    """Its factors, where it has some and not a size."""
    method, rank = _METHODS[module.mode]
    rank = 2 if isinstance(module, nn.UpsamplingNearest2d) else rank
    attributes: dict[str, Any] = {"method": method}
    if method in ("linear", "cubic"):
        attributes["align_corners"] = bool(module.align_corners)
    factor = module.scale_factor
    if isinstance(factor, tuple | list) or (factor is not None and rank):
        attributes["size"] = [_whole(number) for number in _tuple(factor, rank)]
    elif factor is not None:
        attributes["size"] = _whole(factor)  # `walk` knows how many axes
    return [Found((Form("resize", (), attributes),), lines={"align_corners": setting("align_corners")})]


def _whole(factor: float) -> int | float:
    return int(factor) if float(factor).is_integer() else factor


READERS: Final[dict[type, Reader]] = {
    **dict.fromkeys(_NAMES, activation),
    nn.GELU: _gelu,
    nn.LeakyReLU: _leaky_relu,
    **dict.fromkeys((nn.ELU, nn.CELU), _elu),
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax), _softmax),
    nn.Softplus: _softplus,
    nn.Hardtanh: _hardtanh,
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout), dropout),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), pooling),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), pooling),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), adaptive),
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), adaptive),
    nn.Flatten: flatten,
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), resize),
}
