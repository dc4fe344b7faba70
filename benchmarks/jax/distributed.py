"""polyamp's JAX step on several devices against the same by hand: `jax.jit`, optax, `NamedSharding`, a loss scale.

    replicated     parameters on every device, the batch sharded
    sharded        parameters and moments sharded over their first axis that their number divides, the batch too
    added          collectives in polyamp's compiled program beyond those in that by hand; with `--count`, these alone

The model is the two-layer transformer of `transformer`, clipped, with AdamW and dynamic loss scaling in every dtype.
The devices are forced ones of the CPU, which share its cores. Run by `bench.py`; it judges nothing. About a minute and
a half on two CPU cores. `--devices 64 --count` compiles for 64 and runs nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import polyamp
from benchmarks.common import paired_timing, results, workloads
from benchmarks.common.paired_timing import Row, Settings, Step
from benchmarks.common.results import Entry, Side
from benchmarks.jax import measure, transformer

TARGET: Final = 1.02
AXIS: Final = "replica"
KINDS: Final = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
COLLECTIVE: Final = re.compile(rf"= .*? ({'|'.join(KINDS)})(?:-start)?\(")


class Case(NamedTuple):
    """How the model is trained."""

    placement: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.placement}, {jax.device_count()} devices, {self.dtype}, clip"


CASES: Final = [Case(placement, dtype) for placement in ("replicated", "sharded") for dtype in workloads.DTYPES]
QUICK: Final = [Case("sharded", "float16")]


class Made(NamedTuple):
    """A side of a comparison: its compiled step, a fresh state, the batch, and how to read a loss."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batch: Any
    loss: Callable[[Any], Any]
    text: str


def mesh() -> Mesh:
    """All devices, one axis."""
    return Mesh(np.asarray(jax.devices()), (AXIS,))


def placed(tree: Any, placement: str) -> Any:
    """The arrays of a tree on the mesh."""

    def put(array: Any) -> Any:
        axes = (
            [axis for axis, size in enumerate(array.shape) if size % jax.device_count() == 0]
            if placement == "sharded"
            else []
        )
        spec = PartitionSpec(*([None] * axes[0]), AXIS) if axes else PartitionSpec()
        return jax.device_put(jnp.array(array), NamedSharding(mesh(), spec))  # a copy: each side donates its own

    return jax.tree.map(put, tree)


def batch() -> Any:
    """One batch, sharded by rows; repeated where it has fewer rows than there are devices."""
    times = -(-jax.device_count() // transformer.BATCH)
    given = jax.tree.map(lambda array: jnp.tile(array, (times, 1)), transformer.batches(1)[0])
    return jax.device_put(given, NamedSharding(mesh(), PartitionSpec(AXIS)))


def by_hand(case: Case) -> Made:
    """The handwritten step, which says how its state lies."""
    optimizer = transformer.optax_adamw()
    compute = jnp.dtype(case.dtype)
    state = transformer.handwritten_state(transformer.initial_variables(), optimizer, compute=compute)
    state = placed(state, case.placement)
    plain = transformer.handwritten_step(optimizer, compute=compute, residual=jnp.float32)
    shardings = jax.tree.map(lambda array: array.sharding, state)
    step = jax.jit(lambda state, batch: plain(state, batch), donate_argnums=0, out_shardings=(shardings, None))
    compiled = step.lower(state, batch()).compile()
    return Made(step, state, batch(), lambda output: output[0], compiled.as_text())


def with_polyamp(case: Case) -> Made:
    """polyamp's step."""
    recipe = polyamp.Recipe(
        policy=workloads.DTYPES[case.dtype],
        scaler=polyamp.LossScaler(
            init_scale=transformer.INITIAL_SCALE,
            growth_interval=transformer.GROWTH_INTERVAL,
            min_scale=transformer.MIN_SCALE,
            max_scale=transformer.MAX_SCALE,
        ),
        optimizer=polyamp.adamw(
            transformer.LEARNING_RATE,
            betas=(transformer.BETA1, transformer.BETA2),
            eps=transformer.ADAM_EPSILON,
            weight_decay=transformer.WEIGHT_DECAY,
        ),
        clip_norm=transformer.CLIP_NORM,
    )
    variables = placed(transformer.initial_variables(), case.placement)
    state = polyamp.init((transformer.Transformer(), variables), recipe)
    step = measure.train_step(loss_fn, recipe)
    compiled = step._run["jax"].lower(state, batch()).compile()
    return Made(step, state, batch(), lambda result: result.loss, compiled.as_text())


def loss_fn(model: Any, batch: Any) -> Any:
    """The loss as a polyamp user writes it."""
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def closed(side: Made) -> Step:
    """One step after the other; returns the loss."""
    state = side.state

    def run() -> Any:
        nonlocal state
        state, output = side.step(state, side.batch)
        jax.block_until_ready(state)
        return side.loss(output)

    return run


def collectives(text: str) -> dict[str, int]:
    """Kind -> how many a compiled program has."""
    found: dict[str, int] = {}
    for kind in COLLECTIVE.findall(text):
        found[kind] = found.get(kind, 0) + 1
    return dict(sorted(found.items()))


def compared(case: Case, settings: Settings, *, counted: bool) -> Iterator[Entry]:
    """The times of a case, and what its programs send."""
    sides = by_hand(case), with_polyamp(case)
    if not counted:
        base, own = (closed(side) for side in sides)
        curves = [[float(step()) for _ in range(workloads.CHECKED_STEPS)] for step in (base, own)]
        row = Row(str(case), TARGET, ("by hand", base), ("polyamp", own), section="replicas")
        yield paired_timing.entry(row, paired_timing.measure(row, settings), distance=paired_timing.distance(*curves))
    counts = [collectives(side.text) for side in sides]
    kinds = [", ".join(f"{number} {kind}" for kind, number in each.items()) or "none" for each in counts]
    yield Entry(
        section="replicas",
        name=f"collectives added, {case}",
        unit="",
        own=Side("polyamp", [float(sum(counts[1].values()) - sum(counts[0].values()))]),
        target=1.0,
        note=f"by hand {kinds[0]}; polyamp {kinds[1]}",
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="ROW", help="rows whose name starts so")
    parser.add_argument("--devices", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--count", action="store_true", help="compile and count collectives, run nothing")
    arguments, settings = paired_timing.parse(parser, steps=1, warmup=3, rounds=101, seconds=8)
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    environment = measure.environment()
    print(results.heading(environment, settings._asdict()) + "\n", flush=True)
    wanted = tuple(arguments.only)
    entries: list[Entry] = []
    for case in QUICK if arguments.quick else CASES:
        if not wanted or str(case).startswith(wanted):
            entries += compared(case, settings, counted=arguments.count)
    paired_timing.finish(entries, environment, settings, __file__, arguments.json)


if __name__ == "__main__":
    main()
