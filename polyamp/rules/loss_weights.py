"""S8, S9: the divisor of a mean loss, which determines how much a micro-batch or a replica counts.

A function of `polyamp.losses` records its divisor. The weight of a batch is the first of these that applies:

- the count of a returned `MeanSum`, which excludes `weight=`,
- the value of `train_step(weight=...)`,
- the recorded divisor, if `loss_fn` returns that very array,
- the number of rows.

This module knows no framework.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, cast

from polyamp.array_namespace import ArrayNamespace
from polyamp.errors import LossError, describe_value
from polyamp.rules.step_checks import split_loss_and_aux

WeightFunction = Callable[[Any], Any]
"""`weight(batch)`: divisor of the mean of the batch's loss, a number or a scalar of the framework."""


class LossCount(NamedTuple):
    """Divisor of a loss of `polyamp.losses`.

    Attributes:
        loss: the mean.
        count: its divisor, a float32 scalar; None if that is the number of elements.
        size: the number of elements: a number, or a scalar if a compiler does not know it; None if unknown.
        line: source text that computes `count` for a batch, for `weight=`.
    """

    loss: Any
    count: Any
    size: Any
    line: str


class _RecordedMeans(threading.local):
    """Stack of lists that record means, one list per `loss_fn` that runs in this thread."""

    def __init__(self) -> None:
        self.lists: list[list[LossCount]] = []


_RECORDED_MEANS: Final = _RecordedMeans()


def record_mean(
    loss: Any, count: Any, shape: Sequence[int | None], line: str = "", size: Callable[[], Any] | None = None
) -> None:
    """Record a mean, for the step that runs `loss_fn`.

    Args:
        loss: the mean, a scalar.
        count: see `LossCount`.
        shape: shape of the averaged array.
        line: see `LossCount`.
        size: returns the number of elements as a scalar, for an unknown shape.
    """
    lists = _RECORDED_MEANS.lists
    if lists:
        known = None not in shape
        elements = math.prod(cast("Sequence[int]", shape)) if known else None if size is None else size()
        lists[-1].append(LossCount(loss, count, elements, line))


def call_loss_fn(loss_fn: Callable[[Any, Any], Any], model: Any, batch: Any) -> tuple[Any, list[LossCount]]:
    """Return the result of `loss_fn` and the means that it recorded."""
    found: list[LossCount] = []
    _RECORDED_MEANS.lists.append(found)
    try:
        result = loss_fn(model, batch)
    finally:
        _RECORDED_MEANS.lists.pop()
    return result, found


class MeanTerm(NamedTuple):
    """One summand of a `MeanSum`: `factor * total / count`; a count of None is the number of rows.

    Attributes:
        given: the count as passed by the user, which identifies terms over the same count; None for the rows.
    """

    factor: Any
    total: Any
    count: Any
    given: Any = None


class MeanSum:
    """Loss as a total and its divisor, or a sum of such terms, so that a step knows the count of the mean."""

    __array_ufunc__ = None  # NumPy then leaves `array + mean` to `__radd__`

    def __init__(self, terms: Sequence[MeanTerm]) -> None:
        self.terms: Final = tuple(terms)

    def __add__(self, other: Any) -> MeanSum:
        return MeanSum((*self.terms, *_mean_terms(other)))

    __radd__ = __add__

    def __sub__(self, other: Any) -> MeanSum:
        return MeanSum((*self.terms, *(-MeanSum(_mean_terms(other))).terms))

    def __rsub__(self, other: Any) -> MeanSum:
        return MeanSum((*(-self).terms, *_mean_terms(other)))

    def __neg__(self) -> MeanSum:
        return MeanSum([term._replace(factor=-term.factor) for term in self.terms])

    def __mul__(self, factor: Any) -> MeanSum:
        if isinstance(factor, MeanSum):
            raise LossError("a Mean can be added to another and multiplied by a number, not by another Mean.")
        return MeanSum([term._replace(factor=term.factor * factor) for term in self.terms])

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> MeanSum:
        if isinstance(divisor, MeanSum):
            raise LossError("a Mean can be added to another and divided by a number, not by another Mean.")
        return MeanSum([term._replace(factor=term.factor / divisor) for term in self.terms])

    def __repr__(self) -> str:
        return f"Mean({' + '.join(f'{t.factor} * {t.total} / {t.count}' for t in self.terms)})"


def _mean_terms(value: Any) -> tuple[MeanTerm, ...]:
    if isinstance(value, MeanSum):
        return value.terms
    return (
        () if isinstance(value, int | float) and value == 0 else (MeanTerm(1.0, value, None),)
    )  # the initial value of sum()


