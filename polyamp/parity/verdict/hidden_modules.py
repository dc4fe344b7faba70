"""What one side does not expose: gradients, layers that it does not call, recurrent cells inside another call."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from polyamp.parity.trace.sketch import Sketch
from polyamp.parity.trace.trace import Entry
from polyamp.parity.verdict.alignment import Alignment
from polyamp.porting.layouts.layer_kinds import RECURRENT_KINDS

StepGradients = Mapping[tuple[Any, ...], Entry]


def add_zero_gradients(
    alignment: Alignment, ours: StepGradients, theirs: StepGradients
) -> tuple[StepGradients, StepGradients]:
    """Return both sides' entries, with zero gradients without a dtype for parameters that lack a gradient.

    Frameworks differ in whether a parameter on which the loss does not depend has a zero gradient or none.
    """
    return _fill_zero_gradients(alignment, ours, theirs), _fill_zero_gradients(alignment, theirs, ours)


def _fill_zero_gradients(alignment: Alignment, step: StepGradients, other: StepGradients) -> StepGradients:
    absent = {
        key: each
        for key, each in other.items()
        if each.what == "gradient" and key not in step and each.module in alignment.layer_kinds
    }
    if not absent:
        return step
    made = {
        key: msgspec.structs.replace(each, sketch=None if each.sketch is None else _zero_sketch(each.sketch), own="")
        for key, each in absent.items()
    }
    return {**step, **made}


def _zero_sketch(like: Sketch) -> Sketch:
    return msgspec.structs.replace(
        like,
        dtype="",
        mean=0.0,
        rms=0.0,
        largest=0.0,
        nonfinite=0,
        zeros=like.size,
        width="bfloat16",
        values=bytes(len(like.values)),
        sums=bytes(len(like.sums)),
    )


def is_absent(entry: Entry) -> bool:
    """Return whether an entry stands for a gradient that its side lacks."""
    return entry.what == "gradient" and entry.sketch is not None and not entry.sketch.dtype


def hidden_recurrent_cells(alignment: Alignment, shown: Sequence[str], last: str, first: str) -> list[str]:
    """Return the cells of recurrent stacks that run between two modules.

    Cells are matched one by one, but their outputs are not compared: frameworks run them inside one call.

    Args:
        alignment: alignment of the sides.
        shown: modules whose outputs were compared, in the order of the program.
        last: the last that agrees; "" if there is none, and then the result is empty.
        first: the first that does not.

    Returns:
        Their paths, in definition order if the compared modules are in that order too. Else all cells without a
        compared output, sorted by name.
    """
    if not last:
        return []
    order = list(alignment.layer_kinds)
    known = set(shown)
    found = [path for path, kind in alignment.layer_kinds.items() if path not in known and kind in RECURRENT_KINDS]
    places = [order.index(path) for path in shown if path in alignment.layer_kinds]
    if places != sorted(places) or not {first, last} <= set(order):
        return sorted(found, key=_natural_sort_key)
    begin = order.index(last) + 1
    return [path for path in order[begin : order.index(first)] if path in found]


def one_sided_layers(
    alignment: Alignment, sides: tuple[StepGradients, StepGradients], last: str, first: str
) -> list[tuple[str, int]]:
    """Return the layers that one side alone calls between two modules, each with the number of that side.

    Args:
        alignment: alignment of the sides.
        sides: the entries of a step, of both.
        last: the last module that agrees; "" stands for the beginning.
        first: the first that does not; "" stands for the end.
    """
    layers = {path for path, kind in alignment.layer_kinds.items() if kind not in RECURRENT_KINDS}
    layers.update(alignment.parameter_owners)
    orders = [output_modules(entry for entry in side.values() if entry.stage == "forward") for side in sides]
    found: list[tuple[str, int]] = []
    for number, order in enumerate(orders):
        begin = order.index(last) + 1 if last in order else 0
        end = order.index(first) if first and first in order else len(order)
        found += [(path, number) for path in order[begin:end] if path in layers and path not in orders[1 - number]]
    return found


def recurrent_cell_positions(alignment: Alignment, place: Mapping[str, float]) -> dict[str, float]:
    """Return the positions in the program of recurrent cells whose outputs were not recorded.

    A cell is placed before the layer that follows it in definition order, or before the last layer if the calls have
    another order.

    Args:
        alignment: alignment of the sides.
        place: positions of the recorded modules.
    """
    layers = [path for path in alignment.layer_kinds if path in place]
    if not layers:
        return {}
    found: dict[str, float] = {}
    known = [place[path] for path in layers]
    follows = max(known) if known != sorted(known) else None
    after = max(known)
    for path in reversed(alignment.layer_kinds):
        if path in place:
            after = place[path]
        elif alignment.layer_kinds[path] in RECURRENT_KINDS:
            found[path] = (after if follows is None else follows) - 0.5
    return found


def _natural_sort_key(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


def output_modules(entries: Iterable[Entry]) -> list[str]:
    """Return the modules that have outputs, in order, each once."""
    outputs = (entry.module.partition("#")[0] for entry in entries if entry.what.startswith("output"))
    return list(dict.fromkeys(outputs))
