"""`make release`: builds the files of a release into `dist/` and checks them. Nothing is uploaded.

python -m tests.release            all checks; status 1 if one of them fails
python -m tests.release --draft    the same, but an unreleased changelog and placeholders are only named
python -m tests.release --api      breaking changes of the public API since the last tag alone (or --since COMMIT)
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from typing import Final

from tests.release.api_diff import ROOT, breaking_changes, last_tag
from tests.release.source_checks import changelog_problems, read_version, url_problems

DIST: Final = ROOT / "dist"
_SECTION: Final = re.compile(r"^### (?:Changed|Removed)$", re.MULTILINE)


def main() -> int:
    options = argparse.ArgumentParser(prog="make release")
    options.add_argument("--draft", action="store_true")
    options.add_argument("--api", action="store_true")
    options.add_argument("--since", default=None)
    given = options.parse_args()
    since = given.since or last_tag()
    if given.api:
        return _report_api(since, [])
    version = read_version()
    open_points = [*changelog_problems((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)]
    open_points += url_problems((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    failed = build() or check_files()
    failed = _report_api(since, open_points) or failed
    for point in open_points:
        print(f"open: {point}")
    for file in sorted(DIST.iterdir()):
        print(f"{file.relative_to(ROOT)}  {file.stat().st_size:,} bytes")
    print("Nothing was uploaded.")
    return 1 if failed or (open_points and not given.draft) else 0


def build() -> int:
    """Build sdist and wheel into an empty `dist/`."""
    shutil.rmtree(DIST, ignore_errors=True)
    return _run("build", "--outdir", str(DIST), str(ROOT))


def check_files() -> int:
    """Check the metadata, the rendered README and the contents of what was built."""
    failed = _run("twine", "check", "--strict", *map(str, sorted(DIST.iterdir())))
    tests = ("tests/packaging/test_wheel.py", "tests/release")
    return _run("pytest", "-q", "--doctest-modules", "-p", "no:cacheprovider", *tests) or failed


def _run(*command: str) -> int:
    print(f"== {' '.join(command[:2])}", flush=True)
    environment = {**os.environ, "POLYAMP_DIST": str(DIST)}
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, check=False).returncode


def _report_api(since: str | None, open_points: list[str]) -> int:
    """Print the breaking changes; with some, the newest section of the changelog must have Changed or Removed."""
    if since is None:
        print("== public API: there is no tag before this commit, so that nothing can be compared")
        return 0
    changes = breaking_changes(since)
    print(f"== public API: {len(changes)} breaking changes since {since}", *changes, sep="\n")
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    if changes and not _SECTION.search(newest):
        open_points.append("the public API broke, and CHANGELOG.md's newest section has no Changed or Removed.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
