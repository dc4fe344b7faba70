"""The page of the rows, `docs/measurements/downstream.md`, and the rows as data beside it."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Final

from tests.downstream.package import ROOM, ROOT
from tests.downstream.run import Row

PAGE: Final = ROOT / "docs" / "measurements" / "downstream.md"
DATA: Final = PAGE.with_suffix(".json")

_TOP = """\
# Public packages with polyamp in them

Written by `make downstream`. It is not part of `make test`.

Each package's own tests or programs run twice: as published, and with polyamp in the place of the framework's or the
package's own mixed precision. Nothing of the packages is changed or copied: tests come from their source
distributions on PyPI. All runs are on the CPU, so tests that need a GPU are skipped in both.

- *without*: tests that pass as published. Only these count.
- *with*: how many of them pass with polyamp.
- *used*: how often the tests made or called an object of polyamp. A package that never uses one fails the run.

A test that passes without polyamp and fails with it fails the run, unless it is listed under the table with its reason.

"""


_BOTTOM = """
## What is put in

{put_in}

## What is not here

- torch's tests of `GradScaler` are in no distribution on PyPI. They do not run.
- Lightning's and equinox's tests and timm's train.py are in none either. Programs of `tests/downstream/programs` stand
  in for them.
- torchtune has no source distribution. pip needs a Rust compiler to fetch nanochat's.
- Nothing runs on a GPU. The tests of float16 in Accelerate and ignite need one.
"""


def replacements() -> dict[str, str]:
    """Return what can be replaced -> the first sentence of its function, read from the source without an import."""
    tree = ast.parse((ROOM / "plugin" / "downstream_replacements.py").read_text(encoding="utf-8"))
    documents = {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)}
    tables = [node.value for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)]
    named = {
        key.value: value.id
        for table in tables
        for key, value in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Name)
    }
    return {name: re.sub(r"\s+", " ", documents[function].partition("\n\n")[0]) for name, function in named.items()}


def line(row: Row) -> str:
    """Return a row's line of the table."""
    used = ", ".join(f"{name} {count:,}" for name, count in sorted(row.uses.items())) or "nothing"
    replaced = ", ".join(f"`{name}`" for name in row.replaced)
    return f"| {row.name} {row.version} | {row.what} | {replaced} | {row.native} | {row.passed} | {used} | {row.date} |"


def page(rows: Sequence[Row]) -> str:
    """Return the page."""
    native, passed = sum(row.native for row in rows), sum(row.passed for row in rows)
    parts = [
        _TOP,
        f"{len(rows)} packages: {passed:,} of {native:,} tests pass with polyamp.\n\n",
        "| package | what runs | replaced | without | with | used | date |\n|---|---|---|---|---|---|---|\n",
        *(line(row) + "\n" for row in rows),
        "\n## Differences\n\n",
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for test, reason in row.differences.items():
            reasons.setdefault((row.name, reason), []).append(f"`{test}`")
    parts += [f"- {name}: {', '.join(tests)}. {reason}\n" for (name, reason), tests in reasons.items()]
    parts += [] if reasons else ["None.\n"]
    used = {name for row in rows for name in row.replaced}
    put_in = "\n".join(f"- {sentence}" for name, sentence in replacements().items() if name in used)
    return "".join([*parts, _BOTTOM.format(put_in=put_in)])


def read_rows() -> list[Row]:
    """Return the rows of the last run that was written."""
    values = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else []
    return [Row.of(each) for each in values]


def write_page(rows: Sequence[Row]) -> None:
    """Write the page and its data."""
    PAGE.write_text(page(rows), encoding="utf-8")
    DATA.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
