"""A random trial of several replicas, as plain data, and what its outcome is: no framework is imported here.

`draw(framework, seed)` is the trial; each framework's `<framework>_trials.py` runs it: N replicas, each with its own
part of the batch, with an overflow in a replica's part at some steps, beside one device that is given the whole batch.
What must hold (S9, S12) is said by `Outcome.failures`, in words. Called by `__main__` and by the tests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

import polyamp

INPUTS: Final = 6
HIDDEN: Final = 16
CLASSES: Final = 3
STEPS: Final = 8
RATE: Final = 1e-2

ENGINES: Final[dict[str, dict[str, tuple[int, ...]]]] = {
    "torch": {"ddp": (2, 3, 4), "ddp-static": (2, 4), "fsdp2": (2, 3, 4), "hsdp": (4,)},
    "jax": {"replicated": (2, 4), "sharded": (2, 4), "shard_map": (2, 4)},
    "tensorflow": {"mirrored": (2, 3, 4)},
}
"""Framework -> engine -> numbers of replicas."""
OPTIMIZERS: Final[dict[str, Callable[[], Any]]] = {
    "sgd": lambda: polyamp.sgd(0.1, momentum=0.9),
    "adam": lambda: polyamp.adam(RATE, eps=1e-3),
    "adamw": lambda: polyamp.adamw(polyamp.schedules.warmup_cosine(RATE, warmup_steps=2, total_steps=STEPS), eps=1e-3),
    "rmsprop": lambda: polyamp.rmsprop(RATE, eps=1e-3),
    "lion": lambda: polyamp.lion(RATE),
}
"""An epsilon that is seen: Adam's of 1e-8 makes a whole step of a gradient that is rounding alone."""
POLICIES: Final = ("float32", "mixed_bfloat16", "mixed_float16")
SHARED: Final[dict[str, int]] = {"torch": 1, "jax": 8, "tensorflow": 4}
"""So many seeds in a row differ in their data and overflows alone: what is compiled serves all of them."""


class Trial(NamedTuple):
    """One trial.

    Attributes:
        framework: in which it runs.
        seed: that it was drawn from.
        engine: of `ENGINES`.
        world: replicas.
        policy: of `POLICIES`; in float32 too the scaler is on, so that its steps can be skipped.
        optimizer: of `OPTIMIZERS`.
        clip_norm: or None.
        accumulate: micro-batches of a step.
        norm: "layer", "batch" (each micro-batch is normalised by itself, and running statistics move), or "".
        rows: of a replica's part of a step's batch.
        unused: whether there is a parameter on which no loss depends (S23).
        steps: how many.
        overflows: (step, replica, row) whose input is an infinity.
    """

    framework: str
    seed: int
    engine: str
    world: int
    policy: str
    optimizer: str
    clip_norm: float | None
    accumulate: int
    norm: str
    rows: int
    unused: bool
    steps: int
    overflows: tuple[tuple[int, int, int], ...]

    def recipe(self, *, policy: str = "", accumulate: int = 0) -> polyamp.Recipe:
        """What every replica trains with."""
        return polyamp.Recipe(
            policy=policy or self.policy,
            optimizer=OPTIMIZERS[self.optimizer](),
            scaler=polyamp.LossScaler(init_scale=2.0**6, growth_interval=2, max_scale=2.0**8),
            clip_norm=self.clip_norm,
            accumulate_steps=accumulate or self.accumulate,
        )

    @property
    def skipped(self) -> list[bool]:
        """Of each step, whether it has to be skipped."""
        steps = {step for step, _, _ in self.overflows}
        return [step in steps for step in range(self.steps)]

    @property
    def exact(self) -> bool:
        """Whether one device with the same micro-batches computes the same, running statistics aside."""
        return self.rows % self.accumulate == 0 or self.norm != "batch"

    def parts(self) -> Iterator[list[dict[str, Any]]]:
        """Each step's batch, one part for each replica: "x" float32 (rows, INPUTS), "y" int32 (rows,)."""
        rng = np.random.default_rng(self.seed)
        weights = rng.standard_normal((INPUTS, CLASSES))
        for step in range(self.steps):
            x = rng.standard_normal((self.world, self.rows, INPUTS)).astype(np.float32)
            y = np.argmax(x @ weights, axis=-1).astype(np.int32)
            for where, replica, row in self.overflows:
                if where == step:
                    x[replica, row] = np.inf
            yield [{"x": x[replica], "y": y[replica]} for replica in range(self.world)]

    def weights(self) -> dict[str, Any]:
        """The initial weights: "first", "second", "head" as (in, out), their biases, and "unused"."""
        rng = np.random.default_rng(self.seed + 1)
        sizes = {"first": (INPUTS, HIDDEN), "second": (HIDDEN, HIDDEN), "head": (HIDDEN, CLASSES)}
        made = {name: rng.normal(0, size[0] ** -0.5, size).astype(np.float32) for name, size in sizes.items()}
        made |= {f"{name}_bias": np.zeros(size[1], np.float32) for name, size in sizes.items()}
        return made | ({"unused": np.ones(HIDDEN, np.float32)} if self.unused else {})


