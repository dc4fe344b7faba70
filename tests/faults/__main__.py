"""`python -m tests.faults`: put one fault after another into polyamp and see whether the tests find it.

    python -m tests.faults [--only WORDS] [--room core|reference|torch|tensorflow|jax] [--list]

Every fault of the lists here is written into its file, the tests that should see it run, and the file comes back from
git. A fault is caught if they fail, and was looked for in vain if they pass. Not part of `make test`: to be run by hand
when tests are thinned or made cheaper, before and after. It refuses to run where git sees a change, since it takes the
files of the tree from git. The exit status is 1 if a fault was missed, or does not fit the code any more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.faults.backends import JAX, TENSORFLOW, TORCH
from tests.faults.planted import CORE, REFERENCE, Fault

ROOT = Path(__file__).resolve().parents[2]
FAULTS = (*CORE, *REFERENCE, *TORCH, *TENSORFLOW, *JAX)


def git(*arguments: str) -> str:
    """What git says."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def command(test: str) -> list[str]:
    """`conformance NAME ...` is the conformance suite on a backend; everything else are pytest's own arguments."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.xla"]
    words = test.split(" -k ")
    first, *rest = words[0].split()
    chosen = ["-k", words[1]] if len(words) > 1 else []
    if first == "conformance":
        deviations = "--polyamp-deviations=tests/conformance/deviations.py"
        return [*pytest, "--pyargs", "polyamp.conformance", f"--polyamp-backend={rest[0]}", deviations, *chosen]
    return [*pytest, first, *rest, *chosen]


def verdict(fault: Fault) -> str:
    """ "caught", "MISSED", or why the fault could not be planted."""
    path = ROOT / fault.path
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    if source.count(fault.before) != 1:
        return f"DOES NOT FIT: {source.count(fault.before)} places in {fault.path}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    try:
        path.write_text(source.replace(fault.before, fault.after), encoding="utf-8")
        for test in fault.tests:
            done = subprocess.run(command(test), cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            if done.returncode in (1, 2):  # 2: a test file could not be read
                return "caught"
            if done.returncode:
                return f"DOES NOT FIT: {test!r} ended with {done.returncode}: {done.stdout.strip()[-200:]}"
    finally:
        git("checkout", "--", fault.path)
    return "MISSED"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant, test, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--room", default="", help="core, reference, torch, tensorflow or jax")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    given = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if given.only in fault.name and given.room in ("", fault.room)]
    if given.list:
        print("\n".join(f"{fault.room:<10} {fault.name}" for fault in chosen))
        return 0
    if git("status", "--porcelain", "--untracked-files=no").strip():
        print("tests.faults writes into files and takes them back from git: commit or stash your changes first.")
        return 2
    counts: Counter[str] = Counter()
    for fault in chosen:
        begun = time.perf_counter()
        found = verdict(fault)
        counts[f"{fault.room} {found.partition(':')[0]}"] += 1
        print(f"{found:<8} {fault.room:<10} {fault.name}  ({time.perf_counter() - begun:.0f} s)", flush=True)
    print("; ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    return int(any(not what.endswith("caught") for what in counts))


if __name__ == "__main__":
    sys.exit(main())
