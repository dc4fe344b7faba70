"""`make soak`: random trials of several replicas on every framework's engines, each with overflows on some replica.

    python -m tests.soak                                    500 trials of torch, 200 of JAX, 300 of TensorFlow
    python -m tests.soak --only torch --seeds 0-40          some of them
    python -m tests.soak --only torch --seeds 17            one again

Each framework's trials run in a process of their own. A process from which nothing is heard for `--silence` seconds is
ended, and what it owed counts as failed: nothing may hang. Prints a table, a line for every trial in which something
did not hold, and one line of JSON. The exit status is 1 if a trial failed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tests.soak.trial import ENGINES, Outcome, broken, draw

ROOT: Final = Path(__file__).parents[2]
COUNTS: Final = {"torch": 500, "jax": 200, "tensorflow": 300}
"""Trials of a whole run."""
DEVICES: Final = 4
"""Forced host devices of JAX."""


def work(framework: str, seeds: Sequence[int]) -> None:
    """The process of one framework: a line of JSON for each outcome."""
    for outcome in import_module(f"tests.soak.{framework}_trials").trials(seeds):
        print(json.dumps(outcome._asdict()), flush=True)


def outcomes(framework: str, seeds: Sequence[int], silence: float) -> Iterator[Outcome]:
    """Those of a framework's process, and of the seeds that it did not come to, that they are missing."""
    command = [sys.executable, "-m", "tests.soak", "--work", framework, "--seeds", ",".join(map(str, seeds))]
    variables = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", **os.environ}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")])
    if framework == "jax":
        from tests import xla

        flags = f"--xla_force_host_platform_device_count={DEVICES} {xla.FLAGS if xla.known() else ''}"
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    owed = dict.fromkeys(seeds)
    heard: queue.Queue[str | None] = queue.Queue()
    last: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE) as process:
        threading.Thread(target=_read, args=(process.stdout, heard), daemon=True).start()
        how = ""
        while not how:
            try:
                line = heard.get(timeout=silence)
            except queue.Empty:
                how = f"nothing was heard for {silence:g} s"
                process.kill()
                break
            if line is None:
                how = f"the process ended with status {process.wait()}"
            elif line.startswith('{"seed"'):
                found = Outcome(**json.loads(line))
                owed.pop(found.seed, None)
                yield found
            else:
                last.append(line)
    for seed in owed:
        yield broken(draw(framework, seed), how, *last[-3:])


def _read(stream: Any, heard: queue.Queue[str | None]) -> None:
    for line in stream:
        heard.put(line)
    heard.put(None)


def table(found: dict[str, list[Outcome]]) -> str:
    """A line for each framework, engine and number of replicas."""
    lines = [f"{'':24}{'replicas':>9}{'trials':>8}{'steps':>8}{'skipped':>9}{'failed':>8}{'median apart':>14}"]
    for framework, outcomes_ in found.items():
        for engine, world in sorted({(each.engine, each.world) for each in outcomes_}):
            those = [each for each in outcomes_ if (each.engine, each.world) == (engine, world)]
            apart = sorted(each.apart for each in those if each.apart == each.apart)
            lines.append(
                f"{f'{framework}, {engine}':24}{world:9}{len(those):8}{sum(each.steps for each in those):8}"
                f"{sum(each.skipped for each in those):9}{sum(bool(each.failures) for each in those):8}"
                f"{apart[len(apart) // 2] if apart else float('nan'):14.1e}"
            )
    return "\n".join(lines)


def seeds_of(text: str) -> list[int]:
    """`0-40` (its end left out), or a list, `1,5,10-12`."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, end = part.partition("-")
        found += range(int(first), int(end)) if dash else [int(first)]
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ENGINES), default=list(ENGINES), metavar="FRAMEWORK")
    parser.add_argument("--seeds", type=seeds_of, help="of each framework; default: all of them")
    parser.add_argument("--silence", type=float, default=300.0, help="seconds (default: %(default)g)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every outcome, raw")
    parser.add_argument("--work", choices=list(ENGINES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.seeds)
        return 0
    began = time.perf_counter()
    found: dict[str, list[Outcome]] = {}
    for framework in options.only:
        found[framework] = []
        for outcome in outcomes(framework, options.seeds or range(COUNTS[framework]), options.silence):
            found[framework].append(outcome)
            if len(found[framework]) % 25 == 0:
                bad = sum(bool(each.failures) for each in found[framework])
                seconds = time.perf_counter() - began
                print(f"{framework}: {len(found[framework])} trials, {bad} failed, {seconds:.0f} s", flush=True)
            if outcome.failures:
                print(f"{framework} seed {outcome.seed}: {draw(framework, outcome.seed)}", flush=True)
                print("".join(f"    {text}\n" for text in outcome.failures), flush=True)
    every = [outcome for those in found.values() for outcome in those]
    failed = {name: [each.seed for each in those if each.failures] for name, those in found.items()}
    print(table(found))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        raw = {name: [each._asdict() for each in those] for name, those in found.items()}
        options.json.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    print(
        json.dumps(
            {
                "trials": len(every),
                "steps": sum(each.steps for each in every),
                "skipped": sum(each.skipped for each in every),
                "failed": {name: seeds for name, seeds in failed.items() if seeds},
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
    )
    return int(any(failed.values()))


if __name__ == "__main__":
    sys.exit(main())
