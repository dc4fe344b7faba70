"""Diagnosis of a divergence: its likely cause (dtype, epsilon, layout, formula, factor, randomness) and the evidence.

The checks run in descending order of certainty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from polyamp.errors import join_first
from polyamp.float_formats import FORMATS
from polyamp.parity.precisions import FLOAT32, Phase
from polyamp.parity.report_data import Divergence, SideValues
from polyamp.parity.trace.sketch import Sketch, sample_indices
from polyamp.parity.trace.trace import Entry, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.causes.attention_formulas import explain_attention
from polyamp.parity.verdict.causes.cause import Cause
from polyamp.parity.verdict.causes.common_factors import (
    FACTOR_TOLERANCE,
    common_factor,
    explain_zeros,
)
from polyamp.parity.verdict.causes.element_profile import attention_evidence, differing_indices, index_evidence
from polyamp.parity.verdict.causes.formula_causes import explain_columns, explain_formula
from polyamp.parity.verdict.causes.gradient_causes import backward_evidence, missing_gradient
from polyamp.parity.verdict.causes.initial_weights import explain_initial_weight, find_order, is_permutation
from polyamp.parity.verdict.causes.known_arrays import known_arrays, known_columns
from polyamp.parity.verdict.causes.loss_causes import explain_loss
from polyamp.parity.verdict.causes.normalizations import has_batch_statistics
from polyamp.parity.verdict.causes.operation_causes import (
    call_differences,
    narrow_operations,
    near_operations,
    operation_differences,
)
from polyamp.parity.verdict.causes.step_causes import explain_step, recipe_differences
from polyamp.parity.verdict.causes.step_history import StepHistory
from polyamp.parity.verdict.distances import EntryComparison
from polyamp.recipe.recipe import Recipe

_PERMUTATION_MIN_DISTANCE: Final = 1e-2
"""Relative distance above which a permutation of the values is considered."""
_NOT_FROM_UPDATES: Final = ("statistic", "scale", "finite", "applied")
"""What a step reports or updates that no gradient and no optimizer makes."""
_EPSILON_ATTRIBUTES: Final = ("epsilon", "eps")
_MAX_OPERATIONS: Final = 6
"""Largest number of operations that are listed of a module."""


class Circumstances(NamedTuple):
    """What is known around a difference.

    Attributes:
        labels: of both sides.
        phase: the phase.
        alignment: alignment of the sides.
        traces: of both sides.
        recipes: of both sides; None of a side that has none, or that a loop of the user's trains.
        history: the entries of this step and of the one before.
        roundoff: unit roundoff of the phase.
        after: path of the last module that agrees; "" if there is none.
    """

    labels: tuple[str, str]
    phase: Phase
    alignment: Alignment
    traces: tuple[Trace, Trace]
    recipes: tuple[Recipe | None, Recipe | None]
    history: StepHistory
    roundoff: float
    after: str = ""


def build_divergence(
    comparison: EntryComparison, known: Circumstances, between: Sequence[str] = (), observation: str | None = None
) -> Divergence:
    """Return the divergence at an entry, with its diagnosis.

    Args:
        comparison: comparison of the entry at which the sides diverge.
        known: what is known around it.
        between: layers that run between the last module that agrees and the entry, and have no compared output.
        observation: operations that ran in other dtypes there, or layers that one side alone calls, as text.
    """
    labels, phase = known.labels, known.phase
    one, two = comparison.one, comparison.two
    cause = diagnose(comparison, known)
    if between:
        cause = cause._replace(evidence=[_hidden_layers_evidence(one.module, between), *cause.evidence])
    if between and observation:
        behind = f", behind {known.after!r}, which agrees" if known.after else ""
        cause = cause._replace(sentence=f"{observation}{behind}.")
    elif observation:
        cause = cause._replace(evidence=[f"{observation}.", *cause.evidence])
    scale = comparison.scale or 1.0
    module, worst = one.module.partition("#")[0], _worst_element(comparison)
    return Divergence(
        phase=phase.title,
        step=one.step,
        stage=one.stage,
        module=between[0] if between else one.module,
        what="output" if between and one.what == "input" else one.what,
        name=one.name,
        sides={
            label: _side_values(entry, trace, module, worst)
            for label, entry, trace in zip(labels, (one, two), known.traces, strict=True)
        },
        distance=comparison.distance / scale if math.isfinite(comparison.distance) else None,
        allowed=comparison.allowed / scale,
        own={label: None if own is None else own / scale for label, own in zip(labels, comparison.own, strict=True)},
        kind=cause.kind,
        sentence=cause.sentence,
        evidence=cause.evidence,
        after=known.after,
    )


def diagnose(comparison: EntryComparison, known: Circumstances) -> Cause:
    """Return the likely cause of a difference."""
    labels, alignment, phase, one = known.labels, known.alignment, known.phase, comparison.one
    module = one.module.partition("#")[0]
    step_cause = _diagnose_step(comparison, known)
    if step_cause is not None:
        return step_cause
    a, b = comparison.one.sketch, comparison.two.sketch
    where = _location_text(one, known.after)
    if a is None or b is None:
        if comparison.kind in ("dtype", "operations"):
            sentence = "One side alone computes or stores the loss in 16 bits."
            return Cause("dtype", sentence, [_number_text(comparison, labels)])
        found = _diagnose_loss(comparison, known) or _diagnose_number(comparison, labels)
        settings = recipe_differences(labels, known.recipes) if one.stage == "step" else []
        return found._replace(evidence=[*found.evidence, *settings])
    if a.nonfinite != b.nonfinite:
        counts = f"{a.nonfinite} of {a.size} in {labels[0]}, {b.nonfinite} in {labels[1]}"
        return Cause("not finite", f"Only one side has inf or NaN {where}.", [f"inf or NaN: {counts}."])
    size = comparison.scale or 1.0
    own = {label: each / size for label, each in zip(labels, comparison.own, strict=True) if each is not None}
    if comparison.kind == "randomness":
        texts = [f"{label}: two runs of it differ by {each:.1e} (relative)." for label, each in own.items()]
        sentence = f"One side does not repeat itself {where}: something random runs in the model."
        return Cause("randomness", sentence, texts)
    if comparison.kind == "operations":
        place = f"{'Before' if one.what == 'input' else 'In'} {_path_text(one)}"
        texts = [f"{each:.1e} in {label}" for label, each in own.items()]
        evidence = [f"Relative distance from a side's own float32 run: {' and '.join(texts)}."] * bool(own)
        return Cause("dtype", f"{place} one side runs in 16 bits what the other keeps in float32.", evidence)
    if comparison.kind == "dtype":
        sentence = f"{labels[0]} gives {a.dtype} and {labels[1]} {b.dtype} {where}."
        return Cause("dtype", sentence, [_width_text(labels, a, b)])
    if comparison.kind == "missing":
        return missing_gradient(labels, (one, comparison.two), known.history.both())
    is_own_setting = one.what != "input"  # a layer's settings do not explain a difference in its input
    differences = alignment.differences.get(module, []) if is_own_setting else []
    attributes = alignment.differing_attributes.get(module, []) if is_own_setting else []
    if any(kind in _EPSILON_ATTRIBUTES for kind in attributes):
        return Cause("epsilon", f"Another epsilon {where}.", differences)
    if one.step == 0:
        return explain_initial_weight(labels, (one, comparison.two), known.history.entries(0).values())
    if one.what == "parameter":
        return _diagnose_parameter(comparison, labels)
    if one.what == "average":
        return Cause("formula", "Another moving average of what agrees.", ["Compare decay, warmup and every of ema."])
    if differences and one.what == "statistic":
        return Cause("formula", f"Other settings {where}.", differences)
    operations: list[str] = []
    if one.stage == "forward":
        near = [near_operations(trace, alignment, _near_modules(one)) for trace in known.traces]
        narrow = narrow_operations(labels, near, where) if phase.name == FLOAT32 else None
        if narrow is not None:
            return narrow
        operations = [
            *call_differences(labels, known.history.both(), alignment),
            *_hidden_settings(alignment),
            *operation_differences(labels, known.traces, near),
        ]
        if _is_rounded(a, b, comparison.distance / size):
            return Cause("dtype", f"One side was rounded to fewer digits {where}.", [_width_text(labels, a, b)])
        formula = _diagnose_formula(comparison, known, _location_text(one, ""))
        if formula is not None:
            return formula._replace(evidence=[*formula.evidence, *operations, *differences])
    factor = common_factor(a, b)
    if factor is not None:
        return Cause(
            "factor",
            f"Every value of {labels[1]} is {factor:.6g} times that of {labels[0]} {where}.",
            [f"The ratio is the same in all {a.samples().size} elements that were looked at.", *operations],
        )
    if comparison.distance > _PERMUTATION_MIN_DISTANCE * size and is_permutation(a, b):
        order = find_order(a, b)
        return Cause(
            "layout",
            f"The same numbers in another order {where}{f': those of {labels[0]} {order}' if order else ''}.",
            [f"Mean {a.mean:.6g}, root mean square {a.rms:.6g} and largest {a.largest:.6g} are alike on both sides."],
        )
    if differences:
        return Cause("formula", f"Other settings {where}.", [*differences, *operations])
    zeros = explain_zeros(labels, a, b, where)
    if zeros is not None:
        return zeros
    text = f"relative distance {comparison.distance / size:.1e}, {comparison.allowed / size:.1e} allowed"
    profile = differing_indices(a, b, comparison.allowed)
    places = index_evidence(profile)
    if one.stage == "backward":
        places = [*backward_evidence(one, known.history.both()), *places]
    if phase.name != FLOAT32 and None in comparison.own:
        sentence = f"Further apart than the policy explains {where}; without a run in float32 to compare."
        return Cause("formula", sentence, [f"{text}.", *places])
    if phase.name != FLOAT32:
        sentence = f"Alike in float32, and further apart than the policy explains {where}."
        return Cause("dtype", sentence, [f"{text}.", *places])
    if one.what == "output" and alignment.layer_kinds.get(module) == "embedding":
        sentence = f"Other rows are looked up {where}: the indices differ, or their order."
        return Cause("formula", sentence, [*operations, *places])
    queries = _attention_projections(one, known)
    if queries:
        container = one.module.rpartition("/")[0]
        outputs = [known.history.output(path) for path in queries.values()]
        sentence = (
            f"Another attention in {container!r}: {join_first(list(queries), 3)} agree, what is made of them does not."
        )
        cause = explain_attention(labels, (a, b), outputs, container) or Cause("formula", sentence, [])
        evidence = [*cause.evidence, *attention_evidence(profile), *operations, *places]
        return cause._replace(evidence=evidence or [f"{text}."])
    small = comparison.distance < 1e-2 * comparison.scale
    return Cause(
        "formula",
        f"Another formula {where}{': a small one, such as an approximation or an epsilon' if small else ''}.",
        [*operations, *places] or [f"In float32, where rounding explains little: {text}."],
    )


def _near_modules(entry: Entry) -> list[str]:
    """Return the modules whose own operations run right before an entry: its containers, and itself for an output."""
    parts = entry.module.partition("#")[0].split("/")
    containers = ["/".join(parts[:end]) for end in range(len(parts))]
    return containers if entry.what == "input" else [*containers, "/".join(parts)]


def _attention_projections(entry: Entry, known: Circumstances) -> dict[str, str]:
    """Return "query", "key", "value" -> path, in the container of a module whose input differs; or an empty dict."""
    if entry.what != "input" or entry.stage != "forward":
        return {}
    container = entry.module.rpartition("/")[0]
    inside = [path for path in known.alignment.layer_kinds if path.rpartition("/")[0] == container]
    found = {
        role: path
        for role in ("query", "key", "value")
        for path in inside
        if path.rpartition("/")[2].removesuffix("_proj") in (role, role[0])
    }
    return found if len(found) == 3 and entry.module not in found.values() else {}  # one of each role


def _hidden_settings(alignment: Alignment) -> list[str]:
    """Return the settings that differ of layers whose own output is not compared, such as activations."""
    compared = set(alignment.modules.values())
    lines = dict.fromkeys(line for path, own in alignment.differences.items() if path not in compared for line in own)
    return [f"Other settings of layers whose output is not compared: {join_first(list(lines), 2)}."] if lines else []


def _diagnose_step(comparison: EntryComparison, known: Circumstances) -> Cause | None:
    """Diagnose what a step reports or updates from the rule of the step; None if no rule is recognised."""
    entry = comparison.one
    if entry.step < 1 or entry.stage not in ("step", "update") or entry.what in _NOT_FROM_UPDATES:
        return None
    found = explain_step(known.labels, entry.step, known.recipes, known.history.updates(), known.roundoff)
    settings = recipe_differences(known.labels, known.recipes)
    if found is None:
        return Cause("formula", settings[0], []) if settings and entry.number is None else None
    numbers = [] if entry.number is None else [_number_text(comparison, known.labels)]
    return found._replace(evidence=[*found.evidence, *settings, *numbers])


def _diagnose_loss(comparison: EntryComparison, known: Circumstances) -> Cause | None:
    """Diagnose the loss of a pass by its gradient with respect to the last output; None if that does not show it."""
    entry = comparison.one
    if entry.what != "loss" or entry.stage != "forward" or not math.isfinite(comparison.distance):
        return None
    for path in dict.fromkeys(("", known.after)):
        key = (entry.step, "backward", path, "cotangent", "")
        one, two = (known.history.entries(side).get(key) for side in (0, 1))
        if one is not None and two is not None and one.sketch is not None and two.sketch is not None:
            return explain_loss(known.labels, (one.sketch, two.sketch), _number_text(comparison, known.labels))
    return None


def _diagnose_formula(comparison: EntryComparison, known: Circumstances, where: str) -> Cause | None:
    """Diagnose a module's input or output by the arrays before it; None if no formula is recognised."""
    a, b = comparison.one.array_sketch, comparison.two.array_sketch
    module = comparison.one.module.partition("#")[0]
    parameters = known.history.channel_parameters(module, a.shape[-1] if a.shape else 1)
    bias = parameters.get((module, "bias"))
    if known.alignment.layer_kinds.get(module) == "batch_norm" and bias is not None and a.samples().size == a.size:
        uses = [has_batch_statistics(each.samples(), a.shape, bias) for each in (a, b)]
        if uses[0] != uses[1]:
            label, other = known.labels if uses[0] else known.labels[::-1]
            sentence = f"{label} normalizes by statistics of the batch {where}, {other} does not: in inference mode?"
            return Cause("formula", sentence, [f"Only {label}'s output has its bias as the mean of each channel."])
    arrays = known_arrays(comparison.one, *known.history.both())
    found = explain_formula(known.labels, (a.samples(), b.samples()), arrays, where, parameters)
    if found is not None or len(a.shape) < 2 or a.shape != b.shape or a.samples().size != a.size:
        return found
    one, two = (each.samples().reshape(-1, a.shape[-1]) for each in (a, b))
    return explain_columns(known.labels, (one, two), known_columns(comparison.one, *known.history.both()), where)


