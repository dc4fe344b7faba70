"""`PhaseTrace` and the entries of one step of it: read step by step, indexed by key, and in program order.

At the end stands what one side does not expose: gradients, layers that it does not call, recurrent cells inside another
call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from polyamp.parity.trace.sketch import Sketch
from polyamp.parity.trace.trace import NOT_SLOTS, Entry, Trace, entry_key
from polyamp.parity.verdict.alignment import Alignment
from polyamp.porting.layouts.layer_kinds import RECURRENT_KINDS

StepEntries = Mapping[tuple[Any, ...], Entry]


class PhaseTrace(NamedTuple):
    """One side's run of one phase.

    Attributes:
        trace: the run without its entries.
        entries: returns a new iterator over its entries, in recorded order.
    """

    trace: Trace
    entries: Callable[[], Iterable[Entry]]


def entries_by_step(run: PhaseTrace) -> Iterator[dict[tuple[Any, ...], Entry]]:
    """Yield the entries of each step by their keys, one step at a time."""
    return map(_index_entries, _split_steps(run.entries()))


def _split_steps(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield the entries of each step as a list, in order."""
    number, found = 0, list[Entry]()
    for entry in entries:
        while entry.step > number:
            yield found
            number, found = number + 1, []
        found.append(entry)
    yield found


def _index_entries(entries: Iterable[Entry]) -> dict[tuple[Any, ...], Entry]:
    return {entry_key(entry): entry for entry in entries}


def module_path(module: str) -> str:
    """Return the path of an entry's module without the number of its call.

    >>> module_path("block/attention#2")
    'block/attention'
    """
    return module.partition("#")[0]


def order_entries(step: StepEntries, alignment: Alignment) -> list[Entry]:
    """Return entries in program order; gradients follow their module's cotangents, slots precede parameters."""
    entries = list(step.values())
    forward = [entry for entry in entries if entry.stage == "forward"]
    place: dict[str, float] = {}
    for number, entry in enumerate(forward):
        place.setdefault(entry.module.partition("#")[0], number)
    place |= recurrent_cell_positions(alignment, place)
    back = [entry for entry in entries if entry.stage == "backward"]
    order = {id(entry): number for number, entry in enumerate(back)}

    def backward(entry: Entry) -> tuple[float, int, int]:
        module = entry.module.partition("#")[0]
        return (-place.get(module, -1), int(entry.what == "gradient"), order[id(entry)])

    metrics = [entry for entry in entries if entry.stage == "step"]
    update = [entry for entry in entries if entry.stage == "update"]
    slots = [entry for entry in update if entry.what not in NOT_SLOTS]
    return [*forward, *sorted(back, key=backward), *metrics, *slots, *(e for e in update if e not in slots)]


def is_downstream_of_output(entry: Entry) -> bool:
    """Return whether an entry depends on the model's output through the loss."""
    return entry.what == "loss" or (entry.stage == "backward" and bool(entry.module))


def has_overflow(ours: StepEntries, theirs: StepEntries) -> bool:
    """Return whether the gradients of this step are non-finite on both sides.

    A user's loop reports no norm: its recorded gradients are looked at, where the other side reports one.
    """
    norms = [
        [e.number for e in step.values() if e.what == "grad_norm" and e.number is not None] for step in (ours, theirs)
    ]
    return any(norms) and all(
        not any(map(math.isfinite, found)) if found else _has_nonfinite_gradient(step)
        for found, step in zip(norms, (ours, theirs), strict=True)
    )


def _has_nonfinite_gradient(step: StepEntries) -> bool:
    return any(e.what == "gradient" and e.sketch is not None and e.sketch.nonfinite for e in step.values())


def add_zero_gradients(alignment: Alignment, ours: StepEntries, theirs: StepEntries) -> tuple[StepEntries, StepEntries]:
    """Return both sides' entries, with zero gradients without a dtype for parameters that lack a gradient.

    Frameworks differ in whether a parameter on which the loss does not depend has a zero gradient or none.
    """
    return _fill_zero_gradients(alignment, ours, theirs), _fill_zero_gradients(alignment, theirs, ours)


def _fill_zero_gradients(alignment: Alignment, step: StepEntries, other: StepEntries) -> StepEntries:
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
    alignment: Alignment, sides: tuple[StepEntries, StepEntries], last: str, first: str
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
