"""What the command prints and writes. Called by `__main__`."""

from __future__ import annotations

from typing import Any, Final

from tests.porting.faults import clean
from tests.porting.faults.listed import FAULTS

_SHARE: Final = 0.95
_HEAD: Final = """# Faults that a moved model has, and what finds them

Made by `python -m tests.porting.faults --write`; `tests/porting/test_port_faults.py` runs a few of them in every run.

Each fault is what a person does who ports a model by hand: a few words of the target's code (or of the source's) are
others, an array on its way is turned wrongly, a wrong `names=` is given. Then `polyamp.port(source, target,
check=batch)` moves the model. A fault is found by the report (`report.differences`, which a failed check repeats), by
an error of matching or structure, or by the check. It counts only if everything that was named lies where the fault
is, which was written down beforehand: the module that the fault is in or, for code between layers, the first matched
layer behind it ("behind x": nothing matched comes after x). Of layers whose outputs are not to be seen, for they run
inside another one (the cells of a recurrent stack), the check names all between the last that agrees and the first
that does not: in the tagger that is all four cells and the head, which is all that these rows say. An error of matching
shows a table of all layers without a partner; the fault's must be among them.

The faults were written before they were run, and what the first run missed was mended in the check or, where the place
written down was too narrow, in the list; so the share says that these are found, not how many of yours will be. Not
tried: faults that show on other inputs alone (a mask for padding, a dtype's range), and those of training (dropout's
seed, initialisers). The clean pairs have other sizes of all models, pictures of one channel, one to three blocks and
one to four heads among them, and go through every ordered pair of the six libraries.
"""


class Results:
    """What came of faults and clean pairs so far."""

    def __init__(self) -> None:
        self._faults: dict[int, tuple[str, list[str], bool, str]] = {}
        self._clean: dict[int, str] = {}

    def take(self, found: list[Any]) -> str:
        """A line of a worker, kept; and what is printed of it."""
        if found[0] == "clean":
            _, number, alarm = found
            self._clean[number] = alarm
            pair = clean.pairs()[number]
            said = f"{pair.model:<12} {pair.source:>7} -> {pair.target:<7}  clean, sizes {pair.seed}"
            return f"ALARM    {said}\n         {alarm}" if alarm else f"clean    {said}"
        _, number, by, named, right, said = found
        self._faults[number] = (by, named, right, said)
        fault = FAULTS[number]
        line = f"{fault.model:<12} {fault.source:>7} -> {fault.target:<7}  {fault.what}: {by} {', '.join(named[:4])}"
        if right:
            return f"found    {line}"
        return f"{'ELSE' if by else 'MISSED':<8} {line}\n         expected at {fault.at}; {said}"

    def counts(self) -> str:
        """One line."""
        found, seen = (
            sum(each[2] for each in self._faults.values()),
            sum(bool(each[0]) for each in self._faults.values()),
        )
        alarms = sum(map(bool, self._clean.values()))
        return (
            f"{found} of {len(self._faults)} faults found and named at the right module, {seen} found at all; {alarms} "
            f"false alarms on {len(self._clean)} clean pairs"
        )

    def hold(self) -> bool:
        """Whether enough were found, and nothing was said of clean pairs."""
        found = sum(each[2] for each in self._faults.values())
        return found >= _SHARE * len(self._faults) and not any(self._clean.values())

    def page(self) -> str:
        """The page of the docs."""
        rows = ["| model | pair | fault | planted in | found by | named |", "|---|---|---|---|---|---|"]
        missed = []
        for number, (by, named, right, said) in sorted(self._faults.items()):
            fault = FAULTS[number]
            shown = ", ".join(f"`{path}`" for path in _told(fault.at, named, by)) or "nothing"
            cells = (fault.model, f"{fault.source} → {fault.target}", fault.what, fault.where, by or "nothing", shown)
            rows.append(f"| {' | '.join(cells)} |")
            if not right:
                missed.append(f"- {fault.model}, {fault.source} → {fault.target}, {fault.what}: {_first(said)}")
        alarms = [f"- {clean.pairs()[number]}: {_first(said)}" for number, said in sorted(self._clean.items()) if said]
        parts = [_HEAD, f"{self.counts()}.".capitalize(), "## Faults", "\n".join(rows)]
        if missed:
            parts += ["## Not found, or named elsewhere", "\n".join(missed)]
        if alarms:
            parts += ["## False alarms", "\n".join(alarms)]
        return "\n\n".join(part.strip() for part in parts) + "\n"


def _told(at: str, named: list[str], by: str) -> list[str]:
    import re

    if by == "error":
        named = [path for path in dict.fromkeys(named) if re.fullmatch(at, path)]
    return named[:3] + ([f"and {len(named) - 3} more"] if len(named) > 3 else [])


def _first(said: str) -> str:
    return " ".join(said.split())[:300] if said else "nothing was said"
