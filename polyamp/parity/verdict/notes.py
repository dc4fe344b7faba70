"""Notes of a comparison: dropout of one side alone, quantities that were never compared, advice that agreement settles.

A note is about the whole comparison, so it is written when everything has been compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from polyamp.parity.report_data import ComparisonRow, Divergence
from polyamp.parity.verdict.alignment import Alignment

_ADVICE: Final = ". Write: "
"""What stands before the line of code that removes a difference of settings (`attribute_differences`)."""
NOTHING_MOVED: Final = (
    "nothing moved: no parameter changed on either side in any step. Is the optimizer's step called, with a rate above "
    "0?"
)


def dropout_notes(labels: tuple[str, str], counts: tuple[int | None, int | None]) -> list[str]:
    """Return a note if both sides have not called dropout equally often.

    Args:
        labels: of both sides.
        counts: calls that were turned off; None where they could not be counted, or nothing was turned off.
    """
    if None in counts or counts[0] == counts[1]:
        return []
    calls = " and ".join(
        f"{count} {'call' if count == 1 else 'calls'} in {label}" for label, count in zip(labels, counts, strict=True)
    )
    return [f"dropout was off: {calls}. With dropout they do not train alike"]


def notes_of_uncompared(shapes: Mapping[tuple[str, str], str], rows: Iterable[ComparisonRow]) -> list[str]:
    """Return the notes about quantities with other shapes, without those that were compared elsewhere.

    Args:
        shapes: (module, quantity) -> note.
        rows: all rows of the table: another call, step or phase may have had equal shapes.
    """
    compared = {(row.module.partition("#")[0], row.what.partition(",")[0]) for row in rows}
    return [
        note
        for (module, what), note in shapes.items()
        if (module.partition("#")[0], what.partition(",")[0]) not in compared
    ]


def settle_activations(
    notes: Sequence[str], alignment: Alignment, rows: Sequence[ComparisonRow], first: Divergence | None
) -> list[str]:
    """Return notes, without advice to set the activation of a layer whose output agrees.

    One side runs it in the layer and the other behind it: what the advice writes would run it twice or never.

    Args:
        notes: of the comparison.
        alignment: alignment of the sides.
        rows: the table.
        first: the divergence; it may come from the activation of the layer before it.
    """
    agree = {row.module for row in rows if row.what.startswith("output") and not row.counts}
    suspected = set() if first is None else {first.module.partition("#")[0], first.after.partition("#")[0]}
    settled = [
        text.partition(_ADVICE)[0]
        for path, texts in alignment.differences.items()
        for text, attribute in zip(texts, alignment.differing_attributes[path], strict=True)
        if attribute == "activation" and path in agree - suspected
    ]
    return [
        note.partition(_ADVICE)[0] + ". The outputs agree: it runs elsewhere on the other side"
        if _ADVICE in note and any(text in note for text in settled)
        else note
        for note in notes
    ]
