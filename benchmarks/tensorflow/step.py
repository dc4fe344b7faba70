"""polyamp's TensorFlow step against the same step with Keras's `LossScaleOptimizer` in a custom loop.

Eight Dense(256) layers with biases, Adam, dynamic loss scaling, in one `tf.function` on either side; the Keras loop is
the one of Keras's own guide, without the global norm that polyamp's step reports. The rows:

    float32        loss scaling alone: nothing is cast on either side
    bfloat16       mixed_bfloat16, outside XLA
    float16        mixed_float16, under XLA on both sides (outside it float16 is not usable on some CPUs)
    Keras's Adam   the bfloat16 row with keras.optimizers.Adam in the recipe, in the place of polyamp's spec
    XLA            polyamp's bfloat16 step under XLA against outside of it and against Keras's under XLA; with --slow
                   also the float16 step against outside of it
    block          a transformer block in bfloat16 over the same in float32, both polyamp's
    host reads     values that polyamp's step takes to the host
    growth         from 200 to 1000 weights of 8x8, bfloat16 with loss scaling and clipping: microseconds a weight; with
                   --slow up to 2000, which TensorFlow needs minutes to trace and optimize, and by hand at each count

Run by hand and by `bench.py`; it judges nothing and always exits with 0. About a hundred seconds on two CPU cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import msgspec
import numpy as np
import tensorflow as tf

import polyamp
from benchmarks.common import paired_timing, results, workloads
from benchmarks.common.paired_timing import Found, Row, Settings, Step
from benchmarks.common.results import Entry, Side
from benchmarks.tensorflow import measure, models

WIDTH, LAYERS, BATCH, SCALE = 256, 8, 64, 2.0**10
COUNTS, SLOW_COUNTS = (200, 1000), (200, 1000, 2000)
QUICK = ("bfloat16", "block", "host")
"""The rows of `--quick`."""
SECONDS = 3
"""Of measuring a row, unless `--seconds` says otherwise."""
_TARGET = 0.95


def batch() -> tuple[Any, Any]:
    """Inputs and targets, float32."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((BATCH, WIDTH)).astype(np.float32) for _ in range(2))
    return tf.constant(x), tf.constant(y)


def stack(policy: str | None = None) -> Any:
    """Eight layers, the same weights every time, under Keras's policy; None leaves the layers' dtype to polyamp."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, activation="relu", dtype=policy) for _ in range(LAYERS - 1)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(WIDTH, dtype=policy)])


class Weights(keras.layers.Layer):
    """`count` weights of 8x8 side by side, whose own cost is little."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def build(self, shape: Any) -> None:
        """Make them."""
        self.each = [self.add_weight((8, 8)) for _ in range(self._count)]

    def call(self, x: Any) -> Any:
        """All of them as one vector, times x."""
        return tf.concat([tf.reshape(weight, (-1,)) for weight in self.each], 0) * x


def side_by_side(count: int) -> Any:
    """A model of `Weights`."""
    inputs = keras.Input((1,))
    return keras.Model(inputs, Weights(count)(inputs))


def loss_fn(model: Any, batch: Any) -> Any:
    """Mean squared error."""
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


def scaled_by_keras(optimizer: Any) -> Any:
    """Keras's scaler around an optimizer."""
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=SCALE)


def by_hand(model: Any, optimizer: Any, batch: tuple[Any, Any], *, jit: bool = False) -> Step:
    """A scaler in the loop of Keras's guide to mixed precision; the layers are under Keras's policy already."""
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function(jit_compile=jit, autograph=False)
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(model(x, training=True), tf.float32) - y))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, variables), variables)
        return loss

    return lambda: step(*batch)


def library(model: Any, batch: tuple[Any, Any], *, jit: bool = False, **fields: Any) -> Step:
    """polyamp's step."""
    recipe = polyamp.Recipe(**fields)
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe, jit_compile=jit)
    return lambda: step(state, batch)[1].loss


def waiting(step: Step) -> Step:
    """The step, and then its loss as a number."""
    return lambda: step().numpy()


def keras_adam() -> Any:
    """Keras's Adam."""
    return keras.optimizers.Adam(workloads.LEARNING_RATE, epsilon=models.ADAM_EPSILON)


def stack_fields(policy: str) -> dict[str, Any]:
    """The recipe for the eight layers."""
    adam = polyamp.adam(workloads.LEARNING_RATE, eps=models.ADAM_EPSILON)
    return {"policy": policy, "optimizer": adam, "scaler": polyamp.LossScaler(init_scale=SCALE)}


def against_keras(name: str, dtype: str, *, jit: bool = False, target: float | None = _TARGET, **fields: Any) -> Row:
    """The eight layers by hand and with polyamp."""
    policy = workloads.DTYPES[dtype]
    hand = by_hand(stack(policy), scaled_by_keras(keras_adam()), batch(), jit=jit)
    own = library(stack(), batch(), jit=jit, **{**stack_fields(policy), **fields})
    for side in (hand, own):
        measure.check_products(side, dtype)
    return Row(name, target, ("Keras", waiting(hand)), ("polyamp", waiting(own)))


def under_xla(dtype: str, share: float = 1.0) -> Row:
    """polyamp's step inside and outside of XLA."""
    fields = stack_fields(workloads.DTYPES[dtype])
    outside, inside = (waiting(library(stack(), batch(), jit=jit, **fields)) for jit in (False, True))
    return Row(f"XLA: {dtype}", None, ("outside", outside), ("XLA", inside), share=share)


