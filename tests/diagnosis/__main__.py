"""`python -m tests.diagnosis torch|jax|tensorflow [NUMBER...]`: `polyamp.diagnose` on models with planted modules.

Each framework has four models, of 22 to 196 modules with 1 to 4 planted; NUMBER chooses some of them, from 1. For every
model it prints the planted modules, what was found, the trainings that it took beside the largest number allowed,
2 k log2(n), and how far the training with the recommended overrides is from float32. The exit status is 1 if a set is
not exact or a bound is not kept. JAX compiles each training, with XLA's cheapest code (`tests.xla`); Keras trains op by
op. Either takes minutes for the large models.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import polyamp
from tests import xla

PLANTED: dict[str, list[tuple[int, list[int]]]] = {
    "torch": [(5, [3]), (8, [0, 5]), (20, [6, 11, 16]), (38, [3, 10, 24, 31])],
    "jax": [(5, [2]), (8, [4, 6]), (20, [8, 12, 16]), (38, [16, 20, 32, 37])],
    "tensorflow": [(5, [1]), (8, [1, 7]), (20, [5, 6, 7]), (14, [2, 6, 7, 11])],
}
"""The blocks of each model, and which of them have a planted module, drawn at random."""
RECIPE = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.adamw(2e-3))


def torch_model(blocks: int, planted: list[int]) -> tuple[Any, list[str]]:
    from tests.backends.torch.observe.test_diagnose import Hot, SmallVariance, network

    kinds = (Hot, SmallVariance)
    made = network(blocks, {place: kinds[number % 2]() for number, place in enumerate(planted)})
    return made, [f"{place + 1}/extra" for place in planted]


def jax_model(blocks: int, planted: list[int]) -> tuple[Any, list[str]]:
    from tests.backends.jax.observe.test_diagnose import Network

    return Network(blocks, planted), [f"blocks/{place}/extra" for place in planted]


def tensorflow_model(blocks: int, planted: list[int]) -> tuple[Any, list[str]]:
    import keras

    from tests.backends.tensorflow.observe.test_diagnose import Hot

    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((16,))
    for number in range(blocks):
        inner = keras.layers.Dense(16, "tanh", name=f"up{number}")(
            keras.layers.LayerNormalization(name=f"norm{number}")(x)
        )
        inner = keras.layers.Dense(16, name=f"down{number}")(inner)
        if number in planted:
            inner = Hot(name=f"hot{number}")(inner)
        x = keras.layers.Add(name=f"add{number}")([x, inner])
    model = keras.Model(inputs, keras.layers.Dense(4, name="head")(x))
    return model, [f"hot{place}" for place in planted]


MODELS: dict[str, Callable[[int, list[int]], tuple[Any, list[str]]]] = {
    "torch": torch_model,
    "jax": jax_model,
    "tensorflow": tensorflow_model,
}


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def main() -> None:
    name = sys.argv[1]
    xla.quick()
    rng, failed = np.random.default_rng(0), 0
    rows = [rng.normal(size=(32, 16)).astype(np.float32) for _ in range(8)]
    batches = [{"x": x, "y": x[:, :4].argmax(-1)} for x in rows]
    for blocks, planted in [PLANTED[name][int(number) - 1] for number in sys.argv[2:]] or PLANTED[name]:
        model, expected = MODELS[name](blocks, planted)
        began = time.perf_counter()
        with np.errstate(all="ignore"):
            report = polyamp.diagnose(model, loss_fn, batches, RECIPE)
        search, most = len(report.trials) - 2, 2 * len(planted) * math.log2(len(report.modules))
        last = next((trial.distance for trial in report.trials if trial.float32 == sorted(report.sensitive)), None)
        allowed = report.tolerance / 2  # S21's factor of two; a diagnosis takes four
        good = report.sensitive == expected and search <= most and last is not None and last <= allowed
        failed += not good
        print(
            f"{name}, {len(report.modules)} modules: planted {', '.join(expected)}; found "
            f"{', '.join(report.sensitive) or report.outcome}; {search} trainings of at most {most:.0f}; apart "
            f"{last if last is None else f'{last:.1e}'}, allowed {allowed:.1e}; "
            f"{time.perf_counter() - began:.0f} s: {'as it must be' if good else 'WRONG'}",
            flush=True,
        )
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
