"""What the command prints and writes. Called by `__main__`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.parity.held_out.listed import PAIRS, PLANTS

Results = Mapping[str, Mapping[str, Any]]
_SHARES: Final = {"found": 0.98, "place": 0.95, "kind": 0.90}
_TITLES: Final = {
    "C": "## Faults of a third part",
    "D": "## Faults of a fourth part",
    "E": "## Faults of a fifth part",
}
_TITLE: Final = "## Faults that were kept back"


def line(name: str) -> str:
    """A fault or a clean pair in words."""
    number = int(name[1:])
    if name[0] == "f":
        plant = PLANTS[number]
        sides = f"{plant.first.framework} -> {plant.second.framework}"
        return f"{name} {plant.family} {sides} {plant.kind}: {plant.what}"
    pair = PAIRS[number]
    return (
        f"{name} {pair.family} {pair.first.framework} -> {pair.second.framework} clean: {pair.words}, seed {pair.seed}"
    )


def said(name: str, result: Mapping[str, Any]) -> str:
    """A line of the output."""
    if "error" in result and not result.get("kind"):
        return f"ERROR    {line(name)}\n         {result['error'][:600]}"
    if name[0] == "c":
        return f"ALARM    {line(name)}\n         {result['alarm']}" if result["alarm"] else f"clean    {line(name)}"
    if not result["found"]:
        return f"MISSED   {line(name)} | {result['said'][:300]}"
    marks = (
        "found"
        if result["place"] and result["kind"]
        else "ELSE " * (not result["place"]) + "KIND" * (not result["kind"])
    )
    text = f"{marks:<8} {line(name)} | {result['named']} | {result['said'].partition(':')[0]}"
    plant = PLANTS[int(name[1:])]
    return text if marks == "found" else f"{text}\n         {plant.expected} {plant.says!r}; {result['said'][:500]}"


def _of(results: Results, key: str) -> tuple[int, int]:
    own = [result for name, result in results.items() if name[0] == "f"]
    return sum(bool(result.get(key)) for result in own), len(own)


def counts(results: Results) -> str:
    """One line."""
    pairs = [result for name, result in results.items() if name[0] == "c"]
    shares = ", ".join(
        f"{key} {count} of {whole} ({count / max(whole, 1):.1%})"
        for key in _SHARES
        for count, whole in [_of(results, key)]
    )
    alarms = sum(bool(result.get("alarm") or result.get("error")) for result in pairs)
    return f"{shares}; {alarms} alarms in {len(pairs)} clean pairs"


def hold(results: Results) -> bool:
    """Whether enough were found, and nothing was said of clean ones."""
    enough = all(_of(results, key)[0] >= share * _of(results, key)[1] for key, share in _SHARES.items())
    return enough and not any(
        result.get("alarm") or result.get("error") for name, result in results.items() if name[0] == "c"
    )


def write(page: Path, results: Results, part: str) -> None:
    """Put a part's table into a page: in the place of the one before, or at the end."""
    title = _TITLES.get(part, _TITLE)
    before, _, behind = page.read_text(encoding="utf-8").partition(title)
    _, mark, others = behind.partition("\n## ")
    section = f"{before.rstrip()}\n\n{title}\n\n{_section(results, part)}\n"
    page.write_text(f"{section}{mark}{others}", encoding="utf-8")


def _section(results: Results, part: str) -> str:
    rows = ["| family | faults | found | place | kind |", "|---|---|---|---|---|"]
    for group in (lambda plant: plant.family, lambda plant: plant.kind):
        for word in dict.fromkeys(map(group, PLANTS)):
            own = {n: r for n, r in results.items() if n[0] == "f" and group(PLANTS[int(n[1:])]) == word}
            if own:
                rows.append(f"| {word} | {len(own)} | {' | '.join(str(_of(own, key)[0]) for key in _SHARES)} |")
    missed = [
        f"- {line(name)}: {_short(result)}"
        for name, result in sorted(results.items(), key=lambda item: (item[0][0], int(item[0][1:])))
        if (name[0] == "f" and not all(result.get(key) for key in _SHARES))
        or (name[0] == "c" and (result.get("alarm") or result.get("error")))
    ]
    return "\n".join(
        [
            f"Made by `python -m tests.parity.held_out --half {part} --write`.",
            *_WORDS.get(part, _OF_HALVES),
            "",
            f"{counts(results)}.",
            "",
            *rows,
            "",
            "Not found, named elsewhere, or as another kind; and alarms:",
            "",
            *missed,
        ]
    )


def _short(result: Mapping[str, Any]) -> str:
    marks = ", ".join(f"{key} wrong" for key in _SHARES if key in result and not result[key])
    text = result.get("error") or result.get("alarm") or f"{marks}; {result.get('named', '')}; {result.get('said', '')}"
    return " ".join(text.split())[:300]


_OF_HALVES: Final = (
    "A few of half A run in",
    "`tests/parity/test_held_out.py`. 254 faults over eight families, and 216 clean pairs, with where and as",
    "what each must be named, were written without the rules being read. A seed split both lists in two before",
    "the first was run.",
    "",
    "A rule of the step counts as the right kind only if the sentence or the evidence names it, and a rounding",
    "in a model's code only if the dtype is named. A pair that is refused with an error that names the layer",
    "and its setting counts as found.",
    "",
    "After half A was run, eight places of it were changed: a norm of the user's own in a pair with nnx is no",
    "module there, and a module may have no partner because of the fault, so the first one behind it may be",
    "named; and two plants, which changed no number. By the same reasons two places and one plant of half B",
    "were changed before it was run. Clean pairs under a policy that their models do not take got another one.",
)
_OF_PART_C: Final = (
    "The faults and clean pairs of part C were written later and apart, without the rules being read: the eight",
    "families in other sizes, a third of the faults in loops written by hand and a third under 16 bits. Before the",
    "first comparison both sides of each fault were trained without one, and those that changed no number were",
    "replaced. What counts as found, as the right place and as the right kind is as above.",
)
_OF_PART_D: Final = (
    "The faults and clean pairs of part D were written after part C's had been looked at, apart, without the rules",
    "being read: the eight families in further sizes, 30 of 100 faults in loops written by hand, and 41 under 16 bits.",
    "There a fault counts as one of the dtype only where a softmax, a norm or a loss is in 16 bits and the other side",
    "has it in float32. Both sides of each fault and clean pair were trained without a comparison first, and faults",
    "that changed no number were replaced. What counts as found is as above.",
)
_OF_PART_E: Final = (
    "The faults and clean pairs of part E were written after part D's had been looked at, apart, without the rules",
    "being read: the eight families in further sizes, and for the most part faults that no part before has; 26 of 100",
    "are in loops written by hand, and 35 under 16 bits. Dtypes count as in part D. Both sides of each fault and clean",
    "pair were trained without a comparison first, and faults that changed no number, or only what the policy's 16",
    "bits round, were replaced. Six of part D's eight misses were mended in between; part E ran once, after that.",
)
_WORDS: Final = {"C": _OF_PART_C, "D": _OF_PART_D, "E": _OF_PART_E}