def _diagnose_parameter(comparison: EntryComparison, labels: tuple[str, str]) -> Cause:
    """Diagnose a parameter after an update whose gradient and optimizer slots agree."""
    what = f"parameter {comparison.one.name!r} of {comparison.one.module!r}"
    size = comparison.scale or 1.0
    text = f"Its gradient and the optimizer's slots agree; relative distance {comparison.distance / size:.1e}."
    if comparison.why:
        why = comparison.why.replace("The second side's", f"{labels[1]}'s").replace("the first's", f"{labels[0]}'s")
        return Cause("formula", f"The optimizers move {what} in another way.", [why, text])
    return Cause("formula", f"The optimizers move {what} in another way: by another rate, decay or epsilon.", [text])


def _diagnose_number(comparison: EntryComparison, labels: tuple[str, str]) -> Cause:
    one, two = comparison.one.number or 0.0, comparison.two.number or 0.0
    what = comparison.one.what
    text = _number_text(comparison, labels)
    if not (math.isfinite(one) and math.isfinite(two)):
        return Cause("not finite", f"The {what} is finite on one side alone.", [text])
    if what == "finite":
        return Cause("formula", "One side skips the step and the other does not.", [text])
    if what == "scale":
        return Cause("factor", "The loss scale differs: its first value, or when it grows and backs off.", [text])
    times = _integer_ratio_evidence(one, two, labels)
    why = f"The {what} differs."
    if what == "loss" and comparison.one.stage == "step":
        why = "The losses of the passes agree, and the step reports another one: of other rows, or added otherwise."
    elif what == "loss":
        why = "All outputs agree and the loss does not: the loss functions differ."
    return Cause("factor" if times else "formula", why, [text, *times])


