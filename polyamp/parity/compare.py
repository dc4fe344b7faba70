"""`compare`: train copies of two models in one process and report the first divergence."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from polyamp._version import __version__
from polyamp.errors import ArgumentError
from polyamp.parity.execution.participant import Participant
from polyamp.parity.execution.recorder import BatchSource, ParticipantAlignment
from polyamp.parity.precisions import Phase, comparison_phases, recipe_data, without_judge
from polyamp.parity.report.curves import curve_from_trace
from polyamp.parity.report.report import Report
from polyamp.parity.trace import trace as traces
from polyamp.parity.verdict.verdict import PhaseTrace, compare_traces
from polyamp.porting.check import Batch, ChannelOrderAdapter
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
    """Compare two models array by array over a few training steps and report where they first diverge.

    Copies of both models start from the first's weights (`polyamp.port`) and train on the same batches: in float32,
    then under the recipe's policy. Small models also run in float64, which measures the rounding of float32. Compared
    in this order: module outputs, loss, gradients, the step's metrics, parameters and moments after each update. A
    difference counts when it is larger than rounding explains (`polyamp.parity.verdict.tolerances`).

    Args:
        model_a: as `polyamp.init` takes it. It is not changed.
        model_b: of any framework that can share the process, including the same one. It gets the first's weights for
            the comparison; its own are restored afterwards.
        batch: argument of `loss_fn`, of NumPy arrays; a list of batches, of which step k gets number k modulo their
            number; or a function from the step number (from 0) to a batch. Images are in the layout of `model_a`;
            `polyamp.porting.Batch(a, b)` gives each side its own.
        loss_fn: `loss_fn(model, batch) -> loss`; a pair for one each. None: compares the outputs with fixed random
            numbers, in inference mode; the batch is then the models' input.
        recipe: training recipe; a pair for one each; functions of the model where it uses a framework's own
            optimizer. None: one forward and backward pass in float32.
        steps: number of training steps.
        names: as for `polyamp.port`, where layers cannot be matched by name.
        inputs: inputs of the models themselves, where layers are identified by name only (linen, haiku, functions);
            a list of two for one each.
        randomness: "off": dropout passes its input through. "shared": both sides drop the same elements.
        labels: names of the sides in the report; by default their frameworks.
        options: `{"init": {...}, "step": {...}}`, options of `polyamp.init` and `train_step`; a pair for one each.

    Returns:
        A report: `report.agrees`, `report.first`, `print(report)`, `report.save(folder)`.

    Raises:
        PortError: the models cannot be matched.
        ArgumentError: an argument is invalid.
        PolyampError: any error that a step raises.

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
    loss_fns, recipes, given_options = (_value_per_side(each) for each in (loss_fn, recipe, options))
    given_inputs = _value_per_side(tuple(inputs)) if isinstance(inputs, list) else (inputs, inputs)
    called = labels or _default_labels(model_a, model_b)
    one, two = (
        Participant(
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
    second, taken = two.align_with(one.inventory, names)
    first = one.first(second.agreed, taken)
    sides = ((one, first), (two, second))
    batches = _batch_sources(batch, ChannelOrderAdapter(one.inventory, two.inventory))
    trained = one.recipe is not None or two.recipe is not None
    phases = comparison_phases((one.recipe, two.recipe), max(one.parameters, two.parameters))
    ran: list[dict[str, traces.Trace]] = [{}, {}]
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="polyamp-parity-") as folder:
        for number, (party, meeting) in enumerate(sides):
            for phase in phases:
                path = Path(folder) / f"{number}-{phase.name}"
                trace = _record_phase(party, phase, meeting, batches[number], steps if trained else 1, path, notes)
                if trace is not None:
                    ran[number][phase.name] = trace
        runs = [
            (
                phase,
                _phase_trace(Path(folder) / f"0-{phase.name}", ran[0].get(phase.name)),
                _phase_trace(Path(folder) / f"1-{phase.name}", ran[1].get(phase.name)),
            )
            for phase in phases
        ]
        found = compare_traces(called, runs, second.agreed[0], (one.recipe, two.recipe))
        curves = [
            curve
            for phase in phases
            for number in (0, 1)
            if phase.name in ran[number]
            for curve in [
                curve_from_trace(
                    called[number], phase.shown, traces.read_entries(Path(folder) / f"{number}-{phase.name}")
                )
            ]
        ]
    return Report(
        polyamp=__version__,
        recipes={party.label: recipe_data(party.recipe) for party, _ in sides if party.recipe is not None},
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


def _record_phase(
    party: Participant,
    phase: Phase,
    meeting: ParticipantAlignment,
    batches: BatchSource,
    steps: int,
    path: Path,
    notes: list[str],
) -> traces.Trace | None:
    """Run one phase of one side. Return None if its float64 reference run fails; any other failure is raised."""
    writer = traces.TraceWriter(path)
    try:
        return party.run(phase, meeting, batches, steps, writer)
    except Exception as error:
        if not phase.wide:
            raise
        notes.append(without_judge(party.label, error))
        return None
    finally:
        writer.close()


def _phase_trace(path: Path, trace: traces.Trace | None) -> PhaseTrace:
    if trace is None:
        return PhaseTrace(traces.Trace(side="", phase=""), tuple)
    return PhaseTrace(trace, lambda: traces.read_entries(path))


def _value_per_side(value: Any) -> tuple[Any, Any]:
    return (value[0], value[1]) if isinstance(value, tuple) and len(value) == 2 else (value, value)


def _default_labels(model_a: Any, model_b: Any) -> tuple[str, str]:
    from polyamp.contract import registry

    one, other = registry.backend_for(model_a).name, registry.backend_for(model_b).name
    return (one, other) if one != other else (f"{one} a", f"{one} b")


def _batch_sources(batch: Any, across: ChannelOrderAdapter) -> tuple[BatchSource, BatchSource]:
    """Return the batch functions of both sides."""
    if callable(batch) and not isinstance(batch, Mapping):
        made: Callable[[int], Any] = batch
        return lambda step: _source_batch(made(step)), lambda step: _target_batch(made(step), across)
    several = batch if isinstance(batch, list) else [batch]
    return (
        lambda step: _source_batch(several[step % len(several)]),
        lambda step: _target_batch(several[step % len(several)], across),
    )


def _source_batch(batch: Any) -> Any:
    return batch.source if isinstance(batch, Batch) else batch


def _target_batch(batch: Any, across: ChannelOrderAdapter) -> Any:
    if isinstance(batch, Batch) and batch.target is not None:
        return batch.target
    return across.tree(_source_batch(batch))