class LossOutput(NamedTuple):
    """Parsed result of `loss_fn`.

    Attributes:
        value: the loss, an array. It is 0 for a `MeanSum` whose count is 0.
        aux: the auxiliary output.
        weight: count of the mean, a number or a float32 scalar, if it depends on values; None if it does not or is
            unknown.
        size: upper bound of the number of averaged elements, a number or a scalar (see `LossCount`); None if unknown.
        terms: the summands, if the loss is a sum of means over different counts; else empty.
    """

    value: Any
    aux: Any
    weight: Any
    size: Any
    terms: tuple[MeanTerm, ...] = ()

    @property
    def own(self) -> Any:
        """The weight, or else the number of elements; None if both are unknown."""
        return self.size if self.weight is None else self.weight


def parse_loss_output(
    result: Any,
    means: Sequence[LossCount],
    xp: ArrayNamespace,
    *,
    weight: Any = None,
    totals: TermTotals | None = None,
    rows: Any = 1,
    selects: bool = False,
) -> LossOutput:
    """Return the loss that `loss_fn` returned, with its weight.

    Args:
        result: the return value of `loss_fn`: a loss, or (loss, aux).
        means: the means that `polyamp.losses` recorded.
        xp: the framework's array namespace.
        weight: the value of `train_step(weight=...)` for this batch, or None.
        totals: for a sum of means over different counts: those of all micro-batches and replicas (`term_totals`).
        rows: number of rows of this batch, for such a sum.
        selects: True if `ElementCounts` weighs means over a selection. If False, a mean over nothing has the weight 0.

    Raises:
        LossError: the result is neither, or a `MeanSum` is combined with a `weight`.
    """
    first = result[0] if isinstance(result, tuple) and result else result
    if isinstance(first, MeanSum):
        if isinstance(result, tuple) and len(result) != 2:
            split_loss_and_aux(result)
        if weight is not None:
            raise LossError(
                "loss_fn returned a Mean, which has its own count, and train_step was given weight= too. Drop one."
            )
        aux = result[1] if isinstance(result, tuple) else None
        return _mean_loss_output(first, aux, xp, totals, rows)
    loss, aux = split_loss_and_aux(result)
    if weight is not None:
        return LossOutput(loss, aux, weight, None)
    for own in means:
        if own.loss is loss:
            nothing = not selects and own.count is None and isinstance(own.size, int) and own.size == 0
            return LossOutput(loss, aux, 0.0 if nothing else own.count, own.size)
    return LossOutput(loss, aux, None, None)


def is_sum_of_means(result: Any) -> bool:
    """Whether `loss_fn` returned a sum of means over different counts."""
    first = result[0] if isinstance(result, tuple) and result else result
    return isinstance(first, MeanSum) and len(_merge_terms(first.terms)) > 1


class TermTotals(NamedTuple):
    """Divisors of the terms of a sum of means.

    Attributes:
        counts: count of each term over all micro-batches and replicas.
        parts: total number of micro-batches and replicas.
    """

    counts: Sequence[Any]
    parts: int


def term_counts(loss: LossOutput, rows: Any) -> list[Any]:
    """Return the count of each term of a batch with `rows` rows."""
    return [rows if term.count is None else term.count for term in loss.terms]


def term_totals(counts: Sequence[Sequence[Any]]) -> TermTotals:
    """Return the totals over micro-batches, from the `term_counts` of each.

    Raises:
        LossError: their terms differ.
    """
    if len({len(own) for own in counts}) > 1:
        raise LossError("loss_fn must return a sum of as many Means over different counts for every micro-batch.")
    return TermTotals([sum(own) for own in zip(*counts, strict=True)], len(counts))


def _mean_loss_output(mean: MeanSum, aux: Any, xp: ArrayNamespace, totals: TermTotals | None, rows: Any) -> LossOutput:
    terms = _merge_terms(mean.terms)
    if totals is not None:  # scaled by the number of parts, so that the mean over the parts is the whole loss
        wholes = [
            t._replace(total=t.total * (rows if t.count is None else 1.0) * float(totals.parts), count=by)
            for t, by in zip(terms, totals.counts, strict=True)
        ]
        return LossOutput(sum(_term_value(term, xp) for term in wholes), aux, None, None, terms)
    value = sum(_term_value(term, xp) for term in terms)
    if len(terms) == 1:
        return LossOutput(value, aux, terms[0].count, None)
    weight = None if any(term.count is None for term in terms) else sum(term.count for term in terms)
    return LossOutput(value, aux, weight, None, terms)


def _merge_terms(terms: Sequence[MeanTerm]) -> tuple[MeanTerm, ...]:
    """Merge terms over the same count object into one."""
    groups: dict[Any, list[MeanTerm]] = {}
    for term in terms:
        given = term.given
        groups.setdefault(("number", given) if isinstance(given, int | float) else id(given), []).append(term)
    return tuple(
        own[0] if len(own) == 1 else MeanTerm(1.0, sum(t.factor * t.total for t in own), own[0].count)
        for own in groups.values()
    )


