"""The attention of known queries, keys and values is recovered from its output."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from polyamp.parity.trace.sketch import sketch
from polyamp.parity.verdict.causes.attention_formulas import explain_attention, find_attention

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
ROWS, POSITIONS, HEADS, WIDTH = 3, 5, 4, 4
QUERY = RNG.standard_normal((ROWS, POSITIONS, HEADS * WIDTH))
KEY, VALUE = (RNG.standard_normal((ROWS, POSITIONS, 2 * WIDTH)) for _ in range(2))


def rotated(x: Array, base: float, shift: int = 0) -> Array:
    """Rotary positions as in LLaMA: x * cos + rotate_half(x) * sin."""
    angles = np.arange(shift, POSITIONS + shift)[:, None] / base ** (np.arange(0, WIDTH, 2) / WIDTH)
    angles = np.concatenate([angles, angles], -1)
    turned = np.concatenate([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1)
    return np.asarray(x * np.cos(angles) + turned * np.sin(angles))


def attention(
    *, scale: float = 1 / math.sqrt(WIDTH), ahead: int = 0, base: float = 0.0, shift: int = 0, tiles: bool = False
) -> Array:
    heads = [x.reshape(ROWS, POSITIONS, -1, WIDTH).transpose(0, 2, 1, 3) for x in (QUERY, KEY, VALUE)]
    query = heads[0]
    key, value = (np.tile(x, (1, 2, 1, 1)) if tiles else np.repeat(x, 2, 1) for x in heads[1:])
    if base:
        query, key = rotated(query, base), rotated(key, base, shift)
    scores = np.einsum("bhqd,bhkd->bhqk", query, key) * scale
    scores = np.where(np.arange(POSITIONS) <= np.arange(POSITIONS)[:, None] + ahead, scores, -1e30)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    made = np.einsum("bhqk,bhkd->bqhd", weights / weights.sum(-1, keepdims=True), value)
    return np.asarray(made.reshape(ROWS, POSITIONS, -1))


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (attention(), "4 heads, scale 1 / sqrt(width), a causal mask, key heads repeated"),
        (attention(scale=1.0), "scale 1, "),
        (attention(ahead=1), "a causal mask that shows one position ahead"),
        (attention(ahead=POSITIONS), "no mask"),
        (attention(tiles=True), "key heads tiled"),
        (attention(base=1e4), "rotary positions of base 10000, key"),
        (attention(base=5e5), "rotary positions of base 500000"),
        (attention(base=1e4, shift=1), "rotary positions of base 10000, the keys' from 1"),
    ],
)
def test_an_attention_is_recovered(output: Array, words: str) -> None:
    found = find_attention(QUERY, KEY, VALUE, output)
    assert found is not None
    assert words in found.text
    assert found.rows == ROWS


def test_both_attentions_are_named() -> None:
    projections = [sketch(x, "float32") for x in (QUERY, KEY, VALUE)]
    outputs = sketch(attention(base=1e4), "float32"), sketch(attention(base=5e5), "float32")
    found = explain_attention(("a", "b"), outputs, projections, "block/attention")
    assert found is not None
    assert found.sentence.startswith("Other attentions in 'block/attention': a has 4 heads, scale 1 / sqrt(width), a")
    assert "base 500000" in found.sentence
    assert found.evidence == ["This gives 3 and 3 of 3 rows of the batch."]
    assert explain_attention(("a", "b"), (outputs[0], outputs[0]), projections, "") is None
    assert explain_attention(("a", "b"), outputs, [None, *projections[1:]], "") is None
    noise = sketch(RNG.standard_normal(QUERY.shape), "float32")
    alone = explain_attention(("a", "b"), (noise, outputs[0]), projections, "x")
    assert alone is not None
    assert alone.sentence.startswith("Another attention in 'x': b has 4 heads")
