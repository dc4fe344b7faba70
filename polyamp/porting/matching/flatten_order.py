"""Order of a dense layer's rows after a flatten, and of its columns before a reshape.

The order depends on the framework's channel position: a flatten of (channels, height, width) and one of (height, width,
channels) give the same numbers in two orders. The number of channels is known from the layer next to the dense one. The
spatial axes keep their order, so that their lengths need not be known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from polyamp.errors import PortError
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.layer_kinds import find_kind
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.matching.matching import LayerMatch


class ChannelOrder(NamedTuple):
    """Reordering of a dense layer's rows or columns.

    Attributes:
        channels: number of channels.
        rows: True if a flatten precedes the layer; False if its output is reshaped into an image.
        first: True if the source has the channels first; None if one side does not report their position.
        neighbour: path of the source's layer that determines the number of channels.
    """

    channels: int
    rows: bool
    first: bool | None
    neighbour: str

    def apply(self, arrays: Mapping[str, Lazy], *, back: bool = False) -> dict[str, Lazy]:
        """Return the canonical arrays of the layer in the target's order; with `back`, the target's arrays in the
        source's."""
        if self.rows:
            return {**arrays, "kernel": self._reorder(arrays["kernel"], 0, back)}
        return {name: self._reorder(array, array.ndim - 1, back) for name, array in arrays.items()}

    def _reorder(self, array: Lazy, axis: int, back: bool) -> Lazy:
        length = array.shape[axis]
        assert self.first is not None
        first = self.first != back
        split = (self.channels, length // self.channels) if first else (length // self.channels, self.channels)

        def read() -> Any:
            values = array.read()
            opened = values.reshape(*values.shape[:axis], *split, *values.shape[axis + 1 :])
            return opened.swapaxes(axis, axis + 1).reshape(values.shape)

        return Lazy(array.shape, array.dtype, read)


def find_channel_orders(source: Inventory, target: Inventory, pairs: Sequence[LayerMatch]) -> dict[str, ChannelOrder]:
    """Map paths of the target's dense layers to their reordering. Empty if both sides have the same channel
    position."""
    ours, theirs = source.channels, target.channels
    if ours == theirs and (ours is not None or source.framework == target.framework):
        return {}
    side = source if source.ordered else target
    place = {layer.path: number for number, layer in enumerate(side.layers)}
    own = [(each.source if source.ordered else each.target).path for each in pairs]
    ordered = [
        each
        for _, each in sorted(
            ((place[path], each) for path, each in zip(own, pairs, strict=True) if path in place),
            key=lambda entry: entry[0],
        )
    ]
    found = {}
    for number, each in enumerate(ordered):
        if each.fit.source.kind != "dense" or each.fit.target.kind != "dense":
            continue
        inputs, features = each.fit.source.shapes(each.source.arrays)["kernel"]
        before = _channel_count(ordered[number - 1], "features") if number else None
        after = _channel_count(ordered[number + 1], "inputs") if number + 1 < len(ordered) else None
        first = None if ours is None or theirs is None else ours == "first"
        if before and inputs > before and inputs % before == 0:
            found[each.target.path] = ChannelOrder(before, True, first, ordered[number - 1].source.path)
        elif after and features > after and features % after == 0:
            found[each.target.path] = ChannelOrder(after, False, first, ordered[number + 1].source.path)
    return found


def unknown_order_error(orders: Mapping[str, ChannelOrder]) -> PortError | None:
    """Return the error for a flatten whose order cannot be determined; None if there is none."""
    for path, order in orders.items():
        if order.first is None:
            return PortError(
                f"the order of the {'rows' if order.rows else 'columns'} of {path!r} cannot be told: it lies beside "
                f"{order.neighbour!r}, whose {order.channels} channels were flattened, and one side does not say "
                "whether it has channels first or last. check=batch shows it."
            )
    return None


def _channel_count(match: LayerMatch, role: str) -> int | None:
    """Return the number of channels that a layer returns ("features") or takes ("inputs"); None for a layer without
    channels."""
    form = match.fit.source
    row = find_kind(form.kind)
    if not row.has_channels:
        return None
    shapes = form.shapes(match.source.arrays)
    name = "kernel" if row.is_convolution else next(iter(shapes))
    shape, axes = shapes[name], row.arrays[name]
    for axis in range(-len(axes), 0):
        if axes[axis].partition(" / ")[0] in (role, "channels"):
            return shape[axis] * (int(form.attributes.get("groups") or 1) if axes[axis].endswith(" / groups") else 1)
    return None
