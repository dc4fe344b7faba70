"""Comparison of the dtypes in which both sides ran the operations that a policy keeps in float32.

A softmax in 16 bits is hardly further from float32 than the products around it. No distance reveals it; the recorded
operations do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from polyamp.contract.casting_report import OperationCount
from polyamp.float_formats import HALF_DTYPES
from polyamp.parity.trace.trace import Trace
from polyamp.parity.verdict.alignment import Alignment, nearest_module

_OPERATION_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "softmax": ("softmax", "logsoftmax", "exp", "logsumexp", "sparsesoftmaxcrossentropywithlogits"),
    "sum": ("sum", "mean", "reducesum", "cumsum", "var"),
    "powers": ("rsqrt", "pow", "integerpow", "square"),
}
"""Families of S4 -> the frameworks' operations, in lower case without underscores. A framework's own normalization is
not listed: its statistics are float32 whatever its arrays are (S4)."""


def find_dtype_mismatches(alignment: Alignment, labels: tuple[str, str], traces: tuple[Trace, Trace]) -> dict[str, str]:
    """Return modules in which one side ran operations of a family in 16 bits and the other side in float32.

    Args:
        alignment: alignment of the sides.
        labels: of both sides.
        traces: of one phase.

    Returns:
        Path in the first side's names -> the operations with their dtypes, as text.
    """
    known = set(alignment.modules.values())
    ours, theirs = (_dtypes_by_family(each.operations, known) for each in traces)
    found: dict[str, str] = {}
    for key in ours.keys() & theirs.keys():
        narrow = [any(dtype in HALF_DTYPES for dtype in each[key].values()) for each in (ours, theirs)]
        if narrow[0] != narrow[1]:
            texts = (
                f"{_format_dtypes(each[key])} in {label}" for label, each in zip(labels, (ours, theirs), strict=True)
            )
            found[key[0]] = "; ".join(texts)
    return found


def _dtypes_by_family(operations: Iterable[OperationCount], known: set[str]) -> dict[tuple[str, str], dict[str, str]]:
    """Return (module, family) -> operation -> its dtype, the narrowest if there are several."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in operations:
        if row.rule == "follow":  # a framework in which it takes its operands' dtype, such as in a Keras layer's `call`
            continue
        plain = row.name.lower().replace("_", "").replace(".", "")
        for family, names in _OPERATION_FAMILIES.items():
            if plain in names:
                own = found.setdefault((nearest_module(row.module, known), family), {})
                if own.get(row.name) not in HALF_DTYPES:
                    own[row.name] = row.dtype
    return found


def _format_dtypes(dtypes: Mapping[str, str]) -> str:
    return ", ".join(f"{name} in {dtype}" for name, dtype in dtypes.items())
