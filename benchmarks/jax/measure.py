"""Measurements of several jitted training steps against each other, in one process: every JAX benchmark's, in part.

Machines are noisy, so times are compared within a round, in which every variant runs once; what counts is the median
of the rounds' ratios, with their spread. `report` is one table with a column for each variant and the facts of its
compiled program; `entry` and `compile_entry` are two of the columns as `results` has them.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import numpy as np

import polyamp
from benchmarks.common import paired_timing, results
from benchmarks.common.results import Entry, Side
from polyamp.contract import registry

_THREADS: Final = 2
_CONVERT: Final = re.compile(r"\bconvert\(")
_LOWERED_CONVERT: Final = re.compile(r"stablehlo\.convert .* -> ")  # one that changes nothing is printed without arrow
_INSTRUCTION: Final = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = ", re.MULTILINE)
_DOT: Final = re.compile(r"stablehlo\.dot_general .*-> tensor<(?:\d+x)*(\w+)>")
_HALF: Final = re.compile(r"stablehlo\.(add|subtract|multiply|divide|exponential|rsqrt)\b.* : tensor<(?:\d+x)*b?f16>")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train the model.

    Attributes:
        name: heading of its column.
        state: makes a fresh state from the shared initial weights.
        step: makes what a user calls: `state, output = step(state, batch)`.
        read: (loss, applied) of an output, as scalars; never timed.
        jitted: makes a fresh `jax.jit` function like that inside `step`, to be compiled; the default is `step` itself.
        inside: the `jax.jit` function inside a step that has run; the default is the step itself.
        compiles: how often its trace + compile is timed at most; None for as often as the settings say.
    """

    name: str
    state: Callable[[], Any]
    step: Callable[[], Callable[[Any, Any], tuple[Any, Any]]]
    read: Callable[[Any], tuple[Any, Any]]
    jitted: Callable[[], Any] | None = None
    inside: Callable[[Any], Any] = lambda step: step
    compiles: int | None = 1


class Settings(NamedTuple):
    """How long to measure.

    Attributes:
        rounds: rounds of step times.
        steps: steps of each variant in a round.
        compiles: repetitions of trace + compile, at most; 0 for none at all.
        curve: steps of the loss curve.
    """

    rounds: int = 25
    steps: int = 3
    compiles: int = 3
    curve: int = 10


FULL: Final = Settings()
QUICK: Final = Settings(rounds=2, steps=1, compiles=0, curve=3)


class Curve(NamedTuple):
    """Losses of the first steps from the initial weights, and how many of those steps were skipped."""

    losses: list[float]
    skipped: int


class Program(NamedTuple):
    """What the compiler made of a step.

    Attributes:
        converts: `convert` instructions in the optimized HLO, those inside fusions included.
        instructions: all instructions in the optimized HLO.
        lowered_converts: `convert` operations in the StableHLO that change the dtype; a function that is called twice
            counts once.
        dots: output dtype -> matrix products in the StableHLO. This is what tells that two variants compute alike.
        bytes_accessed: XLA's estimate of bytes read and written, or None.
        temporary_bytes: memory for intermediate results, or None.
    """

    converts: int
    instructions: int
    lowered_converts: int
    dots: dict[str, int]
    half_arithmetic: dict[str, int]
    bytes_accessed: float | None
    temporary_bytes: int | None


class Compile(NamedTuple):
    """Seconds of one trace (Python to StableHLO) and one compilation (StableHLO to machine code)."""

    trace: float
    compile: float

    @property
    def total(self) -> float:
        """Both."""
        return self.trace + self.compile


class Measured(NamedTuple):
    """Everything that was measured, by variant name; lists have one entry per round or repetition; the warm steps.

    `compiles` is empty until `compile_times` fills it: that empties JAX's caches, so it comes last.
    """

    steps: dict[str, Callable[[Any, Any], tuple[Any, Any]]]
    curves: dict[str, Curve]
    step_seconds: dict[str, list[float]]
    programs: dict[str, Program]
    compiles: dict[str, list[Compile]]


def measure(variants: Sequence[Variant], batches: Sequence[Any], settings: Settings) -> Measured:
    """All measurements but those of the compiler. `batches` are at least `settings.curve` many."""
    jax.config.update("jax_enable_compilation_cache", False)
    steps = {variant.name: variant.step() for variant in variants}
    lowered = [variant.inside(steps[variant.name]).lower(variant.state(), batches[0]) for variant in variants]
    facts = [program(*both) for both in zip(lowered, compiled_together(lowered), strict=True)]
    programs = {variant.name: fact for variant, fact in zip(variants, facts, strict=True)}
    curves = {v.name: curve(v, steps[v.name], batches[: settings.curve]) for v in variants}
    return Measured(steps, curves, step_times(variants, steps, batches, settings), programs, {})


