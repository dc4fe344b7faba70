"""Measures the loss-scaling part of a JAX step against the same written by hand with optax; by hand: run this file.

The part is unscale, norm, finite flag, clip, update and skip, compiled alone, from given gradients. Both versions run
in turn in one process. Beside the times stands what XLA's optimized program does with the gradients.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

import polyamp
from polyamp.backend import Gradients
from polyamp_jax import step as steps

RATE: Final = 0.1
CLIP: Final = 1.0
SETS: Final = {"200 of 32x32": (200, 32), "8 of 1024x1024": (8, 1024)}


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
    gradients = steps._unscaled(scaled, steps._scale(state), state.params)
    (state,), (result,) = steps.applied([state], [Gradients(gradients, state.running)], "all")
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
    norm.block_until_ready()
    for leaf in jax.tree.leaves(state):
        leaf.block_until_ready()
    return time.perf_counter() - start, state


def measure(count: int, width: int, mode: Any, runs: int) -> dict[str, tuple[Program, list[float]]]:
    """Version -> what its program does, and times in seconds."""
    state = initial(count, width, mode)
    compute = steps._compute(state)  # the gradients of the scaled loss come in these dtypes
    scaled = {k: jax.random.normal(jax.random.key(i), v.shape, v.dtype) for i, (k, v) in enumerate(compute.items())}
    # a copy: each version donates its own state
    plain = (jax.tree.map(jnp.copy, state.params), jnp.float32(2.0**15), jnp.int32(0))
    starts: dict[str, tuple[Any, Any]] = {"polyamp": (ours, state), "by hand": (by_hand, plain)}
    compiled = {k: jax.jit(f, donate_argnums=0).lower(s, scaled).compile() for k, (f, s) in starts.items()}
    states = {k: s for k, (_, s) in starts.items()}
    times: dict[str, list[float]] = {k: [] for k in starts}
    for run in range(runs + 3):
        for k, step in compiled.items():
            seconds, states[k] = timed(step, states[k], scaled)
            if run >= 3:
                times[k].append(seconds)
    return {k: (described(compiled[k], scaled), times[k]) for k in starts}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["autocast", "cast"], help="the policy's mode (default: the backend's)")
    parser.add_argument("--runs", type=int, default=51, help="timed calls of each version (default: %(default)s)")
    options = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.default_backend()}, float16, mode {options.mode or 'default'}")
    for title, (count, width) in SETS.items():
        found = measure(count, width, options.mode, options.runs)
        print(f"\n{title}")
        for version, (program, times) in found.items():
            low, middle, high = statistics.quantiles([t * 1e3 for t in times], n=4)
            print(f"  {version:8} {middle:7.2f} ms (quartiles {low:.2f} to {high:.2f})")
            print(
                f"           per gradient {program.passes:.2f} reads and {program.copies:.2f} copies;"
                f" {program.fusions} fusions, {program.converts} converts, {program.megabytes:.1f} MB"
            )
        ratios = [a / b for a, b in zip(found["polyamp"][1], found["by hand"][1], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        ratio = statistics.median(found["polyamp"][1]) / statistics.median(found["by hand"][1])
        print(f"  ratio of medians {ratio:.2f} (quartiles of the paired ratios {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
