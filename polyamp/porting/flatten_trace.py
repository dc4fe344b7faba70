"""`FlattenTrace`, which runs both models on a batch and finds the order of rows and columns next to a flatten.

The target runs with the source's values. If every earlier layer has its values in the right order, a dense layer takes
the same numbers on both sides, in the same order or in another one, and that one is the order of its rows. An order
that is found changes what later layers take, so the target runs again until nothing changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from polyamp.porting.layouts.converter import Evaluation
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.matching.flatten_order import ChannelOrder, OrderQuestion
from polyamp.porting.matching.flatten_proof import Segment
from polyamp.porting.matching.matching import LayerMatch

if TYPE_CHECKING:
    from polyamp.porting.layouts.lazy_array import Array

    AdaptChannels = Callable[[Array], Array]

_EVIDENCE: Final = "traced with the batch"
_CLOSE: Final = 0.05
"""Largest relative distance of inputs that count as the same numbers: layers before may differ in an epsilon."""
_CLEAR: Final = 5.0
"""Every other order must be this many times farther away, and at least `_APART`."""
_APART: Final = 1e-3
_MAX_SAMPLES: Final = 16
_MAX_PARTIAL: Final = 4096
"""Largest number of lengths that are tried for a flatten of which other values stand next to the channels."""


class FlattenTrace:
    """Orders that runs of both models show, step by step.

    Args:
        source: the source's layers.
        target: the target's.
        pairs: the matched layers.
        known: path of a target's layer -> an order that the user gave. It stays.
        questions: layers whose order is not known.
        traced: paths of the target's dense layers whose inputs are compared.
        adapt: function that moves an image's channels from the source's position to the target's.
        is_flatten_only: whether only orders count that a flatten of a convolution's channels has.

    Attributes:
        orders: path of a target's layer -> its order, as far as it is known now.
    """

    def __init__(
        self,
        source: Inventory,
        target: Inventory,
        pairs: Sequence[LayerMatch],
        known: Mapping[str, ChannelOrder],
        questions: Sequence[OrderQuestion],
        traced: Sequence[str],
        adapt: AdaptChannels,
        *,
        is_flatten_only: bool = False,
    ) -> None:
        self._pairs = {each.target.path: each for each in pairs}
        self._questions = questions
        self._traced = [path for path in traced if path in self._pairs]
        self._adapt = adapt
        self._columns = [each for each in questions if not each.rows]
        self._tried: set[str] = set()
        self._channels = _channel_numbers(source, target)
        self._is_flatten_only, self._is_first = is_flatten_only, source.channels == "first"
        self.orders = dict(known)
        self._settled: set[tuple[str, bool]] = set()
        for each in questions:
            if each.guess is not None and each.rows:
                self._set(each.path, each.guess)

    @property
    def paths(self) -> tuple[set[str], set[str]]:
        """Paths of modules whose inputs are needed: of the source, of the target."""
        theirs = {*self._traced, *(each.following for each in self._columns)} & self._pairs.keys()
        return {self._pairs[path].source.path for path in theirs}, theirs

    def update(self, one: Evaluation, two: Evaluation) -> bool:
        """Compare what layers took, and return whether an order has changed, so that the target must run again.

        Args:
            one: the source's evaluation.
            two: the target's, with values in the current orders.
        """
        before = dict(self.orders)
        self._settled.clear()
        for path in self._traced:
            ours, theirs = self._inputs(path, one, two)
            if ours is None or theirs is None:
                continue
            length = self._kernel_shape(path)[0]
            found = find_segments(_flatten_samples(ours, length), _flatten_samples(theirs, length), self._channels)
            if found is not None and self._may_have(found):
                self._settled.add((path, True))
                self._set(path, ChannelOrder(found, (), _EVIDENCE), rows=True)
        for question in self._columns:
            self._update_columns(question, one, two)
        return self.orders != before

    def _may_have(self, segments: Sequence[Segment]) -> bool:
        counts = [each.major if self._is_first else each.minor for each in segments]
        return not self._is_flatten_only or all(count in self._channels for count in counts)

    def _update_columns(self, question: OrderQuestion, one: Evaluation, two: Evaluation) -> None:
        """Settle the columns of a layer by what the layer after the reshape takes, or try the other order."""
        ours, theirs = self._inputs(question.following, one, two)
        if ours is None or theirs is None or not ours.size:
            return
        ours = self._adapt(ours)
        is_whole = ours[0].size == self._kernel_shape(question.path)[1]
        if is_close(ours, theirs):
            other = ours.reshape(len(ours), -1, question.channels).swapaxes(1, 2).reshape(ours.shape) if is_whole else 0
            is_shown = not is_close(ours, other, _APART) if is_whole else _agree(one, two, self._adapt)
            if is_shown:
                self._settled.add((question.path, False))
        elif is_whole and question.guess is not None and question.path not in self._tried:
            self._tried.add(question.path)
            self._set(question.path, dataclasses.replace(question.guess, evidence=_EVIDENCE), rows=False)

    def unsettled(self) -> list[OrderQuestion]:
        """Return the questions that the runs did not answer."""
        return [each for each in self._questions if (each.path, each.rows) not in self._settled]

    def reasons(self, one: Evaluation, two: Evaluation) -> dict[str, str]:
        """Return path of a layer -> why the batch does not show its order."""
        found = {}
        for each in self.unsettled():
            ours, theirs = self._inputs(each.path if each.rows else each.following, one, two)
            if ours is None or theirs is None:
                found[each.path] = "no call of it can be observed on both sides"
            elif not np.any(ours):
                found[each.path] = "the batch gives it nothing but zeros"
            else:
                found[each.path] = "the two models give it other numbers, or the batch fits several orders"
        return found

    def without_guesses(self, questions: Sequence[OrderQuestion]) -> dict[str, ChannelOrder]:
        """Return the orders with the layers of some questions in the source's order."""
        left = {(each.path, each.rows) for each in questions}
        made = {}
        for path, order in self.orders.items():
            rows = () if (path, True) in left else order.rows
            columns = () if (path, False) in left else order.columns
            if rows or columns:
                made[path] = dataclasses.replace(order, rows=rows, columns=columns)
        return made

    def _set(self, path: str, order: ChannelOrder, rows: bool | None = None) -> None:
        old = self.orders.pop(path, ChannelOrder())
        if rows is None:
            new = ChannelOrder(order.rows or old.rows, order.columns or old.columns, order.evidence)
        elif rows:
            new = ChannelOrder(order.rows, old.columns, order.evidence)
        else:
            new = ChannelOrder(old.rows, order.columns, order.evidence)
        if new.rows or new.columns:
            self.orders[path] = new

    def _inputs(self, path: str, one: Evaluation, two: Evaluation) -> tuple[Array | None, Array | None]:
        match = self._pairs.get(path)
        return (None, None) if match is None else (one.inputs.get(match.source.path), two.inputs.get(path))

    def _kernel_shape(self, path: str) -> tuple[int, ...]:
        match = self._pairs[path]
        return match.fit.source.shapes(match.source.arrays)["kernel"]


