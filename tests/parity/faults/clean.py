"""200 clean comparisons: every ordered pair of libraries and each with itself, other weights, batches, sizes, policies
and optimizers. Nothing may be said of one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from polyamp import Group, adam, adamw, lion, no_decay, rmsprop, schedules, sgd
from polyamp.parity.report.report import Report
from polyamp.parity.report_data import Comparison
from tests.fixtures.port import common
from tests.parity.faults.finding import compared, largest
from tests.parity.faults.in_precision import DROPOUT
from tests.porting.faults.clean import sizes
from tests.porting.faults.planting import LIBRARIES, models

COUNT: Final = 200
POLICIES: Final = ("float32", "mixed_bfloat16", "mixed_float16")
_PAIRS: Final = (*itertools.permutations(LIBRARIES, 2), *((each, each) for each in LIBRARIES))
_MERGED: Final = ("torch",)
"""Libraries whose recurrent layers have two biases where the others have one."""
_OPTIMIZERS: Final = (
    {"optimizer": sgd(0.1, momentum=0.9)},
    {"optimizer": adamw(1e-3, weight_decay=0.1, groups=no_decay("bias", "norm"))},
    {"optimizer": adam(schedules.linear_warmup(1e-2, 4, start=1e-3)), "clip_norm": 0.5},
    {"optimizer": sgd(0.05, momentum=0.9, nesterov=True, weight_decay=1e-3), "accumulate_steps": 2},
    {"optimizer": rmsprop(1e-3)},
    {"optimizer": lion(1e-4, weight_decay=0.1), "clip_norm": 1.0},
    {"optimizer": adamw(1e-2)},
)
_SHIFTED: Final = ("haiku",)
"""Libraries whose LSTM adds 1 to the forget gate in its formula."""


class Clean(NamedTuple):
    """A comparison of equal trainings.

    Attributes:
        model: of `common.MODELS`.
        first: library.
        second: library.
        policy: of `POLICIES`.
        seed: of everything else.
    """

    model: str
    first: str
    second: str
    policy: str
    seed: int

    @property
    def dropout(self) -> bool:
        """Whether the model drops, by masks that both sides share."""
        return self.model == "gpt" and self.first in DROPOUT and self.second in DROPOUT and self.seed % 2 == 0


def runs(count: int = COUNT) -> list[Clean]:
    """All of them: models, pairs and policies in turn, out of step with each other."""
    found = []
    for seed in range(count):
        model = common.MODELS[seed % len(common.MODELS)]
        first, second = _PAIRS[(7 * seed) % len(_PAIRS)]
        found.append(Clean(model, first, second, POLICIES[(seed // len(common.MODELS)) % len(POLICIES)], seed))
    return found


def recipes(run: Clean) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The arguments of both sides' recipes. Of a tagger with two biases in one framework and one in the other, each of
    the two gets half of the rate: else their sum would move twice as far. One whose bias is kept without the 1 of the
    forget gate is not decayed: a decay pulls at what is kept."""
    recipe: dict[str, Any] = {"policy": run.policy, **_OPTIMIZERS[run.seed % len(_OPTIMIZERS)]}
    if run.model == "vit" and "haiku" in (run.first, run.second):  # whose token no name tells to be no bias
        recipe["optimizer"] = recipe["optimizer"].replace(groups=())
    if run.dropout:  # whose masks frameworks draw in other orders where a step has several micro-batches
        recipe["accumulate_steps"] = 1
    merged, shifted = ((run.first in each) != (run.second in each) for each in (_MERGED, _SHIFTED))
    if run.model != "tagger" or not (merged or shifted):
        return recipe, recipe
    recipe["optimizer"] = recipe["optimizer"].replace(weight_decay=0.0, groups=())
    if not merged:
        return recipe, recipe
    recipe["clip_norm"] = None
    halved = recipe["optimizer"].replace(groups=[Group("lstm/bias*", learning_rate_scale=0.5)])
    two = {**recipe, "optimizer": halved}
    return (two, recipe) if run.first in _MERGED else (recipe, two)


def report(run: Clean) -> Report:
    """What the comparison says."""
    others = sizes(run.seed) if run.seed % 3 == 0 else ()
    edits = DROPOUT if run.dropout else {}
    sides = tuple(models(library, edits.get(library, ()), others) for library in (run.first, run.second))
    return compared(
        run.model,
        (sides[0], sides[1]),
        run.seed,
        recipes=recipes(run),
        randomness="shared" if run.dropout else "off",
        steps=1 if run.dropout else 2,
        sizes=others,
        eager=run.seed % 2 == 1,
    )


def outcome(comparison: Comparison, seconds: float = 0.0) -> tuple[str, float, float]:
    """What was said against a clean comparison, which should be nothing; seconds; the largest distance over what is
    allowed there."""
    return said(comparison), seconds, largest(comparison)


def said(comparison: Comparison) -> str:
    """The first divergence in a line; "" if there is none."""
    first = comparison.first
    if first is None:
        return ""
    where = f"{first.phase}, step {first.step}, {first.stage}, {first.module or 'the model'}, {first.what} {first.name}"
    return f"{where}: distance {first.distance}, allowed {first.allowed}, own {first.own}: {first.sentence}"
