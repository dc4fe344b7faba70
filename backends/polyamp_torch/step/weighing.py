"""What a micro-batch counts in a torch step (S8, S9): its weight over a unit, which its scaled loss is multiplied by.

The unit keeps the scaled loss about as large as without weights. On one device it is the most that the largest
micro-batch can count. Ranks need the same one before they know each other's weights: they agree on a power of two at
their first step.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from polyamp.rules import weights
from polyamp.rules.weights import Count, Loss, Totals, WeightFunction
from polyamp.rules.window import Window
from polyamp.trees import leaves
from polyamp_torch.arrays import XP
from polyamp_torch.step.measure import looks
from polyamp_torch.step.replicas import Number, Replicas


def weighing_of(
    function: WeightFunction | None, parts: Sequence[Any], window: Window, replicas: Replicas, device: torch.device
) -> Weighing:
    """The weights of one step's micro-batches.

    Args:
        function: `weight=` of the user's, or None.
        parts: the micro-batches.
        window: their rows.
        replicas: of the state.
        device: of the state.
    """
    if len(parts) == 1 and replicas.count == 1:
        return OneBatch(function, parts, device, omits=replicas.held is None)
    return Several(function, parts, window, replicas, device)


class Weighing(ABC):
    """What the micro-batches of a step count.

    Attributes:
        factors: what the scaled loss of each pass so far was multiplied by.
        among_others: whether there are other micro-batches or replicas.
        sums_means: whether a loss was a sum of means over different counts.
        is_unclear: whether means of other numbers of elements went into a loss that does not say what it is over.
        rest: the passes after the first one, for a sum of means: (micro-batch, whether it counts).
        omits: whether a pass that counts for nothing needs no backward pass: nobody else waits for it.
    """

    factors: list[Number]
    among_others = True
    sums_means = False
    is_unclear = False
    rest: list[tuple[Any, bool]]
    omits: bool

    @property
    def begins(self) -> bool:
        """Whether the first pass of several is next."""
        return self.among_others and not self.factors

    @abstractmethod
    def count_others(self, count: Callable[[Any], list[Any]]) -> None:
        """Count what a sum of means divides by in the micro-batches after the first one, each by a forward pass: before
        that of the first one, whose graph needs what such a pass may write to.

        Args:
            count: the counts for a micro-batch, by a forward pass.
        """

    @abstractmethod
    def read(self, result: Any, found: Sequence[Count], part: Any, count: Callable[[Any], list[Any]]) -> Loss:
        """The loss of the next pass.

        Args:
            result: what `loss_fn` returned.
            found: the means that it made.
            part: its micro-batch.
            count: the counts of a sum of means for another micro-batch, by a forward pass.
        """

    @abstractmethod
    def counted(self, loss: Loss, part: Any, *, counts: bool = True) -> Number:
        """What the scaled loss of the next pass is to be multiplied by.

        Args:
            loss: as `read` gave it.
            part: its micro-batch.
            counts: False for a pass that other ranks wait for.
        """

    @property
    @abstractmethod
    def total(self) -> Number:
        """The sum of the factors, a float where all are."""

    @abstractmethod
    def weight(self, total: Number) -> torch.Tensor | None:
        """What the mean of the loss is over, from the sum of the factors; None where it does not depend on values."""

    @abstractmethod
    def mean(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of the losses times their factors, divided by the factors' sum; of no factor 0."""


