"""What one side does not show: gradients that are not there, and layers inside of others. Called by `verdict`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from polyamp.parity.aligned import Agreed
from polyamp.parity.sketch import Sketch
from polyamp.parity.trace import Entry
from polyamp.porting.matching.differences import RECURRENT

Step = Mapping[tuple[Any, ...], Entry]


def gradients(agreed: Agreed, ours: Step, theirs: Step) -> tuple[Step, Step]:
    """Both sides' entries, where a parameter on which one side's loss does not depend has a gradient of zeros without
    a dtype: the same function has the same gradients, whether a framework makes zeros or none."""
    return _completed(agreed, ours, theirs), _completed(agreed, theirs, ours)


def _completed(agreed: Agreed, step: Step, other: Step) -> Step:
    absent = {
        key: each
        for key, each in other.items()
        if each.what == "gradient" and key not in step and each.module in agreed.kinds
    }
    if not absent:
        return step
    made = {
        key: msgspec.structs.replace(each, sketch=None if each.sketch is None else _nothing(each.sketch), own="")
        for key, each in absent.items()
    }
    return {**step, **made}


def _nothing(like: Sketch) -> Sketch:
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
    """Whether an entry stands for a gradient that its side does not have."""
    return entry.what == "gradient" and entry.sketch is not None and not entry.sketch.dtype


def hidden(agreed: Agreed, shown: Sequence[str], last: str, first: str) -> list[str]:
    """Cells of recurrent stacks that run between two modules: they are matched one by one, and no output of them is
    compared, for frameworks run them inside of one call.

    Args:
        agreed: what the sides agreed on.
        shown: modules whose outputs were compared, in the order of the program.
        last: the last that agrees; "" if there is none, and then nothing is known.
        first: the first that does not.

    Returns:
        Their paths: as the models define them, if that is also the order of what was shown; else all that are shown
        nowhere, by name.
    """
    if not last:
        return []
    order = list(agreed.kinds)
    known = set(shown)
    found = [path for path, kind in agreed.kinds.items() if path not in known and kind in RECURRENT]
    places = [order.index(path) for path in shown if path in agreed.kinds]
    if places != sorted(places) or not {first, last} <= set(order):
        return sorted(found, key=_natural)
    begin = order.index(last) + 1
    return [path for path in order[begin : order.index(first)] if path in found]


def places(agreed: Agreed, place: Mapping[str, float]) -> dict[str, float]:
    """Where cells of recurrent stacks run, of which no output was seen: before the layer that follows them where the
    model is defined, or before the last layer if that is not the order of its calls.

    Args:
        agreed: what the sides agreed on.
        place: of the modules that were seen.
    """
    layers = [path for path in agreed.kinds if path in place]
    if not layers:
        return {}
    found: dict[str, float] = {}
    known = [place[path] for path in layers]
    follows = max(known) if known != sorted(known) else None
    after = max(known)
    for path in reversed(agreed.kinds):
        if path in place:
            after = place[path]
        elif agreed.kinds[path] in RECURRENT:
            found[path] = (after if follows is None else follows) - 0.5
    return found


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


def modules(entries: Iterable[Entry]) -> list[str]:
    """The modules of outputs, in order, each once."""
    outputs = (entry.module.partition("#")[0] for entry in entries if entry.what.startswith("output"))
    return list(dict.fromkeys(outputs))
