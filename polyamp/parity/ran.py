"""In which dtypes the operations ran that a policy keeps in float32, side by side. Called by `verdict`.

A softmax in 16 bits is hardly further from float32 than the products around it, so that no distance tells it; but the
operations that ran do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from polyamp.contract.report import Operation
from polyamp.parity.aligned import Agreed
from polyamp.parity.trace import Trace

_NARROW: Final = ("bfloat16", "float16")
_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "softmax": ("softmax", "logsoftmax", "exp", "logsumexp", "sparsesoftmaxcrossentropywithlogits"),
    "sum": ("sum", "mean", "reducesum", "cumsum", "var"),
    "powers": ("rsqrt", "pow", "integerpow", "square"),
}
"""Families of S4 -> the operations that frameworks have for them, in small letters without underscores. A framework's
own normalization is none of them: its statistics are float32 whatever its arrays are (S4)."""


def narrower(agreed: Agreed, labels: tuple[str, str], traces: tuple[Trace, Trace]) -> dict[str, str]:
    """Modules in which one side ran an operation of such a family in 16 bits and the other its own in float32.

    Args:
        agreed: what the sides agreed on.
        labels: of both sides.
        traces: of one phase.

    Returns:
        Path as the first side spells it -> what ran, in words.
    """
    known = set(agreed.modules.values())
    ours, theirs = (_dtypes(each.operations, known) for each in traces)
    found: dict[str, str] = {}
    for key in ours.keys() & theirs.keys():
        narrow = [any(dtype in _NARROW for dtype in each[key].values()) for each in (ours, theirs)]
        if narrow[0] != narrow[1]:
            said = (f"{_listed(each[key])} in {label}" for label, each in zip(labels, (ours, theirs), strict=True))
            found[key[0]] = "; ".join(said)
    return found


def _dtypes(operations: Iterable[Operation], known: set[str]) -> dict[tuple[str, str], dict[str, str]]:
    """(module, family) -> operation -> the dtype it ran in, the narrower of several."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in operations:
        plain = row.name.lower().replace("_", "").replace(".", "")
        for family, names in _FAMILIES.items():
            if plain in names:
                own = found.setdefault((_nearest(row.module, known), family), {})
                if own.get(row.name) not in _NARROW:
                    own[row.name] = row.dtype
    return found


def _nearest(path: str, known: set[str]) -> str:
    while path and path not in known:
        path = path.rpartition("/")[0]
    return path


def _listed(ran: Mapping[str, str]) -> str:
    return ", ".join(f"{name} in {dtype}" for name, dtype in ran.items())
