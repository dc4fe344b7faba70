"""Loss weights of micro-batches (S8, S9). The scaled loss of each is multiplied by its weight over a unit.

The unit keeps the scaled loss about as large as without weights. On one device it is the largest weight that a
micro-batch can have. Ranks need the same unit before they know each other's weights, so they agree on a power of two
in their first step.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from polyamp.rules import loss_weights
from polyamp.rules.accumulation import Accumulation
from polyamp.rules.loss_weights import LossCount, LossOutput, TermTotals, WeightFunction
from polyamp.trees import leaves
from polyamp_torch.arrays import XP, can_read_without_sync
from polyamp_torch.distributed.replicas import ScalarOrTensor, TorchReplicas


def make_loss_weighting(
    function: WeightFunction | None,
    parts: Sequence[Any],
    window: Accumulation,
    replicas: TorchReplicas,
    device: torch.device,
) -> LossWeighting:
    """Return the loss weighting of one step's micro-batches.

    Args:
        function: the user's `weight=`, or None.
        parts: the micro-batches.
        window: their sizes in rows.
        replicas: the state's replicas.
        device: the state's device.
    """
    if len(parts) == 1 and replicas.count == 1:
        return SingleBatchWeighting(function, parts, device, omits=replicas.engine.name is None)
    return MicroBatchWeighting(function, parts, window, replicas, device)


class LossWeighting(ABC):
    """Base class of the loss weightings of a step's micro-batches.

    Attributes:
        factors: the factor of the scaled loss in each pass so far.
        among_others: whether there are other micro-batches or replicas.
        sums_means: whether a loss was a sum of means over different counts.
        is_unclear: whether a loss without an explicit count combines means over different numbers of elements.
        rest: the passes after the first one, for a sum of means: (micro-batch, whether it counts).
        omits: whether a pass of weight 0 needs no backward pass, because no other process waits for it.
    """

    factors: list[ScalarOrTensor]
    among_others = True
    sums_means = False
    is_unclear = False
    rest: list[tuple[Any, bool]]
    omits: bool

    @property
    def is_empty(self) -> bool:
        """Whether all weights were 0, as the host knows, so that no backward pass ran."""
        return self.omits and all(isinstance(factor, float) and factor == 0.0 for factor in self.factors)

    @abstractmethod
    def count_others(self, count: Callable[[Any], list[Any]]) -> None:
        """Count the divisors of a sum of means in the micro-batches after the first one, by a forward pass each.

        This runs before the first one's pass, whose graph needs values that the counting passes may overwrite.

        Args:
            count: the counts for a micro-batch, by a forward pass.
        """

    @abstractmethod
    def read(self, result: Any, found: Sequence[LossCount], part: Any, count: Callable[[Any], list[Any]]) -> LossOutput:
        """Return the loss of the next pass.

        Args:
            result: the return value of `loss_fn`.
            found: the means that it computed.
            part: its micro-batch.
            count: the counts of a sum of means for another micro-batch, by a forward pass.
        """

    @abstractmethod
    def next_factor(self, loss: LossOutput, part: Any, *, counts: bool = True) -> ScalarOrTensor:
        """Return the factor for the scaled loss of the next pass.

        Args:
            loss: the result of `read`.
            part: its micro-batch.
            counts: False for a pass that runs only because other ranks wait for it.
        """

    def shown_loss(self, loss: torch.Tensor, factor: ScalarOrTensor) -> torch.Tensor:
        """Return a pass's loss as results show it: 0 if its weight is 0, even if the loss is not finite.

        Args:
            loss: the loss, detached.
            factor: the result of `next_factor`.
        """
        if isinstance(factor, float):
            return loss if factor else torch.zeros_like(loss)
        return torch.where(factor > 0.0, loss, torch.zeros_like(loss))

    @property
    @abstractmethod
    def total(self) -> ScalarOrTensor:
        """The sum of the factors; a float if all of them are floats."""

    @abstractmethod
    def weight(self, total: ScalarOrTensor) -> torch.Tensor | None:
        """Return the total weight of the mean loss, from the sum of the factors; None if independent of values."""


class SingleBatchWeighting(LossWeighting):
    """Weighting of a single batch: factor 1, or 0 if its weight is 0."""

    among_others = False

    def __init__(
        self, function: WeightFunction | None, parts: Sequence[Any], device: torch.device, *, omits: bool
    ) -> None:
        self.factors = []
        self.rest = []
        self.omits = omits
        self._given = (
            None if function is None else _weight_number(loss_weights.batch_loss_weight(function, parts[0]), device)
        )
        self._device = device
        self._weight: ScalarOrTensor | None = None

    @property
    def is_empty(self) -> bool:
        return self.omits and self.factors == [0.0]

    def count_others(self, count: Callable[[Any], list[Any]]) -> None:
        """Do nothing: there are no other micro-batches."""

    def read(self, result: Any, found: Sequence[LossCount], part: Any, count: Callable[[Any], list[Any]]) -> LossOutput:
        loss = loss_weights.parse_loss_output(result, found, XP, weight=self._given)
        self.sums_means = bool(loss.terms)
        return loss

    def next_factor(self, loss: LossOutput, part: Any, *, counts: bool = True) -> ScalarOrTensor:
        factor = 1.0
        if loss.weight is not None:
            self._weight = _weight_number(loss.weight, self._device)
            factor = 0.0 if isinstance(self._weight, float) and self._weight == 0.0 else 1.0
        self.factors.append(factor)
        return factor

    def shown_loss(self, loss: torch.Tensor, factor: ScalarOrTensor) -> torch.Tensor:
        """Return the loss; a weight on a device, which the host doesn't read, may be 0 although the factor is 1."""
        if factor == 1.0 and not isinstance(self._weight, torch.Tensor):
            return loss
        return super().shown_loss(loss, self._weight if isinstance(self._weight, torch.Tensor) else factor)

    @property
    def total(self) -> ScalarOrTensor:
        return self.factors[0]

    def weight(self, total: ScalarOrTensor) -> torch.Tensor | None:
        return None if self._weight is None else _float32_scalar(self._weight, self._device)