def is_close(ours: Any, theirs: Any, tolerance: float = _CLOSE) -> bool:
    """Return whether arrays are the same numbers, as far as settings of layers before them are."""
    if np.shape(ours) != np.shape(theirs):
        return False
    scale = float(np.max(np.abs(ours), initial=0.0))
    return scale > 0.0 and bool(np.max(np.abs(ours - theirs)) <= tolerance * scale)


def _agree(one: Evaluation, two: Evaluation, adapt: AdaptChannels) -> bool:
    """Return whether both models return the same numbers."""
    pairs = zip(one.outputs, two.outputs, strict=False)
    return len(one.outputs) == len(two.outputs) and all(is_close(adapt(ours), theirs) for ours, theirs in pairs)


def _channel_numbers(*sides: Inventory) -> list[int]:
    """Return the numbers of channels of the convolutions of both sides."""
    found = set()
    for side in sides:
        for layer in side.layers:
            form = layer.forms[0]
            if form.attributes.get("channels") is not None:
                found |= {size for size in form.shapes(layer.arrays).get("kernel", ())[-2:] if size > 1}
    return sorted(found)


def _flatten_samples(array: Array, length: int) -> Array:
    """Return inputs as a matrix of samples and values."""
    return np.asarray(array, np.float32).reshape(-1, length) if array.size and not array.size % length else array[:0]


def find_segments(ours: Array, theirs: Array, channels: Sequence[int] = ()) -> tuple[Segment, ...] | None:
    """Return in which order one side has the other's values; None if the values do not show it.

    Args:
        ours: the source's values, (samples, values).
        theirs: the target's.
        channels: numbers of channels that a part of the values may have.

    Returns:
        The transposed segments; empty if the orders are the same.

    >>> image = np.arange(6.0).reshape(1, 2, 3)
    >>> find_segments(image.reshape(1, 6), image.transpose(0, 2, 1).reshape(1, 6))
    (Segment(start=0, major=2, minor=3),)
    >>> find_segments(image.reshape(1, 6), image.reshape(1, 6))
    ()
    >>> find_segments(np.ones((1, 6)), np.ones((1, 6)))
    """
    if ours.shape != theirs.shape or not ours.size:
        return None
    ours, theirs = ours[:_MAX_SAMPLES], theirs[:_MAX_SAMPLES]
    scale = float(np.max(np.abs(ours)))
    if not scale > 0.0 or not np.isfinite(ours).all():
        return None
    length = ours.shape[1]
    whole = [(Segment(0, major, length // major),) for major in range(2, length // 2 + 1) if not length % major]
    candidates: list[tuple[Segment, ...]] = [(), *whole]
    distances = [_distance(ours, theirs, each) / scale for each in candidates]
    if min(distances) > _CLOSE:
        partial = _partial_segments(ours, theirs, channels, scale)
        candidates += partial
        distances += [_distance(ours, theirs, each) / scale for each in partial]
    best = int(np.argmin(distances))
    if distances[best] > _CLOSE:
        return None
    others = [distance for number, distance in enumerate(distances) if number != best]
    return candidates[best] if min(others, default=np.inf) > max(_CLEAR * distances[best], _APART) else None


def _partial_segments(ours: Array, theirs: Array, channels: Sequence[int], scale: float) -> list[tuple[Segment, ...]]:
    """Return segments at the start or at the end of the values that other values follow or precede."""
    length = ours.shape[1]
    differs = np.flatnonzero(np.max(np.abs(ours - theirs), axis=0) > _CLOSE * scale)
    first, last = int(differs[0]), int(differs[-1])
    found: list[tuple[Segment, ...]] = []
    for count in channels:
        for other in range(2, length // count + 1):
            size = count * other
            starts = [0] if last < size < min(length, last + 2 + _MAX_PARTIAL) else []
            starts += [length - size] if length - size <= first and size < length else []
            found += [(Segment(start, *sides),) for start in starts for sides in {(count, other), (other, count)}]
    return found


def _distance(ours: Array, theirs: Array, segments: Sequence[Segment]) -> float:
    index: Any = np.arange(ours.shape[1])
    for segment in segments:
        index = segment.permute(index)
    return float(np.max(np.abs(ours[:, index] - theirs)))
