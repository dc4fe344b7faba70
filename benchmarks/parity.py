"""Measures `polyamp.compare` on models of 50 million parameters: seconds beyond the models' own, and peak memory.

    python benchmarks/parity.py [--quick] [--policy mixed_bfloat16] [--pairs torch-nnx torch-keras ...]
    python benchmarks/parity.py --width 336 --steps 3 --pairs torch-nnx     10 million parameters, three steps

Run by hand. The model is the GPT of `tests/fixtures/port`, large. Each framework first trains it for one step alone,
through polyamp, in a process of its own; then two of them are compared over `--steps` in a process of their own. What
is shown: the largest resident memory of each process as the system counts it, interpreter and frameworks included; the
seconds of the whole comparison; and those of them that are not the models' own (`Report.own_seconds`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "backends")]  # this folder's torch/ and jax/ are not the frameworks

SIZES: Final = (("VOCABULARY", 512), ("CONTEXT", 64), ("WIDTH", 768), ("HEADS", 12), ("BLOCKS", 7))
QUICK: Final = (("VOCABULARY", 512), ("CONTEXT", 32), ("WIDTH", 128), ("HEADS", 4), ("BLOCKS", 2))
ROWS: Final = 4
PAIRS: Final = ("torch-nnx", "torch-keras", "keras-nnx", "torch-torch")
MOST_SECONDS: Final = 60.0
"""What a comparison may take beyond the models' own time."""
MOST_MEMORY: Final = 2.2
"""How many times the memory of one side alone it may take."""
_QUIET: Final = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}


def _memory() -> float:
    """The largest resident memory so far, GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _made(library: str, sizes: Any) -> tuple[Any, Any]:
    from tests.porting.faults.planting import models

    module = models(library, (), sizes)
    return module, module.build("gpt", 0)


def _batch(sizes: Any) -> dict[str, Any]:
    from tests.porting.faults.planting import sized

    return {key: array[:ROWS] for key, array in sized(sizes).batch("gpt", 0).items()}


def alone(library: str, policy: str, sizes: Any) -> dict[str, Any]:
    """One step of one side."""
    import polyamp

    module, model = _made(library, sizes)
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.adamw(1e-3))
    began = time.perf_counter()
    state = polyamp.init(model, recipe, **module.OPTIONS)
    state, result = polyamp.train_step(module.loss_fn, recipe)(state, _batch(sizes))
    loss = float(result.loss)
    return {"seconds": time.perf_counter() - began, "memory": _memory(), "loss": loss}


def together(first: str, second: str, policy: str, sizes: Any, steps: int) -> dict[str, Any]:
    """A comparison."""
    import polyamp

    (ours, one), (theirs, two) = _made(first, sizes), _made(second, sizes)
    before = _memory()
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.adamw(1e-3))
    options = ({"init": ours.OPTIONS}, {"init": theirs.OPTIONS})
    loss_fns = (ours.loss_fn, theirs.loss_fn)
    labels = ("first", "second")
    report = polyamp.compare(one, two, _batch(sizes), loss_fns, recipe, steps, options=options, labels=labels)
    return {
        "agrees": report.agrees,
        "parameters": report.environments[0].parameters,
        "seconds": report.seconds,
        "beyond": report.seconds - report.own_seconds,
        "memory": _memory(),
        "before": before,
    }


def _apart(arguments: list[str]) -> dict[str, Any]:
    """What a process of its own measures."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, **_QUIET}, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {ran.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models: whether it runs")
    parser.add_argument("--policy", default="float32")
    parser.add_argument("--pairs", nargs="+", default=PAIRS)
    parser.add_argument("--width", type=int, help="of the model; 768 are 50 million parameters")
    parser.add_argument("--steps", type=int, default=1, help="of a comparison")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = QUICK if given.quick else SIZES
    if given.width:
        sizes = (*sizes, ("WIDTH", given.width))
    if given.one:
        pair = len(given.one) == 2
        measured = (
            together(*given.one, given.policy, sizes, given.steps) if pair else alone(*given.one, given.policy, sizes)
        )
        print(json.dumps(measured))
        return
    common = ["--policy", given.policy, *(["--quick"] if given.quick else []), "--steps", str(given.steps)]
    common += ["--width", str(given.width)] if given.width else []
    libraries = dict.fromkeys(name for pair in given.pairs for name in pair.split("-"))
    single = {name: _apart([*common, "--one", name]) for name in libraries}
    for name, found in single.items():
        print(f"{name} alone: {found['seconds']:.1f} s, {found['memory']:.2f} GB", flush=True)
    head = "sides | agrees | parameters | seconds | beyond the models' own | peak memory | of the larger, smaller alone"
    print(f"| {head} |")
    print("|---|---|---|---|---|---|---|")
    for pair in given.pairs:
        first, second = pair.split("-")
        found = _apart([*common, "--one", first, second])
        alones = sorted(single[name]["memory"] for name in (first, second))
        times = f"{found['memory'] / alones[1]:.2f}, {found['memory'] / alones[0]:.2f}"
        print(
            f"| {first}, {second} | {'yes' if found['agrees'] else 'no'} | {found['parameters'] / 1e6:.1f} M "
            f"| {found['seconds']:.1f} s | {found['beyond']:.1f} s (at most {MOST_SECONDS:g}) "
            f"| {found['memory']:.2f} GB | {times} (at most {MOST_MEMORY:g}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
