"""The room of `make downstream`: its packages' files and the page agree, and what counts as a difference."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.downstream.package import GROUPS, ROOM, ROOT, Package, packages
from tests.downstream.run import Row, compare
from tests.downstream.table import PAGE, page, read_rows, replacements

PACKAGE = Package(
    "thing", "1.0", "torch", "its tests", ("torch.autocast",), ("tests",), differences={"test_b": "on purpose"}
)


def record(**outcomes: str) -> dict[str, object]:
    return {"outcomes": outcomes, "messages": {"test_c": "AssertionError"}, "uses": {"autocast": 3}}


def test_at_least_eight_packages_in_every_framework() -> None:
    assert len(packages()) >= 8
    assert {package.group for package in packages()} == set(GROUPS)
    assert len({package.name for package in packages()}) == len(packages())


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_a_package_says_what_runs(package: Package) -> None:
    assert bool(package.tests) != bool(package.program)
    assert set(package.replaced) <= set(replacements())
    assert not package.program or (ROOM / "programs" / package.program).is_file()
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    assert pins.get(package.name, package.version) == package.version


def test_every_program_has_a_package() -> None:
    programs = {path.name for path in (ROOM / "programs").glob("*.py")}
    assert programs == {package.program for package in packages() if package.program}


def test_the_page_is_that_of_the_rows_and_every_package_has_one() -> None:
    rows = read_rows()
    assert [row.name for row in rows] == [package.name for package in packages()]
    assert PAGE.read_text(encoding="utf-8") == page(rows)
    for row, package in zip(rows, packages(), strict=True):
        assert (row.version, row.what, row.replaced) == (package.version, package.what, package.replaced)
        assert row.good, row.failures
        assert row.differences == package.differences
        assert row.native - row.passed == len(row.differences)


def test_a_listed_difference_is_no_failure_and_an_old_one_is() -> None:
    native = record(test_a="passed", test_b="passed", test_c="passed", test_d="failed", test_e="skipped")
    row = compare(
        PACKAGE, native, record(test_a="passed", test_b="failed", test_c="passed", test_d="failed"), "2026-01-01"
    )
    assert (row.native, row.passed, row.differences, row.failures) == (3, 2, {"test_b": "on purpose"}, {})
    assert row.good
    row = compare(PACKAGE, native, record(test_a="passed", test_b="passed", test_c="failed"), "2026-01-01")
    assert row.failures == {"test_c": "AssertionError", "test_b": "listed as a difference, and passes"}
    assert not row.good
    row = compare(PACKAGE, native, record(test_b="failed", test_c="passed"), "2026-01-01")
    assert row.failures == {"test_a": "did not run"}


def test_a_row_that_never_used_polyamp_is_not_good() -> None:
    row = Row("thing", "1.0", "its tests", ("torch.autocast",), 3, 3, {"autocast": 1}, {}, {}, "2026-01-01")
    assert row.good
    assert not dataclasses.replace(row, uses={}).good
    assert not dataclasses.replace(row, native=0, passed=0).good
