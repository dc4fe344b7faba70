"""`docs/site/site_check.py` sees what is wrong with a built site: planted faults, one of each kind."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[3] / "docs" / "site"


@pytest.fixture
def site_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; it needs no Sphinx."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("site_check")


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        *folders, stem, kind = name.split("__")
        path = folder.joinpath(*folders, f"{stem}.{kind}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_a_site_without_faults(site_check: Any, tmp_path: Path) -> None:
    index = {"objects": {"polyamp": [[0, 0, 1, "", "init"]], "": [[0, 1, 0, "module-polyamp", "polyamp"]]}}
    write(
        tmp_path,
        index__html='<a href="page.html#here">to</a><a href="https://a.org/x">out</a><script src="a.js"></script>',
        page__html='<p id="here"></p><a href="#here">x</a><a href="index.html">back</a><img src="data:image/png,x">',
        reference__rules__s7__html='<h1 id="s7-unscaled-gradients"></h1><a href="../../index.html"></a>',
        search__html="",
        reference__api__index__html='<a href="training.html#polyamp.init"></a><a href="l.html#module-polyamp.losses">'
        '<a href="../rules/s7.html#s7-unscaled-gradients"></a>',
        a__js='var home = "https://a.org";  // https://a.org',
        a__css='/* https://a.org */ p { background: url("data:image/svg+xml,x") }',
        llms__txt="# A\n\n- [a](page.html)\n- [b](_sources/gone.md.txt)\n",
        searchindex__js=f"Search.setIndex({json.dumps(index)})",
    )
    site = site_check.BuiltSite(tmp_path)
    targets = [link.partition(": ")[2] for link in site.broken_links()]
    assert targets == ["training.html#polyamp.init", "l.html#module-polyamp.losses"]
    assert site.outside_addresses() == []
    assert site.orphans() == ["reference/api/index.html", "reference/rules/s7.html"]
    assert site.missing_from_search(["polyamp", "polyamp.init", "polyamp.save"]) == ["polyamp.save"]
    assert site.missing_for_language_models() == ["_sources/gone.md.txt"]
    assert site.unlinked_names(["polyamp.init", "polyamp.save", "polyamp.losses"]) == ["polyamp.save"]
    assert site.unlinked_rules("### S7 Unscaled gradients\n### S8 Accumulation\n") == ["S8"]
    assert site.missing_rules("### S7 Unscaled gradients\n") == []
    assert site.missing_rules("### S7 Unscaled gradients\n### S8 Accumulation\n") == ["S8"]


def test_faults(site_check: Any, tmp_path: Path) -> None:
    write(
        tmp_path,
        index__html='<a href="gone.html">1</a><a href="page.html#gone">2</a><a href="#gone">3</a>'
        '<script src="https://cdn.org/a.js"></script><link rel="stylesheet" href="//fonts.org/a.css">'
        '<link rel="canonical" href="https://a.org"><p style="background: url(https://a.org/x.png)">',
        page__html="",
        a__css='@import "https://a.org/b.css"; p { src: url(https://a.org/font.woff2) }',
        a__js='fetch("https://a.org/data"); import("//a.org/m.js")',
    )
    site = site_check.BuiltSite(tmp_path)
    assert site.broken_links() == ["index.html: gone.html", "index.html: page.html#gone", "index.html: #gone"]
    assert site.outside_addresses() == [
        "index.html: https://cdn.org/a.js",
        "index.html: //fonts.org/a.css",
        "index.html: https://a.org/x.png",
        "a.css: https://a.org/b.css",
        "a.css: https://a.org/font.woff2",
        "a.js: https://a.org/data",
        "a.js: //a.org/m.js",
    ]
