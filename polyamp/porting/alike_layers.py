"""`make_settler`, which finds by runs of both models which of several alike layers is which.

Alike layers fit each other in kind and shape, and no name decides: an actor and a critic, the norms of a block. The
target is filled with one assignment after the other, in the order of calls first. One is right if outputs and gradients
of both models agree on the batch. Layers that take other numbers than their partners show what to try next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from polyamp.errors import PortError
from polyamp.porting.check import GRADIENT_TOLERANCE, Batch, ChannelOrderAdapter, relative_error
from polyamp.porting.layouts.converter import Evaluation
from polyamp.porting.layouts.inventory import NativeLayer, canonical_gradients
from polyamp.porting.layouts.lazy_array import Array
from polyamp.porting.matching.layer_fit import find_layer_fit
from polyamp.porting.matching.matching import LayerMatch, Matching
from polyamp.porting.model_run import TrialRun, try_plan
from polyamp.porting.model_side import ModelSide
from polyamp.porting.transfer_plan import PlanMatching, Settler

_MAX_RUNS: Final = 24
"""Largest number of assignments that are tried."""
_SAME_INPUTS: Final = 1e-3
"""Largest relative distance of inputs that count as the same numbers."""


def make_settler(source: ModelSide, target: ModelSide, batch: Batch) -> Settler:
    """Return the function that settles the alike layers of a matching by runs of both models on a batch.

    It returns the matching with their pairs, or the reason why the batch does not show them.
    """

    def settle(matching: Matching, plan_matching: PlanMatching) -> Matching | str:
        return _AlikeLayers(source, target, batch, matching, plan_matching).settle()

    return settle


class _Member(NamedTuple):
    """A layer of the source: the number of its group, and its position there."""

    group: int
    position: int


_Assignment = tuple[tuple[NativeLayer, ...], ...]
"""For each group, the target's layers in the order of the source's layers that they are assigned to."""


class _AlikeLayers:
    """Groups of alike layers, and the runs that settle them.

    Args:
        source: the source.
        target: the target.
        batch: inputs of both.
        matching: the matching with the groups.
        plan_matching: function from a matching without groups to a plan.
    """

    def __init__(
        self, source: ModelSide, target: ModelSide, batch: Batch, matching: Matching, plan_matching: PlanMatching
    ) -> None:
        self._source, self._target, self._batch = source, target, batch
        self._matching, self._plan_matching = matching, plan_matching
        self._ours = [ours for ours, _ in matching.indistinguishable]
        self._theirs = [theirs for _, theirs in matching.indistinguishable]
        self._adapter = ChannelOrderAdapter(source.inventory, target.inventory)
        self._first_error: PortError | None = None
        self._runs = 0

    def settle(self) -> Matching | str:
        """Return the matching with the groups in pairs, or why the batch does not show them."""
        for assignment, trial in self._search():
            if trial.error is None:
                return self._without_doubt(assignment, trial.source)
        tried = f"{self._runs} assignment{'s' * (self._runs != 1)} of them, and in none do both models agree"
        return f"The batch does not show it: both models were run with {tried}. In the first: {self._first_error}"

    def _without_doubt(self, assignment: _Assignment, one: Evaluation) -> Matching | str:
        alike = self._same_gradients(one)
        if alike is None:
            return self._assigned(assignment)
        return (
            f"The batch does not show it: {alike[0].path!r} and {alike[1].path!r} of the source have the same "
            "gradients on it, so that nothing tells them apart."
        )

    def _search(self) -> Iterator[tuple[_Assignment, TrialRun]]:
        """Yield assignments and their runs: as listed, in the order of calls, then by what layers take."""
        listed: _Assignment = tuple(tuple(theirs) for theirs in self._theirs)
        trial = self._try(listed)
        if trial is None:
            return
        yield listed, trial
        calls = [_call_order(each) for each in (trial.source, trial.target)]
        order = sorted(
            (_Member(group, position) for group, ours in enumerate(self._ours) for position in range(len(ours))),
            key=lambda each: calls[0].get(self._ours[each.group][each.position].path, len(calls[0])),
        )
        assignment = self._in_call_order(order, calls[1])
        if assignment != listed:
            trial = self._try(assignment)
            if trial is None:
                return
            yield assignment, trial
        yield from self._improved(assignment, trial, order)

    def _in_call_order(self, order: Sequence[_Member], calls: Mapping[str, int]) -> _Assignment:
        """Return the assignment of the layers that are called first to those that are called first."""
        made = []
        for group, theirs in enumerate(self._theirs):
            called = iter(sorted(theirs, key=lambda layer: calls.get(layer.path, len(calls))))
            by_position = {each.position: next(called) for each in order if each.group == group}
            made.append(tuple(by_position[position] for position in range(len(theirs))))
        return tuple(made)

    def _improved(
        self, assignment: _Assignment, trial: TrialRun, order: Sequence[_Member]
    ) -> Iterator[tuple[_Assignment, TrialRun]]:
        """Yield assignments in which the layers take what their partners take, in the order of calls."""
        choices: list[tuple[_Assignment, int, NativeLayer]] = []
        start = 0
        while True:
            wrong = next((n for n in range(start, len(order)) if not self._agrees(order, n, assignment, trial)), None)
            for number in range(start, len(order) if wrong is None else wrong):
                choices += [(assignment, number, each) for each in self._others(order, number, assignment, trial)]
            if wrong is not None:
                choices += [(assignment, wrong, each) for each in self._others(order, wrong, assignment, trial)]
            if not choices:
                return
            before, start, other = choices.pop()
            assignment = _swap(before, order[start], other)
            start += 1
            again = self._try(assignment)
            if again is None:
                return
            trial = again
            yield assignment, trial

    def _agrees(self, order: Sequence[_Member], number: int, assignment: _Assignment, trial: TrialRun) -> bool:
        group, position = order[number]
        return self._takes_the_same(self._ours[group][position], assignment[group][position], trial)

    def _others(
        self, order: Sequence[_Member], number: int, assignment: _Assignment, trial: TrialRun
    ) -> list[NativeLayer]:
        """Return the later layers of the group that take what this layer of the source takes."""
        group, position = order[number]
        later = [assignment[group][each.position] for each in order[number + 1 :] if each.group == group]
        ours = self._ours[group][position]
        return [other for other in reversed(later) if self._takes_the_same(ours, other, trial)]

    def _takes_the_same(self, ours: NativeLayer, theirs: NativeLayer, trial: TrialRun) -> bool:
        """Return whether two layers take the same numbers, as far as their calls can be observed."""
        one, two = trial.source.inputs.get(ours.path), trial.target.inputs.get(theirs.path)
        if one is None or two is None or one.size != two.size:
            return True
        adapted = self._adapter.array(one)
        if adapted.shape == two.shape and relative_error(adapted, two) <= _SAME_INPUTS:
            return True
        return relative_error(np.sort(one, axis=None), np.sort(two, axis=None)) <= _SAME_INPUTS  # rows in another order

    def _assigned(self, assignment: _Assignment) -> Matching:
        pairs = list(self._matching.pairs)
        for ours, theirs in zip(self._ours, assignment, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                fit = find_layer_fit(one, other, absent_bias=True)
                assert fit is not None  # all layers of a group fit each other
                pairs.append(LayerMatch(one, other, fit, "batch"))
        place = {layer.path: number for number, layer in enumerate(self._target.inventory.layers)}
        pairs.sort(key=lambda each: place.get(each.target.path, 0))
        return Matching(pairs, self._matching.unmatched)

    def _try(self, assignment: _Assignment) -> TrialRun | None:
        """Run both models with an assignment; return None if there were enough runs."""
        if self._runs == _MAX_RUNS:
            return None
        self._runs += 1
        plan = self._plan_matching(self._assigned(assignment))
        observed = tuple({layer.path for group in side for layer in group} for side in (self._ours, self._theirs))
        trial = try_plan(self._source, self._target, plan, self._batch, (observed[0], observed[1]))
        self._first_error = self._first_error or trial.error
        return trial

    def _same_gradients(self, one: Evaluation) -> tuple[NativeLayer, NativeLayer] | None:
        """Return two alike layers that another assignment might exchange unseen, because their gradients are the same;
        None if there are none."""
        for group in self._ours:
            gradients = [_fingerprint(_gradients(layer, one)) for layer in group]
            for first, second in itertools.combinations(range(len(group)), 2):
                near = _is_near(gradients[first], gradients[second])
                if near and not _gradient_distance(group[first], group[second], one) > 10 * GRADIENT_TOLERANCE:
                    return group[first], group[second]
        return None


def _gradient_distance(first: NativeLayer, second: NativeLayer, one: Evaluation) -> float:
    """Return the largest relative difference of the gradients of two alike layers; 0 if they have none."""
    ours, theirs = _gradients(first, one), _gradients(second, one)
    return max((relative_error(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()), default=0.0)


def _gradients(layer: NativeLayer, one: Evaluation) -> dict[str, Array]:
    return {name: array.read() for name, array in canonical_gradients(layer, layer.forms[0], one.gradients).items()}


def _fingerprint(gradients: Mapping[str, Array]) -> float:
    return float(sum(np.abs(each).sum(dtype=np.float64) for each in gradients.values()))


def _is_near(one: float, other: float) -> bool:
    return abs(one - other) <= 0.01 * max(abs(one), abs(other))


def _call_order(evaluation: Evaluation) -> dict[str, int]:
    return {path: number for number, path in enumerate(evaluation.modules)}


def _swap(assignment: _Assignment, member: _Member, other: NativeLayer) -> _Assignment:
    """Return the assignment with another layer for a member, whose layer goes where that was."""
    group = list(assignment[member.group])
    place = next(number for number, layer in enumerate(group) if layer is other)
    group[member.position], group[place] = group[place], group[member.position]
    return tuple(tuple(group) if number == member.group else each for number, each in enumerate(assignment))
