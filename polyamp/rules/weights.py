"""S8, S9: what the mean of a loss is over, and so how much a micro-batch or a replica counts.

A function of `polyamp.losses` notes what it divided by. If `loss_fn` returns that very array, its count is the weight
of the batch; a `Mean` brings its own, `train_step(weight=...)` gives one for any other loss, and without any of these a
batch counts by its rows. It knows no framework.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, cast

from polyamp.arrays import ArrayNamespace
from polyamp.errors import LossError, described
from polyamp.rules.refusals import split_result

WeightFunction = Callable[[Any], Any]
"""`weight(batch)`: what the mean of the batch's loss is over, a number or a scalar of the framework."""


class Count(NamedTuple):
    """What a loss of `polyamp.losses` was divided by.

    Attributes:
        loss: the mean.
        count: what it was divided by, a float32 scalar; None where that is the number of its elements.
        size: the number of its elements, a number or, where a compiler does not know it, a scalar; None where nobody
            does.
        line: how to write `count` for a batch, for `weight=`.
    """

    loss: Any
    count: Any
    size: Any
    line: str


class _Notes(threading.local):
    """The lists that losses are noted in, one for each `loss_fn` that runs in this thread."""

    def __init__(self) -> None:
        self.lists: list[list[Count]] = []


_NOTES: Final = _Notes()


def note(
    loss: Any, count: Any, shape: Sequence[int | None], line: str = "", size: Callable[[], Any] | None = None
) -> None:
    """Note a mean, for the step that runs `loss_fn`.

    Args:
        loss: the mean, a scalar.
        count: see `Count`.
        shape: of what it is the mean of.
        line: see `Count`.
        size: gives the number of its elements as a scalar, where the shape is not known.
    """
    lists = _NOTES.lists
    if lists:
        known = None not in shape
        elements = math.prod(cast("Sequence[int]", shape)) if known else None if size is None else size()
        lists[-1].append(Count(loss, count, elements, line))


def call(loss_fn: Callable[[Any, Any], Any], model: Any, batch: Any) -> tuple[Any, list[Count]]:
    """What `loss_fn` returns, and the means that it made."""
    found: list[Count] = []
    _NOTES.lists.append(found)
    try:
        result = loss_fn(model, batch)
    finally:
        _NOTES.lists.pop()
    return result, found


class Term(NamedTuple):
    """One summand of a `Mean`: `factor * total / count`; a count of None is that of the rows.

    Attributes:
        given: the count as it was given, by which terms over the same one are known; None where that is the rows.
    """

    factor: Any
    total: Any
    count: Any
    given: Any = None


class Mean:
    """A loss as a total and what it is divided by, so that a step knows what its mean is over; or a sum of such."""

    __array_ufunc__ = None  # so that NumPy leaves `array + mean` to `__radd__`

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms: Final = tuple(terms)

    def __add__(self, other: Any) -> Mean:
        return Mean((*self.terms, *_terms(other)))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Mean:
        return Mean((*self.terms, *(-Mean(_terms(other))).terms))

    def __rsub__(self, other: Any) -> Mean:
        return Mean((*(-self).terms, *_terms(other)))

    def __neg__(self) -> Mean:
        return Mean([term._replace(factor=-term.factor) for term in self.terms])

    def __mul__(self, factor: Any) -> Mean:
        if isinstance(factor, Mean):
            raise LossError("a Mean can be added to another and multiplied by a number, not by another Mean.")
        return Mean([term._replace(factor=term.factor * factor) for term in self.terms])

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Mean:
        if isinstance(divisor, Mean):
            raise LossError("a Mean can be added to another and divided by a number, not by another Mean.")
        return Mean([term._replace(factor=term.factor / divisor) for term in self.terms])

    def __repr__(self) -> str:
        return f"Mean({' + '.join(f'{t.factor} * {t.total} / {t.count}' for t in self.terms)})"


def _terms(value: Any) -> tuple[Term, ...]:
    if isinstance(value, Mean):
        return value.terms
    return () if isinstance(value, int | float) and value == 0 else (Term(1.0, value, None),)  # what sum() begins with


class Loss(NamedTuple):
    """What `loss_fn` returned.

    Attributes:
        value: the loss, an array. Of a `Mean` whose count is 0 it is 0.
        aux: what came beside it.
        weight: what its mean is over, a number or a float32 scalar, where that depends on values; None where it does
            not, or nobody says.
        size: the number of elements that the mean is over at most, a number or a scalar (see `Count`); None where
            nobody says.
        terms: the summands, where the loss is a sum of means over different counts; else none.
    """

    value: Any
    aux: Any
    weight: Any
    size: Any
    terms: tuple[Term, ...] = ()

    @property
    def own(self) -> Any:
        """The weight, or else the number of elements; None where nobody says."""
        return self.size if self.weight is None else self.weight


