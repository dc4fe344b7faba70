"""One package's tests, run twice: as they are, and with polyamp put in. The two records compared make a `Row`."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tests.downstream.package import ROOM, ROOT, Package
from tests.downstream.sources import source_folder

RECORD: Final = "POLYAMP_DOWNSTREAM_RECORD"
REPLACED: Final = "POLYAMP_DOWNSTREAM_REPLACED"
OUT: Final = ROOT / "out" / "downstream"
SECONDS: Final = 1800
"""The longest that one run of a package may take."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        name, version, what, replaced: as in the package.
        native: how many tests pass without polyamp; `passed`: how many of these pass with it.
        uses: polyamp's class or function -> how often the tests made or called it.
        differences: test -> reason, those that the package lists.
        failures: test -> message, of tests that pass without polyamp and fail with it, and are not listed.
        date: the day of the run, ISO.
    """

    name: str
    version: str
    what: str
    replaced: tuple[str, ...]
    native: int
    passed: int
    uses: Mapping[str, int]
    differences: Mapping[str, str]
    failures: Mapping[str, str]
    date: str

    @property
    def good(self) -> bool:
        """Whether tests ran, used polyamp, and all that differ are listed."""
        return bool(self.native and self.uses and not self.failures)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Row:
        """Return a row from JSON's values."""
        return cls(**{**values, "replaced": tuple(values["replaced"])})


def compare(package: Package, native: Mapping[str, Any], changed: Mapping[str, Any], date: str) -> Row:
    """Compare the two records of a package. A listed difference that passes counts as a failure: the list is old."""
    passing = [test for test, outcome in native["outcomes"].items() if outcome == "passed"]
    after = changed["outcomes"]
    different = {test: after.get(test, "did not run") for test in passing if after.get(test) != "passed"}
    unlisted = {test: outcome for test, outcome in different.items() if test not in package.differences}
    failures = {test: changed["messages"].get(test, outcome) for test, outcome in unlisted.items()}
    failures |= {test: "listed as a difference, and passes" for test in package.differences if test not in different}
    listed = {test: reason for test, reason in package.differences.items() if test in different}
    about = (package.name, package.version, package.what, package.replaced)
    passed = len(passing) - len(different)
    return Row(*about, len(passing), passed, changed["uses"], listed, failures, date)


def measure(package: Package, python: str) -> Row:
    """Run a package's tests in both ways with an interpreter, and compare."""
    folder = source_folder(package) if package.has_source else ROOM / "programs"
    with ThreadPoolExecutor(2) as pool:
        native, changed = pool.map(lambda put_in: _record(package, python, folder, put_in), (False, True))
    return compare(package, native, changed, datetime.datetime.now(tz=datetime.UTC).date().isoformat())


def _record(package: Package, python: str, folder: Path, put_in: bool) -> dict[str, Any]:
    """Run the tests once, and return the record. A run without one is an error with the end of what pytest printed."""
    OUT.mkdir(parents=True, exist_ok=True)
    record = OUT / f"{package.name}-{'polyamp' if put_in else 'native'}.json"
    record.unlink(missing_ok=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "DOWNSTREAM_SOURCE": str(folder), **package.environment}
    environment |= {RECORD: str(record), REPLACED: ",".join(package.replaced) if put_in else ""}
    paths = [str(ROOM / "plugin"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    programs = ROOM / "programs"
    own = ["-c", str(programs / "pytest.ini"), "--noconftest", str(programs / package.program)]
    command = [python, "-m", "pytest", "-q", "-p", "downstream_recorder", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["--tb=short", *(own if package.program else package.tests)]
    result = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    record.with_suffix(".txt").write_text(result.stdout, encoding="utf-8")
    if not record.exists():
        raise SystemExit(f"{package.name} ended with {result.returncode} and wrote no record:\n{result.stdout[-3000:]}")
    read: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return read