def _number_text(comparison: EntryComparison, labels: tuple[str, str]) -> str:
    one, two = comparison.one.number or 0.0, comparison.two.number or 0.0
    return f"{comparison.one.what}: {one:.6g} in {labels[0]}, {two:.6g} in {labels[1]}."


def _integer_ratio_evidence(one: float, two: float, labels: tuple[str, str]) -> list[str]:
    if not one or not two:
        return []
    ratio = two / one
    for factor, label in ((ratio, labels[1]), (1 / ratio, labels[0])):
        if factor > 1.5 and abs(factor - round(factor)) < FACTOR_TOLERANCE * factor:
            return [f"{label} has {round(factor)} times the other's: a sum where the other takes a mean?"]
    return []


def _hidden_layers_evidence(module: str, between: Sequence[str]) -> str:
    return (
        f"It shows in the output of {module or 'the model'!r}; before it run layers that do not show theirs on both "
        f"sides: {join_first(list(map(repr, between)), _MAX_OPERATIONS)}."
    )


def _path_text(entry: Entry) -> str:
    return repr(entry.module) if entry.module else "the model"


def _location_text(entry: Entry, after: str) -> str:
    path = _path_text(entry)
    if entry.what == "input":
        return f"in what {path} is given" + (f", behind {after!r}, which agrees: between the two" if after else "")
    if entry.stage == "forward":
        return f"in the output of {path}" + (f", after {after!r}, which agrees" if after else "")
    if entry.what == "cotangent":
        return f"in the gradient that reaches the output of {path}"
    return f"in {entry.what} {entry.name!r} of {path}"


