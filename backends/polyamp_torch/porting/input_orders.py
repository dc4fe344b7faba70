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
from polyamp_torch.porting.layers import stateless_layers, weight_layers
from polyamp_torch.porting.layers.layer_record import LayerReader


def _classes_read_by(*readers: LayerReader) -> tuple[type, ...]:
    named = {**weight_layers.READERS, **stateless_layers.READERS}
    return tuple(kind for kind, read in named.items() if read in readers)


_CONVOLUTIONS: Final = _classes_read_by(weight_layers.convolution, weight_layers.transposed_convolution)
_NORMS: Final = _classes_read_by(weight_layers.batch_norm, weight_layers.instance_norm, weight_layers.group_norm)
_ELEMENTWISE: Final = (
    *_classes_read_by(stateless_layers.activation),
    *(nn.GELU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.Softplus, nn.Hardtanh, nn.Dropout, nn.AlphaDropout),
)
_PER_CHANNEL: Final = (
    *_classes_read_by(stateless_layers.pooling, stateless_layers.adaptive_pooling, stateless_layers.resize),
    *(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
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
