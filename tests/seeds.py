"""Ranges of seeds as commands take them."""

from __future__ import annotations


def seeds(text: str) -> list[int]:
    """ "3", "0-20" (20 left out), "1,5,10-12" as numbers."""
    found: list[int] = []
    for part in text.split(","):
        first, _, end = part.partition("-")
        found += range(int(first), int(end)) if end else [int(first)]
    return found
