"""Four workloads trained with polyamp and by hand in Keras: time, peak memory, and overhead as micro-batches grow.

By hand is a custom loop in one `tf.function`: Keras's own dtype policy on the layers, `keras.optimizers.AdamW`, and
Keras's `LossScaleOptimizer` for float16; polyamp is `polyamp.init` and `polyamp.train_step` with `polyamp.adamw`. The
same weights and data; the losses of the first steps are compared before either is timed. float16 runs under XLA on both
sides, as polyamp chooses by itself on a CPU; float32 and bfloat16 outside of it. The rows:

    workloads   mlp, block, gpt and resnet in each dtype; mlp and block with clipping, and with four micro-batches;
                some only with --slow, as TensorFlow traces and compiles them for long
    memory      what a warm step takes at its peak, above what was held before it
    growth      an mlp of 20 layers in bfloat16 with 1, (4 with --slow) and 16 micro-batches: what polyamp's step takes
                over the handwritten one; with --slow also the mlp's own 100 layers

Run by hand and by `bench.py`; it judges nothing and always exits with 0. About two minutes on two CPU cores, most of
which TensorFlow traces and compiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import keras
import tensorflow as tf

import polyamp
from benchmarks.common import paired_timing, results, workloads
from benchmarks.common.paired_timing import Found, Row, Settings, Step
from benchmarks.common.results import Entry, Side
from benchmarks.common.workloads import Workload
from benchmarks.tensorflow import measure, models

PACE: Final = {"seconds": 2, "steps": 1, "warmup": 1}
"""Settings of a row: a step takes 2 to 200 ms, and is warm when it has been checked."""
WEIGHT_DECAY: Final = 0.01
SHALLOW: Final = workloads.MLP._replace(layers=20)
"""Traced in seconds with micro-batches, where the mlp takes half a minute."""


class Case(NamedTuple):
    """One workload trained in one way."""

    workload: Workload
    dtype: str
    clip: bool = False
    accumulate: int = 1

    @property
    def name(self) -> str:
        """As in the tables."""
        depth = f" of {SHALLOW.layers} layers" * (self.workload == SHALLOW)
        variants = [", clip"] * self.clip + [f", accumulate {self.accumulate}"] * (self.accumulate > 1)
        return f"{self.workload.name}{depth}, {self.dtype}{''.join(variants)}"

    @property
    def clip_norm(self) -> float | None:
        """Of the recipe, and of Keras's optimizer."""
        return workloads.CLIP_NORM if self.clip else None

    @property
    def narrow(self) -> bool:
        """Whether losses are scaled, and XLA compiles."""
        return self.dtype == "float16"


def cases() -> Iterator[Case]:
    """All of them; the growth of overhead is read from those of the two mlps in bfloat16."""
    for workload in workloads.ALL:
        for dtype in workloads.DTYPES:
            yield Case(workload, dtype)
            if workload in (workloads.MLP, workloads.BLOCK) and dtype != "float32":
                yield Case(workload, dtype, clip=True)
            if workload in (workloads.MLP, workloads.BLOCK) and dtype == "bfloat16":
                yield Case(workload, dtype, accumulate=4)
    yield Case(workloads.MLP, "bfloat16", accumulate=16)
    for count in workloads.ACCUMULATE:
        yield Case(SHALLOW, "bfloat16", accumulate=count)


SLOW: Final = {
    Case(workloads.MLP, "float32"): 15,
    Case(workloads.MLP, "bfloat16", clip=True): 20,
    Case(workloads.MLP, "bfloat16", accumulate=4): 20,
    Case(workloads.MLP, "bfloat16", accumulate=16): 30,
    Case(workloads.MLP, "float16"): 50,
    Case(workloads.MLP, "float16", clip=True): 50,
    Case(workloads.BLOCK, "float16", clip=True): 10,
    Case(workloads.GPT, "float16"): 12,
    Case(workloads.RESNET, "float16"): 12,
    Case(SHALLOW, "bfloat16", accumulate=4): 5,
}
"""Left out without `--slow` -> about how many seconds TensorFlow traces and compiles both sides."""
QUICK: Final = (Case(workloads.BLOCK, "bfloat16"), Case(workloads.BLOCK, "bfloat16", accumulate=4))


def left_out(case: Case) -> Entry:
    """What the table says of a slow case."""
    note = f"left out: TensorFlow needs about {SLOW[case]} s to trace and compile both sides; --slow measures it"
    return Entry(
        section="workloads", name=case.name, unit="s", base=Side("by hand", []), own=Side("polyamp", []), note=note
    )