def compiled_together(lowered: Sequence[Any]) -> list[Any]:
    """Compile several lowered `jax.jit` functions on two threads. JAX keeps what it compiled: calls find it."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda one: one.compile(), lowered))


def train_step(loss_fn: Callable[[Any, Any], Any], recipe: polyamp.Recipe) -> Any:
    """`polyamp.train_step` whose `jax.jit` function exists before the first call, so that it can be compiled."""
    step = polyamp.train_step(loss_fn, recipe)
    step._run["jax"] = registry.get("jax").train_step(loss_fn, recipe)
    return step


def curve(variant: Variant, step: Callable[[Any, Any], tuple[Any, Any]], batches: Sequence[Any]) -> Curve:
    """The loss curve over `batches`, one step each."""
    state, found = variant.state(), []
    for batch in batches:
        state, output = step(state, batch)
        found.append(variant.read(output))
    return Curve([float(loss) for loss, _ in found], sum(not bool(applied) for _, applied in found))


def step_times(
    variants: Sequence[Variant], steps: dict[str, Any], batches: Sequence[Any], settings: Settings
) -> dict[str, list[float]]:
    """Seconds a step, one entry per round. `steps` are warm; within a round the variants take turns, in changing order.

    The variants advance over the same batches in step, so that they compute on numbers alike (subnormal numbers are
    slow on some CPUs).
    """
    states = {variant.name: variant.state() for variant in variants}
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(settings.rounds):
        start = number * settings.steps
        chosen = [batches[index % len(batches)] for index in range(start, start + settings.steps)]
        for variant in _shuffled(variants, number):
            state, step = states[variant.name], steps[variant.name]
            begin = time.perf_counter()
            for batch in chosen:
                state, _ = step(state, batch)
            jax.block_until_ready(state)
            times[variant.name].append((time.perf_counter() - begin) / settings.steps)
            states[variant.name] = state
    return times


def compile_times(variants: Sequence[Variant], batch: Any, settings: Settings) -> dict[str, list[Compile]]:
    """Trace and compile times of fresh steps with JAX's caches empty, in turns."""
    states = {variant.name: variant.state() for variant in variants}
    times: dict[str, list[Compile]] = {variant.name: [] for variant in variants}
    for number in range(settings.compiles):
        for variant in _shuffled([v for v in variants if v.compiles is None or number < v.compiles], number):
            jitted: Any = (variant.jitted or variant.step)()
            jax.clear_caches()
            gc.collect()  # not in the middle of what is timed
            begin = time.perf_counter()
            lowered = jitted.lower(states[variant.name], batch)
            middle = time.perf_counter()
            lowered.compile()
            end = time.perf_counter()
            times[variant.name].append(Compile(middle - begin, end - middle))
    return times


def program(lowered: Any, compiled: Any) -> Program:
    """The facts of `Program` from `jax.jit(f).lower(...)` and its `.compile()`."""
    optimized, portable = compiled.as_text(), lowered.as_text()
    dots: dict[str, int] = {}
    for dtype in _DOT.findall(portable):
        dots[dtype] = dots.get(dtype, 0) + 1
    half: dict[str, int] = {}
    for operation in _HALF.findall(portable):
        half[operation] = half.get(operation, 0) + 1
    cost, memory = compiled.cost_analysis() or {}, compiled.memory_analysis()
    return Program(
        converts=len(_CONVERT.findall(optimized)),
        instructions=len(_INSTRUCTION.findall(optimized)),
        lowered_converts=len(_LOWERED_CONVERT.findall(portable)),
        dots=dots,
        half_arithmetic=half,
        bytes_accessed=cost.get("bytes accessed"),
        temporary_bytes=getattr(memory, "temp_size_in_bytes", None),
    )


def _shuffled(variants: Sequence[Variant], number: int) -> list[Variant]:
    """Another order every round, so that no variant always follows the same one; the same orders in every run."""
    return [variants[index] for index in np.random.default_rng(number).permutation(len(variants))]


# --- the report


