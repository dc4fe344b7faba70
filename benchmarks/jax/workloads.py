"""polyamp's JAX step against the step that an expert writes by hand, for four workloads in three dtypes.

Both sides train the flax linen modules of `models` from the same weights on the same batch. By hand that is the
module in its 16-bit form, optax.adamw, dynamic loss scaling for float16, and one `jax.jit` with donation; polyamp gets
the module as float32 code and its default mode. The losses of the first steps are compared before anything is timed.
The rows, each `WORKLOAD, DTYPE[, clip|, accumulate N]`:

    workloads  time of a step
    memory     what XLA allocates for a step beside its arguments, as the compiler itself says: temporaries, and
               results that do not take the place of an argument
    growth     the MLP's batch in 1 and 16 micro-batches (with --slow also in 4): what polyamp adds to each

Every row costs two compilations, so a full run leaves some out, float32 beyond `mlp` among them, which --slow measures.
Run by hand and by `make bench`; it judges nothing and exits with 0. About two minutes on two CPU cores, most of it
compilation; `--quick` takes one row.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import optax

import polyamp
from benchmarks.common import paired_timing, results, workloads
from benchmarks.common.paired_timing import Row, Settings
from benchmarks.common.results import Entry, Side
from benchmarks.common.workloads import Workload
from benchmarks.jax import measure, models

_WEIGHT_DECAY: Final = 1e-2
_GROWTH_INTERVAL: Final = 2000
_ROW_SECONDS: Final = 2
_SLOW: Final = 0.01
"""Seconds of a step."""
_MIB: Final = 2.0**20


class Case(NamedTuple):
    """What a row trains, and how.

    Attributes:
        workload: the model and its data.
        dtype: of `workloads.DTYPES`.
        clip: whether gradients are clipped to `workloads.CLIP_NORM`.
        accumulate: micro-batches in a step; the batch is split into as many.
    """

    workload: Workload
    dtype: str
    clip: bool = False
    accumulate: int = 1

    @property
    def name(self) -> str:
        """Of its row."""
        accumulate = f", accumulate {self.accumulate}" if self.accumulate > 1 else ""
        return f"{self.workload.name}, {self.dtype}{', clip' if self.clip else ''}{accumulate}"

    @property
    def clip_norm(self) -> float | None:
        """The largest norm, or None."""
        return workloads.CLIP_NORM if self.clip else None


FULL: Final = [
    *(Case(workloads.MLP, dtype) for dtype in workloads.DTYPES),
    *(Case(workloads.BLOCK, dtype) for dtype in ("bfloat16", "float16")),
    Case(workloads.BLOCK, "float16", clip=True),
    *(Case(each, "bfloat16") for each in (workloads.GPT, workloads.RESNET)),
    Case(workloads.MLP, "bfloat16", accumulate=16),
]
SLOW: Final = [
    *(Case(each, "float32") for each in (workloads.BLOCK, workloads.GPT, workloads.RESNET)),
    *(Case(each, "float16") for each in (workloads.GPT, workloads.RESNET)),
    Case(workloads.MLP, "float16", clip=True),
    *(Case(each, "bfloat16", accumulate=4) for each in (workloads.MLP, workloads.BLOCK)),
]
"""Left out without `--slow`."""
QUICK: Final = [Case(workloads.MLP, "bfloat16")]


class Training:
    """A training under way: a step, the `jax.jit` function inside it, its next state, and the batch."""

    def __init__(
        self, step: Callable[[Any, Any], tuple[Any, Any]], jitted: Callable[[], Any], state: Any, batch: Any
    ) -> None:
        self._step = step
        self._jitted = jitted
        self._state = state
        self.batch = batch

    def __call__(self) -> Any:
        """One step, waited for; its loss."""
        self._state, loss = self._step(self._state, self.batch)
        jax.block_until_ready((self._state, loss))
        return loss

    def lowered(self) -> Any:
        """The step before its compilation."""
        return self._jitted().lower(self._state, self.batch)

    def allocated(self) -> float:
        """MiB that a step takes beside its arguments. JAX keeps what the step was compiled to, so nothing compiles."""
        memory = self.lowered().compile().memory_analysis()
        beside = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return float(memory.temp_size_in_bytes + beside) / _MIB


# --- by hand


class HandState(NamedTuple):
    """State of the handwritten step.

    Attributes:
        params: master weights, float32.
        statistics: flax's "batch_stats", or an empty dict.
        opt_state: AdamW's.
        scale: loss scale, float32 scalar; 1 where the dtype needs none.
        good_steps: finite steps since the scale last moved, int32 scalar.
    """

    params: Any
    statistics: Any
    opt_state: Any
    scale: jax.Array
    good_steps: jax.Array


def by_hand(case: Case, variables: Any, batch: Any) -> Training:
    """The step of an expert. Like polyamp's it casts the weights in the loss, so their gradients are float32."""
    module = models.model(case.workload, jnp.dtype(case.dtype))
    optimizer = optax.adamw(workloads.LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
    scaled = case.dtype == "float16"

    def scaled_loss(params: Any, statistics: Any, scale: Any, batch: Any) -> tuple[Any, Any]:
        inputs, targets = batch
        variables = {"params": params, "batch_stats": statistics}
        outputs, changed = module.apply(variables, inputs, mutable=["batch_stats"])
        loss = _loss(case.workload, outputs.astype(jnp.float32), targets)
        return (loss * scale if scaled else loss), (loss, changed.get("batch_stats", {}))

    gradients_of = jax.grad(scaled_loss, has_aux=True)

    def gradients(state: HandState, batch: Any) -> tuple[Any, Any, Any]:
        if case.accumulate == 1:
            grads, (loss, statistics) = gradients_of(state.params, state.statistics, state.scale, batch)
            return grads, loss, statistics

        def one(carry: tuple[Any, Any], part: Any) -> tuple[tuple[Any, Any], Any]:
            statistics, total = carry
            grads, (loss, statistics) = gradients_of(state.params, statistics, state.scale, part)
            return (statistics, jax.tree.map(jnp.add, total, grads)), loss

        parts = jax.tree.map(lambda leaf: leaf.reshape(case.accumulate, -1, *leaf.shape[1:]), batch)
        start = (state.statistics, jax.tree.map(jnp.zeros_like, state.params))
        (statistics, total), losses = jax.lax.scan(one, start, parts)
        return jax.tree.map(lambda g: g / case.accumulate, total), losses.mean(), statistics

    def step(state: HandState, batch: Any) -> tuple[HandState, Any]:
        grads, loss, statistics = gradients(state, batch)
        if scaled:
            grads = jax.tree.map(lambda g: g / state.scale, grads)
        if scaled or case.clip:
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        if case.clip:
            factor = workloads.CLIP_NORM / jnp.maximum(norm, workloads.CLIP_NORM)
            grads = jax.tree.map(lambda g: g * factor, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), statistics, opt_state)
        if not scaled:
            return HandState(*new, state.scale, state.good_steps), loss
        finite = jnp.isfinite(norm)
        new = jax.tree.map(functools.partial(jnp.where, finite), new, tuple(state[:3]))
        grow = state.good_steps + 1 == _GROWTH_INTERVAL
        scale = jnp.where(finite, jnp.where(grow, state.scale * 2, state.scale), state.scale / 2)
        return HandState(*new, scale, jnp.where(finite & ~grow, state.good_steps + 1, 0)), loss

    params = jax.tree.map(jnp.copy, variables["params"])
    statistics = jax.tree.map(jnp.copy, variables.get("batch_stats", {}))
    scale = jnp.float32(workloads.INIT_SCALE if scaled else 1.0)
    state = HandState(params, statistics, optimizer.init(params), scale, jnp.int32(0))
    jitted = jax.jit(step, donate_argnums=0)
    return Training(jitted, lambda: jitted, state, batch)


