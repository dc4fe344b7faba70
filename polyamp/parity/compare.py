"""`compare`: two models in one process, trained side by side on copies, and where they part. The one line."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from polyamp._version import __version__
from polyamp.errors import ArgumentError
from polyamp.parity import trace as traces
from polyamp.parity.curves import curves_of
from polyamp.parity.party import Party
from polyamp.parity.phases import Phase, as_data, phases_of
from polyamp.parity.report import Report
from polyamp.parity.running import Batches, Meeting
from polyamp.parity.verdict import Ran, compared
from polyamp.porting.check import Across, Batch
from polyamp.recipe.recipe import Recipe

RANDOMNESS: Final = ("off", "shared")


def compare(
    model_a: Any,
    model_b: Any,
    batch: Any,
    loss_fn: Any = None,
    recipe: Any = None,
    steps: int = 1,
    *,
    names: Mapping[str, str] | None = None,
    inputs: Any = None,
    randomness: str = "off",
    labels: tuple[str, str] | None = None,
    options: Any = None,
) -> Report:
    """Whether two models compute and train alike, and where they part first.

    Copies of both are trained from the first's weights (`polyamp.port`) on the same batches: in float32 first, then
    under the recipe's policy; small ones in float64 too, which says how much float32 rounds. Modules' outputs, loss,
    gradients, the step's report, and parameters and moments after each update are compared in this order, and a
    difference counts when the two sides are further apart than rounding explains (`polyamp.parity.tolerances`).

    Args:
        model_a: as `polyamp.init` takes it. It is not changed.
        model_b: of any framework that can share the process, the same one included. It gets the first's weights for
            the comparison, and has its own again afterwards.
        batch: what `loss_fn` is given, of NumPy arrays; a list of batches, of which step k gets number k modulo their
            number; or a function of the step's number (from 0) that gives it. Images are given as `model_a` has them;
            `polyamp.porting.Batch(a, b)` gives each side its own.
        loss_fn: `loss_fn(model, batch) -> loss`; a pair for one each. None: the outputs against fixed random
            numbers, as in inference, where the batch is the models' input.
        recipe: what to train with; a pair for one each; functions of the model where it holds a framework's own
            optimizer. None: one forward and backward pass in float32.
        steps: training steps.
        names: as for `polyamp.port`, where names do not tell which layer is which.
        inputs: what the models themselves take, where layers are known by their names alone (linen, haiku, functions);
            a list of two for one each.
        randomness: "off": dropout passes on what it gets. "shared": both sides drop the same elements.
        labels: what the report calls the sides; by default their frameworks.
        options: `{"init": {...}, "step": {...}}`, what `polyamp.init` and `train_step` are given; a pair for one each.

    Returns:
        A report: `report.agrees`, `report.first`, `print(report)`, `report.save(folder)`.

    Raises:
        PortError: the models do not fit each other.
        ArgumentError: an argument that cannot be.
        PolyampError: whatever a step would raise.

    Example:
        >>> import numpy as np, polyamp
        >>> from polyamp.reference import MLP
        >>> one, other = MLP.random([4, 8, 1], seed=0), MLP.random([4, 8, 1], seed=1)
        >>> compare(one, other, np.ones((2, 4), "f4")).agrees
        True
    """
    began = time.perf_counter()
    if randomness not in RANDOMNESS:
        raise ArgumentError(f"randomness must be 'off' or 'shared'. Received: randomness={randomness!r}.")
    if isinstance(loss_fn, Recipe):
        raise ArgumentError(
            "loss_fn stands before recipe: polyamp.compare(model_a, model_b, batch, loss_fn, recipe). Received: a "
            "recipe as loss_fn."
        )
    if isinstance(batch, list) and not batch:
        raise ArgumentError("batch must be a batch, or a list with at least one. Received: an empty list.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"steps must be a whole number of at least 1. Received: steps={steps!r}.")
    loss_fns, recipes, given_options = (_pair(each) for each in (loss_fn, recipe, options))
    given_inputs = _pair(tuple(inputs)) if isinstance(inputs, list) else (inputs, inputs)
    called = labels or _labels(model_a, model_b)
    one, two = (
        Party(
            called[number],
            model,
            loss_fns[number],
            recipes[number],
            inputs=given_inputs[number],
            options=given_options[number],
            randomness=randomness,
        )
        for number, model in enumerate((model_a, model_b))
    )
    second, taken = two.meet(one.inventory, names)
    first = one.first(second.agreed, taken)
    sides = ((one, first), (two, second))
    batches = _batches(batch, Across(one.inventory, two.inventory))
    trained = one.recipe is not None or two.recipe is not None
    phases = phases_of((one.recipe, two.recipe), max(one.parameters, two.parameters))
    ran: list[dict[str, traces.Trace]] = [{}, {}]
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="polyamp-parity-") as folder:
        for number, (party, meeting) in enumerate(sides):
            for phase in phases:
                path = Path(folder) / f"{number}-{phase.name}"
                trace = _run(party, phase, meeting, batches[number], steps if trained else 1, path, notes)
                if trace is not None:
                    ran[number][phase.name] = trace
        runs = [
            (
                phase,
                _ran(Path(folder) / f"0-{phase.name}", ran[0].get(phase.name)),
                _ran(Path(folder) / f"1-{phase.name}", ran[1].get(phase.name)),
            )
            for phase in phases
        ]
        found = compared(called, runs, second.agreed[0], (one.recipe, two.recipe))
        curves = [
            curve
            for phase in phases
            for number in (0, 1)
            if phase.name in ran[number]
            for curve in [curves_of(called[number], phase.shown, traces.read(Path(folder) / f"{number}-{phase.name}"))]
        ]
    return Report(
        polyamp=__version__,
        recipes={party.label: as_data(party.recipe) for party, _ in sides if party.recipe is not None},
        phases=[phase.shown for phase in phases],
        steps=steps if trained else 1,
        environments=[party.environment() for party, _ in sides],
        comparisons=[msgspec.structs.replace(found, notes=[*found.notes, *notes])],
        curves=curves,
        failures=[],
        randomness=randomness,
        seconds=time.perf_counter() - began,
        own_seconds=sum(trace.seconds for each in ran for trace in each.values()),
    )


def _run(
    party: Party, phase: Phase, meeting: Meeting, batches: Batches, steps: int, path: Path, notes: list[str]
) -> traces.Trace | None:
    """One phase of one side; None where it has no float64, which is a judge and none of the user's own runs."""
    writer = traces.Writer(path)
    try:
        return party.run(phase, meeting, batches, steps, writer)
    except Exception as error:
        if not phase.wide:
            raise
        notes.append(without_judge(party.label, error))
        return None
    finally:
        writer.close()


