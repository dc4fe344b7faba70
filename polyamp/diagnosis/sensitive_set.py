"""`find_sensitive`: the smallest set of modules that must stay in float32, from trials of sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Trial = Callable[[frozenset[str]], bool]
"""Whether a training agrees with float32 if exactly these modules compute in float32."""


def find_sensitive(modules: Sequence[str], agrees: Trial) -> list[str]:
    """Return the modules without which no set agrees, in the order in which they were found.

    The search assumes that a set which agrees still does with one module more, that the empty set does not agree, and
    that all modules together do. It finds one module after the other: the shortest beginning of the list that agrees,
    together with what is known, ends with one. Its length grows by factors of 4 until it agrees, then the last step is
    halved, so that a good order takes few trials; any order at most 2 * k * log2(n), of n modules with k in the set.

    Args:
        modules: those to choose from, the most suspicious first.
        agrees: a trial.

    Example:
        >>> find_sensitive(list("abcdefgh"), {"b", "e"}.issubset)
        ['e', 'b']
    """
    found: list[str] = []
    left = list(modules)
    while True:
        length = _shortest_beginning(left, found, agrees)
        found.append(left[length - 1])
        left = left[: length - 1]
        if not left or agrees(frozenset(found)):
            return found


def _shortest_beginning(left: Sequence[str], found: Sequence[str], agrees: Trial) -> int:
    """Return the smallest number of first modules that agree together with those found. All of them agree."""
    low, high = 0, 1  # the first `low` do not agree
    while high < len(left) and not agrees(frozenset([*found, *left[:high]])):
        low, high = high, 4 * high
    high = min(high, len(left))
    while high - low > 1:
        middle = (low + high) // 2
        if agrees(frozenset([*found, *left[:middle]])):
            high = middle
        else:
            low = middle
    return high
