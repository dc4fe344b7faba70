"""polyamp's parts for Keras against Keras's own: `compile` and `fit`, and `LossScaleOptimizer` in a custom loop.

The model is the one of `step`, eight Dense(256) layers with Adam at batch 64. The rows, in each dtype:

    fit                  `polyamp_tensorflow.compile` over `model.compile` under Keras's mixed policy, then `model.fit`
                         on either side; the time of a batch, from whole epochs. float16 under XLA, which polyamp
                         chooses by itself and Keras is told, as it takes minutes without on some processors
    LossScaleOptimizer   polyamp_tensorflow's in the place of Keras's around the same `keras.optimizers.Adam`, in the
                         same loop in one `tf.function`; float16 under XLA, the others outside of it

Losses are compared before timing. Run by hand and by `bench.py`; it judges nothing and always exits with 0. About
forty seconds on two CPU cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf

import polyamp
import polyamp_tensorflow
from benchmarks.common import paired_timing, results, workloads
from benchmarks.common.paired_timing import Found, Row, Settings, Step
from benchmarks.common.results import Entry
from benchmarks.tensorflow import measure, models
from benchmarks.tensorflow.step import BATCH, WIDTH, by_hand, keras_adam, scaled_by_keras, stack, waiting

BATCHES: Final = 30
"""Of an epoch."""
SECONDS: Final = 3
_TARGET = 1.0


def data() -> tuple[Any, Any]:
    """Inputs and targets of an epoch, float32."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((BATCHES * BATCH, WIDTH), np.float32) for _ in range(2))
    return x, y


def fit_by_keras(dtype: str) -> Any:
    """The model compiled by Keras."""
    model, optimizer = stack(workloads.DTYPES[dtype]), keras_adam()
    if dtype == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=workloads.INIT_SCALE)
    model.compile(optimizer, loss="mse", jit_compile=True if dtype == "float16" else "auto")
    return model


def fit_by_polyamp(dtype: str) -> Any:
    """The model compiled by a recipe."""
    model = stack()
    recipe = polyamp.Recipe(
        policy=workloads.DTYPES[dtype],
        optimizer=polyamp.adam(workloads.LEARNING_RATE, eps=models.ADAM_EPSILON),
        scaler=polyamp.LossScaler(init_scale=workloads.INIT_SCALE) if dtype == "float16" else None,
    )
    polyamp_tensorflow.compile(model, recipe, loss="mse")
    assert model.layers[0].compute_dtype == dtype
    return model


def fit_row(dtype: str, settings: Settings) -> Entry:
    """`fit` on both."""
    x, y = data()
    built = [fit_by_keras(dtype), fit_by_polyamp(dtype)]

    def losses(model: Any) -> list[float]:
        history = model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, epochs=workloads.CHECKED_STEPS, verbose=0)
        found: list[float] = history.history["loss"]
        return found

    def epoch(model: Any) -> Step:
        return lambda: model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)

    distance = paired_timing.distance(*(losses(model) for model in built))
    sides = [epoch(model) for model in built]
    row = Row(f"fit, {dtype}", _TARGET, ("Keras", sides[0]), ("polyamp", sides[1]), section="peers")
    if dtype != "float32":
        row = row._replace(target=None, note="other numerics: polyamp runs the last layer, the head, in float32")
    found = paired_timing.measure(row, settings._replace(steps=1, warmup=1))
    each = Found(*([seconds / BATCHES for seconds in times] for times in found))
    return paired_timing.entry(_noted(row, dtype, distance), each, distance=distance)


def scaled_by_polyamp(optimizer: Any) -> Any:
    """polyamp's scaler around an optimizer."""
    return polyamp_tensorflow.LossScaleOptimizer(optimizer, polyamp.LossScaler(init_scale=workloads.INIT_SCALE))


def optimizer_row(dtype: str, settings: Settings) -> Entry:
    """`LossScaleOptimizer` on both."""
    x, y = (tf.constant(part[:BATCH]) for part in data())
    sides = []
    for scaled in (scaled_by_keras, scaled_by_polyamp):
        step = by_hand(stack(workloads.DTYPES[dtype]), scaled(keras_adam()), (x, y), jit=dtype == "float16")
        measure.check_products(step, dtype)
        sides.append(waiting(step))
    distance = paired_timing.distance(*([side() for _ in range(workloads.CHECKED_STEPS)] for side in sides))
    name = f"LossScaleOptimizer, {dtype}"
    row = Row(name, _TARGET, ("Keras", sides[0]), ("polyamp", sides[1]), section="peers")
    return paired_timing.entry(_noted(row, dtype, distance), paired_timing.measure(row, settings), distance=distance)


def _noted(row: Row, dtype: str, distance: float) -> Row:
    return row if distance <= workloads.TOLERANCE[dtype] else row._replace(note="other numerics")


def entries(wanted: tuple[str, ...], dtypes: tuple[str, ...], settings: Settings) -> Iterator[Entry]:
    """Those whose names start with one of `wanted`."""
    for name, row in (("fit", fit_row), ("LossScaleOptimizer", optimizer_row)):
        for dtype in dtypes:
            if f"{name}, {dtype}".startswith(wanted):
                yield row(dtype, settings)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="ROW", help="rows whose name starts so")
    arguments, settings = paired_timing.parse(parser, seconds=SECONDS)
    tf.config.threading.set_intra_op_parallelism_threads(settings.threads)
    environment = measure.environment()
    print(results.heading(environment, settings._asdict()) + "\n", flush=True)
    dtypes = ("bfloat16",) if arguments.quick else tuple(workloads.DTYPES)
    found = list(entries(tuple(arguments.only) or ("",), dtypes, settings))
    paired_timing.finish(found, environment, settings, __file__, arguments.json)


if __name__ == "__main__":
    main()
