"""Casting reports compared by family: composites, modules of other names, and what has no counterpart."""

from __future__ import annotations

import json

import polyamp
from polyamp.contract.casting_comparison import OTHER_MODULES, FamilyDifference, align_modules, compare_families
from polyamp.contract.casting_report import CastCount, CastingReport, OperationCount

POLICY = polyamp.Policy("mixed_float16")
FAMILIES = {
    "addmm": "matrix products",
    "dot_general": "matrix products",
    "conv": "convolutions",
    "layer_norm": "normalisation",
    "sdpa": "attention",
    "softmax": "softmax",
    "rsqrt": "powers",
    "reduce_sum": "sums",
    "exp": "exponentials",
}


def report(*rows: tuple[str, str, str] | tuple[str, str, str, str]) -> CastingReport:
    operations = [OperationCount(*row[:3], "", 1, *row[3:]) for row in rows]
    return CastingReport(POLICY, operations, [CastCount("float32", "float16", 2)], FAMILIES, ["Seen from afar."])


def test_operations_of_one_family_are_compared_whatever_their_names() -> None:
    one = report(("fc", "addmm", "float16"), ("fc", "relu", "float16"), ("", "addmm", "float32"))
    two = report(("fc", "dot_general", "float32"), ("fc", "max", "float16"), ("", "dot_general", "float32"))
    found = compare_families(one, two)
    assert found.differences == [
        FamilyDifference("fc", "matrix products", "forward", "float16", "float32", "addmm", "dot_general")
    ]
    assert (found.compared, found.only_first, found.only_second) == (3, [], [])


def test_directions_are_compared_apart() -> None:
    one = report(("", "addmm", "float16"), ("", "addmm", "float16", "backward"))
    two = report(("", "addmm", "float16"), ("", "addmm", "float32", "backward"))
    assert [row.direction for row in compare_families(one, two).differences] == ["backward"]


def test_a_whole_function_is_compared_with_its_parts() -> None:
    one = report(("", "softmax", "float32"), ("n", "layer_norm", "float32"))
    parts = [("", "exp", "float32"), ("", "reduce_sum", "float32"), ("n", "reduce_sum", "float32")]
    same = compare_families(one, report(*parts, ("n", "rsqrt", "float32")))
    assert (same.differences, same.compared, same.only_second) == ([], 2, [])
    (row,) = compare_families(one, report(*parts, ("n", "rsqrt", "float16"))).differences
    assert row[:5] == ("n", "normalisation", "forward", "float32", "float16, float32")
    assert (row.first_operations, row.second_operations) == ("layer_norm", "reduce_sum, rsqrt")


def test_a_fused_attention_is_compared_by_its_products() -> None:
    one = report(("", "sdpa", "float16"))
    two = report(("", "dot_general", "float16"), ("", "exp", "float32"))
    found = compare_families(one, two)
    assert (found.differences, found.compared, found.only_second) == ([], 1, ["exp (., forward)"])
    assert len(compare_families(one, report(("", "dot_general", "float32"))).differences) == 1


def test_parts_that_both_sides_have_are_compared_with_each_other() -> None:
    one = report(("", "softmax", "float32"), ("", "reduce_sum", "float16"))
    two = report(("", "exp", "float32"), ("", "reduce_sum", "float16"))
    assert compare_families(one, two).differences == []


def test_modules_of_other_names_are_paired_in_order() -> None:
    one = report(("0", "conv", "float16"), ("1", "layer_norm", "float32"), ("2", "addmm", "float16"))
    two = report(
        *(("stem", "conv", "float16"), ("ln", "rsqrt", "float32"), ("ln", "reduce_sum", "float32")),
        ("head", "dot_general", "float32"),
    )
    assert align_modules(one, two) == {"0": "stem", "1": "ln", "2": "head"}
    assert [row.module for row in compare_families(one, two).differences] == ["2 = head"]
    crossed = compare_families(one, two, {"0": "head", "2": "none"})
    assert [row[:5] for row in crossed.differences] == [
        (OTHER_MODULES, "matrix products", "forward", "float16", "float32")
    ]


def test_modules_of_one_side_alone_are_compared_as_one() -> None:
    one = report(("a", "addmm", "float16"), ("b", "addmm", "float32"), ("a", "exp", "float32"))
    two = report(("c", "conv", "float16"), ("d", "softmax", "float32"), ("e", "exp", "float16"))
    found = compare_families(one, two)
    assert [row[:5] for row in found.differences] == [(OTHER_MODULES, "exponentials", "forward", "float32", "float16")]
    assert found.only_first == ["addmm (a, forward)", "addmm (b, forward)"]
    assert found.only_second == ["conv (c, forward)", "softmax (d, forward)"]


def test_families_and_notes_go_through_json_and_renaming() -> None:
    made = report(("fc", "addmm", "float16"))
    read = CastingReport.from_dict(json.loads(json.dumps(made.to_dict())))
    assert read == made
    assert (read.families, read.notes) == (FAMILIES, ("Seen from afar.",))
    assert made.renamed({"fc": "x"}).families == FAMILIES
    assert str(made).endswith("opaque: none\nSeen from afar.")