def without_judge(label: str, error: Exception) -> str:
    """The note of a side that cannot be run in float64: its framework cannot, or the model asks for a dtype itself."""
    said = str(error).strip().partition("\n")[0]
    return f"{label} has no float64 run to judge its float32 by: {said or type(error).__name__}"


def _ran(path: Path, trace: traces.Trace | None) -> Ran:
    if trace is None:
        return Ran(traces.Trace(side="", phase=""), tuple)
    return Ran(trace, lambda: traces.read(path))


def _pair(value: Any) -> tuple[Any, Any]:
    return (value[0], value[1]) if isinstance(value, tuple) and len(value) == 2 else (value, value)


def _labels(model_a: Any, model_b: Any) -> tuple[str, str]:
    from polyamp.contract import registry

    one, other = registry.backend_for(model_a).name, registry.backend_for(model_b).name
    return (one, other) if one != other else (f"{one} a", f"{one} b")


def _batches(batch: Any, across: Across) -> tuple[Batches, Batches]:
    """The batches of either side."""
    if callable(batch) and not isinstance(batch, Mapping):
        made: Callable[[int], Any] = batch
        return lambda step: _first(made(step)), lambda step: _second(made(step), across)
    several = batch if isinstance(batch, list) else [batch]
    return (
        lambda step: _first(several[step % len(several)]),
        lambda step: _second(several[step % len(several)], across),
    )


def _first(batch: Any) -> Any:
    return batch.source if isinstance(batch, Batch) else batch


def _second(batch: Any, across: Across) -> Any:
    if isinstance(batch, Batch) and batch.target is not None:
        return batch.target
    return across.tree(_first(batch))
