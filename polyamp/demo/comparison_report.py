"""Report of a demo run: measurements of every framework, and the distances of their loss curves.

The distance of two loss curves over their first n steps is the largest relative difference at any of them,

    max over t < n of |a_t - b_t| / max(|a_t|, |b_t|, LOSS_FLOOR)

and S21 limits it: see `TOLERANCE` and `MIXED_FACTOR`. Two frameworks that skip different steps (a gradient at the edge
of float16's range, rounded up in one and down in the other) continue with different updates. So they are compared only
up to the first such step; see `MIN_SHARED_STEPS`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

TOLERANCE: Final = 5e-5
"""Largest allowed distance of two frameworks' float32 curves, and the least limit under any policy (S21)."""
MIXED_FACTOR: Final = 2.0
"""Limit under another policy, in multiples of the larger of the two frameworks' own distances from float32 (S21)."""
COMPARED_STEPS: Final = 100
"""Number of steps to which the rule applies: rounding differences grow with every update, as in any optimisation."""
MIN_SHARED_STEPS: Final = 20
"""Two frameworks whose skipped steps differ before this step are outside the tolerance whatever their distance."""
LOSS_FLOOR: Final = 1e-2
"""Loss in nats below which losses are compared absolutely: the relative error of a loss near 0 is meaningless."""

LossCurve = Sequence[float | None]
"""A value per step; None where it was not finite, which JSON cannot represent."""


class FrameworkRun(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one framework under one policy.

    Attributes:
        backend, policy: the framework and the policy.
        version, device: the framework's version and the device it computed on.
        losses: unscaled training loss of every step, before its update.
        twin_losses: if steps were skipped, the losses of the same framework in float32 without the same updates.
            Without it the distance from float32 would measure a skipped update, not precision.
        grad_norms: global norm of the unscaled gradients of every step, before clipping.
        scales: loss scale after every step.
        skips: True for every step whose update was not applied.
        accuracy: share of the held-out digits that the trained model classifies correctly, 0 to 1.
        applied: updates applied, as counted by the framework.
        ms_per_step: median wall time of a step, including reading its results, without the first, compiling step.
    """

    backend: str
    policy: str
    version: str
    device: str
    losses: list[float | None]
    grad_norms: list[float | None]
    scales: list[float]
    skips: list[bool]
    accuracy: float
    applied: int
    ms_per_step: float
    twin_losses: list[float | None] | None = None

    @property
    def skipped(self) -> int:
        """Number of skipped steps."""
        return sum(self.skips)


class FrameworkFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Failure of a framework under one policy, or of all its policies if `policy` is None."""

    backend: str
    policy: str | None
    message: str


class FrameworkPair(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of two frameworks under one policy.

    Attributes:
        backends: the two.
        steps: number of first steps that are compared.
        distance: between their loss curves over these steps; None where only one of them is finite.
        whole_run: the same over all steps, for information.
        limit: the largest distance that S21 allows.
        parted: the first step that only one of them skipped; None if there is none.
    """

    backends: tuple[str, str]
    steps: int
    distance: float | None
    whole_run: float | None
    limit: float
    within: bool
    parted: int | None


class PolicyComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of all pairs of frameworks under one policy.

    Attributes:
        policy: the policy.
        from_float32: framework -> distance of its curve from its own float32 curve; None where not finite.
        pairs: the pairs, the one that decides the verdict first.
    """

    policy: str
    from_float32: dict[str, float | None]
    pairs: list[FrameworkPair]

    @property
    def within(self) -> bool:
        """Whether every pair is within its limit."""
        return all(pair.within for pair in self.pairs)


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a demo run; `from_json` of `to_json` is an equal report.

    Attributes:
        polyamp: version of polyamp.
        recipes: policy -> its recipe.
        baseline: the float32 policy from which distances are measured.
        steps, batch_size, seed: the problem's settings.
        runs: one per framework and policy, in the order asked for.
        comparisons: one per policy with two frameworks or more.
        missing: framework that is not installed -> what to do.
        failures: frameworks and policies that failed.
        seconds: wall time of everything.
        ok: True when at least one framework ran, none failed and every distance is within its limit.
    """

    polyamp: str
    recipes: dict[str, dict[str, Any]]
    baseline: str
    steps: int
    batch_size: int
    seed: int
    runs: list[FrameworkRun]
    comparisons: list[PolicyComparison]
    missing: dict[str, str]
    failures: list[FrameworkFailure]
    seconds: float
    ok: bool

    def to_json(self) -> str:
        """Return the report as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> DemoReport:
        """Read a report from the JSON of `to_json`."""
        return msgspec.json.decode(text, type=cls)


def distance(first: LossCurve, second: LossCurve, steps: int | None = None) -> float | None:
    """Return the largest relative difference over the first `steps` steps; None if only one curve is finite.

    >>> distance([2.0, 1.0], [2.0, 1.1])
    0.09090909090909098
    """
    largest = 0.0
    for a, b in itertools.islice(zip(first, second, strict=True), steps):
        if a is None or b is None:
            if a is not b:
                return None
            continue
        largest = max(largest, abs(a - b) / max(abs(a), abs(b), LOSS_FLOOR))
    return largest


def compare(runs: Sequence[FrameworkRun], baseline: str) -> list[PolicyComparison]:
    """Return a comparison for each policy with at least two frameworks, in the order of the runs."""
    comparisons = []
    for policy in dict.fromkeys(run.policy for run in runs):
        peers = [run for run in runs if run.policy == policy]
        if len(peers) > 1:
            comparisons.append(
                _compare_policy(peers, [run for run in runs if run.policy == baseline], policy, baseline)
            )
    return comparisons


def _compare_policy(
    peers: Sequence[FrameworkRun], baselines: Sequence[FrameworkRun], policy: str, baseline: str
) -> PolicyComparison:
    plain = {} if policy == baseline else {run.backend: run.losses for run in baselines}
    plain |= {run.backend: run.twin_losses for run in peers if run.twin_losses is not None}
    own = {
        run.backend: distance(run.losses, plain[run.backend], COMPARED_STEPS) for run in peers if run.backend in plain
    }
    pairs = [_compare_pair(a, b, plain) for a, b in itertools.combinations(peers, 2)]
    pairs.sort(key=lambda pair: (pair.within, -math.inf if pair.distance is None else -pair.distance))
    return PolicyComparison(policy=policy, from_float32=own, pairs=pairs)


def _compare_pair(a: FrameworkRun, b: FrameworkRun, plain: Mapping[str, LossCurve]) -> FrameworkPair:
    parted = next((step for step, (x, y) in enumerate(zip(a.skips, b.skips, strict=True)) if x != y), None)
    steps = min(COMPARED_STEPS, len(a.losses) if parted is None else parted + 1)
    apart = distance(a.losses, b.losses, steps)
    own = [distance(run.losses, plain[run.backend], steps) for run in (a, b) if run.backend in plain]
    limit = max(TOLERANCE, *(MIXED_FACTOR * (value or 0.0) for value in [*own, 0.0]))
    return FrameworkPair(
        backends=(a.backend, b.backend),
        steps=steps,
        distance=apart,
        whole_run=distance(a.losses, b.losses),
        limit=limit,
        within=apart is not None and apart <= limit and (parted is None or parted >= MIN_SHARED_STEPS),
        parted=parted,
    )
