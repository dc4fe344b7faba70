"""The table of floating-point formats against ml_dtypes, and that no other place lists the formats by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import ml_dtypes
import pytest

from polyamp.float_formats import FORMATS, HALF_DTYPES, FloatFormat

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_a_row_is_what_ml_dtypes_knows(row: FloatFormat) -> None:
    known = ml_dtypes.finfo(row.name)
    assert (row.bits, row.exponent_bits, row.fraction_bits) == (known.bits, known.nexp, known.nmant)
    assert row.largest == float(known.max)
    assert row.smallest_normal == float(known.smallest_normal)
    assert row.unit_roundoff == float(known.eps) / 2
    assert row.bytes * 8 == row.bits


def test_float16_alone_needs_a_loss_scale() -> None:
    assert [row.name for row in FORMATS.values() if row.needs_scale] == ["float16"]


def test_the_pair_of_16_bit_formats_is_written_once() -> None:
    """A tuple, list or set of exactly these two names, or of the framework's dtypes of these names."""
    found = []
    for folder in ("polyamp", "backends"):
        for path in (ROOT / folder).rglob("*.py"):
            if "conformance" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Tuple | ast.List | ast.Set):
                    names = {
                        getattr(each, "value" if isinstance(each, ast.Constant) else "attr", "") for each in node.elts
                    }
                    if names == set(HALF_DTYPES):
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
