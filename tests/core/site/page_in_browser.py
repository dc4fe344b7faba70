"""Looks at the built site in a headless Chromium: `make docs`, then `python -m tests.core.site.page_in_browser [OUT]`.

It fails on the first thing that is not as it must be, and on a missing browser; pictures of what it saw go to OUT.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.core.parity.browser import Browser, found
from tests.core.parity.page_in_browser import CONTRAST

ROOT = Path(__file__).parents[3]
HTML = ROOT / "out" / "docs" / "html"
SITE = ROOT / "docs" / "site"
PICTURED = (
    *("index", "tutorials/first_recipe", "guides/schedules", "guides/from_one_device_to_many", "semantics"),
    *("reference/rules/s12", "explanation/mixed_precision", "explanation/architecture"),
    *("reference/api/index", "reference/api/training", "reference/api/errors", "reference/api/jax"),
    *("measurements/benchmarks", "measurements/data/port_zoo", "project/examples/nanogpt.py"),
)
QUERIES = {
    "polyamp.init": "reference/api/training",
    "StepResult": "reference/api/training",
    "LossScaleStuckError": "reference/api/errors",
    "scaled_value_and_grad": "reference/api/jax",
    "causal_language_model": "reference/api/losses",
    "gradient accumulation": "reference/rules/s8",
}
"""What is typed -> a page that must be among the first ten results."""
WAIT = 20.0
FIRST_PAGES = "Search._performSearch(...Search._parseQuery(%s)).slice(-10).map((each) => each[0])"
"""The pages of the first ten results; the best one is the last."""
ONLY_VISIBLE_TEXT = """(() => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), gone = [];
  while (walk.nextNode()) if (!walk.currentNode.parentElement.checkVisibility()) gone.push(walk.currentNode);
  gone.forEach((node) => node.remove());
})()"""


def wrong_events(browser: Browser) -> list[dict[str, Any]]:
    """Requests that leave the site, errors, and what the console says."""
    wrong = []
    for event in browser.events:
        method, parameters = event.get("method"), event.get("params", {})
        is_outside = method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(
            (HTML.as_uri(), "data:", "blob:")
        )
        if is_outside or method in ("Log.entryAdded", "Runtime.exceptionThrown"):
            wrong.append(event)
    return wrong


def check_page(browser: Browser, page: str, out: Path) -> None:
    """One page in windows of a desktop and a phone, light and dark; pictures of those of `PICTURED`."""
    for width in (1440, 360):
        for dark in (False, True):
            browser.open((HTML / f"{page}.html").as_uri(), width=width, dark=dark)
            wide = browser.ask("document.documentElement.scrollWidth")
            assert wide <= width, f"{page}: {wide} wide in a window of {width}"
            assert wrong_events(browser) == [], page
            if page in PICTURED:
                picture = f"{page.replace('/', '_')}-{width}{'-dark' if dark else ''}.png"
                browser.picture(out / picture, whole=False)
            browser.ask(ONLY_VISIBLE_TEXT)
            contrast, where = browser.ask(CONTRAST)
            assert contrast >= 4.5, f"{page}, dark={dark}: contrast {contrast:.2f} of {where}"


def check_tabs(browser: Browser) -> None:
    """A framework that was chosen stays chosen on the next page."""
    shown = "[...document.querySelectorAll('.sd-tab-set > input:checked')].map((e) => e.nextElementSibling.textContent)"
    browser.open((HTML / "index.html").as_uri())
    assert {each.strip() for each in browser.ask(shown)} == {"PyTorch"}
    browser.ask(
        "[...document.querySelectorAll('.sd-tab-set > label')].find((e) => e.textContent.trim() == 'JAX').click()"
    )
    browser.open((HTML / "tutorials" / "first_recipe.html").as_uri())
    assert {each.strip() for each in browser.ask(shown)} == {"JAX"}
    print("tabs: as they must be")


def check_search(browser: Browser, out: Path) -> None:
    """The search, from files, finds names, errors and words."""
    results = "[...document.querySelectorAll('#search-results ul.search li a')].map((e) => e.getAttribute('href'))"
    for width, (query, page) in zip((1440, 360) * len(QUERIES), QUERIES.items(), strict=False):
        browser.open(f"{(HTML / 'search.html').as_uri()}?q={query.replace(' ', '+')}", width=width)
        end = time.monotonic() + WAIT
        while not (links := browser.ask(results)) and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(1.0)  # results come one after the other, with their texts
        links = browser.ask(results)
        assert any(link.startswith(f"{page}.html") for link in links[:10]), f"{query!r} finds {links[:10]}"
        assert wrong_events(browser) == [], query
        browser.picture(out / f"search-{query.replace(' ', '-')}.png", whole=False)
    print("search: as it must be")


def check_names(browser: Browser) -> None:
    """The search's first ten results for each public name, with and without its package, have its page."""
    sys.path.insert(0, str(SITE))
    api_pages = importlib.import_module("api_pages")
    pages = {
        name.name: f"reference/api/{page.file}" for page, names in api_pages.names_by_page().items() for name in names
    }
    browser.open((HTML / "search.html").as_uri() + "?q=polyamp")
    end = time.monotonic() + WAIT
    while not browser.ask("Boolean(Search._index)") and time.monotonic() < end:
        time.sleep(0.2)
    for name, page in pages.items():
        for query in (name, name.rpartition(".")[2]):
            found = browser.ask(
                f"Search._performSearch(...Search._parseQuery({query!r})).slice(-10).map((each) => each[0])"
            )
            assert page in found, f"{query!r} finds {found}"
    print(f"search for {len(pages)} public names: as it must be")


def main() -> None:
    path = found()
    if path is None:
        raise SystemExit("no Chromium found: install one (apt install chromium), or set CHROMIUM to its path")
    if not (HTML / "index.html").exists():
        raise SystemExit(f"no site in {HTML}: run make docs")
    out = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    with Browser(path) as browser:
        pages = [path for path in sorted(HTML.rglob("*.html")) if "_static" not in path.parts]
        for path in pages:
            check_page(browser, str(path.relative_to(HTML).with_suffix("")), out)
        print(f"{len(pages)} pages: as they must be")
        check_tabs(browser)
        check_search(browser, out)
        check_names(browser)


if __name__ == "__main__":
    main()
