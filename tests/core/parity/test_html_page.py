"""The page and the picture: what they hold, that nothing of a model's names acts in them, and how large they are."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import re
import struct
from collections import Counter
from html.parser import HTMLParser

import msgspec
import numpy as np
import pytest
from matplotlib import image
from matplotlib.colors import to_rgb

from polyamp.parity.report import html_charts, html_page, png_charts
from polyamp.parity.report.report import Report
from polyamp.parity.report_data import Comparison, ComparisonRow, Curve, Divergence
from tests.core.parity import reports

KINDS = reports.kinds()
VOID = {"meta", "input", "br", "path", "link", "img"}
CODES = ("#0b5cad", "#d9730d", "#12806f", "#7c3aed")
"""The picture's colours of the first four sides."""
OPTIONAL = {"td", "th", "tr", "li", "option", "p"}
"""Elements whose end may be left out."""


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        tags: how often each element begins.
        attributes: (element, attribute, value) of all.
        ids: all ids.
        tables: for each table its rows' cells' texts.
        headings: (level, text).
        text: all text outside of style and script.
        style, script: their text.
        crossed: elements that end without having begun.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.headings: list[tuple[int, str]] = []
        self.text, self.style, self.script = "", "", ""
        self.crossed: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()

    @property
    def ids(self) -> list[str]:
        return [value for _, name, value in self.attributes if name == "id"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open[-1] != tag and self._open[-1] in OPTIONAL:
            self._open.pop()
        if self._open and self._open[-1] == tag:
            self._open.pop()
        elif tag not in VOID:
            self.crossed.append(tag)

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside in ("style", "script"):
            setattr(self, inside, getattr(self, inside) + data)
            return
        self.text += data
        if any(tag in ("td", "th") for tag in self._open) and self.tables and self.tables[-1]:
            self.tables[-1][-1][-1] += data
        if inside.startswith("h") and inside[1:].isdigit():
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)


def lines(parsed: Page) -> list[list[str]]:
    """The lines of the first table of modules."""
    return next(table[1:] for table in parsed.tables if table[0][:2] == ["#", "Module"])


@pytest.fixture(scope="module")
def pages() -> dict[str, tuple[str, Page]]:
    made = {name: html_page.render_html(report) for name, report in KINDS.items()}
    return {name: (source, Page(source)) for name, source in made.items()}


@pytest.mark.parametrize("name", KINDS)
def test_every_page_is_whole_small_and_reads_nothing_from_elsewhere(
    name: str, pages: dict[str, tuple[str, Page]]
) -> None:
    source, parsed = pages[name]
    assert len(source.encode()) < 500_000
    assert parsed.crossed == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert not {"img", "link", "iframe", "object", "base", "use"} & set(parsed.tags)
    assert {attribute for _, attribute, _ in parsed.attributes} & {
        "src",
        "onclick",
        "onload",
        "style",
        "srcset",
    } == set()
    assert re.findall(r"https?:|url\(|@import|//[a-z]", source) == []
    assert {value for _, attribute, value in parsed.attributes if attribute == "href"} <= {"#first-0", "#first-1"}
    assert {value[1:] for _, attribute, value in parsed.attributes if attribute == "href"} <= set(parsed.ids)


