"""Layers that nothing tells apart but what is beside them: the norm of a convolution that is known already.

`conv2_block1_1_bn` belongs to `conv2_block1_1_conv`, `BatchNorm_0` to the `Conv_0` beside it, `bn_init` to `conv_init`.
Called by `matching`, once everything else has its partner.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from polyamp.porting.layouts.inventory import NativeLayer
from polyamp.porting.matching.names import name_of

_KINDS: Final = ("norm", "conv", "dense", "transposed conv")
Key = tuple[str, tuple[str, ...]]
Couple = tuple[NativeLayer, NativeLayer]


class Beside:
    """What is known of the layers beside others.

    Args:
        known: layers that have a partner.
        theirs: layers of the target that are asked about.
        every: all layers of the source, and of the target: where a module counts its norms and its convolutions each
            for themselves and has not as many of them, BatchNorm_1 is not beside Conv_1.
    """

    def __init__(
        self,
        known: Sequence[Couple],
        theirs: Sequence[NativeLayer],
        every: tuple[Sequence[NativeLayer], Sequence[NativeLayer]],
    ) -> None:
        self._apart = [_counted_apart(side) for side in every]
        self._known: dict[Key, list[Couple]] = defaultdict(list)
        for couple in known:
            self._known[_key(couple[0].path)].append(couple)
        self._places: dict[Key, list[NativeLayer]] = defaultdict(list)
        for layer in theirs:
            self._places[_key(layer.path)].append(layer)

    def partner(self, layer: NativeLayer) -> NativeLayer | None:
        """The target's layer that is beside the partner of what is beside `layer`; None if that is not one."""
        if _key(layer.path) in self._apart[0]:
            return None
        there = {_key(other.path) for _, other in self._known[_key(layer.path)]} - self._apart[1]
        candidates = [other for key in there for other in self._places[key]]
        return candidates[0] if len(candidates) == 1 else None


def told_apart(
    ours: Sequence[NativeLayer],
    theirs: Sequence[NativeLayer],
    known: Sequence[Couple],
    every: tuple[Sequence[NativeLayer], Sequence[NativeLayer]],
) -> list[Couple] | None:
    """Layers that are alike, in pairs, by the layers beside them and the one that is left; None if these do not tell
    all of them.

    Args:
        ours: layers of the source.
        theirs: as many of the target.
        known: layers that have a partner.
        every: all layers of either side.
    """
    beside = Beside(known, theirs, every)
    found = [(layer, other) for layer in ours if (other := beside.partner(layer)) is not None]
    taken = {id(other) for _, other in found}
    left = [layer for layer in ours if all(layer is not one for one, _ in found)]
    rest = [other for other in theirs if id(other) not in taken]
    if found and len(left) == len(rest) == 1:
        found.append((left[0], rest[0]))
    return found if len(found) == len(ours) == len({id(other) for _, other in found}) else None


def _counted_apart(layers: Sequence[NativeLayer]) -> set[Key]:
    """Keys that are numbers alone, in modules that do not number as many norms as layers before them."""
    numbered: dict[str, dict[bool, set[Key]]] = defaultdict(lambda: {True: set(), False: set()})
    for layer in layers:
        module, words = _key(layer.path)
        if all(word.isdigit() for word in words) and layer.leaves:
            norm = layer.forms[0].kind.endswith("_norm")
            if norm or layer.forms[0].kind in ("conv", "dense", "conv_transpose"):
                numbered[module][norm].add((module, words))
    return {key for both in numbered.values() if both[True] != both[False] for side in both.values() for key in side}


def _key(path: str) -> Key:
    """The module around a layer, and what its name says beside its kind.

    >>> _key("block/BatchNorm_0") == _key("block/Conv_0"), _key("bn_init") == _key("conv_init")
    (True, True)
    >>> _key("conv2_block1_1_bn") == _key("conv2_block1_1_conv")
    True
    """
    module, _, name = path.rpartition("/")
    words = re.findall(r"\d+|[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    rest = [word for word in words if name_of(word).stem not in _KINDS and word not in ("batch", "layer", "group")]
    return module, tuple(rest)
