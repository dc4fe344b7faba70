"""Looks at reports' pages in a headless Chromium: `python -m tests.core.parity.page_in_browser [OUT]`.

It fails on the first thing that is not as it must be, and on a missing browser; pictures of what it saw go to OUT. The
browser is `$CHROMIUM`, or the first of `browser.NAMES` that is installed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from polyamp.parity.report import html_page
from tests.core.parity import reports
from tests.core.parity.browser import Browser, found

FACTS = """(() => {
  const table = document.querySelector(".modules");
  const shown = (row) => row.getClientRects().length > 0;
  const rows = table ? Array.from(table.tBodies[0].rows) : [];
  return {
    wide: document.documentElement.scrollWidth, window: innerWidth,
    rows: rows.length, shown: rows.filter(shown).length,
    tools: Array.from(document.querySelectorAll(".tools")).filter((each) => each.getClientRects().length).length,
    status: document.querySelector("[role=status]")?.textContent ?? "",
    first: rows.filter(shown).slice(0, 3).map((row) => row.cells[1].textContent),
    shares: rows.filter(shown).map((row) => parseFloat(row.cells[6].textContent)),
    sorted: table ? Array.from(table.tHead.rows[0].cells).map((each) => each.getAttribute("aria-sort")) : [],
  };
})()"""

CONTRAST = """(() => {
  const part = (color) => color.match(/[\\d.]+/g).map(Number);
  const linear = (c) => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = (color) => color.slice(0, 3).map((c) => linear(c / 255))
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const paper = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = part(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || ["SCRIPT", "STYLE"].includes(node.tagName)) continue;
    const style = getComputedStyle(node);
    const ink = light(part(node.tagName === "text" ? style.fill : style.color)), ground = light(paper(node));
    found.push([(Math.max(ink, ground) + .05) / (Math.min(ink, ground) + .05), node.outerHTML.slice(0, 80)]);
  }
  return found.sort((a, b) => a[0] - b[0])[0];
})()"""


def check(browser: Browser, url: str, name: str, out: Path) -> None:
    """One page in every window, in both schemes and printed."""
    for width in (1280, 1000, 768, 360):
        for dark in (False, True):
            browser.open(url, width=width, dark=dark)
            facts = browser.ask(FACTS)
            assert facts["wide"] <= width, f"{name}: {facts['wide']} wide in a window of {width}"
            assert facts["shown"] == facts["rows"], name
            contrast, where = browser.ask(CONTRAST)
            assert contrast >= 4.5, f"{name}, dark={dark}: contrast {contrast:.2f} of {where}"
            browser.picture(out / f"{name}-{width}{'-dark' if dark else ''}.png")
            wrong = [event for event in browser.events if is_wrong(event, url)]
            assert wrong == [], f"{name}: {wrong}"
    browser.printed(out / f"{name}.pdf")


def is_wrong(event: dict[str, Any], url: str) -> bool:
    """A request for anything but the page, an error, a breach of the security policy."""
    parameters = event.get("params", {})
    if event.get("method") == "Network.requestWillBeSent":
        return bool(parameters["request"]["url"] != url)
    return event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")


def check_controls(browser: Browser, url: str) -> None:
    """Sorting and filtering, with the mouse and with keys, and what a printer gets of a filtered table."""
    browser.open(url)
    begin = browser.ask(FACTS)
    assert begin["tools"] == 1
    assert begin["sorted"] == [None] * 10
    share = 'document.querySelector(".modules thead").rows[0].cells[6].firstElementChild'
    browser.ask(f"{share}.click()")
    facts = browser.ask(FACTS)
    assert facts["sorted"][6] == "descending"
    assert facts["shares"] == sorted(facts["shares"], reverse=True)
    assert facts["shares"] != begin["shares"]
    browser.ask(f"{share}.focus()")
    for key, expected in ((" ", "ascending"), ("Enter", "descending")):
        browser.press(key)
        assert browser.ask(FACTS)["sorted"][6] == expected
    browser.press("Tab")
    assert browser.ask("document.activeElement.textContent") == "Quantity"
    browser.ask('document.querySelector(".modules thead button").click()')
    assert browser.ask(FACTS)["first"][0] == begin["first"][0]

    browser.ask('document.querySelector(".tools input[type=search]").focus()')
    browser("Input.insertText", text="MLP.UP")
    facts = browser.ask(FACTS)
    assert 0 < facts["shown"] < begin["rows"]
    assert all("mlp.up" in each for each in facts["first"])
    assert facts["status"] == f"{facts['shown']} of {begin['rows']} lines"
    browser("Emulation.setEmulatedMedia", media="print")
    printed = browser.ask(FACTS)
    assert (printed["shown"], printed["tools"]) == (begin["rows"], 0), "a printer gets every line and no control"
    browser("Emulation.setEmulatedMedia", media="screen")
    browser.press("Tab")
    browser.press("Tab")
    browser.press(" ")
    both = browser.ask(FACTS)
    assert both["shown"] < facts["shown"], "only differences, by keys"
    browser.ask(
        "const s = document.querySelector('.tools select'); s.value = 'float32'; s.dispatchEvent(new Event('input'))"
    )
    assert 0 < browser.ask(FACTS)["shown"] < both["shown"]


def check_without_script(browser: Browser, url: str) -> None:
    """Every line is there, details open, and no control that does nothing."""
    browser("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(url)
    shown = browser("DOM.getDocument", depth=0)["root"]["nodeId"]
    tools = browser("DOM.querySelector", nodeId=shown, selector=".tools:not([hidden]), thead button")["nodeId"]
    assert tools == 0
    browser("Emulation.setScriptExecutionDisabled", value=False)


def main(out: Path) -> None:
    """All of it."""
    path = found()
    if path is None:
        raise SystemExit("no Chromium found: install one (apt install chromium), or set CHROMIUM to its path")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Browser(path) as browser:
        for name, report in reports.kinds().items():
            file = Path(folder) / f"{name.replace(' ', '-')}.html"
            file.write_text(html_page.render_html(report), encoding="utf-8")
            check(browser, file.as_uri(), file.stem, out)
            print(f"{name}: as it must be")
        url = (Path(folder) / "parts.html").as_uri()
        check_controls(browser, url)
        check_without_script(browser, url)
        print("sorting, filtering, keys, printing, and no script: as they must be")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()))
