"""Order of a dense layer's rows after a flatten, and of its columns before a reshape.

The order depends on the framework's channel position: a flatten of (channels, height, width) and one of (height, width,
channels) give the same numbers in two orders. Layers alone do not prove that there is a flatten, or which layout it
flattens. So `find_flatten_orders` returns a reordering only if `rows=` gives it or the graphs of both models' modules
prove it (`flatten_proof`), and questions otherwise. A run of both models on a batch answers these
(`polyamp.porting.flatten_trace`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from polyamp.errors import PortError, did_you_mean, join_first
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.layer_kinds import find_kind
from polyamp.porting.layouts.lazy_array import Array, Lazy
from polyamp.porting.matching.flatten_proof import (
    EVIDENCE,
    Segment,
    feature_count,
    find_proven_orders,
    flat_segment,
)
from polyamp.porting.matching.matching import LayerMatch
from polyamp.recipe.overrides import covers

CHANNELS = "channels"
"""Value of `rows=` for a layer next to a flatten of channels."""
Rows = Mapping[str, Literal["channels"] | None]
_MAX_LISTED = 8


@dataclasses.dataclass(frozen=True)
class ChannelOrder:
    """Reordering of a dense layer's rows or columns.

    Attributes:
        rows: segments of the rows; empty if they keep their order.
        columns: segments of the columns.
        evidence: what shows it, for the report.
    """

    rows: tuple[Segment, ...] = ()
    columns: tuple[Segment, ...] = ()
    evidence: str = ""

    def apply(self, arrays: Mapping[str, Lazy], *, back: bool = False) -> dict[str, Lazy]:
        """Return the canonical arrays of the layer in the target's order; with `back`, the target's arrays in the
        source's. Numbers in place of arrays are unchanged."""
        made = dict(arrays)
        for name, axis, segments in (("kernel", 0, self.rows), ("kernel", 1, self.columns), ("bias", 0, self.columns)):
            if segments and name in made and made[name].ndim > axis:
                made[name] = _reorder(made[name], axis, segments, back)
        return made

    def restore_output(self, array: Array) -> Array:
        """Return what the target's layer returns, with the features on the last axis, in the source's order."""
        return np.asarray(_reorder(Lazy.of(array), array.ndim - 1, self.columns, True).read())

    def describe(self) -> str:
        """Return what it does, for a report."""
        parts = []
        for name, segments in (("rows", self.rows), ("columns", self.columns)):
            parts += [f"{name} {_describe_segment(segment)}" for segment in segments]
        return f"{' and '.join(parts)} ({self.evidence})"


def _describe_segment(segment: Segment) -> str:
    end = segment.start + segment.major * segment.minor
    return f"{segment.start}:{end} put from ({segment.major}, {segment.minor}) to ({segment.minor}, {segment.major})"


def _reorder(array: Lazy, axis: int, segments: Sequence[Segment], back: bool) -> Lazy:
    def read() -> Any:
        index = np.arange(array.shape[axis])
        for segment in segments:
            index = segment.permute(index)
        return np.take(array.read(), np.argsort(index) if back else index, axis)

    return Lazy(array.shape, array.dtype, read)


class OrderQuestion(NamedTuple):
    """A dense layer whose order is not known.

    Attributes:
        path: path of the target's layer.
        guess: the likeliest reordering; None if there is none.
        neighbour: path of the source's layer that has the channels; "" if none divides the length.
        channels: number of channels of it.
        rows: whether the question is about rows; else about columns.
        following: for columns: path of the target's layer that takes the reshaped output.
        shown_by: "source" or "target" if the graph of that side's modules proves its order; "" if neither does.
    """

    path: str
    guess: ChannelOrder | None
    neighbour: str
    channels: int
    rows: bool
    following: str = ""
    shown_by: str = ""


