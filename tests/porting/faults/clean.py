"""200 clean pairs: other sizes, other values, every ordered pair of libraries. Nothing may be said of one of them."""

from __future__ import annotations

import itertools
from typing import Any, Final, NamedTuple

import numpy as np

import polyamp
from polyamp.errors import PortError
from tests.fixtures.port import common
from tests.porting.faults.finding import batch
from tests.porting.faults.planting import LIBRARIES, models

COUNT: Final = 200


class Clean(NamedTuple):
    """A pair of equal models.

    Attributes:
        model: of `common.MODELS`.
        source: library.
        target: library.
        seed: of the values and of the sizes.
    """

    model: str
    source: str
    target: str
    seed: int


def pairs() -> list[Clean]:
    """All of them, models and libraries in turn."""
    every = itertools.cycle(itertools.product(itertools.permutations(LIBRARIES, 2), common.MODELS))
    return [Clean(model, *libraries, seed) for seed, (libraries, model) in zip(range(COUNT), every, strict=False)]


def sizes(seed: int) -> tuple[tuple[str, Any], ...]:
    """Other sizes of the five models; those of the fixtures at seed 0."""
    if seed == 0:
        return ()
    rng = np.random.default_rng(seed)

    def one_of(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    heads, vit_heads = one_of(1, 2, 4), one_of(2, 3)
    vit_width = vit_heads * one_of(4, 5)
    first = one_of(4, 6, 8)
    return (
        ("CLASSES", one_of(3, 5, 7)),
        ("IMAGE", (one_of(8, 12), one_of(8, 12, 16), one_of(1, 3))),
        ("STAGES", ((first, 1), (first * 2, one_of(1, 2)))),
        ("VOCABULARY", one_of(19, 29, 40)),
        ("CONTEXT", one_of(6, 10)),
        ("WIDTH", heads * one_of(4, 8)),
        ("HEADS", heads),
        ("BLOCKS", one_of(1, 2, 3)),
        ("WORDS", one_of(11, 17)),
        ("LENGTH", one_of(5, 7)),
        ("FEATURES", one_of(4, 6, 10)),
        ("UNITS", one_of(3, 5)),
        ("TAGS", one_of(2, 4)),
        ("CODE", (one_of(6, 8), one_of(8, 12))),
        ("VIT_WIDTH", vit_width),
        ("VIT_HEADS", vit_heads),
        ("VIT_MLP", 2 * vit_width),
        ("VIT_BLOCKS", one_of(1, 2, 3)),
    )


def alarm(pair: Clean) -> str:
    """What was said against a clean pair; nothing, as it should be."""
    others = sizes(pair.seed)
    ours, theirs = (models(library, (), others) for library in (pair.source, pair.target))
    source, target = ours.build(pair.model, pair.seed), theirs.build(pair.model, pair.seed + 1)
    try:
        _, report = polyamp.port(source, target, check=batch(pair.model, (ours, theirs), others))
    except PortError as error:
        return str(error)
    return "; ".join(map(str, report.differences))
