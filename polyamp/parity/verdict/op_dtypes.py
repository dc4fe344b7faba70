"""Comparison of the dtypes in which both sides ran the operations that 16 bits harm, and their products.

A softmax in 16 bits is hardly further from float32 than the products around it. No distance reveals it; the recorded
operations do. Two frameworks are compared in the operations that an autocast policy keeps in float32 in both (S4).
Models of one library are two programs over one table: there a product counts too, and so does what a cast leads to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from polyamp.contract.casting_report import OperationCount
from polyamp.float_formats import FORMATS, HALF_DTYPES
from polyamp.parity.trace.sketch import Sketch
from polyamp.parity.trace.trace import Entry, Trace
from polyamp.parity.verdict.alignment import Alignment, nearest_module
from polyamp.parity.verdict.distances import EntryComparison
from polyamp.parity.verdict.step_entries import StepEntries

_OPERATION_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "softmax": (
        *("softmax", "logsoftmax", "exp", "logsumexp", "crossentropy", "sparsesoftmaxcrossentropywithlogits"),
        *("nllloss", "binarycrossentropywithlogits"),
    ),
    "sum": ("sum", "mean", "reducesum", "cumsum", "var"),
    "powers": ("rsqrt", "pow", "integerpow", "square"),
}
"""Families of S4 -> the frameworks' operations, in lower case without underscores. A framework's own normalization is
not listed: its statistics are float32 whatever its arrays are (S4)."""
_PRODUCTS: Final = "products"
_CAST_PRODUCTS: Final = ("dotgeneral", "convgeneraldilated")
"""JAX's products, which are recorded without a rule in cast mode."""

_OWN_DISTANCES: Final = (2.0**-10, 2.0**-3)
"""Distances from a side's float32 run, in unit roundoffs: the largest without a rounding to 16 bits, the least with
one. Rounding moves an array by a third of a roundoff, and other sums in float32 by less than a hundredth."""


class DtypeMismatch(NamedTuple):
    """Operations that one side runs in 16 bits and the other in float32.

    Attributes:
        module: path in the first side's names.
        following: the module in it that runs right after them; "" if there is none.
        text: the operations with their dtypes.
    """

    module: str
    following: str
    text: str


class _Row(NamedTuple):
    """A recorded operation.

    Attributes:
        family: whose operation it is.
        module: the nearest module that both sides have; of a product, possibly one around it.
        own: the nearest module that both sides have.
        order: the nearest modules of all operations of the side, in order.
        number: the operation's place in `order`.
        name, dtype, calls: `OperationCount.name`, `dtype` and `count`.
    """

    family: str
    module: str
    own: str
    order: Sequence[str]
    number: int
    name: str
    dtype: str
    calls: int

    @property
    def following(self) -> str:
        """The module inside `module` that runs next; "" if none does before another runs."""
        later = itertools.islice(self.order, self.number + 1, None)
        found = next((each for each in later if each not in (self.module, self.own)), "")
        return found if not self.module or found.startswith(f"{self.module}/") else ""


def have_same_library(traces: tuple[Trace, Trace]) -> bool:
    """Return whether both models are of one library."""
    return traces[0].library == traces[1].library != ""


def has_half_loss_alone(numbers: tuple[float, float], roundoff: float) -> bool:
    """Return whether one of two losses, and not the other, is a number of the 16-bit dtype.

    A float32 number is so by chance once in 2**13 or 2**16.

    Args:
        numbers: of both sides.
        roundoff: unit roundoff of the dtype.

    >>> has_half_loss_alone((0.693147, 0.69140625), 2.0**-8)
    True
    """
    if not all(map(math.isfinite, numbers)) or not all(numbers):
        return False
    halves = [(math.frexp(number)[0] / roundoff).is_integer() for number in numbers]
    return halves[0] != halves[1]


def is_rounded_alone(own: tuple[float | None, float | None], scale: float, roundoff: float) -> bool:
    """Return whether one side computes what it computes in float32, and the other has rounded it to 16 bits.

    Args:
        own: distance of each side from its own float32 run; None if there is none.
        scale: norm of the values.
        roundoff: unit roundoff of the dtype of 16 bits.

    >>> is_rounded_alone((0.0, 1.3e-3), 1.0, 2.0**-8), is_rounded_alone((1.1e-3, 1.3e-3), 1.0, 2.0**-8)
    (True, False)
    """
    known = [each for each in own if each is not None]
    exact, rounded = (each * roundoff * scale for each in _OWN_DISTANCES)
    return len(known) == len(own) and min(known) <= exact and max(known) >= rounded > 0.0


def is_narrow_alone(one: Sketch, two: Sketch) -> bool:
    """Return whether one of two arrays has a dtype of 16 bits, and the other has more digits."""
    narrow, wide = (one, two) if one.dtype in HALF_DTYPES else (two, one)
    return narrow.dtype in HALF_DTYPES and not {wide.dtype, wide.width} & set(HALF_DTYPES)


