"""The families in the sizes of part E, and part C's helpers in these sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from tests.parity.held_out.harness import Side
from tests.parity.held_out.part_c import variants
from tests.parity.held_out.planted import Plant
from tests.porting.faults.planting import Edit

_VALUES: Final = {
    "decoder": "24, 6, 4, 23, 32, 3",
    "seq2seq": "12, 2, 6, 19, 24, 2",
    "encoder": "12, 3, 29, 40, 6, 5, 3, 0.3",
    "unet": "10, 3, 5",
    "convnet": "14, 3, 5",
    "tagger": "9, 7, 31, 7",
    "vae": "20, 18, 4",
    "recommender": "6, 5, (11, 17, 5)",
}
"""Values of the names that a family's sizes have, in their order."""


def sizes(family: str, framework: str) -> tuple[Edit, ...]:
    """An edit of a family's text that gives its model the sizes of this part."""
    ((before, _),) = variants.sizes(family, framework)
    names = before.partition(" = ")[0]
    side = ", 8" if names.endswith("SIDE") else ""
    return ((before, f"{names} = {_VALUES[family]}{side}"),)


def side(family: str, framework: str, edits: tuple[Edit, ...] = (), **others: Any) -> Side:
    """A side whose model has the sizes of this part."""
    return Side(framework, (*sizes(family, framework), *edits), **others)


def _resized(make: Callable[..., Plant]) -> Callable[..., Plant]:
    """A helper of part C whose plants have the sizes of this part."""

    def of_this_part(family: str, each: Side) -> Side:
        return each._replace(edits=(*sizes(family, each.framework), *each.edits[1:]))

    @functools.wraps(make)
    def made(family: str, *arguments: Any, **others: Any) -> Plant:
        plant = make(family, *arguments, **others)
        return plant._replace(first=of_this_part(family, plant.first), second=of_this_part(family, plant.second))

    return made


fault: Final = _resized(variants.fault)
rounded: Final = _resized(variants.rounded)
carried: Final = _resized(variants.carried)
recipe: Final = _resized(variants.recipe)
loop: Final = _resized(variants.loop)