def _loss(workload: Workload, outputs: Any, targets: Any) -> Any:
    if workload.vocabulary:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()
    return jnp.mean(jnp.square(outputs - targets))


# --- polyamp


def loss_fn(model: Any, batch: Any) -> Any:
    """The loss as a polyamp user writes it, for all four."""
    inputs, targets = batch
    if jnp.issubdtype(targets.dtype, jnp.integer):
        return polyamp.losses.softmax_cross_entropy(model(inputs), targets)
    return polyamp.losses.mean_squared_error(model(inputs), targets)


def library(case: Case, variables: Any, batch: Any) -> Training:
    """polyamp's step."""
    recipe = polyamp.Recipe(
        policy=workloads.DTYPES[case.dtype],
        scaler=polyamp.LossScaler(init_scale=workloads.INIT_SCALE) if case.dtype == "float16" else None,
        optimizer=polyamp.adamw(workloads.LEARNING_RATE, weight_decay=_WEIGHT_DECAY),
        clip_norm=case.clip_norm,
        accumulate_steps=case.accumulate,
    )
    state = polyamp.init((models.model(case.workload), variables), recipe)
    train = measure.train_step(loss_fn, recipe)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        state, result = train(state, batch)
        return state, result.loss

    return Training(step, lambda: train._run["jax"], state, batch)


