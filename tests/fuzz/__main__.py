"""`python -m tests.fuzz`: train random networks in every framework and compare; `make fuzz` by hand.

    python -m tests.fuzz --seeds 0-2000 [--progress FILE]      many seeds
    python -m tests.fuzz --seeds 123                           one seed again
    python -m tests.fuzz --description '{...}'                 what a failure printed

The exit status is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from textwrap import indent
from typing import Any

from tests.fuzz.build_reference import can
from tests.fuzz.compare import findings
from tests.fuzz.grammar import FEATURES, READY, Description, describe
from tests.fuzz.judge import judged
from tests.fuzz.minimise import BUDGET, smallest
from tests.fuzz.pool import Pool
from tests.fuzz.worker import BUILDERS, FRAMEWORKS
from tests.seeds import seeds


def program(description: Description, framework: str) -> str:
    """Python that trains a description in one framework; it runs from the repository's root."""
    others = [name for name in BUILDERS if name != framework and (name != "reference" or can(description))]
    return (
        f"from tests.fuzz.worker import train\n\n"
        f"description = {description!r}\n"
        f"framework = {framework!r}  # or, in processes of their own, {', '.join(map(repr, others))}\n"
        f"for policy in (None, 'float32'):  # the description's own, and what it is measured from\n"
        f"    record = train(framework, description, policy=policy)\n"
        f"    print({{name: record[name] for name in ('loss', 'grad_norm', 'scale', 'skipped', 'violations')}})\n"
    )


def report(description: Description, found: list[str]) -> str:
    """A failure for people: what was found, and how to see it again."""
    text = "\n".join(found)
    blamed = min(FRAMEWORKS, key=lambda name: text.find(name) if name in text else len(text))
    return (
        f"seed {description['seed']}:\n{indent(text, '  ')}\n"
        f"again: python -m tests.fuzz --description '{json.dumps(description)}'\n"
        f"or as a program:\n{indent(program(description, blamed), '    ')}"
    )


def main() -> int:
    """Run the seeds; print failures as they come and a count at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-20", help="one seed, a range with its end left out, or a list of both")
    parser.add_argument("--description", type=json.loads, help="a description as JSON, in place of seeds")
    parser.add_argument("--features", nargs="*", default=list(READY), choices=FEATURES, help="of the grammar, to add")
    parser.add_argument("--frameworks", nargs="+", default=list(BUILDERS), choices=BUILDERS)
    parser.add_argument(
        "--seldom", type=int, default=10, metavar="N",
        help="what takes long only for every N-th seed: TensorFlow's traced graph, and float32 in every framework",
    )  # fmt: skip
    parser.add_argument("--together", action="store_true", help="the frameworks at the same time")
    parser.add_argument("--thorough-xla", action="store_true", help="XLA's usual code, which takes longer to compile")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds to minimise one failure; 0: do not")
    parser.add_argument("--progress", type=Path, help="a file that gets a line per seed")
    arguments = parser.parse_args()
    chosen = (
        [arguments.description]
        if arguments.description
        else [describe(seed, arguments.features) for seed in seeds(arguments.seeds)]
    )
    failed: list[Any] = []
    begun = time.monotonic()
    with Pool(arguments.frameworks, together=arguments.together, quick=not arguments.thorough_xla) as pool:
        for count, description in enumerate(chosen, 1):
            seldom = description["seed"] % arguments.seldom == 0

            def check(candidate: Description, seldom: bool = seldom) -> list[str]:
                records = pool.train(candidate, compiled=seldom, every_baseline=seldom)
                return judged(candidate, findings(candidate, *records) + pool.whole(candidate, *records), pool)

            found = check(description)
            if found:
                failed.append(description["seed"])
                small, left = description, found
                if arguments.budget:
                    small, left = smallest(description, check, budget=arguments.budget)
                print(report(small, left or found), flush=True)
                if small != description:
                    print("found before it was made small:", *found, sep="\n  ", flush=True)
            if arguments.progress:
                with arguments.progress.open("a") as file:
                    line = {"seed": description["seed"], "findings": found, "seconds": round(time.monotonic() - begun)}
                    file.write(json.dumps(line) + "\n")
            if count % 100 == 0:
                print(f"{count} of {len(chosen)}, {len(failed)} failed, {time.monotonic() - begun:.0f} s", flush=True)
        seconds = ", ".join(f"{name} {value:.0f} s" for name, value in pool.seconds.items())
    print(f"{len(chosen)} descriptions, {len(failed)} failed: {failed}; processor time: {seconds}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
