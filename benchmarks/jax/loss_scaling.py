"""Measures the loss-scaling part of a JAX step against the same written by hand with optax.

The part is unscale, norm, finite flag, clip, update and skip, compiled alone, from given gradients. Both versions run
in turn in one process. Beside the times stands what XLA's optimized program does with the gradients. Then polyamp's
part alone for more and more tensors, a tensor.

Run by hand and by `make bench`; it judges nothing and exits with 0. Half a minute on two CPU cores.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

import polyamp
from benchmarks.common import paired_timing, results
from benchmarks.common.results import Entry, Side
from benchmarks.jax import measure as jax_measure
from polyamp.results import Gradients
from polyamp_jax.step import accumulation, forward_backward
from polyamp_jax.step.update import update_states

RATE: Final = 0.1
CLIP: Final = 1.0
SETS: Final = {"200 of 32x32": (200, 32), "8 of 1024x1024": (8, 1024)}
COUNTS: Final = [200, 1000]
_ASKED: Final = 10_000
_SMALL: Final = 8


class Settings(NamedTuple):
    """Timed calls, and the policy's mode."""

    runs: int
    mode: str


class Program(NamedTuple):
    """What the optimized program does, per gradient where it says so.

    Attributes:
        passes: instructions that read a gradient or an array made of it alone.
        copies: arrays as large as a gradient that are made of it alone.
        fusions: fusions that the program calls.
        converts: conversions of dtype.
        megabytes: XLA's count of bytes accessed, in 10^6 bytes.
    """

    passes: float
    copies: float
    fusions: int
    converts: int
    megabytes: float


def initial(count: int, width: int, mode: Any) -> Any:
    """A float16 state of `count` square parameters."""
    recipe = polyamp.Recipe(
        policy=polyamp.Policy("mixed_float16", mode=mode), optimizer=polyamp.sgd(RATE), clip_norm=CLIP
    )
    keys = jax.random.split(jax.random.key(0), count)
    params = {f"w{i:03}": jax.random.normal(key, (width, width)) for i, key in enumerate(keys)}
    return polyamp.init((lambda params, x: x, params), recipe)


def ours(state: Any, scaled: Any) -> tuple[Any, Any]:
    """polyamp's part: (state, norm)."""
    gradients = accumulation.unscale_gradients(scaled, forward_backward.active_loss_scale(state), state.params)
    (state,), (result,) = update_states([state], [Gradients(gradients, state.running)], "all")
    return state, result.grad_norm


def by_hand(state: tuple[Any, Any, Any], scaled: Any) -> tuple[Any, Any]:
    """The usual hand-written part: (parameters, scale, good steps), norm."""
    params, scale, good = state
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, scaled)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))
    norm = optax.global_norm(gradients)
    factor = CLIP / jnp.maximum(norm, CLIP)
    params = jax.tree.map(lambda p, g: jnp.where(finite, p - RATE * (g * factor), p), params, gradients)
    good = jnp.where(finite, good + 1, 0)
    grown = jnp.where(good == 2000, scale * 2, scale)
    return (params, jnp.where(finite, grown, scale / 2), jnp.where(good == 2000, 0, good)), norm