# --- comparing


def left_out(case: Case) -> Entry:
    """What the table says of a slow case."""
    note = "left out: XLA needs about 10 s to compile both sides; --slow measures it"
    return Entry(
        section="workloads", name=case.name, unit="s", own=Side("polyamp", []), base=Side("by hand", []), note=note
    )


def compared(case: Case, settings: Settings) -> tuple[Entry, Entry]:
    """A case's step time and memory."""
    variables, batch = models.variables(case.workload), jax.tree.map(jnp.asarray, workloads.data(case.workload))
    base, own = by_hand(case, variables, batch), library(case, variables, batch)
    measure.compiled_together([base.lowered(), own.lowered()])
    curves = [[float(side()) for _ in range(workloads.CHECKED_STEPS)] for side in (base, own)]
    distance = paired_timing.distance(*curves)
    note = "" if distance <= workloads.TOLERANCE[case.dtype] else f"other numerics: losses {curves[1]} and {curves[0]}"
    row = Row(case.name, None, ("by hand", base), ("polyamp", own), section="workloads", note=note)
    found = paired_timing.measure(row, _fitting(settings, base))
    memory = Entry(
        section="memory",
        name=case.name,
        unit="MiB",
        own=Side("polyamp", [own.allocated()]),
        base=Side("by hand", [base.allocated()]),
    )
    return paired_timing.entry(row, found, distance=distance), memory


def _fitting(settings: Settings, step: Training) -> Settings:
    """The settings for a step of this length: a slow one needs no repetition within a round, but more time."""
    begin = time.perf_counter()
    step()
    if time.perf_counter() - begin < _SLOW:
        return settings
    return settings._replace(steps=1, warmup=1, seconds=2 * settings.seconds)


def growth(entry: Entry, case: Case) -> Entry:
    """What polyamp adds to a micro-batch, from the entry of a case."""
    assert entry.base is not None
    beyond = [one - other for one, other in zip(entry.own.values, entry.base.values, strict=True)]
    size = case.workload.batch // case.accumulate
    low, middle, high = (one / case.accumulate * 1e6 for one in statistics.quantiles(beyond, n=4))
    return msgspec.structs.replace(
        entry,
        section="growth",
        name=f"mlp, bfloat16, {case.accumulate} micro-batch{'es' if case.accumulate > 1 else ''} of {size}",
        note=f"polyamp adds {middle:.0f} us ({low:.0f}..{high:.0f}) to a micro-batch",
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="rows whose names begin so")
    parser.add_argument("--slow", action="store_true", help="also the rows that a full run leaves out for their time")
    arguments, settings = paired_timing.parse(parser, seconds=_ROW_SECONDS)
    environment = measure.environment()
    print(results.heading(environment, settings._asdict()) + "\n", flush=True)
    entries: list[Entry] = []
    for case in QUICK if arguments.quick else FULL + SLOW:
        if arguments.only is not None and not case.name.startswith(tuple(arguments.only)):
            continue
        if case in SLOW and not arguments.slow:
            entries.append(left_out(case))
            continue
        time_, memory = compared(case, settings)
        entries += [time_, memory]
        if case._replace(accumulate=1) == Case(workloads.MLP, "bfloat16"):
            entries.append(growth(time_, case))
        jax.clear_caches()  # or the programs of all rows would stay in memory
    paired_timing.finish(entries, environment, settings, __file__, arguments.json)


if __name__ == "__main__":
    main()
