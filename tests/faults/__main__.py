"""`python -m tests.faults`: put one fault after another into polyamp and see whether the tests find it.

    python -m tests.faults [--only WORDS] [--room core|reference|torch|tensorflow|jax] [--list]

Every fault of the lists here is written into its file in a copy of the repository, and the tests that should see it
run. A fault is caught if they fail, and was looked for in vain if they pass. Not part of `make test`: to be run by hand
when tests are thinned or made cheaper, before and after. The exit status is 1 if a fault was missed, or does not fit
the code any more. `tests.mutants` draws faults at random.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.faults.backends import JAX, TENSORFLOW, TORCH
from tests.faults.planted import CORE, REFERENCE, Fault
from tests.mutants.sandbox import Sandbox
from tests.mutants.selection import conformance

FAULTS = (*CORE, *REFERENCE, *TORCH, *TENSORFLOW, *JAX)


def arguments_of(test: str) -> tuple[str, ...]:
    """`conformance NAME ...` is the conformance suite on a backend; everything else are pytest's own arguments."""
    words = test.split(" -k ")
    first, *rest = words[0].split()
    chosen = ["-k", words[1]] if len(words) > 1 else []
    return conformance(rest[0], *chosen) if first == "conformance" else (first, *rest, *chosen)


def verdict(sandbox: Sandbox, fault: Fault) -> str:
    """ "caught", "MISSED", or why the fault could not be planted."""
    path = sandbox.root / fault.path
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    if source.count(fault.before) != 1:
        return f"DOES NOT FIT: {source.count(fault.before)} places in {fault.path}"
    with sandbox.changed(fault.path, source.replace(fault.before, fault.after)):
        for test in fault.tests:
            outcome = sandbox.pytest(*arguments_of(test))
            if outcome.status in (1, 2, None):  # 2: a test file could not be read; None: time up
                return "caught"
            if outcome.status:
                return f"DOES NOT FIT: {test!r} ended with {outcome.status}: {outcome.output.strip()[-200:]}"
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
    counts: Counter[str] = Counter()
    with Sandbox() as sandbox:
        for fault in chosen:
            begun = time.perf_counter()
            found = verdict(sandbox, fault)
            counts[f"{fault.room} {found.partition(':')[0]}"] += 1
            print(f"{found:<8} {fault.room:<10} {fault.name}  ({time.perf_counter() - begun:.0f} s)", flush=True)
    print("; ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    return int(any(not what.endswith("caught") for what in counts))


if __name__ == "__main__":
    sys.exit(main())