class FlattenOrders(NamedTuple):
    """Reorderings that are known, and questions.

    Attributes:
        known: path of a target's dense layer -> its reordering.
        questions: layers whose order is not known.
        traced: paths of the target's dense layers whose inputs may be flattened channels.
    """

    known: dict[str, ChannelOrder]
    questions: list[OrderQuestion]
    traced: list[str]


def find_flatten_orders(
    source: Inventory, target: Inventory, pairs: Sequence[LayerMatch], rows: Rows | None = None
) -> FlattenOrders:
    """Return the order of every dense layer's rows and columns, as far as it is known.

    Without a difference of channel positions there are no questions.

    Args:
        source: the source's layers.
        target: the target's.
        pairs: the matched layers.
        rows: glob over the target's paths -> "channels", or None for layers without a flatten next to them.

    Raises:
        PortError: `rows` is invalid, names no dense layer, or says "channels" where no channels divide the length.
    """
    ours, theirs = source.channels, target.channels
    walk = _Walk(_ordered_pairs(source, target, pairs))
    proven = find_proven_orders(source, target, pairs)
    dense = [each.target.path for each in pairs if _is_dense(each)]
    given = _check_rows(rows, dense)
    first = None if ours is None or theirs is None or ours == theirs else ours == "first"
    is_known = ours is not None and theirs is not None
    is_same = ours == theirs if is_known else source.framework == target.framework  # a file of weights does not say
    known = _proven_reorderings(proven.rows, {path: order for (path, _), order in proven.columns.items()})
    questions: list[OrderQuestion] = []
    for candidate in walk.candidates:
        path = candidate.match.target.path
        is_proven = path in proven.rows if candidate.rows else (path, candidate.following) in proven.columns
        if path not in given and not is_proven:
            shown = path in target.inputs, candidate.match.source.path in source.inputs
            by = {(True, False): "target", (False, True): "source"}.get(shown, "") if candidate.rows else ""
            questions += [] if is_same else [candidate.question(first)._replace(shown_by=by)]
    for path, value in given.items():
        known.pop(path, None)
        if value is not None:
            known[path] = walk.order_of(path, first)
    return FlattenOrders(known, questions, [path for path in walk.traced if path not in given])


def _proven_reorderings(
    rows: Mapping[str, Segment | None], columns: Mapping[str, Segment | None]
) -> dict[str, ChannelOrder]:
    found = {}
    for path in {**rows, **columns}:
        ours, theirs = (() if (segment := side.get(path)) is None else (segment,) for side in (rows, columns))
        if ours or theirs:
            found[path] = ChannelOrder(ours, theirs, EVIDENCE)
    return found


