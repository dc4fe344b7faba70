"""What a comparison says of a fault or of a clean pair, and whether that is what was written down."""

from __future__ import annotations

import re
from typing import Any

from polyamp.errors import PortError
from polyamp.parity.report.report import Report
from polyamp.parity.report_data import Comparison
from tests.parity.faults.clean import said
from tests.parity.faults.finding import is_right, largest
from tests.parity.held_out.clean_pairs import Pair
from tests.parity.held_out.harness import compared
from tests.parity.held_out.planted import Plant, named


def planted(plant: Plant, seed: int = 0) -> Report:
    """Compare a right side and one with a fault."""
    return compared(plant.family, plant.first, plant.second, seed, carried=plant.carried, **plant.options)


def clean(pair: Pair) -> Report:
    """Compare two sides that train alike."""
    return compared(pair.family, pair.first, pair.second, pair.seed, **pair.options)


def refused(plant: Plant, error: Exception) -> dict[str, Any]:
    """Whether a pair that is refused is so for its fault: the error names the setting of a layer, and the layer."""
    words = str(error)
    told = isinstance(error, PortError) and "the target computes another function" in words
    place = told and any(re.fullmatch(plant.expected.at, path) for path in re.findall(r"[\w/]+", words))
    return {"found": told, "place": place, "kind": place, "named": "an error", "said": words}


def of_plant(plant: Plant, comparison: Comparison) -> dict[str, Any]:
    """Whether a fault is found, at the right place and as the right kind, and what was said."""
    first = comparison.first
    notes = " ".join(comparison.notes)
    if first is None:
        noted = plant.kind in ("randomness", "formula") and plant.says == "~dropout" and named(plant.says, "", notes)
        return {"found": noted, "place": noted, "kind": noted, "named": "a note" if noted else "", "said": notes}
    sentence = " ".join([first.sentence, *first.evidence])
    where = f"{first.phase}, step {first.step}, {first.stage}, {first.module or 'the model'}, {first.what} {first.name}"
    return {
        "found": True,
        "place": is_right(first, plant.expected),
        "kind": named(plant.says, first.kind, sentence),
        "named": where.strip(),
        "said": f"{first.kind}: {sentence} [distance {first.distance}, allowed {first.allowed}]",
    }


def of_pair(comparison: Comparison) -> dict[str, Any]:
    """What is said against a clean pair, which should be nothing, and the largest distance over what is allowed."""
    return {"alarm": said(comparison), "margin": largest(comparison)}