class Outcome(NamedTuple):
    """What came of a trial.

    Attributes:
        seed: of the trial.
        engine: of the trial.
        world: of the trial.
        steps: that were made, on each replica.
        skipped: steps of them that were skipped.
        failures: what did not hold; empty where all did.
        apart: distance of the trained parameters from those of one device, relative to how far they moved.
        seconds: that it took.
    """

    seed: int
    engine: str
    world: int
    steps: int
    skipped: int
    failures: list[str]
    apart: float
    seconds: float


def broken(trial: Trial, *failures: str, seconds: float = 0.0) -> Outcome:
    """The outcome of a trial that did not come to its end."""
    return Outcome(trial.seed, trial.engine, trial.world, trial.steps, 0, list(failures), float("nan"), seconds)


def draw(framework: str, seed: int) -> Trial:
    """The trial of a seed."""
    rng = random.Random(f"{framework} {seed // SHARED[framework]}")
    engine = rng.choice(sorted(ENGINES[framework]))
    world = rng.choice(ENGINES[framework][engine])
    accumulate = rng.choice((1, 1, 2, 3))
    rows = accumulate * rng.choice((1, 2, 4)) + (rng.random() < 0.25 and accumulate > 1)
    how = {
        "policy": rng.choice(POLICIES),
        "optimizer": rng.choice(sorted(OPTIMIZERS)),
        "clip_norm": rng.choice((None, 0.05, 1.0)),
        "norm": rng.choice(("", "layer", "batch")) if rows % accumulate == 0 and rows > accumulate else "",
        "unused": rng.random() < 0.2,
    }
    rng = random.Random(f"{framework} data {seed}")
    where = sorted(rng.sample(range(STEPS), rng.choice((1, 2, 3))))
    overflows = tuple((step, rng.randrange(world), rng.randrange(rows)) for step in where)
    return Trial(
        framework, seed, engine, world, accumulate=accumulate, rows=rows, steps=STEPS, overflows=overflows, **how
    )  # type: ignore[arg-type]  # the fields by name


# --- what must hold


def decisions(trial: Trial, replicas: Sequence[Sequence[tuple[bool, float]]], one: Sequence[float]) -> list[str]:
    """Each replica's (skipped, scale) after each step: as scripted, the same on all, and one device's scale."""
    found = []
    for replica, steps in enumerate(replicas):
        if [skipped for skipped, _ in steps] != trial.skipped:
            found.append(f"replica {replica} skipped {[skipped for skipped, _ in steps]}, not {trial.skipped}")
        if [scale for _, scale in steps] != list(one):
            found.append(f"replica {replica} has the scales {[scale for _, scale in steps]}, one device {list(one)}")
    return found


def alike(digests: Sequence[Sequence[dict[str, str]]]) -> list[str]:
    """Each replica's name -> digest after each step: the same on all."""
    found = []
    for step, each in enumerate(zip(*digests, strict=True)):
        names = [name for name in each[0] if len({replica[name] for replica in each}) > 1]
        if names:
            found.append(f"after step {step} replicas differ in {', '.join(names)}")
    return found[:3]


def untouched(trial: Trial, digests: Sequence[Sequence[dict[str, str]]], names: Sequence[str]) -> list[str]:
    """What a skipped step must leave bit for bit as it was (S12)."""
    found = []
    for replica, steps in enumerate(digests):
        for step in range(1, trial.steps):
            changed = [name for name in names if steps[step][name] != steps[step - 1][name]]
            if trial.skipped[step] and changed:
                found.append(f"replica {replica}: the skipped step {step} changed {', '.join(changed)}")
    return found[:3]


def distance(one: dict[str, Any], other: dict[str, Any], start: dict[str, Any]) -> float:
    """How far two sets of arrays are apart, relative to how far the second is from where both began."""
    apart = math.sqrt(sum(float(np.sum(np.square(one[name] - other[name], dtype=float))) for name in other))
    moved = math.sqrt(sum(float(np.sum(np.square(other[name] - start[name], dtype=float))) for name in other))
    return apart / moved if moved else apart


def near(
    trial: Trial, own: dict[str, Any], one: Callable[[str, float], dict[str, Any]], start: dict[str, Any]
) -> tuple[float, list[str]]:
    """Distance of the trained arrays from one device's, and what is to be said of it.

    In float32 it may be 1e-5 of the way that the parameters went, or what a last digit of the weights makes of
    it; under a mixed policy twice the larger distance of both from float32 (S21).

    Args:
        trial: which.
        own: what the replicas trained.
        one: `one(policy, nudge)` trains one device, from weights that are moved by that share.
        start: the initial arrays.
    """
    base = one(trial.policy, 0.0)
    apart = distance(own, base, start)
    if trial.policy == "float32":
        limit = 1e-5
        if apart > limit:
            limit = max(limit, 4 * distance(one("float32", 6e-8), base, start))
    else:
        exact = one("float32", 0.0)
        limit = max(1e-5, 2 * max(distance(own, exact, start), distance(base, exact, start)))
    return apart, [] if apart <= limit else [f"{apart:.2e} apart from one device, {limit:.2e} are allowed"]