def find_dtype_mismatches(
    alignment: Alignment, labels: tuple[str, str], traces: tuple[Trace, Trace], *, is_cast: bool = False
) -> list[DtypeMismatch]:
    """Return modules in which one side ran operations of a family in 16 bits and the other side in float32.

    Args:
        alignment: alignment of the sides.
        labels: of both sides.
        traces: of one phase.
        is_cast: whether the policy casts, and keeps no operation in float32.
    """
    is_same_library = have_same_library(traces)
    if is_cast and not is_same_library:
        return []  # what an operation widens inside is the framework's own
    known = set(alignment.modules.values())
    sides = [_rows(trace.operations, known, is_same_library) for trace in traces]
    sides = [_with_products_in_containers(own, other, known) for own, other in (sides, sides[::-1])]
    found = []
    for module, family in dict.fromkeys((row.module, row.family) for own in sides for row in own):
        rows = [[row for row in own if (row.module, row.family) == (module, family)] for own in sides]
        is_one_sided = not all(rows) and is_same_library and not is_cast and family != _PRODUCTS
        if (all(rows) and _differ(rows, is_same_library)) or (is_one_sided and _half_count(rows[0] or rows[1])):
            narrow = min(rows, key=lambda own: not _half_count(own))
            following = next(row.following for row in narrow if row.dtype in HALF_DTYPES)
            text = "; ".join(f"{_format_dtypes(own)} in {label}" for label, own in zip(labels, rows, strict=True))
            found.append(DtypeMismatch(module, following, text))
    return found


class MismatchPlaces:
    """Where in a step operations of other dtypes show.

    That is the input of the module that runs next in their module, if both sides have it, else the output of their
    module. Operations outside of all modules that changed no bit there run later: in the loss function, if the loss
    differs.

    Args:
        mismatches: of the phase.
    """

    def __init__(self, mismatches: Sequence[DtypeMismatch]) -> None:
        self._mismatches = mismatches
        self._unchanged: tuple[EntryComparison, str] | None = None

    def place(
        self, found: EntryComparison, ours: StepEntries, theirs: StepEntries
    ) -> tuple[EntryComparison, str | None]:
        """Return the comparison, of the kind "operations" where other dtypes show in it, and these as text or None.

        Args:
            found: comparison of the next entry of the step.
            ours, theirs: entries of the step.
        """
        entry = found.one
        if not self._mismatches or entry.step != 1 or entry.stage != "forward":
            return found, None
        mismatch = self._mismatch_at(entry, ours, theirs)
        text = None if mismatch is None else f"{mismatch.module or 'the model itself'}: {mismatch.text}"
        if mismatch is not None and not mismatch.module and not found.distance and not found.kind:
            self._unchanged = self._unchanged or (found, text or "")
            return found, None
        if entry.what == "loss" and self._unchanged is not None:
            earlier, text = self._unchanged
            found = found if found.distance else earlier
        return (found, None) if text is None else (found._replace(kind=found.kind or "operations"), text)

    def _mismatch_at(self, entry: Entry, ours: StepEntries, theirs: StepEntries) -> DtypeMismatch | None:
        path = entry.module.partition("#")[0]
        for each in self._mismatches:
            key = (1, "forward", each.following, "input", "")
            if each.following and key in ours and key in theirs:
                shows = entry.what == "input" and path == each.following
            else:
                shows = entry.what.startswith("output") and path == each.module
            if shows:
                return each
        return None


def _rows(operations: Sequence[OperationCount], known: set[str], is_same_library: bool) -> list[_Row]:
    """Return the rows that are compared.

    What follows its operands' dtype, such as in a Keras layer's `call`, is compared within one library alone.
    """
    modules = [nearest_module(row.module, known) for row in operations]
    found = []
    for number, (row, module) in enumerate(zip(operations, modules, strict=True)):
        family = _family(row)
        is_comparable = is_same_library or (row.rule != "follow" and family != _PRODUCTS)
        if family and row.dtype in FORMATS and is_comparable:
            found.append(_Row(family, module, module, modules, number, row.name, row.dtype, row.count))
    return found


def _family(row: OperationCount) -> str:
    plain = row.name.lower().replace("_", "").replace(".", "")
    if row.rule == "compute" or plain in _CAST_PRODUCTS:
        return _PRODUCTS
    return next((family for family, names in _OPERATION_FAMILIES.items() if plain in names), "")


def _with_products_in_containers(own: list[_Row], other: list[_Row], known: Container[str]) -> list[_Row]:
    """Return rows in which the products of a module in which the other side runs none are its container's."""
    theirs = {row.module for row in other if row.family == _PRODUCTS}
    found = []
    for row in own:
        module = row.module
        while row.family == _PRODUCTS and module and not any(f"{each}/".startswith(f"{module}/") for each in theirs):
            module = nearest_module(module.rpartition("/")[0], known)
        found.append(row._replace(module=module))
    return found


def _differ(rows: Sequence[Sequence[_Row]], is_same_library: bool) -> bool:
    """Return whether one side alone has 16 bits, or as many operations as the other and more of them in 16 bits."""
    halves = [_half_count(own) for own in rows]
    totals = [sum(row.calls for row in own) for own in rows]
    is_counted = is_same_library and totals[0] == totals[1]
    return halves[0] != halves[1] if is_counted else bool(halves[0]) != bool(halves[1])


def _half_count(rows: Iterable[_Row]) -> int:
    return sum(row.calls for row in rows if row.dtype in HALF_DTYPES)


def _format_dtypes(rows: Sequence[_Row]) -> str:
    texts = (f"{row.name}{f' of {row.own!r}' * (row.own != row.module)} in {row.dtype}" for row in rows)
    return ", ".join(dict.fromkeys(texts)) or "none of them"