def _is_rounded(a: Sketch, b: Sketch, distance: float) -> bool:
    """Return whether one array is the other one, rounded to a narrower dtype; `distance` is relative."""
    if a.width == b.width or "float32" not in (a.width, b.width):
        return False
    return distance <= 2.0 * max(FORMATS[each.width].unit_roundoff for each in (a, b))


def _width_text(labels: tuple[str, str], a: Sketch, b: Sketch) -> str:
    return (
        "; ".join(
            f"all values of {label} are numbers of {each.width}" for label, each in zip(labels, (a, b), strict=True)
        )
        + "."
    )


def _worst_element(comparison: EntryComparison) -> int | None:
    """Return the place, among the stored elements, of the one that differs most; None where elements do not compare."""
    a, b = comparison.one.sketch, comparison.two.sketch
    if a is None or b is None or a.size != b.size or not a.size:
        return None
    apart = np.abs(a.samples() - b.samples())
    return int(np.argmax(apart)) if apart.any() else None


def _side_values(entry: Entry, trace: Trace, module: str, worst: int | None) -> SideValues:
    each = entry.sketch
    if each is None:
        return SideValues(path=entry.own, number=entry.number)
    operations = [row for row in trace.operations if row.module == module]
    return SideValues(
        path=entry.own,
        dtype=each.dtype,
        shape=each.shape,
        mean=each.mean,
        rms=each.rms,
        largest=each.largest,
        nonfinite=each.nonfinite,
        zeros=each.zeros,
        width=each.width,
        worst=None if worst is None else float(each.samples()[worst]),
        worst_index=()
        if worst is None
        else tuple(map(int, np.unravel_index(sample_indices(each.size)[worst], each.shape))),
        operations=[f"{row.name} in {row.dtype}" for row in operations[:_MAX_OPERATIONS]],
    )