def described(compiled: Any, scaled: Any) -> Program:
    """Reads the optimized program: which entry instructions depend on the gradients alone, and who reads those."""
    text = compiled.as_text()
    sizes = {leaf.size for leaf in jax.tree.leaves(scaled)}
    total = sum(leaf.size for leaf in jax.tree.leaves(scaled))
    lines = text[text.index("\nENTRY ") :].splitlines()[2:]
    count = len(jax.tree.leaves(scaled))
    first = max(int(n) for n in re.findall(r" parameter\((\d+)\)", "\n".join(lines))) + 1 - count  # they come last
    derived: set[str] = set()
    others: set[str] = set()
    passes = copies = 0
    for line in lines:
        match = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (?:(\w+)\[([\d,]*)\]\S*|\(.*?\)) ([\w-]+)\((.*)", line)
        if match is None:
            continue
        name, _, dimensions, opcode, rest = match.groups()
        operands = set(re.findall(r"[\w.-]+", rest.split(")")[0]))
        shape = [int(d) for d in dimensions.split(",")] if dimensions else []
        size = 1
        for dimension in shape:
            size *= dimension
        large = size in sizes or size == total
        if opcode == "parameter":
            (derived if int(rest.split(")")[0]) >= first else others).update({name} if large else ())
        elif opcode not in ("tuple", "bitcast", "get-tuple-element"):
            passes += len(operands & derived)
            if large and not operands & others:
                derived.add(name)
                copies += 1
    cost = compiled.cost_analysis()
    accessed = (cost[0] if isinstance(cost, list) else cost)["bytes accessed"]
    return Program(passes / count, copies / count, text.count(" fusion("), text.count(" convert("), accessed / 1e6)


def timed(step: Callable[..., Any], state: Any, scaled: Any) -> tuple[float, Any]:
    """(seconds of one call, its new state)."""
    start = time.perf_counter()
    state, norm = step(state, scaled)
    jax.block_until_ready((state, norm))
    return time.perf_counter() - start, state


class Version:
    """One version with its state; `compile_all` compiles it."""

    def __init__(self, part: Callable[..., Any], state: Any, scaled: Any) -> None:
        self.lowered = jax.jit(part, donate_argnums=0).lower(state, scaled)
        self.compiled: Any = None
        self.times: list[float] = []
        self._state = state
        self._scaled = scaled

    def __call__(self) -> None:
        seconds, self._state = timed(self.compiled, self._state, self._scaled)
        self.times.append(seconds)

    @property
    def program(self) -> Program:
        """Facts of what was compiled."""
        return described(self.compiled, self._scaled)


def compile_all(versions: Sequence[Version]) -> None:
    """Compile them, two at a time."""
    programs = jax_measure.compiled_together([version.lowered for version in versions])
    for version, program in zip(versions, programs, strict=True):
        version.compiled = program


def gradients(state: Any) -> Any:
    """Scaled gradients, in the dtypes in which those of the scaled loss come."""
    compute = forward_backward.compute_parameters(state)
    keys = jax.random.split(jax.random.key(0), len(compute))
    return {k: jax.random.normal(key, v.shape, v.dtype) for key, (k, v) in zip(keys, compute.items(), strict=True)}


def versions(count: int, width: int, mode: Any) -> dict[str, Version]:
    """Both versions of one set."""
    state = initial(count, width, mode)
    scaled = gradients(state)
    # a copy: each version donates its own state
    plain = (jax.tree.map(jnp.copy, state.params), jnp.float32(2.0**15), jnp.int32(0))
    both = {"polyamp": Version(ours, state, scaled), "by hand": Version(by_hand, plain, scaled)}
    compile_all(list(both.values()))
    return both


def measure(several: Sequence[Version], runs: int, warmup: int = 3) -> None:
    """Run them in turn; the warm-up is not kept."""
    for run in range(warmup + runs):
        for version in several if run % 2 else reversed(several):
            version()
    for version in several:
        del version.times[:warmup]


def growth(counts: Sequence[int], runs: int, mode: Any) -> list[Entry]:
    """polyamp's part for more and more tensors of 8x8, a tensor, against the fewest."""
    states = [initial(count, _SMALL, mode) for count in counts]
    several = [Version(ours, state, gradients(state)) for state in states]
    compile_all(several)
    measure(several, runs)
    each = [
        Side(f"{count:,} tensors", [seconds / count * 1e6 for seconds in version.times])
        for count, version in zip(counts, several, strict=True)
    ]
    return [
        Entry(
            section="growth",
            name=f"unscale, norm, clip, update and skip, {side.name}",
            unit="us a tensor",
            own=side,
            base=each[0],
            target=1.0,
            note=""
            if counts[-1] >= _ASKED
            else f"not {_ASKED:,}, which XLA does not compile in the time of a benchmark",
        )
        for side in each[1:]
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["autocast", "cast"], help="the policy's mode (default: the backend's)")
    parser.add_argument("--runs", type=int, default=51, help="timed calls of each version (default: %(default)s)")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="tensors (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a short run: everything works, the times mean little")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured, raw")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.counts = 5, [50, 100]
    environment = jax_measure.environment()
    settings = Settings(options.runs, options.mode or "default")
    print(results.heading(environment, settings._asdict()))
    entries = []
    for title, (count, width) in list(SETS.items())[: 1 if options.quick else None]:
        found = versions(count, width, options.mode)
        measure(list(found.values()), options.runs)
        print(f"\n{title}")
        for name, version in found.items():
            low, middle, high = statistics.quantiles([t * 1e3 for t in version.times], n=4)
            program = version.program
            print(f"  {name:8} {middle:7.2f} ms (quartiles {low:.2f} to {high:.2f})")
            print(
                f"           per gradient {program.passes:.2f} reads and {program.copies:.2f} copies;"
                f" {program.fusions} fusions, {program.converts} converts, {program.megabytes:.1f} MB"
            )
        own, base = (Side(name, version.times) for name, version in found.items())
        name = f"loss scaling alone, float16, {title}"
        entries.append(Entry(section="targets", name=name, unit="s", own=own, base=base))
    print()
    entries += growth(options.counts, options.runs, options.mode)
    paired_timing.finish(entries, environment, settings, __file__, options.json)


if __name__ == "__main__":
    main()
