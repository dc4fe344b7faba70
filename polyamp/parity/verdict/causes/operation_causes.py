"""Operations and layers that only one side runs: in 16 bits in a float32 run, under other names, more often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from polyamp.contract.casting_report import OperationCount
from polyamp.errors import join_first
from polyamp.float_formats import HALF_DTYPES
from polyamp.parity.trace.trace import Entry, Trace
from polyamp.parity.verdict.alignment import Alignment, nearest_module
from polyamp.parity.verdict.causes.cause import Cause
from polyamp.porting.layouts.layer_kinds import RECURRENT_KINDS

_SAME_FRAMEWORK_SHARE: Final = 0.6
"""Least share of operation names that both sides have, of all, at which names can be compared."""
_MAX_OPERATIONS: Final = 5
_MAX_LAYERS: Final = 2


def near_operations(trace: Trace, alignment: Alignment, modules: Iterable[str]) -> list[OperationCount]:
    """Return the operations of some modules, and of those in them that the other side does not have."""
    known, chosen = set(alignment.modules.values()), set(modules)
    return [row for row in trace.operations if nearest_module(row.module, known) in chosen]


def narrow_operations(labels: tuple[str, str], sides: Sequence[Sequence[OperationCount]], where: str) -> Cause | None:
    """Return that one side alone computes in 16 bits near a difference of a float32 run; None if it does not.

    Args:
        labels: of both sides.
        sides: operations of both near the difference.
        where: the place, in words.
    """
    found = [[row for row in rows if _is_narrow(row)] for rows in sides]
    if bool(found[0]) == bool(found[1]):
        return None
    number = 0 if found[0] else 1
    rows = found[number]
    texts = list(dict.fromkeys(f"{row.name} in {row.dtype} ({row.module or 'the model'})" for row in rows))
    return Cause(
        "dtype",
        f"{labels[number]} computes in {rows[0].dtype} inside a float32 model {where}.",
        [f"In {labels[number]} alone: {join_first(texts, _MAX_OPERATIONS)}."],
    )


def operation_differences(
    labels: tuple[str, str], traces: tuple[Trace, Trace], sides: Sequence[Sequence[OperationCount]]
) -> list[str]:
    """Return which operations only one side runs near a difference, as a sentence; empty if frameworks differ or none
    does.

    Args:
        labels: of both sides.
        traces: of both sides.
        sides: operations of both near the difference.
    """
    names = [{row.name for row in trace.operations} for trace in traces]
    if len(names[0] & names[1]) < _SAME_FRAMEWORK_SHARE * len(names[0] | names[1]) or not names[0]:
        return []
    counts = [Counter[str](), Counter[str]()]
    for rows, count in zip(sides, counts, strict=True):
        for row in rows:
            count[row.name] += row.count
    texts = []
    for label, only in zip(labels, (counts[0] - counts[1], counts[1] - counts[0]), strict=True):
        if only:
            listed = [name if number == 1 else f"{number} {name}" for name, number in only.items()]
            texts.append(f"in {label} alone {join_first(listed, _MAX_OPERATIONS)}")
    return [f"Operations: {'; '.join(texts)}."] if texts else []


def call_differences(
    labels: tuple[str, str], sides: tuple[Mapping[Any, Entry], Mapping[Any, Entry]], alignment: Alignment
) -> list[str]:
    """Return which layers only one side calls, or calls more often, as a sentence; empty if there are none.

    Args:
        labels: of both sides.
        sides: all entries of the step, of both sides.
        alignment: alignment of the sides.
    """
    calls = [
        Counter(e.module.partition("#")[0] for e in side.values() if e.what == "output" and e.stage == "forward")
        for side in sides
    ]
    layers = [path for path, kind in alignment.layer_kinds.items() if kind not in RECURRENT_KINDS]
    texts = []
    for number in (0, 1):
        more = [path for path in layers if calls[number][path] > calls[1 - number][path]]
        listed = join_first([f"{path!r}" for path in more], _MAX_LAYERS)
        texts += [f"{labels[number]} calls {listed} more often"] if more else []
    return [f"Calls: {'; '.join(texts)}."] if len(texts) == len(sides) else []


def _is_narrow(row: OperationCount) -> bool:
    return any(dtype in HALF_DTYPES for dtype in row.dtype.split(", "))