def _term_value(term: MeanTerm, xp: ArrayNamespace) -> Any:
    if term.count is None:
        return term.factor * term.total
    if isinstance(term.count, int | float):
        return term.factor * (term.total / (term.count or 1.0))
    one = xp.asarray(1.0, term.count)
    return term.factor * (term.total / xp.where(term.count > 0.0, term.count, one))


class ElementCounts:
    """Numbers of averaged elements per row in the micro-batches of an update, for backends that know lengths.

    The number varies for a mean over a selection (`logits[mask]`); it is constant for a mean over all elements.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float, float] | None = None
        self._every: list[tuple[int, float]] | None = None

    def share(self, size: int | None, rows: float, share: float) -> float:
        """Return the weight of the next micro-batch relative to the others.

        Args:
            size: number of elements that its loss averages; None if unknown.
            rows: its number of rows.
            share: its rows over those of the largest micro-batch.

        >>> elements = ElementCounts()
        >>> [elements.share(size, 4, 1.0) for size in (20, 20, 4, 0)]
        [1.0, 1.0, 0.2, 0.0]
        """
        if not size:
            return share if size is None else 0.0
        if self._first is None:
            self._first = size, rows, share
        first, rows_of_first, share_of_first = self._first
        return share if size * rows_of_first == first * rows else share_of_first * size / first

    def differ(self, found: Sequence[LossCount], rows: float) -> bool:
        """Whether the next micro-batch averages more or fewer elements per row than the first."""
        every = [(item.size, rows) for item in found if item.count is None and item.size is not None]
        if self._every is None:
            self._every = every
        pairs = zip(every, self._every, strict=False)
        return any(size * rows_before != before * rows for (size, _), (before, rows_before) in pairs)


def has_unclear_count(loss: LossOutput, found: Sequence[LossCount]) -> bool:
    """Whether a mean over ignored or weighted elements went into a loss whose own count is unknown."""
    return loss.own is None and not loss.terms and any(item.count is not None for item in found)


MASK_COUNT_LINE: Final = "polyamp.losses.count(batch['mask'])"
"""Source text for the number of elements that a mask selects."""
_WARNED_LOSSES: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def count_line(found: Sequence[LossCount]) -> str:
    """Return the source text for the divisor of the first mean over ignored, weighted or selected elements."""
    return next((item.line for item in found if item.count is not None), MASK_COUNT_LINE)


def warn_unclear_count(loss_fn: Any, line: str) -> None:
    """Warn once per `loss_fn` that micro-batches and replicas count by their rows although its losses do not.

    Args:
        loss_fn: the user's function.
        line: see `count_line`.
    """
    try:
        if loss_fn in _WARNED_LOSSES:
            return
        _WARNED_LOSSES.add(loss_fn)
    except TypeError:  # an object without weak references is warned about each time
        pass
    warnings.warn(
        "loss_fn puts a loss of polyamp.losses with ignored, weighted or selected elements into a sum of its own, so "
        "that the step cannot know what the mean is over: micro-batches and replicas count by their rows, and the "
        "result is not that of one batch where their counts differ. Write "
        f"polyamp.train_step(loss_fn, recipe, weight=lambda batch: {line}), or return polyamp.losses.Mean(total, "
        "count) and add to that.",
        UserWarning,
        stacklevel=2,
    )


def batch_loss_weight(weight: WeightFunction | None, batch: Any) -> Any:
    """Return the value of `weight` for a batch; None without a `weight`.

    Raises:
        LossError: the value is no scalar, negative, or not finite.
    """
    if weight is None:
        return None
    found = weight(batch)
    if isinstance(found, bool) or not isinstance(found, int | float):
        if not hasattr(found, "dtype") or tuple(getattr(found, "shape", (0,))) != ():
            raise LossError(
                "weight(batch) must return what the mean of the batch's loss is over: a number or a scalar array. "
                f"Received: {describe_value(found)}."
            )
        return found
    if not 0.0 <= found < math.inf:
        raise LossError(f"weight(batch) must be at least 0 and finite. Received: {found}.")
    return float(found)


def has_own_weights(given: Sequence[LossOutput]) -> bool:
    """Whether the losses of the micro-batches have their own weights; False if they count by their rows.

    Raises:
        LossError: see `check_consistent_weights`.
    """
    own = [loss.weight is not None for loss in given]
    check_consistent_weights(own)
    return any(own)


def check_consistent_weights(own: Sequence[bool]) -> None:
    """Raise if only some losses of an update have their own weights.

    Args:
        own: whether each loss has one.

    Raises:
        LossError: some have one and some do not.
    """
    if any(own) and not all(own):
        raise LossError(
            "loss_fn returned a mean over what counts for some micro-batches of the window and not for others, so that "
            "they cannot be added up. Return the same kind of loss for all, or give train_step(..., weight=...)."
        )
