"""Looks at pages of reports in a headless Chromium: `python -m tests.core.report_page.page_in_browser [OUT] [PAGE...]`.

It fails on the first thing that is not as it must be, and on a missing browser; pictures of what it saw go to OUT. By
default it looks at `pages`; further arguments are HTML files to look at instead.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from polyamp.report_page.page_files import save_page
from tests.core.parity.browser import Browser, found
from tests.core.parity.page_in_browser import CONTRAST, is_wrong
from tests.core.report_page.pages import empty_page, full_page


def check(browser: Browser, page: Path, out: Path) -> None:
    """One page in windows of a desktop and a phone, light and dark."""
    url = page.resolve().as_uri()
    for width in (1280, 768, 360):
        for dark in (False, True):
            browser.open(url, width=width, dark=dark)
            wide = browser.ask("document.documentElement.scrollWidth")
            assert wide <= width, f"{page.name}: {wide} wide in a window of {width}"
            contrast, where = browser.ask(CONTRAST)
            assert contrast >= 4.5, f"{page.name}, dark={dark}: contrast {contrast:.2f} of {where}"
            wrong = [event for event in browser.events if is_wrong(event, url)]
            assert wrong == [], f"{page.name}: {wrong}"
            browser.picture(out / f"{page.stem}-{width}{'-dark' if dark else ''}.png")
    print(f"{page.stem}: as it must be")


def main() -> None:
    path = found()
    if path is None:
        raise SystemExit("no Chromium found: install one (apt install chromium), or set CHROMIUM to its path")
    out = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    pages = [Path(name) for name in sys.argv[2:]]
    if not pages:
        made = {"full": full_page(), "empty": empty_page()}
        pages = [save_page(page, out / f"{name}.html") for name, page in made.items()]
    with Browser(path) as browser:
        for page in pages:
            check(browser, page, out)


if __name__ == "__main__":
    main()
