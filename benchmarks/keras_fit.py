"""polyamp's `compile` against Keras's own mixed `fit`: `KERAS_BACKEND=torch python benchmarks/keras_fit.py`.

One Keras backend per process: tensorflow, torch or jax. Both sides call `model.fit` on the same batches of one epoch,
with Keras's Adam and the same weights; Keras's layers were made under its policy. A step is one call of `fit`, of
`BATCHES` batches. The rows:

    float32    dense layers under loss scaling: nothing is cast on either side
    bfloat16   the same under mixed_bfloat16 without a scaler
    scaled     the same under mixed_bfloat16 with loss scaling
    spec       the bfloat16 row with `polyamp.adam` in the place of Keras's Adam
    block      a transformer block under mixed_bfloat16
    float16    the dense layers under mixed_float16 with loss scaling; with --slow, as CPUs emulate it

Run by hand; it judges nothing and always exits with 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    ROOT: Final = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(ROOT), str(ROOT / "backends")]  # this folder's torch/ and jax/ are not the frameworks

import keras
import numpy as np

import polyamp
import polyamp_keras
from benchmarks.common import paired_timing, results, workloads
from benchmarks.common.paired_timing import Row, Step
from benchmarks.common.workloads import Workload
from benchmarks.tensorflow import models

DENSE: Final = Workload("mlp", batch=64, width=256, layers=8)
BATCHES: Final = 16
"""Batches of one call of `fit`."""
TARGET: Final = 1.05
SECONDS: Final = 20
"""Of measuring a row, unless `--seconds` says otherwise."""
QUICK: Final = ("bfloat16",)
"""The rows of `--quick`."""


def adam() -> Any:
    """Keras's Adam."""
    return keras.optimizers.Adam(workloads.LEARNING_RATE)


def fit(model: Any, workload: Workload) -> Step:
    """`fit` over one epoch, which returns the mean loss."""
    parts = [workloads.data(workload, seed=seed) for seed in range(BATCHES)]
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))

    def run() -> float:
        history = model.fit(x, y, batch_size=workload.batch, shuffle=False, verbose=0)
        return float(history.history["loss"][0])

    return run


def by_keras(workload: Workload, policy: str, *, scales: bool) -> Step:
    """Keras's policy while the layers are made, and Keras's scaler."""
    with models.keras_policy(policy):
        model = models.model(workload)
    optimizer = adam()
    if scales:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=workloads.INIT_SCALE)
    model.compile(optimizer, loss="mse", auto_scale_loss=False)
    return fit(model, workload)


def by_polyamp(workload: Workload, policy: str, *, scales: bool, optimizer: Any) -> Step:
    """polyamp's `compile`."""
    model = models.model(workload)
    scaler = polyamp.LossScaler(init_scale=workloads.INIT_SCALE) if scales else "off"
    recipe = polyamp.Recipe(policy=policy, scaler=scaler, optimizer=optimizer)
    polyamp_keras.compile(model, recipe, loss="mse")
    return fit(model, workload)


def row(
    name: str, policy: str, workload: Workload = DENSE, *, scales: bool = False, spec: bool = False
) -> tuple[Row, float]:
    """A row, and the largest distance between the losses of both sides in the first calls."""
    optimizer = polyamp.adam(workloads.LEARNING_RATE, eps=1e-7) if spec else adam()
    base = by_keras(workload, policy, scales=scales)
    own = by_polyamp(workload, policy, scales=scales, optimizer=optimizer)
    losses = [[step() for _ in range(2)] for step in (base, own)]
    return Row(name, TARGET, ("Keras's fit", base), ("polyamp", own)), paired_timing.distance(*losses)


def rows(*, slow: bool) -> Iterator[tuple[str, Any]]:
    """Name of a row -> what makes it."""
    yield "float32", lambda: row("fit, float32 with loss scaling", "float32", scales=True)
    yield "bfloat16", lambda: row("fit, bfloat16", "mixed_bfloat16")
    yield "scaled", lambda: row("fit, bfloat16 with loss scaling", "mixed_bfloat16", scales=True)
    yield "spec", lambda: row("fit, bfloat16, polyamp.adam", "mixed_bfloat16", spec=True)
    yield "block", lambda: row("fit, block in bfloat16", "mixed_bfloat16", workloads.BLOCK)
    if slow:
        yield "float16", lambda: row("fit, float16 with loss scaling", "mixed_float16", scales=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="ROW", help="rows whose name starts so")
    parser.add_argument("--slow", action="store_true", help="also float16, which takes minutes")
    arguments, settings = paired_timing.parse(parser, seconds=SECONDS, steps=1)
    environment = {"Keras": keras.__version__, "backend": keras.config.backend(), **results.machine()}
    print(results.heading(environment, settings._asdict()) + "\n", flush=True)
    paired_timing.keep_freed_memory()
    wanted = tuple(arguments.only) or (QUICK if arguments.quick else ("",))
    entries = []
    for name, make in rows(slow=arguments.slow):
        if name.startswith(wanted):
            made, distance = make()
            entries.append(paired_timing.entry(made, paired_timing.measure(made, settings), distance=distance))
            print(results.text(entries[-1:]) + "\n", flush=True)
    paired_timing.finish(entries, environment, settings, __file__, arguments.json)


if __name__ == "__main__":
    main()