class MicroBatchWeighting(LossWeighting):
    """Weighting of several micro-batches or replicas."""

    def __init__(
        self,
        function: WeightFunction | None,
        parts: Sequence[Any],
        window: Accumulation,
        replicas: TorchReplicas,
        device: torch.device,
    ) -> None:
        self.factors = []
        self.omits = replicas.engine.name is None
        self.rest = [(part, True) for part in parts[1:]]
        self._given = (
            None
            if function is None
            else [_weight_number(loss_weights.batch_loss_weight(function, p), device) for p in parts]
        )
        self._window = window
        self._replicas = replicas
        self._device = device
        self._totals: TermTotals | None = None
        self._unit: ScalarOrTensor | None = None
        self._own: list[bool] = []
        self._elements = loss_weights.ElementCounts()
        self._counts: list[list[Any]] | None = None

    def count_others(self, count: Callable[[Any], list[Any]]) -> None:
        found = [(count(other), counts) for other, counts in self.rest]  # some passes run only because other ranks wait
        self._counts = [own for own, counts in found if counts]

    def read(self, result: Any, found: Sequence[LossCount], part: Any, count: Callable[[Any], list[Any]]) -> LossOutput:
        number = len(self.factors)
        own = None if self._given is None else self._given[min(number, len(self._given) - 1)]
        loss = loss_weights.parse_loss_output(result, found, XP, weight=own, selects=True)
        if not loss.terms:
            if loss.own is None and self._elements.differ(found, self._rows(number, part)):
                self.is_unclear = True
            return loss
        self.sums_means = True
        rows = self._rows(number, part)
        if self._totals is None:
            if self._counts is None:
                self.count_others(count)
            every = [loss_weights.term_counts(loss, rows), *(self._counts or [])]
            self._totals = self._replicas.totals(loss_weights.term_totals(every), self._device)
        return loss_weights.parse_loss_output(
            result, found, XP, weight=own, rows=rows, totals=self._totals, selects=True
        )

    def next_factor(self, loss: LossOutput, part: Any, *, counts: bool = True) -> ScalarOrTensor:
        number = len(self.factors)
        self._own.append(loss.weight is not None)
        loss_weights.check_consistent_weights(self._own)
        factor = self._factor(loss, number, part) if counts else 0.0
        self.factors.append(factor)
        return factor

    def _factor(self, loss: LossOutput, number: int, part: Any) -> ScalarOrTensor:
        if self._totals is not None:
            return 1.0
        weight = None if loss.weight is None else _weight_number(loss.weight, self._device)
        shares = self._window.weights
        if self._replicas.count == 1 and weight is None:
            return self._elements.share(loss.size, self._window.sizes[number], shares[number])
        rows = self._rows(number, part)
        if self._unit is None:
            self._unit = self._replicas.unit(functools.partial(self._most, loss, weight, rows, shares[number]))
        if weight is None:
            weight = float(rows if loss.size is None else loss.size)
        return weight / self._unit

    def _most(self, loss: LossOutput, weight: ScalarOrTensor | None, rows: float, share: float) -> ScalarOrTensor:
        """Return the largest weight that a micro-batch can have."""
        if self._given is not None:
            most = functools.reduce(_maximum, self._given)
        elif loss.size is not None:
            most = loss.size / share
        elif weight is None:
            most = rows / share
        else:
            most = weight
        return most

    def _rows(self, number: int, part: Any) -> float:
        return row_count(part, self._window.sizes[min(number, len(self._window.sizes) - 1)])

    @property
    def total(self) -> ScalarOrTensor:
        numbers = [factor for factor in self.factors if isinstance(factor, float)]
        if len(numbers) == len(self.factors):
            return math.fsum(numbers)
        rest = [factor for factor in self.factors if not isinstance(factor, float)]
        return torch.stack(rest).sum() + math.fsum(numbers)

    def weight(self, total: ScalarOrTensor) -> torch.Tensor | None:
        if self._totals is not None:
            return _float32_scalar(sum(self._totals.counts), self._device)
        if not any(self._own) and any(not isinstance(factor, float) or factor for factor in self.factors):
            return None  # otherwise only empty selections
        return _float32_scalar(0.0 if self._unit is None else total * self._unit, self._device)


