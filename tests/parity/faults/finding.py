"""Whether `polyamp.compare` finds a fault, and where it says that it is. Called by the command and the tests."""

from __future__ import annotations

import contextlib
import importlib
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import polyamp
from polyamp.errors import PolyampError
from polyamp.parity.report.report import Report
from polyamp.parity.report_data import Comparison
from polyamp.parity.verdict import verdict as verdicts
from polyamp.porting.check import Batch
from tests.parity.faults.losses import loss_fn
from tests.parity.faults.planted import Expected, Fault
from tests.parity.faults.rules import stepping
from tests.porting.faults.planting import carrying, models, sized

Sizes = tuple[tuple[str, Any], ...]
ROWS: Final = 8
BASE: Final[dict[str, Any]] = {"optimizer": polyamp.sgd(0.1, momentum=0.9)}
"""What both sides train with where a fault says nothing else."""
MOST: Final = 1e9


class Verdict(NamedTuple):
    """What came of one fault.

    Attributes:
        found: whether the comparison says that the sides part.
        right: whether it says so at the right phase, step, pass and module.
        named: "phase, step, pass, module, quantity" as it was said.
        kind: what it looks like.
        said: the sentence, or the error.
        seconds: wall time.
        margin: how many times what is allowed the distance is there.
    """

    found: bool
    right: bool
    named: str
    kind: str
    said: str
    seconds: float = 0.0
    margin: float = 0.0


def batches(model: str, sides: tuple[Any, Any], seed: int, sizes: Sizes = ()) -> Callable[[int], Batch]:
    """The batches of a training: step -> arrays as both sides' models take them."""

    def batch(step: int) -> Batch:
        made = {key: array[:ROWS] for key, array in sized(sizes).batch(model, 10 * seed + step).items()}
        return Batch(*({key: side.native(model, array) for key, array in made.items()} for side in sides))

    return batch


def compared(
    model: str,
    sides: tuple[Any, Any],
    seed: int,
    *,
    losses: tuple[str, str] = ("plain", "plain"),
    recipes: tuple[Mapping[str, Any], Mapping[str, Any]] = (BASE, BASE),
    randomness: str = "off",
    steps: int = 2,
    sizes: Sizes = (),
    eager: bool = False,
) -> Report:
    """Two sides' comparison.

    Args:
        model: of `common.MODELS`.
        sides: modules with the models (`planting.models`).
        seed: of the weights and the batches.
        losses: names of `losses.LOSSES`.
        recipes: arguments of `polyamp.Recipe`.
        randomness: as of `compare`.
        steps: how many.
        sizes: of the models, where they are not the fixtures' own.
        eager: whether Keras steps op by op, and not in a graph.
    """
    ours, theirs = sides
    given = sized(sizes).inputs(model)
    shown = [side.native(model, given) if _needs_inputs(side) else None for side in sides]
    return polyamp.compare(
        ours.build(model, seed),
        theirs.build(model, seed + 1),
        batches(model, sides, seed, sizes),
        loss_fn=(loss_fn(losses[0]), loss_fn(losses[1])),
        recipe=(polyamp.Recipe(**recipes[0]), polyamp.Recipe(**recipes[1])),
        steps=steps,
        labels=("first", "second"),
        options=(_options(ours, eager), _options(theirs, eager)),
        randomness=randomness,
        inputs=shown,
    )


def _options(side: Any, eager: bool) -> dict[str, Any]:
    plain = eager and side.__name__.startswith("keras")
    return {"init": side.OPTIONS, "step": {"compile": False} if plain else {}}


def _needs_inputs(side: Any) -> bool:
    """Whether a library's layers are known by their names alone."""
    return bool(side.__name__.startswith(("linen", "haiku")))


def verdict(fault: Fault, seed: int = 0) -> Verdict:
    """Plant a fault and compare."""
    both = fault.both or {}
    ours = models(fault.first, (*both.get(fault.first, ()), *fault.ours))
    theirs = models(fault.second, (*both.get(fault.second, ()), *fault.edits))
    recipe = {**BASE, **(fault.recipe or {})}
    try:
        with stepping(fault.rule, fault.second), carrying(theirs.build(fault.model, seed), fault.carried):
            report = compared(
                fault.model,
                (ours, theirs),
                seed,
                losses=fault.losses,
                recipes=(recipe, {**recipe, **(fault.changes or {})}),
                randomness=fault.randomness,
                steps=fault.steps,
            )
    except PolyampError as error:
        return Verdict(False, False, "", type(error).__name__, str(error))
    return said_of(fault, report.comparisons[0], report.seconds)


def said_of(fault: Fault, comparison: Comparison, seconds: float = 0.0) -> Verdict:
    """What a comparison says of a fault."""
    first = comparison.first
    if first is None:
        return Verdict(False, False, "", "", "agrees", seconds)
    named = f"{first.phase}, step {first.step}, {first.stage}, {first.module or 'the model'}, {first.what}"
    named += f" {first.name}" if first.name else ""
    numbers = f"distance {first.distance}, allowed {first.allowed}, own {first.own}"
    said = f"{first.sentence} {' '.join(first.evidence)} {numbers}"
    right = is_right(first, fault.expected)
    times = margin(first.distance, first.allowed)  # below 1 where dtypes tell, and no distance
    return Verdict(True, right, named, first.kind, said, seconds, times if times > 1.0 else MOST)


@contextlib.contextmanager
def kept(path: Path | None) -> Iterator[None]:
    """A block whose last comparison's traces are written to a file, so that `judged` can judge them anew."""
    if path is None:
        yield
        return
    module = importlib.import_module("polyamp.parity.execution.report_builder")

    def keeping(labels: Any, runs: Any, agreed: Any, recipes: Any) -> Comparison:
        seen = [(phase, *((ran.trace, list(ran.entries())) for ran in (one, two))) for phase, one, two in runs]
        path.write_bytes(pickle.dumps((labels, seen, agreed, recipes)))
        return verdicts.compare_traces(labels, runs, agreed, recipes)

    with mock.patch.object(module, "compare_traces", keeping):
        yield


def judged(path: Path) -> Comparison:
    """What is said now of traces that were kept."""
    labels, seen, agreed, recipes = pickle.loads(path.read_bytes())  # our own file
    runs = [
        (phase, *(verdicts.PhaseTrace(trace, lambda entries=entries: entries) for trace, entries in both))
        for phase, *both in seen
    ]
    return verdicts.compare_traces(labels, runs, agreed, recipes)


def margin(distance: float | None, allowed: float | None) -> float:
    """How many times what is allowed a distance is; at most `MOST`, where no number says it."""
    if distance is None or not allowed:
        return 0.0 if distance == 0.0 else MOST
    return min(distance / allowed, MOST)


def largest(comparison: Comparison) -> float:
    """The largest margin of a comparison's table."""
    return max((margin(row.distance, row.allowed) for row in comparison.rows), default=0.0)


def is_right(first: Any, expected: Expected) -> bool:
    """Whether a divergence is where it was expected."""
    steps = expected.step if isinstance(expected.step, tuple) else (expected.step,)
    return (
        (first.phase == "float32") == (expected.phase == "float32")
        and first.step in steps
        and first.stage in expected.stage.split("|")
        and bool(re.fullmatch(expected.at, first.module.partition("#")[0]) or re.fullmatch(expected.at, first.module))
        and bool(re.fullmatch(expected.what, first.what))
    )
