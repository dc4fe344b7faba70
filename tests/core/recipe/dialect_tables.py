"""The tables of docs/reference/dialect_keys.md, from the code; run as a script it prints them."""

from __future__ import annotations

from polyamp.recipe.dialects.dialect_report import DIALECTS, DialectTable


def table_text(table: DialectTable) -> str:
    """Return one dialect's part of the page."""
    lines = ["| read | the library's default |", "|---|---|"]
    lines += [f"| `{key}` | `{default!r}` |" for key, default in table.defaults.items()]
    lines += ["", "| not mapped | nothing is lost if it is | why |", "|---|---|---|"]
    for key, row in table.unmapped.items():
        lines.append(f"| `{key}` | {', '.join(f'`{value!r}`' for value in row.off)} | {row.why} |")
    lines += ["", "Not of a recipe: " + ", ".join(f"`{key}`" for key in sorted(table.outside)) + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for dialect in DIALECTS.values():
        print(f"## {dialect[0].library}\n\n{table_text(dialect[0])}")
