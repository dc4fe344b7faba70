"""The zoo's table, from what its processes measured. Framework-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tests.porting.public.zoo.run import Outcome, Row

LINES: Final = 2
"""Lines of `names=` that are still few."""
SHARE: Final = 26 / 30
"""Share of pairs that should be moved with few lines."""
LONGEST: Final = 260
"""Letters of an error that the page shows."""
HEADER: Final = """# A zoo of public models

Made by `make zoo`, that is `python -m tests.porting.public.zoo --write`; `tests/porting/public/test_zoo.py` runs a few
of the pairs in every run.

{count} pairs of public architectures, as people move them from one code base to another. Transformers' and Keras's own
models are their own; the others are written anew, small, after what their authors published, with their names and
shapes of parameters. Weights are random, vectors and statistics are not what a fresh model has. After each call of
`polyamp.port` that came without an error, both models run on a batch that the call did not see, and a judge that shares
no code with it compares their outputs, the gradients of their inputs and all values of all gradients of parameters.

- *without check*: `port(source, target)`, and where that is an error, again with the lines of `names=` that the error
  offers, up to six times. "right": moved, and the judge agrees. "WRONG": moved, and it does not (its largest error).
- *with check*: the same with `check=batch`.
- *lines*, *calls*: entries of `names=` and `forms=`, and calls of `port`, of the shortest right way with `check=`: what
  the errors offer, or the lines that the case lists.
- *outputs*, *gradients*: what the judge measured of that, the largest difference over the largest value.

"""


def good_enough(rows: Sequence[Row]) -> bool:
    """Whether none is wrong, and enough are moved with few lines."""
    return len(few(rows)) >= SHARE * len(rows) and not any(row.wrong for row in rows)


def few(rows: Sequence[Row]) -> list[Row]:
    """The rows that are moved with few lines."""
    return [row for row in rows if row.best.right and row.best.lines <= LINES]


def said(outcome: Outcome) -> str:
    """A way in a few words."""
    if outcome.error:
        return "refused"
    lines = f", {outcome.lines} line{'s' * (outcome.lines != 1)}" if outcome.lines else ""
    if outcome.right:
        return f"right{lines}"
    return f"WRONG ({max(outcome.outputs, outcome.gradients):.1g}){lines}"


def line(row: Row) -> str:
    """A pair's row of the table."""
    best, figures = row.best, ["-"] * 4
    if best.right:
        figures = [str(best.lines), str(best.tries), f"{best.outputs:.1e}", f"{best.gradients:.1e}"]
    return f"| {row.name} | {row.pair} | {' | '.join([said(row.plain), said(row.checked), *figures])} |"


def reason(error: str) -> str:
    """The beginning of an error."""
    text = " ".join(error.split("\n")[0].split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def page(rows: Sequence[Row]) -> str:
    """The whole page."""
    refused = [row for row in rows if not row.best.right]
    wrong = sum(row.wrong for row in rows)
    lines = [
        HEADER.format(count=len(rows)),
        f"{len(few(rows))} of {len(rows)} are ported with at most {LINES} lines, {len(rows) - len(refused)} at all; "
        f"{wrong} came out wrong in one of the ways.\n",
        "\n| model | from → to | without check | with check | lines | calls | outputs | gradients |",
        "\n|---|---|---|---|---|---|---|---|\n",
        *(f"{line(row)}\n" for row in rows),
    ]
    if refused:
        lines.append("\n## Refused with a batch, and why\n\n")
        lines += [f"- {row.name}, {row.pair}: {reason(row.best.error)}\n" for row in refused]
    if any(row.remark for row in rows):
        lines.append("\n## Remarks\n\n")
        lines += [f"- {row.name}, {row.pair}: {row.remark}\n" for row in rows if row.remark]
    return "".join(lines)
