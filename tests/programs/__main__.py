"""Trains every program in one framework, in float32 and in 16 bits, and prints the losses as JSON.

python -m tests.programs torch
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, Final

import polyamp
from tests import garbage

PROGRAMS: Final = ("vae", "clip", "dcgan", "mnist")
POLICIES: Final = ("float32", "mixed_bfloat16")
STEPS: Final = 8


def recipe(name: str, policy: str) -> polyamp.Recipe:
    """The program's recipe file, under a policy; what the file's policy says beside dtypes stays."""
    loaded = polyamp.Recipe.load(Path(__file__).with_name(f"{name}.toml"))
    dtypes = {field: getattr(polyamp.Policy(policy), field) for field in ("param", "compute", "output")}
    return loaded.replace(policy=loaded.policy.replace(**dtypes))


def curve(name: str, framework: str, policy: str) -> list[float]:
    """The losses of one program, step by step."""
    program = importlib.import_module(f"tests.programs.{name}")
    made, build = recipe(name, policy), getattr(program, f"build_{framework}")
    how: dict[str, Any] = {"compile": False} if framework == "tensorflow" else {}  # op by op: a graph costs seconds
    if hasattr(program, "train"):
        losses: list[float] = program.train(build, made, STEPS, how)
        return losses
    options = program.options() if framework == "jax" and hasattr(program, "options") else {}
    state = polyamp.init(build(), made, **options)
    step = polyamp.train_step(program.loss_fn, made, **how)
    losses = []
    for number in range(STEPS):
        state, result = step(state, program.batch(number % 2))
        losses.append(float(result.loss))
    return losses


def main(framework: str) -> None:
    """Print the curves of every program under every policy."""
    garbage.search_seldom()
    if framework == "jax":
        from tests import xla

        xla.quick()
    curves = {name: {policy: curve(name, framework, policy) for policy in POLICIES} for name in PROGRAMS}
    print(json.dumps(curves))


if __name__ == "__main__":
    main(sys.argv[1])
