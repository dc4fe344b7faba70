"""Matching of otherwise indistinguishable layers by their neighbours, such as a norm by its matched convolution.

`conv2_block1_1_bn` belongs to `conv2_block1_1_conv`, `BatchNorm_0` to the `Conv_0` next to it, `bn_init` to
`conv_init`. This is the last step of a matching.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from polyamp.porting.layouts.inventory import NativeLayer
from polyamp.porting.layouts.layer_kinds import find_kind
from polyamp.porting.matching.module_names import parse_module_name

_KINDS: Final = ("norm", "conv", "dense", "transposed conv")
NeighbourKey = tuple[str, tuple[str, ...]]
LayerPair = tuple[NativeLayer, NativeLayer]


class NeighbourIndex:
    """Index of matched layers by the module and name that they share with their neighbours.

    Args:
        pairs: layers that have a partner.
        targets: layers of the target that have no partner yet.
        all_layers: all layers of the source, and of the target. If a module numbers norms and convolutions separately,
            and their numbers differ, BatchNorm_1 is not the neighbour of Conv_1.
    """

    def __init__(
        self,
        pairs: Sequence[LayerPair],
        targets: Sequence[NativeLayer],
        all_layers: tuple[Sequence[NativeLayer], Sequence[NativeLayer]],
    ) -> None:
        self._apart = [_independently_numbered_keys(side) for side in all_layers]
        self._known: dict[NeighbourKey, list[LayerPair]] = defaultdict(list)
        for couple in pairs:
            self._known[_neighbour_key(couple[0].path)].append(couple)
        self._places: dict[NeighbourKey, list[NativeLayer]] = defaultdict(list)
        for layer in targets:
            self._places[_neighbour_key(layer.path)].append(layer)

    def find_partner(self, layer: NativeLayer) -> NativeLayer | None:
        """Return the target's neighbour of the partner of `layer`'s neighbour; None unless there is exactly one."""
        if _neighbour_key(layer.path) in self._apart[0]:
            return None
        there = {_neighbour_key(other.path) for _, other in self._known[_neighbour_key(layer.path)]} - self._apart[1]
        candidates = [other for key in there for other in self._places[key]]
        return candidates[0] if len(candidates) == 1 else None


def pair_by_neighbours(
    sources: Sequence[NativeLayer],
    targets: Sequence[NativeLayer],
    pairs: Sequence[LayerPair],
    all_layers: tuple[Sequence[NativeLayer], Sequence[NativeLayer]],
) -> list[LayerPair] | None:
    """Return indistinguishable layers in pairs by their neighbours, with a single remaining layer on each side paired
    too. None unless all layers are paired.

    Args:
        sources: layers of the source.
        targets: the same number of layers of the target.
        pairs: layers that have a partner.
        all_layers: all layers of each side.
    """
    index = NeighbourIndex(pairs, targets, all_layers)
    found = [(layer, other) for layer in sources if (other := index.find_partner(layer)) is not None]
    taken = {id(other) for _, other in found}
    left = [layer for layer in sources if all(layer is not one for one, _ in found)]
    rest = [other for other in targets if id(other) not in taken]
    if found and len(left) == len(rest) == 1:
        found.append((left[0], rest[0]))
    return found if len(found) == len(sources) == len({id(other) for _, other in found}) else None


def _independently_numbered_keys(layers: Sequence[NativeLayer]) -> set[NeighbourKey]:
    """Return keys that are only numbers, in modules where the numbers of norms and of other layers differ."""
    numbered: dict[str, dict[bool, set[NeighbourKey]]] = defaultdict(lambda: {True: set(), False: set()})
    for layer in layers:
        module, words = _neighbour_key(layer.path)
        if all(word.isdigit() for word in words) and layer.leaves:
            norm = layer.forms[0].kind.endswith("_norm")
            if norm or "kernel" in find_kind(layer.forms[0].kind).arrays:
                numbered[module][norm].add((module, words))
    return {key for both in numbered.values() if both[True] != both[False] for side in both.values() for key in side}


def _neighbour_key(path: str) -> NeighbourKey:
    """Return a layer's parent module, and the words of its name that do not state its kind.

    >>> _neighbour_key("block/BatchNorm_0") == _neighbour_key("block/Conv_0")
    True
    >>> _neighbour_key("bn_init") == _neighbour_key("conv_init")
    True
    >>> _neighbour_key("conv2_block1_1_bn") == _neighbour_key("conv2_block1_1_conv")
    True
    """
    module, _, name = path.rpartition("/")
    words = re.findall(r"\d+|[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    rest = [
        word for word in words if parse_module_name(word).stem not in _KINDS and word not in ("batch", "layer", "group")
    ]
    return module, tuple(rest)
