"""Trains the model of `models` in one framework, stops on the way, and goes on with what the others stopped with.

    python -m tests.porting.states FRAMEWORK FOLDER

It prints a line of JSON when its own runs are done, and leaves the checkpoint of each in the folder; then it waits for
a line on its input, goes on with those of the others, and prints a second one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import polyamp
from polyamp import porting
from tests import garbage
from tests.porting.states import models

Run = dict[str, list[Any]]


def trained(framework: str, step: Any, state: Any, numbers: Iterable[int]) -> tuple[Any, Run]:
    """The state after some steps, and losses, scales and skips on the way."""
    run: Run = {"loss": [], "scale": [], "skipped": []}
    for number in numbers:
        state, result = step(state, models.entered(framework, models.batch(number)))
        run["loss"].append(float(result.loss))
        run["scale"].append(float(state.scale_state.scale))
        run["skipped"].append(bool(result.skipped))
    return state, run


def average_norms(state: Any) -> list[float]:
    """Norms of the averages in canonical layout, which is one in all frameworks (S34)."""
    averages = porting.training_state(state).averages.values()
    return sorted(float(np.linalg.norm(average.read())) for average in averages)


def main(framework: str, folder: Path) -> None:
    """See the module."""
    garbage.search_seldom()
    if framework == "jax":
        from tests import xla

        xla.quick()
    how: dict[str, Any] = {"compile": False} if framework == "tensorflow" else {}  # op by op: a graph costs seconds
    first: dict[str, Any] = {}
    held: dict[tuple[str, str], Any] = {}
    for library in models.BUILD[framework]:
        for name, recipe in models.RECIPES.items():
            step = polyamp.train_step(models.loss_fn, recipe, **how)
            state = polyamp.init(models.made(framework, library), recipe)
            state, before = trained(framework, step, state, range(models.STOP))
            polyamp.save(state, folder / f"{library}-{name}")
            state, after = trained(framework, step, state, range(models.STOP, models.STEPS))
            first[f"{library}-{name}"] = {key: before[key] + after[key] for key in before}
            first[f"{library}-{name}"]["averages"] = average_norms(state)
            held[library, name] = state, step
    if framework == "torch":  # float32 curves are the same everywhere (S21): one of each is enough
        for name, recipe in models.RECIPES.items():
            wide = recipe.replace(policy="float32", scaler="off")
            state = polyamp.init(models.made("torch", "torch"), wide)
            first[f"float32-{name}"] = trained(framework, polyamp.train_step(models.loss_fn, wide), state, models.CALM)[
                1
            ]
    print(json.dumps(first), flush=True)
    sys.stdin.readline()
    second: dict[str, Any] = {}
    for (library, name), (state, step) in held.items():
        for source in models.SOURCES[library]:
            state, report = polyamp.port(folder / f"{source}-{name}", state, rows={"mix": None})
            state, run = trained(framework, step, state, range(models.STOP, models.STEPS))
            said = {"moved": len(report.moved), "step": int(state.step), "recipe": list(map(str, report.recipe))}
            second[f"{source}>{library}-{name}"] = {**run, **said, "averages": average_norms(state)}
    print(json.dumps(second), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
