"""What the command prints and writes. Called by `__main__`."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Final, NamedTuple

from polyamp.parity.verdict.tolerances import FACTOR
from tests.parity.faults import clean
from tests.parity.faults.listed import FAULTS
from tests.parity.faults.planted import Fault

_SHARE: Final = 0.95
_FACTORS: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 256.0)
_VERSIONS: Final = ("torch", "tensorflow", "keras", "jax", "flax", "equinox", "dm-haiku", "optax", "numpy")
_HEAD: Final = """# Faults of a training, and where `polyamp.compare` says that they are

Made by `python -m tests.parity.faults --write`; `tests/parity/test_parity_faults.py` runs a few of them in every run.

Each fault is what a person does who writes a model, a loss or a training a second time: a few words of the code are
others, an array came wrongly from the other framework, the recipe or the rule of the step differs in one thing. Two
steps are made of most, in float32 (with float64 as its judge where the framework has one) and under the policy where
one is named. Before a fault was run it was written down where it must be named: in which phase, at which step, in
which pass and in which module. Of code between two modules that is the module that holds the code, or the first matched
one behind it; of a weight that came wrongly, the weight before the first step or what its layer makes of it; of a rule
that treats all parameters alike, any of them. A fault that is seen elsewhere counts as not found.

Seven places of the list were changed after a run. Six are faults in the code of a recurrent stack: no framework shows
what a cell of it gives, so all cells between the last layer that agrees and the first that does not are named, and the
first of them stands for them. One was a slip: it named the second block for code that both blocks share. Five faults
were planted in another way, because as first written they changed no number (torch computes a 16-bit softmax in float32
inside, Keras's kernel corrects its bias by itself) or broke the model. What the first runs missed was otherwise mended
in polyamp; so the shares say that these are found, not how many of yours will be. In a wrong place counts as not found.

The clean comparisons go through every ordered pair of libraries and each with itself, and through optimizers, policies,
clipping, accumulation, schedules and, with masks that both sides share, dropout; each has weights and batches of its
own, every third another size of model. Taggers with two biases in one framework and one in the other get half of the
rate for either of the two, and no decay where haiku keeps a bias without the 1 of its forget gate: without that they do
not train alike, which the comparison said.
"""


class Found(NamedTuple):
    """What came of a fault."""

    found: bool
    right: bool
    named: str
    kind: str
    said: str
    seconds: float
    margin: float


class Outcome(NamedTuple):
    """What came of a clean comparison."""

    alarm: str
    seconds: float
    margin: float


def line(fault: Fault) -> str:
    """A fault in words."""
    return f"{fault.model:<11} {fault.first:>7} -> {fault.second:<7} {fault.kind}: {fault.what}"


class Results:
    """What came of faults and clean comparisons so far."""

    def __init__(self) -> None:
        self._faults: dict[int, Found] = {}
        self._clean: dict[int, Outcome] = {}

    @property
    def names(self) -> set[str]:
        """What is known already: "f3", "c17"."""
        return {f"f{number}" for number in self._faults} | {f"c{number}" for number in self._clean}

    def take(self, made: list[Any]) -> str:
        """A line of a worker, kept; and what is printed of it."""
        name, *rest = made
        number = int(name[1:])
        if name[0] == "c":
            outcome = self._clean[number] = Outcome(*rest)
            run = clean.runs()[number]
            said = f"{run.model:<11} {run.first:>7} -> {run.second:<7} clean, {run.policy}, seed {run.seed}"
            return f"ALARM    {said}\n         {outcome.alarm}" if outcome.alarm else f"clean    {said}"
        found = self._faults[number] = Found(*rest)
        said = f"{line(FAULTS[number])} | {found.named} | {found.kind}"
        if found.right:
            return f"found    {said}"
        return f"{'ELSE' if found.found else 'MISSED':<8} {said}\n         {FAULTS[number].expected}; {found.said}"

    def counts(self) -> str:
        """One line."""
        right = sum(each.right for each in self._faults.values())
        seen = sum(each.found for each in self._faults.values())
        alarms = sum(bool(each.alarm) for each in self._clean.values())
        return (
            f"{right} of {len(self._faults)} faults named at the right phase, step, pass and module "
            f"({right / max(len(self._faults), 1):.1%}), {seen} seen at all; {alarms} false alarms in "
            f"{len(self._clean)} clean comparisons"
        )

    def hold(self) -> bool:
        """Whether enough were found, and nothing was said of clean ones."""
        right = sum(each.right for each in self._faults.values())
        return right >= _SHARE * len(self._faults) and not any(each.alarm for each in self._clean.values())

    def page(self) -> str:
        """The page of the docs."""
        parts = [_HEAD, f"{self.counts()}.", _versions(), "## By kind of fault", self._kinds()]
        parts += ["## Clean comparisons", self._cleans(), "## How large the factor must be", self._curve()]
        parts += ["## All faults", self._rows()]
        missed = [
            f"- {' '.join(line(FAULTS[number]).split())}: {_short(found.named or found.said, 300)}"
            for number, found in sorted(self._faults.items())
            if not found.right
        ]
        alarms = [
            f"- {' '.join(map(str, clean.runs()[number]))}: {_short(found.alarm, 300)}"
            for number, found in sorted(self._clean.items())
            if found.alarm
        ]
        if missed:
            parts += ["## Not found, or named elsewhere", "\n".join(missed)]
        if alarms:
            parts += ["## False alarms", "\n".join(alarms)]
        return "\n\n".join(part.strip() for part in parts) + "\n"

    def _kinds(self) -> str:
        rows = ["| kind | faults | named right | seen |", "|---|---|---|---|"]
        for kind in dict.fromkeys(each.kind for each in FAULTS):
            own = [found for number, found in self._faults.items() if FAULTS[number].kind == kind]
            right, seen = sum(each.right for each in own), sum(each.found for each in own)
            rows.append(f"| {kind} | {len(own)} | {right} | {seen} |")
        return "\n".join(rows)

    def _cleans(self) -> str:
        rows = [
            "| policy | comparisons | alarms | median of the largest distance / allowed | largest |",
            "|---|---|---|---|---|",
        ]
        for policy in clean.POLICIES:
            own = [found for number, found in self._clean.items() if clean.runs()[number].policy == policy]
            margins = sorted(each.margin for each in own)
            if own:
                middle = f"{margins[len(margins) // 2]:.2f}"
                alarms = sum(bool(each.alarm) for each in own)
                rows.append(f"| {policy} | {len(own)} | {alarms} | {middle} | {margins[-1]:.2f} |")
        return "\n".join(rows)

    def _curve(self) -> str:
        rows = [
            f"`tolerances.FACTOR` is {FACTOR:g}. Had it been another, with everything else as it is:",
            "",
            "| factor | clean comparisons with an alarm | faults no longer named where they are |",
            "|---|---|---|",
        ]
        right = [each for each in self._faults.values() if each.right]
        for factor in _FACTORS:
            alarms = sum(each.margin * FACTOR > factor for each in self._clean.values())
            missed = sum(each.margin * FACTOR <= factor for each in right)
            rows.append(f"| {factor:g} | {_of(alarms, len(self._clean))} | {_of(missed, len(right))} |")
        return "\n".join(rows)

    def _rows(self) -> str:
        rows = ["| model | sides | kind | fault | named at | says |", "|---|---|---|---|---|---|"]
        for number, found in sorted(self._faults.items()):
            fault = FAULTS[number]
            named = found.named or "nothing"
            named = named if found.right else f"**not right**: {named}"
            cells = (fault.model, f"{fault.first}, {fault.second}", fault.kind, fault.what, named, found.kind)
            rows.append(f"| {' | '.join(cells)} |")
        return "\n".join(rows)


def _of(count: int, whole: int) -> str:
    return f"{count} of {whole} ({count / max(whole, 1):.1%})"


def _versions() -> str:
    found = [f"{name} {importlib.metadata.version(name)}" for name in _VERSIONS]
    return f"On one CPU, XLA's cheapest code, TensorFlow without oneDNN. {', '.join(found)}."


def _short(said: str, length: int) -> str:
    return " ".join(said.split())[:length] or "nothing was said"
