"""`find_attention`: which attention of known queries, keys and values gives some output, for arrays stored whole.

Tried are the number of heads, the scale, the causal mask, rotary positions (Su et al., "RoFormer", 2021: both layouts,
both directions, usual bases), how fewer key heads are shared, and how heads are merged.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.parity.trace.sketch import Sketch
from polyamp.parity.verdict.causes.cause import Cause

Array = np.ndarray[Any, Any]
_EQUAL: Final = 1e-5
_MIN_ROWS: Final = 2
"""Least number of rows of the batch that an attention must give: others may have a mask of padding."""
_BASES: Final = (1e4, 5e5, 1e6)
_MASKS: Final = {"no mask": None, "a causal mask": 0, "a causal mask that shows one position ahead": 1}


class AttentionFormula(NamedTuple):
    """An attention that gives an output.

    Attributes:
        heads: number of heads.
        scale: of the scores, in words.
        mask: in words.
        rotation: of queries and keys, in words; "" if there is none.
        sharing: how key heads are shared; "" if there are as many.
        merging: how heads are merged.
        rows: number of rows of the batch that it gives.
    """

    heads: int
    scale: str
    mask: str
    rotation: str
    sharing: str
    merging: str
    rows: int

    @property
    def text(self) -> str:
        """The formula in words."""
        parts = (f"{self.heads} heads", f"scale {self.scale}", self.mask, self.rotation, self.sharing, self.merging)
        return ", ".join(part for part in parts if part)


def find_attention(query: Array, key: Array, value: Array, output: Array) -> AttentionFormula | None:
    """Return the attention that gives most rows of an output; None if none gives `_MIN_ROWS`.

    Args:
        query: (rows, positions, channels).
        key, value: (rows, other positions, channels), the channels possibly of fewer heads.
        output: (rows, positions, channels).
    """
    channels = query.shape[-1]
    if value.shape != key.shape or output.shape != query.shape:
        return None
    sizes = np.sqrt(np.square(output).sum((1, 2)))
    best: AttentionFormula | None = None
    for heads in (count for count in range(1, channels // 2 + 1) if channels % count == 0):
        width = channels // heads
        if key.shape[-1] % width or heads % (key.shape[-1] // width):
            continue
        for rotation, q, k in _rotations(_split(query, width), _split(key, width)):
            for sharing, keys, values in _shared(heads, k, _split(value, width)):
                products = q @ keys.swapaxes(-1, -2)
                for (scale, factor), (mask, ahead) in itertools.product(_scales(width).items(), _MASKS.items()):
                    made = _softmax(products * factor, ahead) @ values
                    for merging, merged in (("", made.swapaxes(1, 2)), ("heads merged without turning", made)):
                        apart = np.sqrt(np.square(merged.reshape(output.shape) - output).sum((1, 2)))
                        rows = int((apart <= _EQUAL * sizes).sum())
                        if rows >= _MIN_ROWS and (best is None or rows > best.rows):
                            best = AttentionFormula(heads, scale, mask, rotation, sharing, merging, rows)
        if best is not None:
            return best
    return None


def explain_attention(
    labels: tuple[str, str], outputs: tuple[Sketch, Sketch], projections: Sequence[Sketch | None], container: str
) -> Cause | None:
    """Return the attentions of both sides; None if neither is recognised, or both are the same.

    Args:
        labels: of both sides.
        outputs: what both sides make of the projections.
        projections: queries, keys and values, which agree.
        container: path of the attention.
    """
    arrays = [_whole(each) for each in (*projections, *outputs)]
    if any(array is None for array in arrays):
        return None
    query, key, value, *sides = (array for array in arrays if array is not None)
    one, two = (find_attention(query, key, value, side) for side in sides)
    if one is not None and two is not None and one.text != two.text:
        texts = [f"{label} has {each.text}" for label, each in zip(labels, (one, two), strict=True)]
        evidence = [f"This gives {one.rows} and {two.rows} of {len(query)} rows of the batch."]
        return Cause("formula", f"Other attentions in {container!r}: {'; '.join(texts)}.", evidence)
    found = one or two
    if found is None or (one is not None and two is not None):
        return None
    label, other = labels if two is None else labels[::-1]
    evidence = [
        f"{label}'s attention gives {found.rows} of {len(query)} rows of the batch, {other}'s is none of the usual."
    ]
    return Cause(
        "formula", f"Another attention in {container!r}: {label} has {found.text}, {other} does not.", evidence
    )


def _whole(sketch: Sketch | None) -> Array | None:
    """Return an array of three axes that is stored whole; None for others."""
    if sketch is None or len(sketch.shape) != len(("rows", "positions", "channels")):
        return None
    values = sketch.samples()
    return values.reshape(sketch.shape) if values.size == sketch.size else None


def _scales(width: int) -> dict[str, float]:
    return {"1 / sqrt(width)": 1 / math.sqrt(width), "1": 1.0, "1 / width": 1 / width}


def _split(array: Array, width: int) -> Array:
    """Return (rows, heads, positions, width)."""
    return array.reshape(*array.shape[:2], -1, width).swapaxes(1, 2)


def _shared(heads: int, key: Array, value: Array) -> Iterator[tuple[str, Array, Array]]:
    """Yield keys and values for all heads."""
    count = heads // key.shape[1]
    if count == 1:
        yield "", key, value
        return
    yield "key heads repeated", np.repeat(key, count, 1), np.repeat(value, count, 1)
    yield "key heads tiled", np.tile(key, (1, count, 1, 1)), np.tile(value, (1, count, 1, 1))


def _rotations(query: Array, key: Array) -> Iterator[tuple[str, Array, Array]]:
    """Yield queries and keys without and with rotary positions."""
    yield "", query, key
    if query.shape[-1] % 2 or query.shape[2] != key.shape[2]:
        return
    for base, halves, sign, shift in itertools.product(_BASES, (True, False), (1, -1), (0, 1)):
        words = (
            f"rotary positions of base {base:g}"
            + ("" if halves else " in pairs")
            + (" turned back" if sign < 0 else "")
        )
        text = words + (", the keys' from 1" if shift else "")
        yield text, _rotated(query, base, halves, sign, 0), _rotated(key, base, halves, sign, shift)


def _rotated(array: Array, base: float, halves: bool, sign: int, shift: int) -> Array:
    cos, sin = _angles(array.shape[2], array.shape[3], base, shift)
    found = np.empty_like(array)
    half = array.shape[3] // 2
    first, second = (slice(0, half), slice(half, None)) if halves else (slice(0, None, 2), slice(1, None, 2))
    one, two = array[..., first], array[..., second]
    found[..., first], found[..., second] = one * cos - sign * two * sin, two * cos + sign * one * sin
    return found


@functools.cache
def _angles(positions: int, width: int, base: float, shift: int) -> tuple[Array, Array]:
    angles = np.arange(shift, positions + shift)[:, None] * base ** (-np.arange(0, width, 2) / width)
    return np.cos(angles), np.sin(angles)


def _softmax(scores: Array, ahead: int | None) -> Array:
    if ahead is not None:
        hidden = np.triu(np.ones(scores.shape[-2:], bool), 1 + ahead)
        scores = np.where(hidden, -np.inf, scores)
    made = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(made / made.sum(-1, keepdims=True))
