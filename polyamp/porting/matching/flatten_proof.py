"""Orders of dense layers' rows and columns that the graphs of both models' modules prove (`Inventory.inputs`).

A `Flatten` between a convolution and a dense layer of one `Sequential` proves the order on one side. An order is proven
if both sides prove theirs, and mean the same convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from polyamp.porting.layouts.input_order import InputOrder
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.layer_kinds import find_kind
from polyamp.porting.layouts.lazy_array import Array
from polyamp.porting.matching.matching import LayerMatch

EVIDENCE: Final = "both graphs of modules show it"


class Segment(NamedTuple):
    """Consecutive values that are a matrix in the source's order, and its transpose in the target's.

    Attributes:
        start: first value.
        major: length of the source's outer axis.
        minor: length of the source's inner axis.
    """

    start: int
    major: int
    minor: int

    def permute(self, index: Array) -> Array:
        """Return an index of values with the segment transposed."""
        end = self.start + self.major * self.minor
        turned = index[self.start : end].reshape(self.major, self.minor).T.reshape(-1)
        return np.concatenate([index[: self.start], turned, index[end:]])


def flat_segment(channels: int, length: int, *, is_first: bool) -> Segment:
    """Return the segment of flattened channels, which are first in the source or in the target."""
    count = length // channels
    return Segment(0, channels, count) if is_first else Segment(0, count, channels)


class ProvenOrders(NamedTuple):
    """What both graphs prove.

    Attributes:
        rows: path of a target's dense layer -> how its rows are reordered; None if they are not.
        columns: (path of a target's dense layer, path of the layer that takes its reshaped output) -> the same.
    """

    rows: dict[str, Segment | None]
    columns: dict[tuple[str, str], Segment | None]


def find_proven_orders(source: Inventory, target: Inventory, pairs: Sequence[LayerMatch]) -> ProvenOrders:
    """Return the orders that the graphs of both models prove."""
    partner = {each.source.path: each for each in pairs}
    rows: dict[str, Segment | None] = {}
    columns: dict[tuple[str, str], Segment | None] = {}
    for each in pairs:
        ours, theirs = source.inputs.get(each.source.path), target.inputs.get(each.target.path)
        if ours is None or theirs is None or ours.layer not in partner:
            continue
        origin = partner[ours.layer]
        if origin.target.path != theirs.layer:
            continue
        if each.fit.source.kind == "dense":
            is_proven, order = _compare(ours, theirs, feature_count(each, "inputs"), feature_count(origin, "features"))
            if is_proven:
                rows[each.target.path] = order
        elif find_kind(each.fit.source.kind).has_channels and origin.fit.source.kind == "dense":
            is_proven, order = _compare(ours, theirs, feature_count(origin, "features"), feature_count(each, "inputs"))
            if is_proven:
                columns[origin.target.path, each.target.path] = order
    several = {path for path, _ in columns if len({order for key, order in columns.items() if key[0] == path}) > 1}
    return ProvenOrders(rows, {key: order for key, order in columns.items() if key[0] not in several})


def _compare(ours: InputOrder, theirs: InputOrder, length: int, channels: int) -> tuple[bool, Segment | None]:
    """Return whether both orders together are proven, and how the values are reordered.

    Args:
        ours: order of the source's values.
        theirs: order of the target's.
        length: number of values.
        channels: number of channels among them.
    """
    if ours.channels == theirs.channels or length == channels:
        return True, None
    if ours.channels is None or theirs.channels is None or not channels or length % channels:
        return False, None
    return True, flat_segment(channels, length, is_first=ours.channels == "first")


def feature_count(match: LayerMatch, role: str) -> int:
    """Return the number of features or channels that a layer takes ("inputs") or returns ("features"); 0 if its arrays
    do not show it."""
    form = match.fit.source
    row, shapes = find_kind(form.kind), form.shapes(match.source.arrays)
    for name, axes in row.arrays.items():
        if name not in shapes:
            continue
        for axis in range(-len(axes), 0):
            word, _, divisor = axes[axis].partition(" / ")
            if word in (role, "channels"):
                return shapes[name][axis] * (int(form.attributes.get("groups") or 1) if divisor else 1)
    return 0
