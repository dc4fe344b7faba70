"""`Fault`: what is planted, and what a comparison must say of it, which is written down before any run.

Called by the lists of faults (`in_*`) and by `finding`. The code of a fixture model is changed as text, as the faults
of ported models are (`tests.porting.faults.planting`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.parity.faults.places import paths
from tests.porting.faults.planting import Carried, Edit


class Expected(NamedTuple):
    """Where the first divergence must be.

    Attributes:
        stage: the pass; several, where one fault may show in one or in the other, are joined by "|".
        at: regular expression of the module's path as the first side spells it.
        step: number of the step; 0 of what the weights are before the first.
        phase: "float32", or "policy".
        what: regular expression of the quantity.
    """

    stage: str
    at: str
    step: int | tuple[int, ...] = 1
    phase: str = "float32"
    what: str = ".*"


class Fault(NamedTuple):
    """One fault. The second side has it, unless `ours` says otherwise.

    Attributes:
        kind: of the issue's list: "formula", "epsilon", "dtype", "layout", "gradient", "loss", "optimizer", "step",
            "statistics", "randomness".
        what: in words.
        model: of `common.MODELS`.
        first: library of the first side.
        second: library of the second.
        expected: where it must be named.
        edits: of the second's code.
        ours: of the first's code.
        both: library -> edits of correct code that give both sides what the fixture does not have.
        carried: arrays that came wrongly to the second side.
        losses: names in `losses.LOSSES`, of the first side and of the second.
        recipe: of both, keyword arguments of `polyamp.Recipe`; see `recipes.BASE`.
        changes: of the second's recipe.
        rule: name of a wrong rule in `rules.RULES`, which the second side steps by.
        randomness: "off" or "shared".
        steps: how many.
    """

    kind: str
    what: str
    model: str
    first: str
    second: str
    expected: Expected
    edits: tuple[Edit, ...] = ()
    ours: tuple[Edit, ...] = ()
    both: Mapping[str, tuple[Edit, ...]] | None = None
    carried: tuple[Carried, ...] = ()
    losses: tuple[str, str] = ("plain", "plain")
    recipe: Mapping[str, Any] | None = None
    changes: Mapping[str, Any] | None = None
    rule: str = ""
    randomness: str = "off"
    steps: int = 2


def forward(model: str, *places: str, **others: Any) -> Expected:
    """A module's output is the first to differ."""
    return Expected("forward", paths(model, *places), **{"what": "(in|out)put.*", **others})


def backward(model: str, *places: str, **others: Any) -> Expected:
    """A gradient."""
    return Expected("backward", paths(model, *places), **others)


def update(model: str, *places: str, **others: Any) -> Expected:
    """What the step made of parameters, moments and statistics."""
    return Expected("update", paths(model, *places), **others)


def carried(model: str, *places: str) -> Expected:
    """A weight that came wrongly, before the first step; or what its layer makes of it."""
    return Expected("update|forward", paths(model, *places), step=(0, 1), what="parameter|(in|out)put.*")


LOSS = Expected("forward", "", what="loss")
