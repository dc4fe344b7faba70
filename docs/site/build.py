"""`make docs`: builds the documentation site into `out/docs/html` and checks it; needs the extra `docs`.

No framework is imported, and no block of a page is executed: the tests do that.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

from api_pages import names_by_page, write_api_pages
from command_pages import write_commands
from public_names import PACKAGES
from recipe_tables import fill_tables
from rule_pages import write_rules
from site_check import BuiltSite
from source_pages import DOCS, ROOT, SourceTree, rules
from sphinx.cmd.build import main as sphinx_build

OUT: Final = ROOT / "out" / "docs"


def main() -> int:
    """Build the site; return 1 if Sphinx or a check finds something wrong."""
    os.chdir(ROOT)
    source, html = OUT / "source", OUT / "html"
    shutil.rmtree(html, ignore_errors=True)  # or pages that are gone would stay
    SourceTree(source).write()
    fill_tables(source / "reference" / f"{name}.md" for name in ("optimizers", "schedules"))
    write_api_pages(source / "reference" / "api")
    write_commands(source / "reference" / "commands.md")
    write_rules(source)
    arguments = ["--fail-on-warning", "--fresh-env", "--conf-dir", str(DOCS), "--quiet"]
    if sphinx_build([*arguments, "--doctree-dir", str(OUT / "doctrees"), str(source), str(html)]):
        return 1
    wrong = problems(html)
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        return 1
    print(f"The site is complete. Open {html / 'index.html'}")
    return 0


def problems(html: Path) -> list[str]:
    """Return a line for each thing that is wrong with the built site."""
    site = BuiltSite(html)
    described = [name.name for names in names_by_page().values() for name in names]
    names = [*PACKAGES, *described]
    semantics = (DOCS / "semantics.md").read_text(encoding="utf-8")
    found = {
        "broken link": site.broken_links(),
        "page that nothing leads to": site.orphans(),
        "address outside of the site": site.outside_addresses(),
        "name that the search does not find": site.missing_from_search(names),
        "name without a link in the index of the API": site.unlinked_names(described),
        "rule that no page leads to": site.unlinked_rules(semantics),
        "rule without an anchor": site.missing_rules(semantics),
        "page that llms.txt names and that is missing": site.missing_for_language_models(),
    }
    print(f"{len(site.pages)} pages, {len(names)} public names, {len(rules(semantics))} rules")
    return [f"{kind}: {each}" for kind, lines in found.items() for each in lines]


if __name__ == "__main__":
    sys.exit(main())
