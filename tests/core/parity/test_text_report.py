"""`str(report)`: at most ten lines of at most 120 columns, whatever the report holds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from polyamp.parity.report.formatting import numbers, plain, truncate_end, truncate_middle
from polyamp.parity.report.html_page import render_html
from polyamp.parity.report.report import Report
from polyamp.parity.report.text_report import render_text
from polyamp.parity.report_data import Failure, JudgedUpdates, OperationSite, SideValues
from tests.core.parity import reports

KINDS = reports.kinds()


@pytest.mark.parametrize("name", KINDS)
def test_ten_lines_of_visible_characters(name: str) -> None:
    text = render_text(KINDS[name])
    assert 1 <= len(text.splitlines()) <= 10
    assert max(map(len, text.splitlines())) <= 120
    assert all(letter.isprintable() for letter in text.replace("\n", ""))
    assert str(KINDS[name]) == text


def test_where_sides_part_both_sides_and_the_reason_are_said() -> None:
    first = reports.divergence()
    assert render_text(reports.report(first=first, parts_at=12)).splitlines() == [
        "torch and jax differ: float32, step 1, forward, encoder.layers.1.norm1 (output)",
        "  module      encoder.layers.1.norm1 in torch, Encoder_0/EncoderLayer_1/LayerNorm_0 in jax",
        "  apart       0.00031 relative; rounding allows 4.2e-06 (74 times); own errors: torch 1.1e-07, jax 1.3e-07",
        "  torch       float32 [8, 128, 64], mean 0.00121, rms 0.9987, largest 4.091, zeros 3; layer_norm in float32",
        "  jax         float32 [8, 128, 64], mean 0.00121, rms 0.9984, largest 4.091, zeros 3; "
        "rsqrt in float32; mul in float32",
        "  looks like  epsilon: The outputs are apart by one factor per row, as with another epsilon: 1e-5 in torch, "
        "1e-6 in jax.",
        "  because     Row by row the quotient of both outputs is constant to 2e-7. Its square, less 1, is "
        "proportional to 1 /",
        "              variance of the input (r = 0.9999).",
        "  before      encoder.layers.1.attention.out is the last that agrees; 84 of 156 quantities differ",
    ]


def test_the_lines_of_both_sides_are_shown_and_the_size_of_the_worst_element() -> None:
    sites = {
        "torch": OperationSite(operation="add", file="/home/me/model.py", line=41, code="y = x * torch.rsqrt(v)"),
        "jax": OperationSite(operation="square", file="/home/me/flax_model.py", line=8, is_missing=True),
    }
    sides = {
        label: SideValues(path="norm", dtype="float32", shape=(2, 3), worst=value, worst_index=(1, 2))
        for label, value in (("torch", 0.5), ("jax", 0.375))
    }
    found = reports.report(first=reports.divergence(sites=sites, sides=sides))
    lines = render_text(found).splitlines()
    assert [line for line in lines if "at [1, 2]" in line] == [
        "  torch       float32 [2, 3], at [1, 2] 0.5",
        "  jax         float32 [2, 3], at [1, 2] 0.375, 0.12 apart",
    ]
    assert lines[6] == (
        '  lines       torch model.py:41, add in "y = x * torch.rsqrt(v)"; jax nothing after flax_model.py:8, square'
    )
    page = render_html(found)
    assert "<code>nothing after flax_model.py:8, square</code>" in page
    assert "y = x * torch.rsqrt(v)&#34;" in page


def test_where_they_agree_it_is_said_what_was_compared_and_what_came_nearest() -> None:
    lines = render_text(reports.report(steps=3)).splitlines()
    assert lines[0] == "torch and jax agree: 3 steps under float32 and mixed_bfloat16"
    assert lines[1] == "  compared    52 output, 52 cotangent, 52 gradient; of 26 modules"
    assert lines[2].startswith(
        "  nearest     30 % of what rounding allows under float32: gradient of kernel of encoder"
    )
    assert lines[4] == "  torch       Transformer, 1,204,736 parameters, torch 2.13.0+cpu on cpu"


def test_a_failure_without_a_divergence_gives_no_verdict() -> None:
    lines = render_text(reports.report(failures=(reports.crash(),))).splitlines()
    assert lines[0] == "no verdict: jax crashed in step 2 under mixed_bfloat16"
    assert lines[1].startswith("  failed      The process ended with signal 11 (SIGSEGV).")
    assert lines[2].startswith("  until then  52 output")


def test_failures_and_other_pairs_beside_a_divergence() -> None:
    lines = render_text(KINDS["failure and difference"]).splitlines()
    (failed,) = [number for number, line in enumerate(lines) if line.startswith("  failed")]
    assert "tensorflow crashed in step 2 under mixed_bfloat16: The process ended" in lines[failed]
    assert "torch took too long in step 2 under mixed_bfloat16" in " ".join(lines[failed : failed + 2])
    assert render_text(reports.report(("torch", "jax", "keras"), parts_at=4)).splitlines()[-1] == (
        "  others      torch and keras agree"
    )


def test_a_number_and_what_is_not_finite() -> None:
    sides = {"torch": SideValues(path="", number=0.693147), "jax": SideValues(path="", number=0.693152)}
    found = reports.report(first=reports.divergence(what="loss", module="", sides=sides, evidence=[]))
    assert render_text(found).splitlines()[0].endswith("step 1, forward, the model (loss)")
    assert render_text(found).splitlines()[3:5] == ["  torch       value 0.693147", "  jax         value 0.693152"]
    sides["jax"] = SideValues(path="")
    lost = reports.report(first=reports.divergence(what="loss", module="", sides=sides, distance=None, own={}))
    assert render_text(lost).splitlines()[4] == "  jax         value not finite"
    assert "inf or NaN 3 of 512" in render_text(KINDS["nan"])
    assert "one side is not finite; rounding allows 0.002" in render_text(KINDS["nan"])


def test_an_array_that_one_side_does_not_have() -> None:
    only = {"torch": SideValues(path="head", dtype="float32", shape=(4,), mean=0.0, rms=1.0, largest=2.0)}
    found = reports.divergence(kind="missing", sides=only, distance=None, allowed=None, own={})
    lines = render_text(reports.report(first=found)).splitlines()
    assert lines[2] == "  apart       no distance can be told"
    assert lines[4].startswith("  looks like  missing on one side: ")


@pytest.mark.parametrize("reason", ["missing", "error", "crashed", "killed", "timeout", "interrupted"])
def test_every_ending_has_words(reason: str) -> None:
    failure = Failure(side="jax", phase="", step=0, reason=reason, message="m")  # type: ignore[arg-type]
    first = render_text(reports.report(failures=(failure,))).splitlines()[0]
    assert first.startswith("no verdict: jax ")
    assert len(first.split()) > 4 or reason == "crashed"


def test_nothing_compared_is_no_agreement() -> None:
    empty: Report = KINDS["nothing"]
    assert not empty.agrees
    assert render_text(empty) == "no verdict: nothing was compared"


def test_texts_are_cut_and_numbers_have_the_digits_that_tell() -> None:
    assert truncate_middle("a" * 50 + "b" * 50, 11) == "aaaa...bbbb"
    assert truncate_end("x" * 30, 10) == "xxxxxx ..."
    assert plain("a\u202eb\r\nc\x07") == "a b c"
    assert numbers([1.00001, 1.00002, None]) == ["1.00001", "1.00002", "not finite"]


def test_of_an_array_without_anything_finite_no_mean_is_said() -> None:
    lost = SideValues(
        path="a", dtype="float16", shape=(2, 3), mean=0.0, rms=0.0, largest=0.0, nonfinite=6, width="bfloat16"
    )
    found = reports.divergence(
        sides={"torch": lost, "jax": SideValues(path="b", dtype="float16", shape=(2, 3), mean=1.5)}
    )
    lines = render_text(reports.report(first=found)).splitlines()
    assert lines[3:5] == ["  torch       float16 [2, 3], inf or NaN 6 of 6", "  jax         float16 [2, 3], mean 1.5"]


TRACEBACK = """ValueError: a shape that does not fit
  File "/home/user/train.py", line 12, in step
    loss = loss_fn(model, batch)
           ^^^^^^^^^^^^^^^^^^^^^
  File "/home/user/models.py", line 40, in forward
    return x @ self.weight"""


@pytest.mark.parametrize("first", [False, True], ids=["no divergence", "a divergence"])
def test_a_failure_keeps_the_last_lines_of_its_traceback(first: bool) -> None:
    changes: dict[str, Any] = {"first": reports.divergence(), "parts_at": 12} if first else {}
    failure = reports.crash(reason="error", message=TRACEBACK)
    lines = render_text(reports.report(failures=(failure,), **changes)).splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("  failed")]
    assert lines[at].endswith("ValueError: a shape that does not fit")
    found = [line.strip() for line in lines[at:]]
    code = found.index("return x @ self.weight")
    assert found[code - 1] == 'File "/home/user/models.py", line 40, in forward'
    assert len(lines) <= 10


def test_of_how_many_parameters_an_update_was_judged_is_said_in_text_and_page() -> None:
    report = reports.report(steps=3)
    counts = [JudgedUpdates(phase="float32", judged=26, updated=26), JudgedUpdates(phase="bf16", judged=20, updated=26)]
    pair = msgspec.structs.replace(report.comparisons[0], updates=counts)
    report = msgspec.structs.replace(report, comparisons=[pair])
    said = "judged: 26 of 26 parameters under float32, 20 of 26 parameters under bf16; rounding hides the others"

    assert f"  updates     {said}" in render_text(report).splitlines()
    assert f"<li>Updates of torch and jax {said}.</li>" in render_html(report)