def block() -> Row:
    """A transformer block in both dtypes."""
    x, y = (tf.constant(part) for part in workloads.data(workloads.BLOCK))
    optimizer = polyamp.adamw(workloads.LEARNING_RATE)
    sides = []
    for dtype in ("float32", "bfloat16"):
        step = library(models.model(workloads.BLOCK), (x, y), policy=workloads.DTYPES[dtype], optimizer=optimizer)
        measure.check_products(step, dtype)
        sides.append((dtype, waiting(step)))
    target = 1 / 1.5 if results.machine()["amx"] else None
    return Row("block, bfloat16 over float32", target, sides[0], sides[1])


def host_reads() -> Iterator[Entry]:
    """How often a step takes a value to the host; nothing reads the step's result."""
    measure.check_host_reads()
    for dtype in ("float32", "bfloat16"):
        step = library(stack(), batch(), **stack_fields(workloads.DTYPES[dtype]))
        step()
        counts = []
        for _ in range(3):
            with measure.host_reads() as seen:
                step()
            counts.append(float(len(seen)))
        name = f"host synchronisations in a step, {dtype}"
        yield Entry(section="targets", name=name, unit="", own=Side("polyamp", counts), target=0.0)


def growth(counts: Sequence[int], settings: Settings, *, slow: bool) -> Iterator[Entry]:
    """Microseconds a weight: polyamp over by hand, and polyamp at the largest count over the smallest."""
    fields = {**stack_fields("mixed_bfloat16"), "optimizer": polyamp.sgd(1e-6), "clip_norm": workloads.CLIP_NORM}
    own = {count: waiting(library(side_by_side(count), _side_batch(count), **fields)) for count in counts}

    def compared(name: str, base: tuple[str, Step], sizes: tuple[int, int], target: float | None = None) -> Entry:
        row = Row(name, target, base, (f"polyamp, {sizes[1]}", own[sizes[1]]), section="growth")
        each = [
            [t / n * 1e6 for t in times] for times, n in zip(paired_timing.measure(row, settings), sizes, strict=True)
        ]
        return msgspec.structs.replace(paired_timing.entry(row, Found(*each)), unit="us a weight")

    for count in counts if slow else counts[:1]:
        with models.keras_policy("mixed_bfloat16"):
            model = side_by_side(count)
        sgd = keras.optimizers.SGD(1e-6, global_clipnorm=workloads.CLIP_NORM)
        hand = by_hand(model, scaled_by_keras(sgd), _side_batch(count))
        yield compared(f"step of {count} weights", ("by hand", waiting(hand)), (count, count))
    least, most = counts[0], counts[-1]
    name = f"step from {least} to {most} weights"
    entry = compared(name, (f"polyamp, {least}", own[least]), (least, most), target=1.0)
    note = (
        "not 10000, as TensorFlow's graph optimizer needs more than in proportion to the weights, by hand as well; "
        f"--slow measures {SLOW_COUNTS[-1]}"
    )
    yield msgspec.structs.replace(entry, note=note)


def _side_batch(count: int) -> tuple[Any, Any]:
    return tf.ones((1, 1)), tf.zeros((1, count * 64))


def makers(settings: Settings, *, slow: bool) -> Iterator[tuple[str, Callable[[], Iterable[Entry]]]]:
    """Name of a row, or how the names of several begin -> what measures it."""

    def one(make: Callable[[], Row]) -> Callable[[], Iterable[Entry]]:
        def measured() -> Iterator[Entry]:
            row = make()
            losses = [[step() for _ in range(workloads.CHECKED_STEPS)] for _, step in (row.base, row.own)]
            distance = paired_timing.distance(*losses)
            yield paired_timing.entry(row, paired_timing.measure(row, settings), distance=distance)

        return measured

    yield "float32", one(lambda: against_keras("float32", "float32"))
    yield "bfloat16", one(lambda: against_keras("bfloat16", "bfloat16"))
    yield "float16, XLA", one(lambda: against_keras("float16, XLA", "float16", jit=True))
    yield (
        "Keras's Adam",
        one(lambda: against_keras("Keras's Adam, bfloat16", "bfloat16", target=None, optimizer=keras_adam())),
    )
    yield "XLA: bfloat16", one(lambda: under_xla("bfloat16"))
    yield (
        "XLA: bfloat16, Keras",
        one(lambda: against_keras("XLA: bfloat16, over Keras's step", "bfloat16", jit=True, target=None)),
    )
    if slow:
        yield "XLA: float16", one(lambda: under_xla("float16", share=0.2))
    yield "block", one(block)
    yield "host", host_reads
    yield "growth", lambda: growth(SLOW_COUNTS if slow else COUNTS, settings, slow=slow)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="ROW", help="rows whose name starts so")
    parser.add_argument(
        "--slow", action="store_true", help="also float16 outside XLA and 2000 weights, which take minutes"
    )
    arguments, settings = paired_timing.parse(parser, seconds=SECONDS)
    tf.config.threading.set_intra_op_parallelism_threads(settings.threads)
    environment = measure.environment()
    print(results.heading(environment, settings._asdict()) + "\n", flush=True)
    wanted = tuple(arguments.only) or (QUICK if arguments.quick else ("",))
    chosen = [make for name, make in makers(settings, slow=arguments.slow) if name.startswith(wanted)]
    entries = [entry for make in chosen for entry in make()]
    paired_timing.finish(entries, environment, settings, __file__, arguments.json)


if __name__ == "__main__":
    main()
