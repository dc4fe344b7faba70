"""What a monitor costs: `python benchmarks/monitor.py torch|jax|tensorflow`, one framework per process.

Eight layers of 512 features, 64 rows, mixed_bfloat16, Adam: a step of 2.1 million parameters with so little work for
each that the figures per parameter weigh much. Six steps take turns in one process: without a monitor, with one that
reads nothing, with and without activations, and with three that read every step: scale and norms alone, everything of
parameters, and activations too. A read step's time beyond the one that is not read, divided by 100, and that one's time
beyond the plain one, are the cost at `every=100`. Printed: medians in milliseconds, and shares of the plain step.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

ROOT: Final = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "backends")]  # this folder's torch/ and jax/ are not the frameworks

import polyamp  # noqa: E402  # from the checkout, whose path stands above

LAYERS, WIDTH, ROWS = 8, 512, 64
ROUNDS, STEPS = 25, 4
EVERY = 100


def torch_model() -> Any:
    import torch

    layers = [(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*[layer for pair in layers for layer in pair])
    return model.cuda() if torch.cuda.is_available() else model


def jax_model() -> Any:
    from flax import nnx

    streams = nnx.Rngs(0)
    layers = [(nnx.Linear(WIDTH, WIDTH, rngs=streams), nnx.relu) for _ in range(LAYERS)]
    return nnx.Sequential(*[layer for pair in layers for layer in pair])


def tensorflow_model() -> Any:
    import keras

    model = keras.Sequential([keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)])
    model.build((None, WIDTH))
    return model


MODELS: dict[str, Callable[[], Any]] = {"torch": torch_model, "jax": jax_model, "tensorflow": tensorflow_model}


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])


def timer(name: str, monitor: polyamp.Monitor | None) -> Callable[[], float]:
    """Return a function that runs some steps and returns the seconds of one."""
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adam(1e-3))
    state = polyamp.init(MODELS[name](), recipe)
    step = polyamp.train_step(loss_fn, recipe, monitor=monitor)
    rng = np.random.default_rng(0)
    batch: Any = {key: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for key in ("x", "y")}
    if name == "torch":
        import torch

        batch = {key: torch.as_tensor(value, device=state.device) for key, value in batch.items()}

    def run() -> float:
        nonlocal state
        begin = time.perf_counter()
        for _ in range(STEPS):
            state, result = step(state, batch)
        float(result.loss)
        return (time.perf_counter() - begin) / STEPS

    return run


def main() -> None:
    name = sys.argv[1]
    timers = {
        "plain": timer(name, None),
        "idle": timer(name, polyamp.Monitor(every=10**9)),
        "scale and norms": timer(name, polyamp.Monitor(every=1, gradients=False, updates=False)),
        "everything": timer(name, polyamp.Monitor(every=1, weights=True)),
        "idle with activations": timer(name, polyamp.Monitor(every=10**9, activations=True)),
        "everything with activations": timer(name, polyamp.Monitor(every=1, weights=True, activations=True)),
    }
    for run in timers.values():
        run(), run()
    seconds: dict[str, list[float]] = {key: [] for key in timers}
    for _ in range(ROUNDS):
        for key, run in timers.items():
            seconds[key].append(run())
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    plain = medians["plain"]
    print(name, ", ".join(f"{key} {1e3 * value:.2f} ms" for key, value in medians.items()))
    for key in ("idle", "idle with activations"):
        print(f"  a step that is not read, {key}: {100 * (medians[key] / plain - 1):+.1f} %")
    for key in ("scale and norms", "everything"):
        print(f"  {key}, every={EVERY}: {100 * (medians[key] / plain - 1) / EVERY:+.3f} %")
    idle, read = (medians[f"{key} with activations"] for key in ("idle", "everything"))
    share = (idle - plain + max(read - idle, 0.0) / EVERY) / plain
    print(f"  everything with activations, every={EVERY}: {100 * share:+.3f} %")


if __name__ == "__main__":
    main()
