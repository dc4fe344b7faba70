"""Compares the programs: `python -m tests.parity.public [--quick] [-v] [PROGRAM]`. It prints a line of JSON: program ->
policy or mistake -> what the report says. `--quick`: what the tests run, one policy of most."""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import torch

import polyamp
from tests import xla
from tests.parity.public.programs import PROGRAMS, Program, adamw

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
QUICK = {"GPT-2": POLICIES[1:2], "ResNet": POLICIES[2:], "LSTM tagger": POLICIES[1:2]}
"""Each is compared in float32 before."""


def compared(program: Program, policy: str, steps: int, changed: Any) -> dict[str, Any]:
    """One comparison, and what came of it."""
    began = time.perf_counter()
    optimizers = changed.get("optimizers", (adamw(), adamw()))
    recipes = tuple(polyamp.Recipe(policy=policy, optimizer=each, clip_norm=1.0) for each in optimizers)
    report = polyamp.compare(
        changed.get("torch", program.torch),
        program.flax,
        program.batch,
        changed.get("losses", program.losses),
        recipes,
        steps,
        names=program.names or None,
        inputs=[None, program.inputs],
    )
    first = report.first
    if "-v" in sys.argv:
        print(policy, report, *(note for each in report.comparisons for note in each.notes), sep="\n", file=sys.stderr)
    return {
        "agrees": report.agrees,
        "first": first and [first.step, first.stage, first.module, first.what, first.name, first.kind],
        "evidence": first.evidence if first else [],
        "share": {
            phase: max((r.distance or 0.0) / r.allowed for r in rows if r.allowed)
            for phase in report.phases
            if (rows := [row for each in report.comparisons for row in each.rows if row.phase == phase])
        },
        "seconds": [round(time.perf_counter() - began, 2), round(report.own_seconds, 2)],
    }


def main() -> None:
    """See the module."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    xla.quick()
    found: dict[str, dict[str, Any]] = {}
    chosen = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    for name, make in PROGRAMS.items():
        if chosen and name not in chosen:
            continue
        program = make()
        policies = QUICK[name] if "--quick" in sys.argv else POLICIES
        mistakes = list(program.mistakes.items())[: 1 if "--quick" in sys.argv else None]
        found[name] = {policy: compared(program, policy, 3, {}) for policy in policies}
        found[name] |= {mistake: compared(program, "float32", 1, changed) for mistake, changed in mistakes}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
