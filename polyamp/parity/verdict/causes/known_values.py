"""`KnownArrays`: the arrays that both sides agree on before a difference, from which its formula is recovered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from polyamp.parity.trace.sketch import sketch_distance
from polyamp.parity.trace.trace import Entry, entry_key

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_EQUAL: Final = 1e-5
"""Relative distance up to which an array counts as the same on both sides."""
_MAX_ARRAYS: Final = 6
"""Number of the latest arrays that are tried."""


class KnownArray(NamedTuple):
    """An array that both sides agree on.

    Attributes:
        module: path of the module.
        what: "input" or "output".
        values: the stored elements.
        shape: of the whole array.
    """

    module: str
    what: str
    values: Array
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every element is stored."""
        size = 1
        for length in self.shape:
            size *= length
        return size == self.values.size


def known_arrays(entry: Entry, ours: Mapping[Any, Entry], theirs: Mapping[Any, Entry]) -> list[KnownArray]:
    """Return arrays of the size of an entry's that were recorded before it and agree, the latest first."""
    assert entry.sketch is not None
    found: list[KnownArray] = []
    for each in ours.values():
        if entry_key(each) == entry_key(entry):
            break
        other = theirs.get(entry_key(each))
        if each.stage != "forward" or each.sketch is None or other is None or other.sketch is None:
            continue
        if each.sketch.size != entry.sketch.size or each.what not in ("input", "output"):
            continue
        if sketch_distance(each.sketch, other.sketch) <= _EQUAL * max(each.sketch.norm, 1e-30):
            found.append(KnownArray(each.module, each.what, each.sketch.samples(), each.sketch.shape))
    return _without_repeats(found[::-1])[:_MAX_ARRAYS]


def _without_repeats(arrays: list[KnownArray]) -> list[KnownArray]:
    """Return arrays without those whose values an earlier one has, such as the input of the next module."""
    kept: dict[bytes, KnownArray] = {}
    for each in arrays:
        key = each.values.tobytes()
        if key not in kept or (kept[key].what == "input" and each.what == "output"):
            kept[key] = each
    return list(kept.values())
