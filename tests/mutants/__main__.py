"""`python -m tests.mutants`: put a random small fault into the library and see whether the tests notice it.

    python -m tests.mutants --seeds 0-20 [--log FILE] [--jobs N] [--whole]      many
    python -m tests.mutants --seeds 17                                          one again
    python -m tests.mutants --seeds 0-20 --only 'polyamp/rules/*'               of some files alone
    python -m tests.mutants --seeds 0-20 --list                                 what would be tried

Each seed draws a file by its length, then a kind of fault, then a place, and runs what ought to notice in a copy of the
repository, the nearest tests first. What survives is printed with its file and line. The same seed draws the same
fault as long as the library is the same; the log keeps the difference itself. A test that also fails without the fault
proves nothing: at the end the tests that noticed something run once on the unchanged copy. The exit status is 1 if a
fault survived, or was noticed only by a test that fails anyway.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import fnmatch
import itertools
import json
import queue
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from tests.mutants.operators import Mutant, mutants
from tests.mutants.sandbox import Sandbox
from tests.mutants.selection import ROOT, Stage, conformance, library, stages
from tests.seeds import seeds

SECONDS: Final = 900.0
"""How long one run of pytest may take; a fault that makes a loop endless is noticed too."""


class Draw:
    """The faults of the library, or of some of its files, by seed."""

    def __init__(self, only: str = "*", root: Path = ROOT) -> None:
        texts = {path: (root / path).read_text(encoding="utf-8") for path in library(root)}
        self._texts = {path: text for path, text in texts.items() if fnmatch.fnmatch(path, only) and mutants(text)}
        self._lengths = list(itertools.accumulate(text.count("\n") for text in self._texts.values()))
        if not self._texts:
            raise SystemExit(f"--only must be a glob of paths such as 'polyamp/rules/*'. Received: {only!r}, no file.")

    def __call__(self, seed: int) -> tuple[str, str, Mutant]:
        """The path, the text and the fault of a seed."""
        rng = random.Random(seed)
        (path,) = rng.choices(list(self._texts), cum_weights=self._lengths)
        by_kind: dict[str, list[Mutant]] = collections.defaultdict(list)
        for mutant in mutants(self._texts[path]):
            by_kind[mutant.kind].append(mutant)
        return path, self._texts[path], rng.choice(by_kind[rng.choice(sorted(by_kind))])


def tried(sandbox: Sandbox, seed: int, path: str, text: str, mutant: Mutant, plan: list[Stage]) -> dict[str, Any]:
    """Plant a fault and run its tests until one fails: a row of the log."""
    begun = time.monotonic()
    row = {"seed": seed, "path": path, "line": mutant.line, "kind": mutant.kind, "diff": mutant.diff(text)}
    row |= {"verdict": "survived", "stage": "", "test": "", "stages": [stage.name for stage in plan]}
    with sandbox.changed(path, mutant.applied(text)):
        for stage in plan:
            outcome = sandbox.pytest(*stage.arguments, variables=stage.variables, seconds=SECONDS)
            if outcome.failed:
                row |= {"verdict": "killed" if outcome.status is not None else "time up", "stage": stage.name}
                row |= {"test": outcome.test}
                break
    return {**row, "seconds": round(time.monotonic() - begun)}


def failing_anyway(sandbox: Sandbox, rows: list[dict[str, Any]]) -> set[str]:
    """The tests among those that noticed a fault which fail without one as well."""
    groups: dict[tuple[str, ...], set[str]] = collections.defaultdict(set)
    for row in rows:
        if row["test"]:  # no test is named where a file could not be imported
            stage, test = row["stage"], row["test"]
            group = stage if stage.startswith("conformance-") else "/".join(test.split("/")[:3])
            groups[group, "doctest" if stage == "doctest" else ""].add(test)
    failing: set[str] = set()
    for (group, how), tests in sorted(groups.items()):

        def fails(*chosen: str, group: str = group, how: str = how) -> bool:
            if group.startswith("conformance-"):  # its expected failures name tests that have to be there
                names = " or ".join(sorted({re.split(r"::|\[", test)[1] for test in chosen}))
                return sandbox.pytest(*conformance(group.removeprefix("conformance-"), "-k", names)).failed
            return sandbox.pytest(*(["--doctest-modules"] if how else []), *chosen).failed

        if fails(*sorted(tests)):  # it ends with the first: now each by itself
            failing |= {test for test in sorted(tests) if fails(test)}
    return failing


def shown(row: dict[str, Any]) -> str:
    """A row of the log for people."""
    by = f" by {row['stage']}: {row['test']}" if row["stage"] else ""
    diff = "" if row["verdict"] == "killed" else "\n" + "\n".join(f"    {line}" for line in row["diff"].splitlines())
    return f"{row['verdict']:<8} seed {row['seed']} {row['path']}:{row['line']} {row['kind']}{by}{diff}"


def main(given: list[str] | None = None) -> int:
    """Draw, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-20", help="one seed, a range with its end left out, or a list of both")
    parser.add_argument("--only", default="*", metavar="GLOB", help="of these files alone")
    parser.add_argument("--log", type=Path, help="a file that gets a line of JSON per seed; seeds in it are left out")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in a copy of its own (default: 1)")
    parser.add_argument("--whole", action="store_true", help="at the end all tests of the backend or of the core")
    parser.add_argument("--list", action="store_true", help="say what would be tried, and run nothing")
    arguments = parser.parse_args(given)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs in the copies is ended with this
    draw = Draw(arguments.only)
    done = [json.loads(line) for line in arguments.log.open()] if arguments.log and arguments.log.exists() else []
    chosen = [seed for seed in seeds(arguments.seeds) if seed not in {row["seed"] for row in done}]
    if arguments.list:
        for seed in chosen:
            path, text, mutant = draw(seed)
            print(f"seed {seed} {path}:{mutant.line} {mutant.kind}\n{mutant.diff(text)}")
        return 0
    free: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()

    def run(seed: int) -> dict[str, Any]:
        path, text, mutant = draw(seed)
        sandbox = free.get()
        try:
            return tried(sandbox, seed, path, text, mutant, stages(path, whole=arguments.whole, root=sandbox.root))
        finally:
            free.put(sandbox)

    rows: list[dict[str, Any]] = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        copies = [Sandbox() for _ in range(arguments.jobs)]
        for copy in copies:
            free.put(copy)
        try:
            for future in concurrent.futures.as_completed([pool.submit(run, seed) for seed in chosen]):
                row = future.result()
                rows.append(row)
                print(shown(row), flush=True)
                if arguments.log:
                    with arguments.log.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            failing = failing_anyway(copies[0], rows)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.close()
    counts = collections.Counter(row["verdict"] for row in rows)
    print(f"{len(rows)} mutants: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    for test in sorted(failing):
        print(f"fails without a mutant too, and proves nothing: {test}")
    return int(bool(counts["survived"] or failing))


if __name__ == "__main__":
    sys.exit(main())
