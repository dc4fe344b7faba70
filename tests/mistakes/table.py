"""The commonest mistakes: what is typed, in which frameworks, and what is said. One row each; no framework is imported.

A row is a piece of code as a user would type it, run with the names of `bench.py`. `said` is looked for in the message
and its notes: it names the argument, what is accepted, what came and what to do. Called by `tests/mistakes` (one
process per framework) and `tests/core/mistakes` (rows that need none).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

FRAMEWORKS: Final = ("torch", "tensorflow", "jax")
TORCH, TENSORFLOW, JAX = (frozenset({name}) for name in FRAMEWORKS)
EVERYWHERE: Final = TORCH | TENSORFLOW | JAX
CORE: Final[frozenset[str]] = frozenset()
"""Rows that need no framework."""


class Row(NamedTuple):
    """One mistake.

    Attributes:
        typed: Python code.
        error: name of the exception's class: polyamp's, or a built-in where polyamp adds a note to the program's own.
        said: regular expression, found in the message with its notes (`.` matches line ends).
        where: the frameworks in which it is tried; none for what needs no framework.
    """

    typed: str
    error: str
    said: str
    where: frozenset[str] = EVERYWHERE


def rows() -> Iterator[Row]:
    """Every row."""
    from tests.mistakes import rows_batches, rows_files, rows_frameworks, rows_losses, rows_recipes, rows_states

    for part in (rows_states, rows_batches, rows_losses, rows_recipes, rows_files, rows_frameworks):
        yield from part.ROWS


def of(framework: str | None) -> list[Row]:
    """The rows that are tried in a framework; with None those that need none."""
    return [row for row in rows() if (framework in row.where if framework else not row.where)]


def every(error: str, where: frozenset[str], pairs: Iterable[tuple[str, str]]) -> list[Row]:
    """Rows of one error and one place, from (typed, said)."""
    return [Row(typed, error, said, where) for typed, said in pairs]