def read(
    result: Any,
    found: Sequence[Count],
    xp: ArrayNamespace,
    *,
    weight: Any = None,
    totals: Totals | None = None,
    rows: Any = 1,
    selects: bool = False,
) -> Loss:
    """The loss that `loss_fn` returned, and its weight.

    Args:
        result: what it returned: a loss, or (loss, aux).
        found: the means that `polyamp.losses` made on the way.
        xp: the framework's array namespace.
        weight: what `train_step(weight=...)` gave for this batch, or None.
        totals: of a sum of means over different counts, those of all micro-batches and replicas (`totals_of`).
        rows: of this batch, for such a sum.
        selects: `Elements` says what a mean over a selection counts beside the others; else one over nothing has the
            weight 0.

    Raises:
        LossError: neither of them; or a `Mean` beside a `weight`.
    """
    first = result[0] if isinstance(result, tuple) and result else result
    if isinstance(first, Mean):
        if isinstance(result, tuple) and len(result) != 2:
            split_result(result)
        if weight is not None:
            raise LossError(
                "loss_fn returned a Mean, which has its own count, and train_step was given weight= too. Drop one."
            )
        aux = result[1] if isinstance(result, tuple) else None
        return _of_mean(first, aux, xp, totals, rows)
    loss, aux = split_result(result)
    if weight is not None:
        return Loss(loss, aux, weight, None)
    own = next((item for item in found if item.loss is loss), None)
    if own is None:
        return Loss(loss, aux, None, None)
    nothing = not selects and own.count is None and isinstance(own.size, int) and own.size == 0
    return Loss(loss, aux, 0.0 if nothing else own.count, own.size)


def is_sum(result: Any) -> bool:
    """Whether `loss_fn` returned a sum of means over different counts."""
    first = result[0] if isinstance(result, tuple) and result else result
    return isinstance(first, Mean) and len(_together(first.terms)) > 1


class Totals(NamedTuple):
    """What the terms of a sum of means are divided by.

    Attributes:
        counts: of each term, its count over all micro-batches and replicas.
        parts: how many micro-batches and replicas there are together.
    """

    counts: Sequence[Any]
    parts: int


def counts_of(loss: Loss, rows: Any) -> list[Any]:
    """The count of each term of a batch, which has so many rows."""
    return [rows if term.count is None else term.count for term in loss.terms]


def totals_of(counts: Sequence[Sequence[Any]]) -> Totals:
    """The totals over micro-batches, from `counts_of` each.

    Raises:
        LossError: they have not the same terms.
    """
    if len({len(own) for own in counts}) > 1:
        raise LossError("loss_fn must return a sum of as many Means over different counts for every micro-batch.")
    return Totals([sum(own) for own in zip(*counts, strict=True)], len(counts))


def _of_mean(mean: Mean, aux: Any, xp: ArrayNamespace, totals: Totals | None, rows: Any) -> Loss:
    terms = _together(mean.terms)
    if totals is not None:  # each part of the whole, times their number: the mean of these is the whole
        wholes = [
            t._replace(total=t.total * (rows if t.count is None else 1.0) * float(totals.parts), count=by)
            for t, by in zip(terms, totals.counts, strict=True)
        ]
        return Loss(sum(_quotient(term, xp) for term in wholes), aux, None, None, terms)
    value = sum(_quotient(term, xp) for term in terms)
    if len(terms) == 1:
        return Loss(value, aux, terms[0].count, None)
    weight = None if any(term.count is None for term in terms) else sum(term.count for term in terms)
    return Loss(value, aux, weight, None, terms)