def question_error(questions: Sequence[OrderQuestion], why: Mapping[str, str] = {}) -> PortError:
    """Return the error for layers whose order is not known.

    Args:
        questions: the layers.
        why: path of a layer -> why a batch does not show it.
    """
    lines = []
    for each in questions:
        what = "rows" if each.rows else "columns"
        line = f"  {each.path}: {what}"
        if each.neighbour:
            line += f", perhaps in the order of {each.neighbour}'s {each.channels} channels"
        if each.shown_by:
            line += f"; the modules of the {each.shown_by} show it, those of the other side do not"
        lines.append(line + (f"; {why[each.path]}" if each.path in why else ""))
    paths = list(dict.fromkeys(each.path for each in questions))
    shown = ", ".join(f'"{path}": None' for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
    return PortError(
        "the channels are first on one side and last on the other, and nothing proves whether these layers stand next "
        f"to a flatten, and of which layout:\n{join_first(lines, _MAX_LISTED, chr(10))}\nA run of both models shows "
        f"it: batch=inputs, or check=inputs. Or say it: rows={{{shown}}} for layers that take no flattened channels, "
        '"channels" instead of None for those that do.'
    )


def _check_rows(rows: Any, dense: Sequence[str]) -> dict[str, str | None]:
    """Return path of a dense layer -> the value that `rows` gives it."""
    if rows is None:
        return {}
    if not isinstance(rows, Mapping) or not all(
        isinstance(glob, str) and (value is None or value == CHANNELS) for glob, value in rows.items()
    ):
        raise PortError(
            'rows must map paths of the target\'s dense layers to "channels" or None: {"fc": None}. Received: '
            f"{rows!r}."
        )
    given: dict[str, str | None] = {}
    for glob, value in rows.items():
        found = [path for path in dense if covers(glob, path)]
        if not found:
            raise PortError(f"rows: {glob!r} is no dense layer of the target.{did_you_mean(glob, dense)}")
        given |= dict.fromkeys(found, value)
    return given


class _Candidate(NamedTuple):
    """A dense layer next to which there may be a flatten."""

    match: LayerMatch
    length: int
    channels: int
    neighbour: str
    rows: bool
    following: str = ""

    def order(self, first: bool, evidence: str) -> ChannelOrder | None:
        if not self.neighbour:
            return None
        segment = flat_segment(self.channels, self.length, is_first=first)
        return ChannelOrder((segment,), (), evidence) if self.rows else ChannelOrder((), (segment,), evidence)

    def question(self, first: bool | None) -> OrderQuestion:
        guess = None if first is None else self.order(first, "")
        return OrderQuestion(self.match.target.path, guess, self.neighbour, self.channels, self.rows, self.following)


class _Image(NamedTuple):
    """The last layer with channels."""

    channels: int
    path: str


class _Walk:
    """A walk over the matched layers in their order, which looks for dense layers next to a flatten.

    A layer that takes as many values as the layer before it returns follows that one, unless these are as many as a
    flatten may have. Until a layer takes the channels of the last convolution, any later layer may flatten them.

    Args:
        pairs: the matched layers, in the order of definition.
    """

    def __init__(self, pairs: Sequence[LayerMatch]) -> None:
        self.candidates: list[_Candidate] = []
        self.traced: list[str] = []
        self._counts = _channel_counts(pairs)
        self._images: dict[str, _Image] = {}
        if not self._counts:
            return
        image: _Image | None = None
        before: set[int] = set()
        width = taken = 0
        is_open = followed = False
        for number, each in enumerate(pairs):
            channels = _channel_count(each, "features")
            if channels is not None:
                if image is None or not self._may_be_flat(each, channels, image):
                    image, followed = _Image(channels, each.source.path), True
                else:
                    followed = False
                width, is_open, taken = channels, True, 0
                before.add(channels)
                continue
            length = _input_length(each)
            if length is None:
                width, taken, followed = _output_width(each), 0, each.fit.source.kind == "embedding"
                continue
            follows = (followed and width == length) or taken == length
            if is_open and image is not None and length == image.channels:
                is_open, follows = False, True
            elif is_open and image is not None and length >= 2 * image.channels:
                is_open, follows = False, False
            is_possible = any(
                2 * count <= length and (count in before or length % count == 0) for count in self._counts
            )  # also of a part of what the layer takes, for convolutions before it
            if _is_dense(each):
                if is_possible:
                    self.traced.append(each.target.path)
                if image is not None:
                    self._images[each.target.path] = image
                if is_possible and not follows:
                    self._add(each, length, image)
            width, taken, followed = _output_width(each), length if follows else 0, True
            self._add_reshape(each, pairs[number + 1 :])
        lengths = {each.length for each in self.candidates if each.rows}
        known = {each.match.target.path for each in self.candidates if each.rows}
        for each in pairs:
            if _is_dense(each) and each.target.path not in known and _input_length(each) in lengths:
                self._add(each, _input_length(each) or 0, self._images.get(each.target.path))

    def order_of(self, path: str, first: bool | None) -> ChannelOrder:
        """Return the reordering of a layer for which `rows=` says "channels"."""
        if first is None:
            raise PortError(
                f'rows={{"{path}": "channels"}} needs the channels first on one side and last on the other, and one '
                "side does not say where it has them, or both have them at one place."
            )
        chosen = [each for each in self.candidates if each.match.target.path == path]
        found = [order for each in chosen if (order := each.order(first, 'rows="channels"')) is not None]
        if not found:
            raise PortError(f'rows={{"{path}": "channels"}}: no channels next to the layer divide its length.')
        return ChannelOrder(
            tuple(segment for order in found for segment in order.rows),
            tuple(segment for order in found for segment in order.columns),
            'rows="channels"',
        )

    def _may_be_flat(self, match: LayerMatch, channels: int, image: _Image) -> bool:
        """Return whether a norm has channels that no convolution returns: a flatten or a concatenation precedes it."""
        return match.fit.source.kind == "batch_norm" and channels >= 2 * image.channels and channels not in self._counts

    def _add(self, match: LayerMatch, length: int, image: _Image | None) -> None:
        if image is None or length % image.channels or length < 2 * image.channels:
            image = next((_Image(c, p) for c, p in self._counts.items() if length % c == 0 and length >= 2 * c), None)
        channels, path = image if image is not None else (0, "")
        self.candidates.append(_Candidate(match, length, channels, path, rows=True))

    def _add_reshape(self, match: LayerMatch, rest: Sequence[LayerMatch]) -> None:
        """Add a dense layer whose output the next layer with channels may take as an image."""
        if not _is_dense(match) or not rest or (channels := _channel_count(rest[0], "inputs")) is None:
            return
        features = _output_width(match)
        following = rest[0]
        if rest[0].fit.source.kind == "batch_norm" and channels == features and len(rest) > 1:
            following = rest[1]
            channels = _channel_count(following, "inputs") or features
        if features > channels and features % channels == 0:
            self.candidates.append(
                _Candidate(match, features, channels, following.source.path, False, following.target.path)
            )


def _ordered_pairs(source: Inventory, target: Inventory, pairs: Sequence[LayerMatch]) -> list[LayerMatch]:
    """Return the pairs in the order of a side whose order is meaningful."""
    side = source if source.ordered else target
    place = {layer.path: number for number, layer in enumerate(side.layers)}
    own = ((each.source if source.ordered else each.target).path for each in pairs)
    numbered = [(place[path], each) for path, each in zip(own, pairs, strict=True) if path in place]
    return [each for _, each in sorted(numbered, key=lambda entry: entry[0])]


def _is_dense(match: LayerMatch) -> bool:
    return match.fit.source.kind == "dense" and match.fit.target.kind == "dense"


def _channel_counts(pairs: Sequence[LayerMatch]) -> dict[int, str]:
    """Return numbers of channels that convolutions return -> the path of the last one."""
    return {
        count: each.source.path
        for each in pairs
        if find_kind(each.fit.source.kind).is_convolution and (count := _channel_count(each, "features")) is not None
    }


def _input_length(match: LayerMatch) -> int | None:
    """Return the number of values that a layer without channels takes; None if its arrays do not show it."""
    shapes = match.fit.source.shapes(match.source.arrays)
    for name in ("kernel", "query_kernel", "input_kernel"):
        if name in shapes:
            return shapes[name][0]
    return next((shape[-1] for name, shape in shapes.items() if name in ("scale", "bias") and shape), None)


def _output_width(match: LayerMatch) -> int:
    """Return the number of values that a layer without channels returns."""
    shapes = match.fit.source.shapes(match.source.arrays)
    for name in ("kernel", "output_kernel"):
        if name in shapes:
            return shapes[name][-1]
    if "recurrent_kernel" in shapes:
        return shapes["recurrent_kernel"][0]
    return next((shape[-1] for shape in shapes.values() if shape), 0)


def _channel_count(match: LayerMatch, role: str) -> int | None:
    """Return the channels of `feature_count`; None for a layer without channels."""
    return (feature_count(match, role) or None) if find_kind(match.fit.source.kind).has_channels else None
