"""`KnownArrays`: the arrays that both sides agree on before a difference, from which its formula is recovered."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.parity.trace.sketch import sketch_distance
from polyamp.parity.trace.trace import Entry, entry_key

Array = np.ndarray[Any, Any]
_EQUAL: Final = 1e-5
"""Relative distance up to which an array counts as the same on both sides."""
_WORDS: Final = {"input": "the input", "output": "output"}
_MAX_ARRAYS: Final = 10
"""Number of the latest arrays that are tried."""
_MAX_REDUCED: Final = 3
"""Number of the latest larger arrays whose reductions are tried."""


class KnownArray(NamedTuple):
    """An array that both sides agree on.

    Attributes:
        module: path of the module.
        what: "output", "the input", or a reduction of one of them.
        values: the stored elements.
        shape: of the whole array.
    """

    module: str
    what: str
    values: Array
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Its name in a sentence."""
        path = self.module or "the model"
        return path if self.what == "output" else f"{self.what} of {path}"

    @property
    def is_whole(self) -> bool:
        """Whether every element is stored."""
        return math.prod(self.shape) == self.values.size


def agreed_before(
    entry: Entry, ours: Mapping[Any, Entry], theirs: Mapping[Any, Entry], kinds: Container[str], tolerance: float
) -> Iterator[Entry]:
    """Yield the first side's arrays that were recorded before an entry and agree.

    Args:
        entry: of the first side.
        ours, theirs: all entries of the step, of both sides.
        kinds: what is looked at (`Entry.what`).
        tolerance: relative distance up to which two arrays agree.
    """
    for key, each in ours.items():
        if key == entry_key(entry):
            return
        other = theirs.get(key)
        if each.what not in kinds or each.sketch is None or other is None or other.sketch is None:
            continue
        if sketch_distance(each.sketch, other.sketch) <= tolerance * each.sketch.norm:
            yield each


def known_arrays(entry: Entry, ours: Mapping[Any, Entry], theirs: Mapping[Any, Entry]) -> list[KnownArray]:
    """Return arrays of the size of an entry's that were recorded before it and agree, the latest first.

    Behind them stand reductions over inner axes of larger ones, such as the mean over positions.
    """
    size, shape = entry.array_sketch.size, entry.array_sketch.shape
    latest = _agreed(entry, ours, theirs)
    same = [each for each in latest if math.prod(each.shape) == size]
    larger = [each for each in latest if each.is_whole and math.prod(each.shape) > size][:_MAX_REDUCED]
    return [*same[:_MAX_ARRAYS], *(made for each in larger for made in _reductions(each, shape))]


def known_columns(entry: Entry, ours: Mapping[Any, Entry], theirs: Mapping[Any, Entry]) -> list[KnownArray]:
    """Return whole arrays with the rows of an entry's and fewer columns that were recorded before it and agree."""
    shape = entry.array_sketch.shape
    return [
        each
        for each in _agreed(entry, ours, theirs)
        if each.is_whole and each.shape[:-1] == shape[:-1] and 1 < each.shape[-1] < shape[-1]
    ][:_MAX_ARRAYS]


def _agreed(entry: Entry, ours: Mapping[Any, Entry], theirs: Mapping[Any, Entry]) -> list[KnownArray]:
    """Return the arrays of the forward pass that were recorded before an entry and agree, the latest first."""
    found = [
        KnownArray(each.module, _WORDS[each.what], each.array_sketch.samples(), each.array_sketch.shape)
        for each in agreed_before(entry, ours, theirs, _WORDS, _EQUAL)
        if each.array_sketch.shape
    ]
    return _without_repeats(found[::-1])


def _reductions(array: KnownArray, shape: tuple[int, ...]) -> list[KnownArray]:
    """Return an array reduced over its axes between the first and the last, where that gives a shape."""
    if len(array.shape) < 3 or (array.shape[0], array.shape[-1]) != shape:
        return []
    values = array.values.reshape(shape[0], -1, shape[1])
    made = {
        "the mean over places": values.mean(1),
        "the maximum over places": values.max(1),
        "the sum over places": values.sum(1),
        "the first place": values[:, 0],
        "the last place": values[:, -1],
    }
    inner = "" if array.what == "output" else f" of {array.what}"
    return [KnownArray(array.module, f"{words}{inner}", np.ravel(x), shape) for words, x in made.items()]


def _without_repeats(arrays: list[KnownArray]) -> list[KnownArray]:
    """Return arrays without those whose values an earlier one has, such as the input of the next module."""
    kept: dict[bytes, KnownArray] = {}
    for each in arrays:
        key = each.values.tobytes()
        if key not in kept or (kept[key].what != "output" and each.what == "output"):
            kept[key] = each
    return list(kept.values())
