"""`python -m tests.downstream`: run tests and programs of public packages with polyamp put in.

    python -m tests.downstream [--only NAME ...] [--write] [--python PATH]
    python -m tests.downstream --requirements GROUP

Each package's tests run twice, as they are and with polyamp. `--write` puts the table into
docs/measurements/downstream.md; with `--only`, the other packages' rows stay. The exit status is 1 if a test that
passes without polyamp fails with it and is not listed, or a package's tests never used polyamp. Not part of
`make test`: it needs the package index and takes some minutes.
"""

from __future__ import annotations

import argparse
import sys

from tests.downstream.package import GROUPS, ROOT, packages
from tests.downstream.run import measure
from tests.downstream.table import line, read_rows, write_page


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.downstream")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these packages alone")
    parser.add_argument("--write", action="store_true", help="write docs/measurements/downstream.md")
    parser.add_argument("--python", default="", help="one interpreter for all, in place of .venv-downstream-GROUP")
    parser.add_argument("--requirements", choices=GROUPS, help="print what the group's environment installs")
    given = parser.parse_args()
    if given.requirements:
        print(*(each for package in packages(given.requirements) for each in package.requirements))
        return 0
    if unknown := set(given.only) - {package.name for package in packages()}:
        parser.error(f"--only takes names of packages/: {', '.join(package.name for package in packages())}. "
                     f"Received: {', '.join(sorted(unknown))}.")  # fmt: skip
    rows = {row.name: row for row in read_rows()} if given.only else {}
    good = True
    for package in packages():
        if given.only and package.name not in given.only:
            continue
        python = given.python or str(ROOT / f".venv-downstream-{package.group}" / "bin" / "python")
        row = rows[package.name] = measure(package, python)
        good = good and row.good
        print(line(row), flush=True)
        for test, message in row.failures.items():
            print(f"  FAILS {test}: {message}", flush=True)
    if given.write:
        write_page([rows[package.name] for package in packages() if package.name in rows])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