def by_hand(case: Case) -> Step:
    """The step as Keras's guides write it, in one `tf.function`."""
    with models.keras_policy(workloads.DTYPES[case.dtype]):
        model = models.model(case.workload)
    optimizer: Any = keras.optimizers.AdamW(
        workloads.LEARNING_RATE, weight_decay=WEIGHT_DECAY, epsilon=models.ADAM_EPSILON, global_clipnorm=case.clip_norm
    )
    if case.narrow:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=workloads.INIT_SCALE)
    variables = model.trainable_variables
    optimizer.build(variables)

    def loss_of(outputs: Any, targets: Any) -> Any:
        outputs = tf.cast(outputs, tf.float32)
        if models.classifies(case.workload):
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=outputs))
        return tf.reduce_mean(tf.square(outputs - targets))

    def gradients(inputs: Any, targets: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            loss = loss_of(model(inputs, training=True), targets)
            scaled = optimizer.scale_loss(loss)
        # dense: Keras's Adam squares the rows of a sparse gradient apart where one token comes twice
        return loss, [tf.convert_to_tensor(each) for each in tape.gradient(scaled, variables)]

    def accumulated(inputs: Any, targets: Any, count: int) -> tuple[Any, Any]:
        parts = [tf.reshape(part, (count, -1, *part.shape[1:])) for part in (inputs, targets)]

        def body(index: Any, loss: Any, sums: Any) -> Any:
            other, more = gradients(parts[0][index], parts[1][index])
            return index + 1, loss + other, [one + each for one, each in zip(sums, more, strict=True)]

        zeros = [tf.zeros(variable.shape) for variable in variables]
        start = (tf.constant(0), tf.constant(0.0), zeros)
        _, loss, sums = tf.while_loop(lambda index, *_: index < count, body, start, parallel_iterations=1)
        return loss / count, [total / count for total in sums]

    @tf.function(jit_compile=case.narrow, autograph=False)
    def step(inputs: Any, targets: Any) -> Any:
        single = case.accumulate == 1
        loss, found = gradients(inputs, targets) if single else accumulated(inputs, targets, case.accumulate)
        optimizer.apply(found, variables)
        return loss

    batch = [tf.constant(part) for part in workloads.data(case.workload)]
    return lambda: step(*batch).numpy()


def library(case: Case) -> Step:
    """The same with polyamp, which chooses XLA by itself."""
    recipe = polyamp.Recipe(
        policy=workloads.DTYPES[case.dtype],
        optimizer=polyamp.adamw(workloads.LEARNING_RATE, eps=models.ADAM_EPSILON, weight_decay=WEIGHT_DECAY),
        clip_norm=case.clip_norm,
        accumulate_steps=case.accumulate,
        scaler=polyamp.LossScaler(init_scale=workloads.INIT_SCALE) if case.narrow else None,
    )

    def loss_fn(model: Any, batch: Any) -> Any:
        losses = polyamp.losses
        of = losses.softmax_cross_entropy if models.classifies(case.workload) else losses.mean_squared_error
        return of(model(batch[0]), batch[1])

    state = polyamp.init(models.model(case.workload), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    batch = tuple(tf.constant(part) for part in workloads.data(case.workload))
    return lambda: step(state, batch)[1].loss.numpy()


def entries_of(case: Case, settings: Settings) -> Iterator[Entry]:
    """Check a case's numerics, then measure it."""
    hand, own = by_hand(case), library(case)  # before either runs: a new seed makes TensorFlow forget its kernels
    losses = [[step() for _ in range(workloads.CHECKED_STEPS)] for step in (hand, own)]
    distance = paired_timing.distance(*losses)
    same = distance <= workloads.TOLERANCE[case.dtype]
    note = (
        "" if same else f"other numerics: losses {losses[0][-1]:.6f} and {losses[1][-1]:.6f} at the last step compared"
    )
    row = Row(case.name, None, ("by hand", hand), ("polyamp", own), section="workloads", note=note)
    found = paired_timing.measure(row, settings)
    yield paired_timing.entry(row, found, distance=distance)
    peaks = [Side(name, [measure.peak_memory(step) for _ in range(3)]) for name, step in (row.base, row.own)]
    yield Entry(section="memory", name=case.name, unit="MiB", base=peaks[0], own=peaks[1])
    if case.workload in (workloads.MLP, SHALLOW) and case.dtype == "bfloat16" and not case.clip:
        yield _overhead(case, found)


def _overhead(case: Case, found: Found) -> Entry:
    """What polyamp takes over the handwritten step, a micro-batch."""
    values = [(own - base) / case.accumulate * 1e6 for base, own in zip(found.base, found.own, strict=True)]
    parts = f"{case.accumulate} micro-batch{'es' * (case.accumulate > 1)}"
    return Entry(
        section="growth",
        name=f"{case._replace(accumulate=1).name}: {parts}, polyamp less by hand",
        unit="us a micro-batch",
        own=Side("polyamp", values),
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="ROW", help="rows whose name starts so")
    parser.add_argument("--slow", action="store_true", help="also the rows that take long to compile")
    arguments, settings = paired_timing.parse(parser, **PACE)
    tf.config.threading.set_intra_op_parallelism_threads(settings.threads)
    measure.count_memory()
    environment = measure.environment()
    print(results.heading(environment, settings._asdict()) + "\n", flush=True)
    wanted = tuple(arguments.only) or ("",)
    chosen = [case for case in (QUICK if arguments.quick else cases()) if case.name.startswith(wanted)]
    entries = [
        entry
        for case in chosen
        for entry in (entries_of(case, settings) if arguments.slow or case not in SLOW else [left_out(case)])
    ]
    paired_timing.finish(entries, environment, settings, __file__, arguments.json)


if __name__ == "__main__":
    main()