def _weight_number(weight: Any, device: torch.device) -> ScalarOrTensor:
    """Return a float32 weight, as a Python float if reading it needs no synchronisation, else on the device."""
    if not isinstance(weight, torch.Tensor):
        return float(weight)
    wide = weight.detach().float()
    return float(wide) if can_read_without_sync(wide.device) else wide.to(device)


def _float32_scalar(number: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(number, dtype=torch.float32, device=device)


def row_count(part: Any, otherwise: int) -> float:
    """Return the number of rows of a micro-batch; `otherwise` if its arrays have different lengths."""
    lengths = {len(leaf) for _, leaf in leaves(part) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    return float(lengths.pop() if len(lengths) == 1 else otherwise)


def weighted_loss_sum(losses: Sequence[torch.Tensor], factors: Sequence[ScalarOrTensor]) -> torch.Tensor:
    """Return the weighted sum of losses; a loss of weight 0 adds 0, even if it is not finite."""
    if len(losses) == 1 and isinstance(factors[0], float) and factors[0] == 1.0:
        return losses[0]
    if all(isinstance(factor, float) and factor == 1.0 for factor in factors):
        return torch.stack(list(losses)).sum()
    return torch.stack([_weighted_loss(loss, factor) for loss, factor in zip(losses, factors, strict=True)]).sum()


def _weighted_loss(loss: torch.Tensor, factor: ScalarOrTensor) -> torch.Tensor:
    if isinstance(factor, float):
        return loss * factor if factor else torch.zeros_like(loss)
    return torch.where(factor > 0.0, loss * factor, torch.zeros_like(loss))


def _maximum(one: ScalarOrTensor, other: ScalarOrTensor) -> ScalarOrTensor:
    if isinstance(one, float) and isinstance(other, float):
        return max(one, other)
    like = one if isinstance(one, torch.Tensor) else other
    assert isinstance(like, torch.Tensor)
    return torch.maximum(torch.as_tensor(one, device=like.device), torch.as_tensor(other, device=like.device))


def nonzero_total(total: ScalarOrTensor) -> ScalarOrTensor:
    """Return the divisor of a weighted sum: the total, or 1 if the total is 0."""
    if isinstance(total, float):
        return total or 1.0
    return torch.where(total > 0.0, total, torch.ones_like(total))


def total_scale(scale: torch.Tensor | None, total: Any, device: torch.device) -> torch.Tensor | None:
    """Return the divisor of the accumulated scaled gradients: the scale times the sum of the weights.

    The sum is 1.0 for a single micro-batch; in a compiled step it may be a tensor."""
    if isinstance(total, float):
        if total == 1.0:
            return scale
        return torch.full((), total, dtype=torch.float64, device=device) if scale is None else scale.double() * total
    by: torch.Tensor = total if scale is None else scale.double() * total
    return by
