"""docs/reference/doctor_table.md names every verdict and its limits, docs/guides/doctor.md the recommendation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import polyamp
from polyamp.doctor import recommendation, verdicts
from polyamp.doctor.measurements import FORMATS_MEASURED, Verdict

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = (DOCS / "guides" / "doctor.md").read_text(encoding="utf-8")
TABLE = (DOCS / "reference" / "doctor_table.md").read_text(encoding="utf-8")


def test_the_verdicts_and_limits_are_those_of_the_code() -> None:
    rows = dict(re.findall(r"^\| ([a-z0-9 ]+) \| (.+) \|$", TABLE, re.MULTILINE))
    del rows["verdict"]
    assert tuple(rows) == get_args(Verdict)
    assert f"{verdicts.NATIVE_SPEED} times" in rows["native"]
    assert f"{verdicts.NARROW_SPEED} times" in rows["native"]
    assert f"{verdicts.NATIVE_SPEED_UNROUNDED} times" in rows["float32 in disguise"]
    assert f"{recommendation.WORTH} times as fast as float32" in GUIDE
    assert f"{recommendation.FLOAT16_WORTH} times as fast as that" in GUIDE


def test_the_output_is_of_this_version_of_the_table() -> None:
    for name in FORMATS_MEASURED:
        assert all(re.search(rf"^{name} ", page, re.MULTILINE) for page in (GUIDE, TABLE))


def test_the_recommended_line_runs() -> None:
    line = next(line for line in GUIDE.splitlines() if line.startswith("recipe = "))
    names = {"polyamp": polyamp}
    exec(line, names)
    assert names["recipe"].policy == polyamp.Policy("mixed_bfloat16")
