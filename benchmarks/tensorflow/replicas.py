"""The step on two replicas of a MirroredStrategy against the loop by hand: what polyamp adds to it.

By hand: `strategy.run` in a `tf.function`, a tape, Keras's `LossScaleOptimizer` around Adam with a `global_clipnorm`,
which Keras takes of each replica's own gradients before it adds them up, and the mean loss. Each replica is a logical
CPU, so that both share the machine's cores.
The rows, eight Dense(256) layers and Adam, a batch of 64 in all:

    float32, bfloat16     loss scaling and clipping

Losses are compared, and collectives counted, before timing. Run by hand and by `bench.py`; it judges nothing and always
exits with 0. About half a minute on two CPU cores.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

import keras
import tensorflow as tf

import polyamp
from benchmarks.common import paired_timing, results, workloads
from benchmarks.common.paired_timing import Row, Settings, Step
from benchmarks.common.results import Entry
from benchmarks.tensorflow import measure, models
from benchmarks.tensorflow.step import batch, loss_fn, scaled_by_keras, stack, stack_fields, waiting

REPLICAS: Final = 2
CLIP: Final = 1e3
"""Which no gradient has, since Keras clips something else."""
DTYPES: Final = ("float32", "bfloat16")
SECONDS: Final = 10
_TARGET = 1.02


def by_hand(strategy: Any, dtype: str, whole: Any) -> Step:
    """The loop by hand on all replicas; it returns their mean loss."""
    with strategy.scope():
        model = stack(workloads.DTYPES[dtype])
        adam = keras.optimizers.Adam(workloads.LEARNING_RATE, epsilon=models.ADAM_EPSILON, global_clipnorm=CLIP)
        optimizer = scaled_by_keras(adam)
        optimizer.build(model.trainable_variables)
    variables = model.trainable_variables

    def replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(model(x, training=True), tf.float32) - y))
            scaled = optimizer.scale_loss(loss / REPLICAS)
        optimizer.apply(tape.gradient(scaled, variables), variables)
        return loss

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(replica, args=(x, y)), axis=None)

    return lambda: step(*whole)


def library(strategy: Any, dtype: str, whole: Any) -> Step:
    """polyamp's step on all replicas."""
    recipe = polyamp.Recipe(**stack_fields(workloads.DTYPES[dtype]), clip_norm=CLIP)
    with strategy.scope():
        state = polyamp.init(stack(), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    return lambda: step(state, whole)[1].loss


def collectives(step: Step) -> int:
    """Reductions of a step, of all replicas together."""
    graph = tf.function(step, autograph=False).get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return sum(node.op.startswith("CollectiveReduce") for node in nodes)


def row(strategy: Any, dtype: str, settings: Settings) -> Entry:
    """Both sides in one dtype."""
    parts = [tf.split(part, REPLICAS) for part in batch()]
    whole = tuple(
        strategy.experimental_distribute_values_from_function(
            lambda context, part=part: part[int(context.replica_id_in_sync_group)]
        )
        for part in parts
    )
    sides = [make(strategy, dtype, whole) for make in (by_hand, library)]
    for side in sides:
        measure.check_products(side, dtype)
    sent = [collectives(side) for side in sides]
    distance = paired_timing.distance(
        *([float(side().numpy()) for _ in range(workloads.CHECKED_STEPS)] for side in sides)
    )
    note = f"{sent[1]} reductions, by hand {sent[0]}"
    if distance > workloads.TOLERANCE[dtype]:
        note += "; other numerics"
    name = f"{REPLICAS} replicas, {dtype}"
    hand, own = (waiting(side) for side in sides)
    found = Row(name, _TARGET, ("Keras by hand", hand), ("polyamp", own), note=note)
    return paired_timing.entry(found, paired_timing.measure(found, settings), distance=distance)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments, settings = paired_timing.parse(parser, seconds=SECONDS)
    tf.config.threading.set_intra_op_parallelism_threads(settings.threads)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    environment = measure.environment()
    print(results.heading(environment, settings._asdict()) + "\n", flush=True)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(REPLICAS)])
    found = [row(strategy, dtype, settings) for dtype in (DTYPES[:1] if arguments.quick else DTYPES)]
    paired_timing.finish(found, environment, settings, __file__, arguments.json)


if __name__ == "__main__":
    main()
