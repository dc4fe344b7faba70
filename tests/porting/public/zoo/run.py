"""Moves the pairs of the zoo, and says of each what `port` did and what the judge measured."""

from __future__ import annotations

import ast
import dataclasses
import re
import time
import types
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

import polyamp
from tests.porting.public.zoo.case import Case
from tests.porting.public.zoo.judge import Distance, distance, is_keras
from tests.porting.public.zoo.values import enter

OUTPUTS: Final = 1e-4
GRADIENTS: Final = 1e-3
"""Errors from which a port that came without an error is wrong."""
TRIES: Final = 6
"""How often a reader does what an error offers."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a pair.

    Attributes:
        error: the message of the last call; empty where the model was moved.
        outputs: relative error that the judge measured.
        gradients: the same of all gradients.
        clean: whether the report said that nothing differs.
        by_order: layers that their order alone told apart.
        differences: attributes that the report lists.
        lines: entries of `names=` and `forms=`.
        tries: calls of `port`.
        seconds: what the last call took.
    """

    error: str = ""
    outputs: float = 0.0
    gradients: float = 0.0
    clean: bool = False
    by_order: int = 0
    differences: tuple[str, ...] = ()
    lines: int = 0
    tries: int = 1
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether the model was moved, and the judge agrees."""
        return not self.error and self.outputs <= OUTPUTS and self.gradients <= GRADIENTS

    @property
    def wrong(self) -> bool:
        """Whether the model was moved, and the judge does not agree."""
        return not self.error and not self.right


def move(
    case: Case, names: Mapping[str, str], *, check: bool, forms: Mapping[str, Any] = types.MappingProxyType({})
) -> Outcome:
    """One call of `port` on fresh models, judged on a batch that the call did not see."""
    import torch

    torch.manual_seed(0)
    source = enter(case.source())
    batch = case.batch(np.random.default_rng(1))
    target = case.target(case.native(batch))
    given: Any = batch[0] if len(batch) == 1 else batch
    if case.to_target is not None:
        own: Any = case.native(batch)
        own = ([*own],) if len(own) > 1 and is_keras(target) else own
        given = polyamp.porting.Batch(given, own[0] if len(own) == 1 else own)
    options: dict[str, Any] = {"names": dict(names)} if names else {}
    if forms:
        options["forms"] = dict(forms)
    if check:
        options["check"] = given
    lines = len(names) + len(forms)
    start = time.perf_counter()
    try:
        moved, report = polyamp.port(source, target, **options)
    except Exception as error:  # noqa: BLE001  # an error that is not polyamp's is a finding, too
        said = str(error) if isinstance(error, polyamp.PolyampError) else f"{type(error).__name__}: {error}"
        return Outcome(error=said or "an error without a message", lines=lines, seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    try:
        apart = distance(case, source, moved)
    except ValueError:
        apart = Distance(float("inf"), float("inf"))
    return Outcome(
        outputs=apart.outputs,
        gradients=apart.gradients,
        clean=report.clean,
        by_order=sum(each.told == "order" for each in report.moved),
        differences=tuple(sorted({each.attribute for each in report.differences})),
        lines=lines,
        seconds=seconds,
    )


def follow(case: Case, *, check: bool) -> Outcome:
    """Calls of `port` by a reader who writes what the errors offer, until it is moved or nothing new is offered."""
    names: dict[str, str] = {}
    for tries in range(1, TRIES + 1):
        outcome = dataclasses.replace(move(case, names, check=check), tries=tries)
        new = offered(outcome.error)
        if not outcome.error or not new or new.items() <= names.items():
            break
        names = {**names, **new}
    return outcome


def offered(error: str) -> dict[str, str]:
    """The `names=` that an error offers."""
    found = re.search(r"names=(\{.*?\})(?=$|\n|\.)", error, re.MULTILINE)
    if found is None:
        return {}
    try:
        return dict(ast.literal_eval(found[1]))
    except (SyntaxError, ValueError):
        return {}


@dataclasses.dataclass(frozen=True)
class Row:
    """A pair in the ways in which people move it.

    Attributes:
        name: the case's.
        pair: the case's.
        plain: without `check=`, following the errors.
        checked: with `check=`, following the errors.
        named: with `check=` and the case's `names=` and `forms=`; None where it has none.
        remark: the case's.
    """

    name: str
    pair: str
    plain: Outcome
    checked: Outcome
    named: Outcome | None
    remark: str

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Row:
        """A row as `dataclasses.asdict` stores it."""
        ways = {way: stored[way] and Outcome(**stored[way]) for way in ("plain", "checked", "named")}
        return cls(**{**stored, **ways})

    @property
    def wrong(self) -> bool:
        """Whether one of the ways moved the model wrongly."""
        return any(each is not None and each.wrong for each in (self.plain, self.checked, self.named))

    @property
    def best(self) -> Outcome:
        """The way with the fewest lines that is right, or else what the last call said."""
        ways = [each for each in (self.checked, self.named) if each is not None]
        right = sorted((each for each in ways if each.right), key=lambda each: (each.lines, each.tries))
        return right[0] if right else ways[-1]


def measure(case: Case) -> Row:
    """All ways of moving a pair."""
    named = move(case, case.names, check=True, forms=case.forms) if case.names or case.forms else None
    if named is not None:
        named = dataclasses.replace(named, tries=case.tries)
    return Row(case.name, case.pair, follow(case, check=False), follow(case, check=True), named, case.remark)