class OneBatch(Weighing):
    """A batch by itself counts in full, or not at all."""

    among_others = False

    def __init__(
        self, function: WeightFunction | None, parts: Sequence[Any], device: torch.device, *, omits: bool
    ) -> None:
        self.factors = []
        self.rest = []
        self.omits = omits
        self._given = None if function is None else _number(weights.of_batch(function, parts[0]), device)
        self._device = device
        self._weight: Number | None = None

    def count_others(self, count: Callable[[Any], list[Any]]) -> None:
        """There are none."""

    def read(self, result: Any, found: Sequence[Count], part: Any, count: Callable[[Any], list[Any]]) -> Loss:
        loss = weights.read(result, found, XP, weight=self._given)
        self.sums_means = bool(loss.terms)
        return loss

    def counted(self, loss: Loss, part: Any, *, counts: bool = True) -> Number:
        factor = 1.0
        if loss.weight is not None:
            self._weight = _number(loss.weight, self._device)
            factor = 0.0 if isinstance(self._weight, float) and self._weight == 0.0 else 1.0
        self.factors.append(factor)
        return factor

    @property
    def total(self) -> Number:
        return self.factors[0]

    def weight(self, total: Number) -> torch.Tensor | None:
        return None if self._weight is None else _scalar(self._weight, self._device)

    def mean(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        return losses[0]


class Several(Weighing):
    """Micro-batches of a window, or of several replicas."""

    def __init__(
        self,
        function: WeightFunction | None,
        parts: Sequence[Any],
        window: Window,
        replicas: Replicas,
        device: torch.device,
    ) -> None:
        self.factors = []
        self.omits = replicas.held is None
        self.rest = [(part, True) for part in parts[1:]]
        self._given = None if function is None else [_number(weights.of_batch(function, p), device) for p in parts]
        self._window = window
        self._replicas = replicas
        self._device = device
        self._totals: Totals | None = None
        self._unit: Number | None = None
        self._own: list[bool] = []
        self._elements = weights.Elements()
        self._counts: list[list[Any]] | None = None

    def count_others(self, count: Callable[[Any], list[Any]]) -> None:
        found = [(count(other), counts) for other, counts in self.rest]  # some only because other ranks wait for it
        self._counts = [own for own, counts in found if counts]

    def read(self, result: Any, found: Sequence[Count], part: Any, count: Callable[[Any], list[Any]]) -> Loss:
        number = len(self.factors)
        own = None if self._given is None else self._given[min(number, len(self._given) - 1)]
        loss = weights.read(result, found, XP, weight=own, selects=True)
        if not loss.terms:
            if loss.own is None and self._elements.differ(found, self._rows(number, part)):
                self.is_unclear = True
            return loss
        self.sums_means = True
        rows = self._rows(number, part)
        if self._totals is None:
            if self._counts is None:
                self.count_others(count)
            every = [weights.counts_of(loss, rows), *(self._counts or [])]
            self._totals = self._replicas.totals(weights.totals_of(every), self._device)
        return weights.read(result, found, XP, weight=own, rows=rows, totals=self._totals, selects=True)

    def counted(self, loss: Loss, part: Any, *, counts: bool = True) -> Number:
        number = len(self.factors)
        self._own.append(loss.weight is not None)
        weights.check_alike(self._own)
        factor = self._factor(loss, number, part) if counts else 0.0
        self.factors.append(factor)
        return factor

    def _factor(self, loss: Loss, number: int, part: Any) -> Number:
        if self._totals is not None:
            return 1.0
        weight = None if loss.weight is None else _number(loss.weight, self._device)
        shares = self._window.shares
        if self._replicas.count == 1 and weight is None:
            return self._elements.share(loss.size, self._window.sizes[number], shares[number])
        rows = self._rows(number, part)
        if self._unit is None:
            self._unit = self._replicas.unit(functools.partial(self._most, loss, weight, rows, shares[number]))
        if weight is None:
            weight = float(rows if loss.size is None else loss.size)
        return weight / self._unit

    def _most(self, loss: Loss, weight: Number | None, rows: float, share: float) -> Number:
        """What the largest micro-batch can count."""
        if self._given is not None:
            most = functools.reduce(_larger, self._given)
        elif loss.size is not None:
            most = loss.size / share
        elif weight is None:
            most = rows / share
        else:
            most = weight
        return most

    def _rows(self, number: int, part: Any) -> float:
        return rows_of(part, self._window.sizes[min(number, len(self._window.sizes) - 1)])

    @property
    def total(self) -> Number:
        numbers = [factor for factor in self.factors if isinstance(factor, float)]
        if len(numbers) == len(self.factors):
            return math.fsum(numbers)
        rest = [factor for factor in self.factors if not isinstance(factor, float)]
        return torch.stack(rest).sum() + math.fsum(numbers)

    def weight(self, total: Number) -> torch.Tensor | None:
        if self._totals is not None:
            return _scalar(sum(self._totals.counts), self._device)
        if not any(self._own) and any(not isinstance(factor, float) or factor for factor in self.factors):
            return None  # otherwise of selections, which are empty
        return _scalar(0.0 if self._unit is None else total * self._unit, self._device)

    def mean(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        return weighed(losses, self.factors) / divisor(self.total)


def _number(weight: Any, device: torch.device) -> Number:
    """A weight on the host, where reading it waits for nothing, and on the device elsewhere; float32 in both."""
    if not isinstance(weight, torch.Tensor):
        return float(weight)
    wide = weight.detach().float()
    return float(wide) if looks(wide.device) else wide.to(device)


def _scalar(number: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(number, dtype=torch.float32, device=device)


def rows_of(part: Any, otherwise: int) -> float:
    """The rows of a micro-batch; of one whose arrays do not agree, its part of the window."""
    lengths = {len(leaf) for _, leaf in leaves(part) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    return float(lengths.pop() if len(lengths) == 1 else otherwise)


def weighed(losses: Sequence[torch.Tensor], factors: Sequence[Number]) -> torch.Tensor:
    """The sum of losses times what they count; one that counts for nothing adds nothing, whatever it is."""
    if all(isinstance(factor, float) and factor == 1.0 for factor in factors):
        return losses[0] if len(losses) == 1 else torch.stack(list(losses)).sum()
    return torch.stack([_times(loss, factor) for loss, factor in zip(losses, factors, strict=True)]).sum()


def _times(loss: torch.Tensor, factor: Number) -> torch.Tensor:
    if isinstance(factor, float):
        return loss * factor if factor else torch.zeros_like(loss)
    return torch.where(factor > 0.0, loss * factor, torch.zeros_like(loss))


def _larger(one: Number, other: Number) -> Number:
    if isinstance(one, float) and isinstance(other, float):
        return max(one, other)
    like = one if isinstance(one, torch.Tensor) else other
    assert isinstance(like, torch.Tensor)
    return torch.maximum(torch.as_tensor(one, device=like.device), torch.as_tensor(other, device=like.device))


def divisor(total: Number) -> Number:
    """What a sum by weights is divided by; where nothing counts, by 1."""
    if isinstance(total, float):
        return total or 1.0
    return torch.where(total > 0.0, total, torch.ones_like(total))
