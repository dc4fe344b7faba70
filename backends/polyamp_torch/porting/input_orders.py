"""Orders of the values that layers take, as the `nn.Sequential`s of a torch model prove them.

What a user's `forward` does with its values is unknown, and so is what a Sequential of another class, or one with
hooks, does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from polyamp.porting.layouts.input_order import InputOrder, InputOrderRecorder, ValueFlow
from polyamp_torch.compat import has_plain_call
from polyamp_torch.porting.layers import stateless_layers

_CONVOLUTIONS: Final = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_NORMS: Final = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_ELEMENTWISE: Final = (
    *(kind for kind, read in stateless_layers.READERS.items() if read is stateless_layers.activation),
    *(nn.GELU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.Softplus, nn.Hardtanh, nn.Dropout, nn.AlphaDropout),
)
_PER_CHANNEL: Final = (
    *(kind for kind, read in stateless_layers.READERS.items() if read is stateless_layers.pooling),
    *(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
)


def input_orders(module: nn.Module, paths: Mapping[str, str]) -> dict[str, InputOrder]:
    """Return path of a layer -> the order of what it takes.

    Args:
        module: the model.
        paths: `.`-separated path of a module -> its path in the inventory.
    """
    named = dict(module.named_modules(remove_duplicate=False))
    counts = Counter(id(part) for part in named.values())
    children: dict[str, list[str]] = {place: [] for place in named}
    for place in named:
        if place:
            children[place.rpartition(".")[0]].append(place)
    recorder = InputOrderRecorder()
    inside: set[str] = set()

    def follow(flow: ValueFlow | None, place: str) -> ValueFlow | None:
        part = named[place]
        if type(part) is not nn.Sequential or not has_plain_call(part):
            return _follow_layer(flow, part, paths[place], recorder)
        inside.add(place)
        for child in children[place]:
            flow = follow(flow, child)
        return flow

    for place, part in named.items():
        if type(part) is nn.Sequential and place not in inside:
            follow(None, place)
    for place, part in named.items():
        if counts[id(part)] > 1:  # its other place may call it with other values
            recorder.forget(paths[place])
    return recorder.inputs


def _follow_layer(flow: ValueFlow | None, module: Any, path: str, recorder: InputOrderRecorder) -> ValueFlow | None:
    """Return the values behind a module that takes `flow`."""
    kind = type(module)
    if not has_plain_call(module):
        return None
    if kind in _CONVOLUTIONS:
        return recorder.convolution(flow, path)
    if kind is nn.Linear:
        return recorder.dense(flow, path)
    if kind in _NORMS:
        return recorder.norm(flow, path)
    if kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return recorder.flatten(flow, "first")
    if kind is nn.Unflatten and module.dim == 1 and isinstance(module.unflattened_size, tuple):
        return recorder.reshape(flow, "first")
    is_kept = kind in _ELEMENTWISE or (kind is nn.PReLU and module.num_parameters == 1)
    return flow if is_kept or (kind in _PER_CHANNEL and flow is not None and flow.is_image) else None