def report(found: Measured, *, reference: str, bases: Sequence[str]) -> str:
    """One plain-text table: a row per measure, a column per variant.

    Args:
        found: what `measure` returned.
        reference: the float32 variant, or one of the bases if there is none.
        bases: the variants to give ratios against; the targets apply to the first.
    """
    names = list(found.curves)
    programs, compiles = found.programs, found.compiles
    seconds = {name: [one.total for one in each] for name, each in compiles.items()}
    rows: list[tuple[str, str, list[str]]] = []

    def row(title: str, cell: Callable[[str], str], target: str = "") -> None:
        rows.append((title, target, [cell(name) for name in names]))

    def step_ratio(base: str, name: str) -> str:
        return str(results.ratio(found.step_seconds[name], found.step_seconds[base]))

    def apart(base: str, name: str) -> str:
        return f"{paired_timing.distance(curves[base], curves[name]):.1e}"

    row("step, ms (median)", lambda n: f"{statistics.median(found.step_seconds[n]) * 1e3:.2f}")
    for base in bases:
        first = base == bases[0]
        row(
            f"  / {base} (quartiles)",
            functools.partial(step_ratio, base),
            "<= 1.02" if first else "",
        )
    fastest = {name: min(each) for name, each in found.step_seconds.items()}
    row(f"  fastest / fastest {bases[0]}", lambda n: f"{fastest[n] / fastest[bases[0]]:.3f}")
    if any(compiles.values()):
        row("trace, s (median)", lambda n: _median([one.trace for one in compiles[n]]))
        row("compile, s (median)", lambda n: _median([one.compile for one in compiles[n]]))
        row(
            f"  sum / {bases[0]}",
            lambda n: str(results.ratio(seconds[n], seconds[bases[0]])) if seconds[n] else "",
            "<= 1.25",
        )
    row("converts, optimized HLO", lambda n: str(programs[n].converts), f"<= {programs[bases[0]].converts}")
    row("converts, StableHLO", lambda n: str(programs[n].lowered_converts))
    row("instructions, optimized HLO", lambda n: str(programs[n].instructions))
    row("dots, StableHLO", lambda n: " ".join(f"{count} {d}" for d, count in sorted(programs[n].dots.items())))
    row(
        "16-bit arithmetic, StableHLO",
        lambda n: " ".join(f"{count} {o[:3]}" for o, count in sorted(programs[n].half_arithmetic.items())) or "none",
    )
    row("bytes accessed, MB", lambda n: _mega(programs[n].bytes_accessed))
    row("temporary memory, MB", lambda n: _mega(programs[n].temporary_bytes))
    curves = {name: curve.losses for name, curve in found.curves.items()}
    row("first loss", lambda n: f"{curves[n][0]:.5f}")
    row(f"loss at step {len(curves[names[0]])}", lambda n: f"{curves[n][-1]:.5f}")
    row("skipped steps", lambda n: str(found.curves[n].skipped))
    row(
        f"curve's distance from {bases[0]}",
        lambda n: f"{paired_timing.distance(curves[bases[0]], curves[n]):.1e}",
        "" if reference in bases else f"<= {paired_timing.distance(curves[reference], curves[bases[0]]):.1e}",
    )
    for base in bases[1:]:
        row(f"curve's distance from {base}", functools.partial(apart, base))
    if reference not in bases:
        row(
            f"curve's distance from {reference}",
            lambda n: f"{paired_timing.distance(curves[reference], curves[n]):.1e}",
        )
    return _table(["", *names, "target"], [[title, *cells, target] for title, target, cells in rows])


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f}" if seconds else ""


def _mega(count: float | None) -> str:
    return "?" if count is None else f"{count / 1e6:.1f}"


def _table(heading: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[place]) for row in [heading, *rows]) for place in range(len(heading))]
    lines = [heading, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


# --- two columns as entries


def entry(found: Measured, name: str, *, base: str, own: str, section: str = "targets", **facts: Any) -> Entry:
    """The step times of two columns, and how far their loss curves are apart; `facts` are fields of the entry."""
    return Entry(
        section=section,
        name=name,
        unit="s",
        own=Side(own, found.step_seconds[own]),
        base=Side(base, found.step_seconds[base]),
        distance=paired_timing.distance(found.curves[base].losses, found.curves[own].losses),
        **facts,
    )


def compile_entry(found: Measured, name: str, *, base: str, own: str, **facts: Any) -> Entry:
    """The times of trace + compile of two columns."""
    totals = {side: [one.total for one in found.compiles[side]] for side in (base, own)}
    return Entry(
        section="targets", name=name, unit="s", own=Side(own, totals[own]), base=Side(base, totals[base]), **facts
    )


def computed(program: Program) -> str:
    """In words, what a program computes in which dtype, as far as `Program` counts it."""
    dots = [f"{count} products in {dtype}" for dtype, count in sorted(program.dots.items())]
    half = [f"{count} {name}" for name, count in sorted(program.half_arithmetic.items())]
    return f"{' and '.join(dots)}, else in 16 bits {', '.join(half) or 'nothing'}"


# --- the command line


def parse(
    parser: argparse.ArgumentParser, *, default: Settings = FULL, quick: Settings = QUICK
) -> tuple[argparse.Namespace, Settings]:
    """The arguments, those that the benchmarks share added, and the settings that they ask for."""
    parser.add_argument("--quick", action="store_true", help="a short run: everything works, the times mean little")
    for name, help_ in (
        ("rounds", "rounds of step times"),
        ("steps", "steps of each variant in a round"),
        ("compiles", "counted repetitions of trace + compile"),
        ("curve", "steps of the loss curve"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{help_} (default: {getattr(default, name)})")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured, raw")
    arguments = parser.parse_args()
    given = {name: value for name in Settings._fields if (value := getattr(arguments, name)) is not None}
    return arguments, (quick if arguments.quick else default)._replace(**given)


def environment() -> dict[str, Any]:
    """Machine, versions and device."""
    import flax
    import optax

    device = jax.devices()[0]
    versions = {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__}
    return {**results.machine(), **versions, "platform": device.platform, "device": device.device_kind}
