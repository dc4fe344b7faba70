"""Texts of a report: one line of visible characters, a limited width, a number."""

from __future__ import annotations

import math
import re
from typing import Final

_INVISIBLE_CHARACTERS: Final = re.compile(r"[\x00-\x20\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]+")
"""White space, control characters, and invisible or direction-changing Unicode marks."""


def plain(text: str) -> str:
    """Return a text as one line of visible characters.

    >>> plain("a\\n  b\\x1b[31m")
    'a b [31m'
    """
    return _INVISIBLE_CHARACTERS.sub(" ", text).strip()


def truncate_middle(text: str, width: int) -> str:
    """Shorten a text to `width` columns by cutting its middle, which keeps module paths distinguishable.

    >>> truncate_middle("encoder/layers/attention/query", 20), truncate_middle("head", 20)
    ('encoder/...ion/query', 'head')
    """
    text = plain(text)
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def truncate_end(text: str, width: int) -> str:
    """Shorten a text to `width` columns by cutting its end.

    >>> truncate_end("a sentence of some length", 14), truncate_end("short", 14)
    ('a sentence ...', 'short')
    """
    text = plain(text)
    return text if len(text) <= width else f"{text[: width - 4].rstrip()} ..."


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as text; None, which stands for a non-finite number, is "not finite".

    >>> number(0.000123456), number(65536.0), number(0.0), number(None)
    ('0.000123', '65536', '0', 'not finite')
    """
    if value is None or not math.isfinite(value):
        return "not finite"
    whole = f"{value:.0f}" if abs(value) < 1e9 and float(value).is_integer() else ""
    return whole or f"{value:.{digits}g}"


def count_text(count: int, word: str, plural: str = "") -> str:
    """Return a count with its noun.

    >>> count_text(1, "step"), count_text(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {word if count == 1 else plural or word + 's'}"