@pytest.mark.parametrize("name", KINDS)
def test_headings_tables_charts_and_controls_have_names(name: str, pages: dict[str, tuple[str, Page]]) -> None:
    _, parsed = pages[name]
    levels = [level for level, _ in parsed.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert ("html", "lang", "en") in parsed.attributes
    assert parsed.tags["main"] == 1
    labelled = {value for _, attribute, value in parsed.attributes if attribute == "aria-labelledby"}
    assert labelled <= set(parsed.ids)
    pictures = [attribute for tag, attribute, _ in parsed.attributes if tag == "svg"]
    assert pictures.count("viewbox") == parsed.tags["svg"]
    assert pictures.count("aria-label") + pictures.count("aria-hidden") == parsed.tags["svg"]
    regions = [value for tag, attribute, value in parsed.attributes if attribute == "role" and value == "region"]
    assert len(regions) == sum(attribute == "tabindex" for _, attribute, _ in parsed.attributes)


@pytest.mark.parametrize("name", KINDS)
def test_only_the_pages_own_script_and_style_may_act(name: str, pages: dict[str, tuple[str, Page]]) -> None:
    _, parsed = pages[name]
    (policy,) = [value for tag, attribute, value in parsed.attributes if value.startswith("default-src")]
    for text in (parsed.style, parsed.script):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert (parsed.tags["script"], parsed.tags["style"]) == (1, 1)


def test_names_of_a_model_are_text_and_nothing_else() -> None:
    evil = "</td></table><script>alert(1)</script><b onclick='x'>\"&amp;"
    row = ComparisonRow(phase=evil, module=evil, stage="forward", what=evil, name=evil, step=1, dtypes=(evil, "f"), distance=1.0, allowed=0.1, counts=True)  # fmt: skip  # noqa: E501
    first = reports.divergence(phase=evil, module=evil, what=evil, sentence=evil, evidence=[evil], after=evil)
    for_all = reports.report((evil, "b"), first=first)
    report = msgspec.structs.replace(
        for_all,
        comparisons=[Comparison(sides=(evil, "b"), first=first, rows=[row], notes=[evil])],
        curves=[Curve(side=evil, phase=evil, loss=[1.0, 2.0])],
        recipes={evil: {evil: evil}},
        phases=[evil],
        failures=[reports.crash(evil, message=evil)],
        randomness=evil,
        polyamp=evil,
        environments=[reports.environment(evil, "torch", model=evil, device=evil, versions={evil: evil})],
    )
    parsed = Page(html_page.render_html(report))
    assert parsed.crossed == []
    assert (parsed.tags["script"], parsed.tags["b"] - Page(html_page.render_html(for_all)).tags["b"]) == (
        1,
        1,
    )  # dtypes differ
    assert "onclick" not in {attribute for _, attribute, _ in parsed.attributes}
    assert parsed.text.count("<script>alert(1)</script>") > 25


def test_the_first_divergence_stands_on_top_with_all_it_has(pages: dict[str, tuple[str, Page]]) -> None:
    _, parsed = pages["parts"]
    first = KINDS["parts"].first
    assert first is not None
    assert parsed.headings[0] == (1, "torch and jax part in the forward pass of step 1")
    assert parsed.headings[1] == (2, "First divergence")
    for text in (first.module, first.sentence, *first.evidence, first.after, "epsilon", "74 times", "1.1e-07"):
        assert text in parsed.text
    sides = parsed.tables[0]
    assert sides[0] == ["", "torch", "jax"]
    assert sides[1] == ["called", "encoder.layers.1.norm1", "Encoder_0/EncoderLayer_1/LayerNorm_0"]
    told = {line[0]: line[1:] for line in sides[1:]}
    assert told["rms ≠"] == ["0.9987", "0.9984"]
    assert told["shape"] == ["8 x 128 x 64"] * 2
    assert told["operations"] == ["layer_norm in float32", "rsqrt in float32mul in float32"]


def test_a_module_and_phase_is_a_line_with_its_worst_quantity(pages: dict[str, tuple[str, Page]]) -> None:
    _, parsed = pages["parts"]
    found = lines(parsed)
    assert len(found) == 26 * 2
    assert [line[1] for line in found[:26]] == reports.modules(26)
    rows = [row for row in KINDS["parts"].comparisons[0].rows if (row.module, row.phase) == ("head", "float32")]
    most = max(rows, key=lambda row: (row.distance or 0.0) / row.allowed)
    head = found[25]
    assert head[:4] == ["26", "head", "float32", "differs"]
    assert (float(head[4]), float(head[5])) == pytest.approx((most.distance, most.allowed), rel=5e-3)
    assert head[7].startswith(f"{most.what}")
    assert head[7].count("step") == 1 + len(rows)
    assert head[8:] == ["float32", "float32\n"]
    assert sum(line[3] == "differs" for line in found) == 2 * (26 - 12)


def test_dtypes_that_differ_anywhere_in_a_module_are_those_of_its_line() -> None:
    rows = [
        ComparisonRow(phase="float32", module="a", stage=stage, what=what, name="", step=1, dtypes=dtypes, distance=1e-7, allowed=1e-6, counts=False)  # noqa: E501
        for stage, what, dtypes in (
            ("forward", "output", ("float32", "float32")),
            ("backward", "cotangent", ("float32", "bfloat16")),
        )
    ]  # fmt: skip
    report = reports.report(comparisons=[Comparison(sides=("torch", "jax"), first=None, rows=rows)])
    assert lines(Page(html_page.render_html(report)))[0][8:] == ["float32", "≠ bfloat16\n"]


def test_what_is_not_finite_or_0_has_a_place_and_a_word() -> None:
    base = {"phase": "float32", "stage": "forward", "what": "output", "name": "", "step": 1, "dtypes": ("f", "f")}
    rows = [
        ComparisonRow(**base, module="nan", distance=None, allowed=1e-6, counts=True),  # type: ignore[arg-type]
        ComparisonRow(**base, module="same", distance=0.0, allowed=1e-6, counts=False),  # type: ignore[arg-type]
        ComparisonRow(**base, module="", distance=0.0, allowed=0.0, counts=False),  # type: ignore[arg-type]
    ]
    report = reports.report(comparisons=[Comparison(sides=("torch", "jax"), first=None, rows=rows)])
    parsed = Page(html_page.render_html(report))
    assert [line[1:7] for line in lines(parsed)] == [
        ["nan", "float32", "differs", "not finite", "1e-06", "not finite"],
        ["same", "float32", "agrees", "0", "1e-06", "0"],
        ["the model", "float32", "agrees", "0", "0", "0"],
    ]
    assert png_charts.draw(report)[1:4] == b"PNG"


def test_failures_come_before_all_else_and_agreement_is_said(pages: dict[str, tuple[str, Page]]) -> None:
    _, failed = pages["failure"]
    assert [text for _, text in failed.headings[:3]] == ["jax crashed in step 2 under mixed_bfloat16", "What failed", "jax crashed in step 2 under mixed_bfloat16"]  # noqa: E501  # fmt: skip
    assert "signal 11 (SIGSEGV)" in failed.text
    _, agrees = pages["agrees"]
    assert agrees.headings[0] == (1, "torch and jax agree")
    assert agrees.headings[1] == (2, "What was compared")
    assert "First divergence" not in agrees.text
    _, nothing = pages["nothing"]
    assert nothing.headings == [(1, "nothing was compared")]


def test_three_sides_have_two_tables_and_the_pair_that_parts_is_first(pages: dict[str, tuple[str, Page]]) -> None:
    _, parsed = pages["failure and difference"]
    later = reports.report(("torch", "jax", "keras"))
    parts = msgspec.structs.replace(later.comparisons[1], first=reports.divergence())
    turned = Page(html_page.render_html(msgspec.structs.replace(later, comparisons=[later.comparisons[0], parts])))
    assert turned.headings[0] == (1, "torch and keras part in the forward pass of step 1")
    assert {"table-0", "table-1", "first-0"} <= set(turned.ids)
    assert [text for _, text in parsed.headings if text.startswith("Modules")] == [
        "Modules: torch and jax",
        "Modules: torch and tensorflow",
    ]


def test_a_large_model_with_everything_watched_stays_below_500_kB() -> None:
    phases = ("float32", "mixed_bfloat16", "mixed_float16")
    large = reports.report(("torch", "jax", "tensorflow"), count=200, steps=200, parts_at=64, phases=phases)
    many = [
        msgspec.structs.replace(
            each,
            rows=each.rows
            + [
                msgspec.structs.replace(row, stage="update", what=what)
                for row in each.rows
                if row.what == "gradient"
                for what in ("parameter", "exp_avg", "exp_avg_sq")
            ],
        )
        for each in large.comparisons
    ]
    source = html_page.render_html(msgspec.structs.replace(large, comparisons=many))
    assert 400_000 < len(source.encode()) < 500_000
    parsed = Page(source)
    assert [len(table) for table in parsed.tables if table[0][0] == "#"] == [601, 601]
    assert "Not every quantity of every module is listed" in parsed.text


def test_of_too_many_modules_those_that_differ_are_kept_and_it_is_said() -> None:
    source = html_page.render_html(reports.report(count=4000, steps=5000, parts_at=3900))
    assert 400_000 < len(source.encode()) < 500_000
    found = lines(Page(source))
    assert sum(line[3] == "differs" for line in found) == 200
    left = re.search(r"([\d,]+) of 8,000 lines are left out", source)
    assert left is not None
    assert len(found) + int(left[1].replace(",", "")) == 8000
    numbers = [int(line[0]) for line in found if line[2] == "float32"]
    assert numbers == sorted(numbers)


def test_a_message_of_any_length_fits() -> None:
    source = html_page.render_html(reports.report(failures=(reports.crash(message="x" * 2_000_000),)))
    assert len(source.encode()) < 500_000


def test_equal_recipes_stand_once_and_none_is_left_out(pages: dict[str, tuple[str, Page]]) -> None:
    source, parsed = pages["parts"]
    assert (2, "Recipe") in parsed.headings
    assert source.count("learning_rate = 0.001") == 1
    assert "scaler" not in parsed.text
    other = {**reports.RECIPE, "clip_norm": 2.0, "aliases": [{"a": [None, 1]}]}
    two = html_page.render_html(reports.report(recipes={"torch": reports.RECIPE, "jax": other}))
    assert source.count("clip_norm") == 1
    assert [text for _, text in Page(two).headings if text in ("Recipes", "torch", "jax")] == [
        "Recipes",
        "torch",
        "jax",
    ]


def test_one_step_has_numbers_and_no_curve() -> None:
    parsed = Page(html_page.render_html(KINDS["one step"]))
    (numbers,) = [table for table in parsed.tables if table[0][0] == "side" and "loss" in table[0]]
    assert numbers[0] == ["side", "loss", "gradient norm", "loss scale", "skipped steps"]
    assert numbers[1][2:] == ["1.507", "1", "none"]
    assert "per step" not in " ".join(value for _, attribute, value in parsed.attributes if attribute == "aria-label")


def test_errors_are_placed_by_module_and_size() -> None:
    near = reports.report().comparisons[0].rows[0]
    near = msgspec.structs.replace(near, distance=1e-7, allowed=1e-6, counts=False)
    points = [(1, near), (3, msgspec.structs.replace(near, distance=1e-4, counts=True))]
    drawn = html_charts.error_chart("forward, float32", points, 3, mark=3)
    assert "forward, float32: 1 of 2 modules beyond what rounding allows" in drawn
    (fine,) = re.findall(r'class="fine" d="M([\d.]+) ([\d.]+)h0"', drawn)
    (bad,) = re.findall(r'class="bad" d="M([\d.]+) ([\d.]+)l6', drawn)
    assert float(fine[0]) < float(bad[0])
    assert float(fine[1]) > float(bad[1])
    assert "first divergence" in drawn


@pytest.mark.parametrize("name", KINDS)
def test_the_picture_is_1200_wide_whatever_the_report(name: str) -> None:
    made = png_charts.draw(KINDS[name])
    assert made[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", made[16:24])
    assert width == 1200
    assert 60 < height < 1200
    assert len(made) < 400_000


def test_equal_curves_all_stay_visible_in_the_picture() -> None:
    sides = ("a", "b", "c", "d")
    curves = [Curve(side=side, phase="float32", loss=[1.0] * 20) for side in sides]
    made = image.imread(io.BytesIO(png_charts.draw(reports.report(sides, phases=("float32",), curves=curves))))
    colours = [np.all(np.abs(made[..., :3] - to_rgb(code)) < 0.02, axis=-1) for code in CODES]
    line = int(np.argmax(colours[0].sum(axis=1)))  # the row of pixels that has most of the first side's colour
    first, *later = (colour[line - 4 : line + 5].any(axis=0) for colour in colours)
    places = np.flatnonzero(first)
    assert len(places) > 900
    assert len(places) == places[-1] - places[0] + 1, "the first side's line is covered somewhere"
    assert all(places.sum() > 100 for places in later), "a later side's line is covered, or not there"


def test_a_name_that_is_no_formula_and_letters_that_no_font_has() -> None:
    first: Divergence = reports.divergence(module="a$b_{c$", sentence="層\U0001f600 $\\frac$")
    report: Report = reports.report(("torch $x", "jax"), first=first)
    assert png_charts.draw(report)[1:4] == b"PNG"