def _together(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Terms over the very same count as one."""
    groups: dict[Any, list[Term]] = {}
    for term in terms:
        given = term.given
        groups.setdefault(("number", given) if isinstance(given, int | float) else id(given), []).append(term)
    return tuple(
        own[0] if len(own) == 1 else Term(1.0, sum(t.factor * t.total for t in own), own[0].count)
        for own in groups.values()
    )


def _quotient(term: Term, xp: ArrayNamespace) -> Any:
    if term.count is None:
        return term.factor * term.total
    if isinstance(term.count, int | float):
        return term.factor * (term.total / (term.count or 1.0))
    one = xp.asarray(1.0, term.count)
    return term.factor * (term.total / xp.where(term.count > 0.0, term.count, one))


class Elements:
    """How many elements for each row the means of a window's micro-batches are over: a selection of them
    (`logits[mask]`) differs from one to the next, where a loss of all does not.

    For backends that know lengths while `loss_fn` runs.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float, float] | None = None
        self._every: list[tuple[int, float]] | None = None

    def share(self, size: int | None, rows: float, share: float) -> float:
        """What the next micro-batch counts beside the others.

        Args:
            size: the number of elements that its loss is the mean of; None where nobody says.
            rows: of it.
            share: its rows over those of the largest.

        >>> elements = Elements()
        >>> [elements.share(size, 4, 1.0) for size in (20, 20, 4, 0)]
        [1.0, 1.0, 0.2, 0.0]
        """
        if not size:
            return share if size is None else 0.0
        if self._first is None:
            self._first = size, rows, share
        first, rows_of_first, share_of_first = self._first
        return share if size * rows_of_first == first * rows else share_of_first * size / first

    def differ(self, found: Sequence[Count], rows: float) -> bool:
        """Whether a mean of the next micro-batch is over more or fewer elements for each row than in the first."""
        every = [(item.size, rows) for item in found if item.count is None and item.size is not None]
        if self._every is None:
            self._every = every
        pairs = zip(every, self._every, strict=False)
        return any(size * rows_before != before * rows for (size, _), (before, rows_before) in pairs)


def is_unclear(loss: Loss, found: Sequence[Count]) -> bool:
    """Whether a mean over ignored or weighted elements went into a loss that does not say what it is over."""
    return loss.own is None and not loss.terms and any(item.count is not None for item in found)


SELECTED: Final = "polyamp.losses.count(batch['mask'])"
"""How to write the number of elements that a mask selects."""
_TOLD: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def line_of(found: Sequence[Count]) -> str:
    """How to write what the first mean over ignored, weighted or selected elements was divided by."""
    return next((item.line for item in found if item.count is not None), SELECTED)


def warn_unclear(loss_fn: Any, line: str, *, stacklevel: int = 2) -> None:
    """Say once for a `loss_fn` that its micro-batches and replicas count by their rows though its losses do not.

    Args:
        loss_fn: the user's.
        line: see `line_of`.
    """
    try:
        if loss_fn in _TOLD:
            return
        _TOLD.add(loss_fn)
    except TypeError:  # what cannot be referred to weakly is told each time
        pass
    warnings.warn(
        "loss_fn puts a loss of polyamp.losses with ignored, weighted or selected elements into a sum of its own, so "
        "that the step cannot know what the mean is over: micro-batches and replicas count by their rows, and the "
        "result is not that of one batch where their counts differ. Write "
        f"polyamp.train_step(loss_fn, recipe, weight=lambda batch: {line}), or return polyamp.losses.Mean(total, "
        "count) and add to that.",
        UserWarning,
        stacklevel=stacklevel,
    )


def of_batch(weight: WeightFunction | None, batch: Any) -> Any:
    """What `weight` gives for a batch; None without one.

    Raises:
        LossError: no scalar, or a number that is negative or not finite.
    """
    if weight is None:
        return None
    found = weight(batch)
    if isinstance(found, bool) or not isinstance(found, int | float):
        if not hasattr(found, "dtype") or tuple(getattr(found, "shape", (0,))) != ():
            raise LossError(
                "weight(batch) must return what the mean of the batch's loss is over: a number or a scalar array. "
                f"Received: {described(found)}."
            )
        return found
    if not 0.0 <= found < math.inf:
        raise LossError(f"weight(batch) must be at least 0 and finite. Received: {found}.")
    return float(found)


def consistent(given: Sequence[Loss]) -> bool:
    """Whether the losses of a window have weights of their own; False where they count by their rows.

    Raises:
        LossError: see `check_alike`.
    """
    own = [loss.weight is not None for loss in given]
    check_alike(own)
    return any(own)


def check_alike(own: Sequence[bool]) -> None:
    """Refuse a window in which some losses have weights of their own.

    Args:
        own: whether each has.

    Raises:
        LossError: some have and some have not.
    """
    if any(own) and not all(own):
        raise LossError(
            "loss_fn returned a mean over what counts for some micro-batches of the window and not for others, so that "
            "they cannot be added up. Return the same kind of loss for all, or give train_step(..., weight=...)."
        )
