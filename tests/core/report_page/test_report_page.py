"""Pages of reports as HTML and as pictures. `python -m tests.core.report_page.page_in_browser` looks at them."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from polyamp.errors import ArgumentError
from polyamp.report_page.html_page import csp_hash, page_css, render_html
from polyamp.report_page.page import MAX_ROWS, BarChart, BarPart, CurveChart, CurveLine, HeatChart
from polyamp.report_page.page_files import save_page
from polyamp.report_page.png_page import draw_png
from polyamp.report_page.svg_charts import MAX_POINTS, draw_chart
from tests.core.report_page.pages import empty_page, full_page


def test_the_page_holds_all_and_asks_for_nothing() -> None:
    text = render_html(full_page("unet"))
    assert not re.search(r"(src|href|url|@import)\s*[=(]", text)
    assert f"style-src 'sha256-{csp_hash(page_css())}'" in text
    assert text.count("<svg role=") == 4
    for words in ("sinking", "The loss scale fell 6 times", "unet.jsonl, 12 records", "3.1 %", "float32&#34;}"):
        assert words in text


def test_names_are_never_markup() -> None:
    text = render_html(full_page())
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)") == 1  # in the table; the charts cut it


def test_what_has_nothing_to_show_is_no_chart() -> None:
    assert "<svg role=" not in render_html(empty_page())
    assert draw_png(empty_page()).startswith(b"\x89PNG")


def test_a_curve_is_broken_where_it_is_not_finite_and_skipped_steps_are_marked() -> None:
    drawn = draw_chart(CurveChart("loss", [10, 20, 30, 40], [CurveLine("loss", [4.0, None, 2.0, 1.0], skipped=[20])]))
    path = re.search(r'class="line s0" d="([^"]*)"', drawn)
    assert path is not None
    assert path[1].count("M") == 2
    assert 'class="lost s0"' in drawn
    assert drawn.count("h8l-4-8z") == 1
    assert ">10<" in drawn
    assert ">40<" in drawn
    assert 'aria-label="loss per step: loss from 4 to 1"' in drawn


def test_a_line_without_values_keeps_its_colour_for_others() -> None:
    lines = [CurveLine("side 1", []), CurveLine("side 2", [1.0, None, 0.5, 0.25], skipped=[2, 9])]
    drawn = draw_chart(CurveChart("loss", range(1, 5), lines))
    assert 'aria-label="loss per step: side 2 from 1 to 0.25"' in drawn
    assert re.findall(r'class="(\w+ s\d)"', drawn) == ["line s1", "lost s1", "skipped s1"]
    assert drawn.count("h8l-4-8z") == 1


def test_very_long_curves_keep_their_spikes() -> None:
    values: list[float | None] = [1.0] * 50_000
    values[31_234] = 9.0
    drawn = draw_chart(CurveChart("loss", range(1, 50_001), [CurveLine("side 1", values)]))
    assert len(drawn) < 15_000
    (line,) = re.findall(r'class="line s0" d="M([^"]*)"', drawn)
    heights = [float(place.split()[1]) for place in line.split("L")]
    assert sum(height < min(heights) + 1 for height in heights) == 1
    assert len(heights) <= MAX_POINTS


def test_a_share_is_darker_than_a_smaller_one_and_none_is_missing() -> None:
    drawn = draw_chart(HeatChart("g", ["a"], ["0", "1", "2", "3"], [[0.0, 0.04, 1.0, None]], "exponent"))
    assert re.findall(r'fill-opacity="([\d.]+)"', drawn) == ["0.30", "1.00"]
    assert drawn.count('class="missing"') == 1


def test_bars_have_the_length_of_their_parts_and_too_many_rows_are_left_to_the_table() -> None:
    rows = [f"m{number}" for number in range(MAX_ROWS + 5)]
    drawn = draw_chart(BarChart("b", rows, [BarPart("x", [1.0] * len(rows)), BarPart("y", [3.0] * len(rows))], "n"))
    assert drawn.count("<rect") == 2 * MAX_ROWS
    first, second = re.findall(r'width="([\d.]+)"', drawn)[:2]
    assert float(second) == pytest.approx(3 * float(first), abs=0.5)


def test_the_picture_is_1200_wide(tmp_path: Path) -> None:
    path = save_page(full_page(), tmp_path / "page.png")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", data[16:20]) == (1200,)


def test_the_suffix_decides(tmp_path: Path) -> None:
    assert save_page(full_page(), str(tmp_path / "page.HTML")).read_text().startswith("<!doctype html>")
    with pytest.raises(ArgumentError, match=r"path must end in \.html or \.png\. Received: 'page\.pdf'"):
        save_page(full_page(), "page.pdf")
    with pytest.raises(ArgumentError, match="path must be one that can be written to"):
        save_page(full_page(), tmp_path / "none" / "page.html")


@pytest.mark.parametrize(("suffix", "package"), [("html", "jinja2"), ("png", "matplotlib")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, package: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ArgumentError, match=rf'A \.{suffix} file needs {package}.*pip install "polyamp\[parity\]"'):
        save_page(full_page(), tmp_path / f"page.{suffix}")
    assert list(tmp_path.iterdir()) == []
