"""Layers that nothing tells apart but what is beside them: the norm of a convolution that is known already.

`conv2_block1_1_bn` belongs to `conv2_block1_1_conv`, `BatchNorm_0` to the `Conv_0` beside it, `bn_init` to `conv_init`.
Called by `matching`, once everything else has its partner.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from polyamp.porting.inventory import NativeLayer
from polyamp.porting.names import name_of

_KINDS: Final = ("norm", "conv", "dense", "transposed conv")
Key = tuple[str, tuple[str, ...]]
Couple = tuple[NativeLayer, NativeLayer]


def told_apart(
    ours: Sequence[NativeLayer], theirs: Sequence[NativeLayer], known: Sequence[Couple]
) -> list[Couple] | None:
    """Layers that are alike, in pairs, by the layers beside them; None if those do not tell all of them.

    Args:
        ours: layers of the source.
        theirs: as many of the target.
        known: layers that have a partner.
    """
    beside: dict[Key, list[Couple]] = defaultdict(list)
    for couple in known:
        beside[_key(couple[0].path)].append(couple)
    places: dict[Key, list[NativeLayer]] = defaultdict(list)
    for layer in theirs:
        places[_key(layer.path)].append(layer)
    found = []
    for layer in ours:
        there = {_key(other.path) for _, other in beside[_key(layer.path)]}
        candidates = [other for key in there for other in places[key]]
        if len(candidates) != 1:
            return None
        found.append((layer, candidates[0]))
    return found if len({id(other) for _, other in found}) == len(theirs) else None


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
