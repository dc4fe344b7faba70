"""`compare`: train copies of two models in one process and report the first divergence."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from polyamp.errors import ArgumentError
from polyamp.parity.execution.batch_checks import RepeatCheck, check_batches, check_count, check_randomness
from polyamp.parity.execution.participant import Participant
from polyamp.parity.execution.report_builder import (
    SideRecord,
    add_note,
    add_sites,
    build_report,
    failed_pass_note,
    make_request,
)
from polyamp.parity.execution.trace_recorder import BatchSource, ParticipantAlignment, side_batch
from polyamp.parity.execution.worker_messages import OperationRequest
from polyamp.parity.precisions import comparison_phases
from polyamp.parity.report.report import Report
from polyamp.porting.check import ChannelOrderAdapter
from polyamp.porting.matching.flatten_order import Rows
from polyamp.recipe.recipe import Recipe


def compare(
    model_a: Any,
    model_b: Any,
    batch: Any,
    loss_fn: Any = None,
    recipe: Any = None,
    steps: int = 1,
    *,
    names: Mapping[str, str] | None = None,
    rows: Rows | None = None,
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
        rows: as for `polyamp.port`, where the first batch does not show whether a dense layer takes flattened channels;
            a note of the report says where that is.
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
    check_randomness(randomness)
    if isinstance(loss_fn, Recipe):
        raise ArgumentError(
            "loss_fn stands before recipe: polyamp.compare(model_a, model_b, batch, loss_fn, recipe). Received: a "
            "recipe as loss_fn."
        )
    check_batches(batch, "batch")
    check_count("steps", steps)
    loss_fns, recipes, given_options = (_value_per_side(each) for each in (loss_fn, recipe, options))
    given_inputs = _value_per_side(tuple(inputs)) if isinstance(inputs, list) else (inputs, inputs)
    side_labels = labels or _default_labels(model_a, model_b)
    one, two = (
        Participant(
            side_labels[number],
            model,
            loss_fns[number],
            recipes[number],
            inputs=given_inputs[number],
            options=given_options[number],
            randomness=randomness,
        )
        for number, model in enumerate((model_a, model_b))
    )
    batches = _batch_sources(batch, ChannelOrderAdapter(one.inventory, two.inventory))
    second, mappings = two.align_with(one.inventory, names, rows, lambda: one.first_pass(batches[0]), batches[1])
    first = one.align_as_first(second.alignments, mappings)
    if one.recipe is None and two.recipe is None:
        steps = 1
    phases = comparison_phases((one.recipe, two.recipe), max(one.parameters, two.parameters))
    records: list[SideRecord] = []
    with tempfile.TemporaryDirectory(prefix="polyamp-parity-") as folder:
        for number, (participant, alignment) in enumerate(((one, first), (two, second))):
            record = SideRecord(
                label=participant.label,
                folder=Path(folder) / str(number),
                environment=participant.environment(),
                recipe=participant.recipe,
                records_operations=participant.records_operations,
                alignment=second.alignments[0],
            )
            record.folder.mkdir()
            for phase in phases:
                path = record.trace_file(phase.name)
                record.end_phase(*participant.record(phase, alignment, batches[number], steps, path))
            records.append(record)
        report = build_report(records, phases, steps, randomness, began)
        request = make_request(report.comparisons[0], records, phases)
        if request is not None:
            report = _record_operations(report, request, ((one, first), (two, second)), batches)
    return msgspec.structs.replace(report, phases=[phase.title for phase in phases])  # float64 also where it failed


def _record_operations(
    report: Report,
    request: OperationRequest,
    sides: Sequence[tuple[Participant, ParticipantAlignment]],
    batches: Sequence[BatchSource],
) -> Report:
    """Return the report with the operations at which the sides part, from a further pass of each."""
    logs = {}
    for (participant, alignment), source in zip(sides, batches, strict=True):
        label = participant.label
        try:
            logs[label] = participant.record_operations(request.phase, alignment, source, request.locations[label])
        except Exception as error:  # noqa: BLE001  # the verdict stands without it
            return add_note(report, 0, failed_pass_note(label, str(error)))
    return add_sites(report, 0, logs)


def _value_per_side(value: Any) -> tuple[Any, Any]:
    return (value[0], value[1]) if isinstance(value, tuple) and len(value) == 2 else (value, value)


def _default_labels(model_a: Any, model_b: Any) -> tuple[str, str]:
    from polyamp.contract import registry

    one, other = registry.backend_for(model_a).name, registry.backend_for(model_b).name
    return (one, other) if one != other else (f"{one} a", f"{one} b")


def _batch_sources(batch: Any, adapter: ChannelOrderAdapter) -> tuple[BatchSource, BatchSource]:
    """Return the batch functions of both sides."""
    if callable(batch) and not isinstance(batch, Mapping):
        repeats = RepeatCheck("batch")

        def source(step: int) -> Any:
            made = batch(step)
            repeats.check(step, made)
            return made
    else:
        several = batch if isinstance(batch, list) else [batch]

        def source(step: int) -> Any:
            return several[step % len(several)]

    return lambda step: side_batch(source(step), None), lambda step: side_batch(source(step), adapter)
