"""What a parity run measures, and how far apart the frameworks are: data and arithmetic, no framework and no process.

Called by `polyamp.demo.runner`; the command line draws and prints what stands here.

The distance of two loss curves over their first n steps is the largest relative difference at any of them,

    max over t < n of |a_t - b_t| / max(|a_t|, |b_t|, LOSS_FLOOR)

and S21 says how large it may be: see `TOLERANCE` and `MIXED_FACTOR`. Two frameworks that skip different steps (a
gradient at the very edge of float16's range, rounded up in one and down in the other) train on with different updates,
so they are compared up to the first such step; see `LEAST_SHARED`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

TOLERANCE: Final = 5e-5
"""Largest distance of two frameworks' float32 curves, and the least that is allowed under any policy (S21)."""
MIXED_FACTOR: Final = 2.0
"""Under another policy: at most this many times the larger of the two frameworks' own distances from float32 (S21)."""
COMPARED_STEPS: Final = 100
"""The rule holds for this many steps: rounding differences grow with every update, as in any optimisation."""
LEAST_SHARED: Final = 20
"""Two frameworks whose skipped steps differ before this step are outside the tolerance whatever their distance."""
LOSS_FLOOR: Final = 1e-2
"""Losses below this many nats are compared absolutely: the relative error of a loss near 0 says nothing."""

Curve = Sequence[float | None]
"""A value per step; None where it was not finite, which JSON cannot hold."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One framework trained under one policy.

    Attributes:
        backend, policy: what ran.
        version, device: the framework's version and the device it computed on.
        losses: unscaled training loss of every step, before its update.
        twin_losses: where steps were skipped: the losses of the same framework in float32 when it leaves out the same
            updates. Without it a skipped update, not precision, would be the distance from float32.
        grad_norms: global norm of the unscaled gradients of every step, before clipping.
        scales: loss scale after every step.
        skips: True for every step whose update was not applied.
        accuracy: share of the held-out digits that the trained model names rightly, 0 to 1.
        applied: updates applied, as the framework counted them.
        ms_per_step: median wall time of a step, reading its results included and the first, compiling step left out.
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


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A framework, or one policy of it, that could not be run. `policy` is None where all of it failed."""

    backend: str
    policy: str | None
    message: str


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two frameworks under one policy.

    Attributes:
        backends: the two.
        steps: how many first steps are compared.
        distance: between their loss curves over these; None where only one of them is finite.
        whole_run: the same over all steps, for information.
        limit: the largest distance that S21 allows them.
        parted: the first step that one skipped and the other did not; None if there is none.
    """

    backends: tuple[str, str]
    steps: int
    distance: float | None
    whole_run: float | None
    limit: float
    within: bool
    parted: int | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All pairs under one policy.

    Attributes:
        policy: the policy.
        from_float32: framework -> distance of its curve from its own float32 curve; None where not finite.
        pairs: the pairs, the one that decides the verdict first.
    """

    policy: str
    from_float32: dict[str, float | None]
    pairs: list[Pair]

    @property
    def within(self) -> bool:
        """True when every pair is within its limit."""
        return all(pair.within for pair in self.pairs)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole parity run; `to_json` writes it and `from_json` reads it back as an equal report.

    Attributes:
        polyamp: version of polyamp.
        recipes: policy -> the recipe it was run with.
        baseline: the float32 policy that distances are measured from.
        steps, batch_size, seed: the problem's settings.
        runs: one per framework and policy, in the order asked for.
        comparisons: one per policy with two frameworks or more.
        missing: framework that is not installed -> what to do.
        failures: what could not be run.
        seconds: wall time of everything.
        ok: True when at least one framework ran, none failed and every distance is within its limit.
    """

    polyamp: str
    recipes: dict[str, dict[str, Any]]
    baseline: str
    steps: int
    batch_size: int
    seed: int
    runs: list[Run]
    comparisons: list[Comparison]
    missing: dict[str, str]
    failures: list[Failure]
    seconds: float
    ok: bool

    def to_json(self) -> str:
        """The report as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Read what `to_json` wrote."""
        return msgspec.json.decode(text, type=cls)


def distance(first: Curve, second: Curve, steps: int | None = None) -> float | None:
    """The largest relative difference over the first `steps` steps; None where only one of the two is finite.

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


def compare(runs: Sequence[Run], baseline: str) -> list[Comparison]:
    """One comparison per policy under which two frameworks ran, in the order of the runs."""
    comparisons = []
    for policy in dict.fromkeys(run.policy for run in runs):
        peers = [run for run in runs if run.policy == policy]
        if len(peers) > 1:
            comparisons.append(_compared(peers, [run for run in runs if run.policy == baseline], policy, baseline))
    return comparisons


def _compared(peers: Sequence[Run], baselines: Sequence[Run], policy: str, baseline: str) -> Comparison:
    plain = {} if policy == baseline else {run.backend: run.losses for run in baselines}
    plain |= {run.backend: run.twin_losses for run in peers if run.twin_losses is not None}
    own = {
        run.backend: distance(run.losses, plain[run.backend], COMPARED_STEPS) for run in peers if run.backend in plain
    }
    pairs = [_pair(a, b, plain) for a, b in itertools.combinations(peers, 2)]
    pairs.sort(key=lambda pair: (pair.within, -math.inf if pair.distance is None else -pair.distance))
    return Comparison(policy=policy, from_float32=own, pairs=pairs)


def _pair(a: Run, b: Run, plain: Mapping[str, Curve]) -> Pair:
    parted = next((step for step, (x, y) in enumerate(zip(a.skips, b.skips, strict=True)) if x != y), None)
    steps = min(COMPARED_STEPS, len(a.losses) if parted is None else parted + 1)
    apart = distance(a.losses, b.losses, steps)
    own = [distance(run.losses, plain[run.backend], steps) for run in (a, b) if run.backend in plain]
    limit = max(TOLERANCE, *(MIXED_FACTOR * (value or 0.0) for value in [*own, 0.0]))
    return Pair(
        backends=(a.backend, b.backend),
        steps=steps,
        distance=apart,
        whole_run=distance(a.losses, b.losses),
        limit=limit,
        within=apart is not None and apart <= limit and (parted is None or parted >= LEAST_SHARED),
        parted=parted,
    )
