"""`compare_traces`: compare two traces entry by entry and find the first divergence, one step in memory at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from polyamp.float_formats import HALF_DTYPES
from polyamp.parity.precisions import FLOAT32, FLOAT64, POLICY, Phase, trains, unit_roundoff
from polyamp.parity.report_data import Comparison, ComparisonRow, Divergence, JudgedUpdates
from polyamp.parity.trace.sketch import sketch_distance
from polyamp.parity.trace.trace import BEFORE_ACTIVATION, Entry, Trace, entry_key
from polyamp.parity.verdict import op_dtypes, step_entries
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.causes.step_history import StepHistory
from polyamp.parity.verdict.diagnosis import Circumstances, build_divergence
from polyamp.parity.verdict.distances import (
    EntryComparison,
    EntryPair,
    has_equal_layout,
    is_rounding_only,
    prefer_float64_distance,
    scalar_distance,
)
from polyamp.parity.verdict.notes import NOTHING_MOVED, dropout_notes, notes_of_uncompared, settle_activations
from polyamp.parity.verdict.optimizer_updates import OptimizerUpdates
from polyamp.parity.verdict.step_entries import (
    PhaseTrace,
    StepEntries,
    entries_by_step,
    has_overflow,
    is_downstream_of_output,
    module_path,
    order_entries,
)
from polyamp.parity.verdict.tolerances import FACTOR, RANDOMNESS_LIMIT, JudgePrecision, PhaseTolerance
from polyamp.parity.verdict.unit_switches import UnitSwitches
from polyamp.porting.layouts.layer_kinds import RECURRENT_KINDS
from polyamp.recipe.recipe import Recipe

_EXACT_QUANTITIES: Final = ("finite", "scale", "applied")
_MATMUL_KINDS: Final = ("dense", "conv", "conv_transpose", "attention", "projections", "lstm", "gru", "simple_rnn")
"""Layers whose output has the policy's dtype in every framework. Other output dtypes are the framework's own (S4)."""
_GRADIENT_FLOOR_SHARE: Final = 0.1
"""Least scale of a gradient, relative to the largest: terms of a sum may cancel (a key's bias), their rounding not."""
_EQUAL_JUDGES: Final = 1e-12
"""Relative distance of two float64 runs up to which they have computed the same."""


def compare_traces(
    labels: tuple[str, str],
    runs: Sequence[tuple[Phase, PhaseTrace, PhaseTrace]],
    alignment: Alignment,
    recipes: tuple[Recipe | None, Recipe | None],
) -> Comparison:
    """Compare two sides phase by phase.

    Args:
        labels, recipes: of the first side, of the other.
        runs: runs of both in each phase that both began; float64 if at least one side has it.
        alignment: alignment of the sides.
    """
    by_phase = {phase.name: (phase, one, two) for phase, one, two in runs}
    first: Divergence | None = None
    rows: list[ComparisonRow] = []
    updates: list[JudgedUpdates] = []
    notes = list(alignment.notes)
    for trace in dict.fromkeys((run.trace.side, run.trace.hidden_reason) for _, *both in runs for run in both):
        notes += [f"{trace[0]}: {trace[1]}"] * bool(trace[1])
    dropouts = [(one.trace.dropouts, two.trace.dropouts) for _, one, two in runs]
    notes = [note for counts in dropouts[:1] for note in dropout_notes(labels, counts)] + notes
    shapes: dict[tuple[str, str], str] = {}
    moved: list[bool] = []
    wider_phase = {FLOAT32: FLOAT64, POLICY: FLOAT32}
    for name in (FLOAT32, POLICY):
        if name not in by_phase:
            continue
        phase, one, two = by_phase[name]
        wider = by_phase[wider_phase[name]][1:] if wider_phase[name] in by_phase else ()
        judges = [run.trace for run in wider] if name == FLOAT32 else []
        comparison = _PhaseComparison(labels, phase, alignment, (one.trace, two.trace), judges, recipes)
        wider_steps = itertools.chain(
            itertools.zip_longest(*map(entries_by_step, wider), fillvalue={}), itertools.repeat(({}, {}))
        )
        pass_only = name == FLOAT32 and FLOAT64 in by_phase and by_phase[FLOAT64][0].pass_only
        for number, (ours, theirs, (wide_ours, wide_theirs)) in enumerate(
            zip(entries_by_step(one), entries_by_step(two), wider_steps, strict=False)
        ):
            comparison.limit_to_exact_quantities(pass_only and number > 1)
            comparison.step(ours, theirs, wide_ours, wide_theirs)
            if comparison.first is not None:
                break  # from here on the models differ, so that every later difference is a consequence
        rows += comparison.rows()
        updates += comparison.updates()
        shapes = {**comparison.shape_notes, **shapes}
        moved += comparison.moved()
        notes += [note for note in comparison.notes if note not in notes]
        first = first or comparison.first
    notes = [NOTHING_MOVED] * (bool(moved) and not any(moved)) + notes
    notes = settle_activations([*notes, *notes_of_uncompared(shapes, rows)], alignment, rows, first)
    return Comparison(sides=labels, first=first, rows=rows, notes=notes, updates=updates)


def _policy_dtypes(recipe: Recipe | None, phase: Phase) -> Any:
    if phase.name != POLICY or recipe is None:
        return None
    return recipe.policy.compute, recipe.policy.output, recipe.policy.float8 is not None


class _PhaseComparison:
    """Comparison of the steps of one phase."""

    def __init__(
        self,
        labels: tuple[str, str],
        phase: Phase,
        alignment: Alignment,
        traces: tuple[Trace, Trace],
        judges: Sequence[Trace],
        recipes: tuple[Recipe | None, Recipe | None],
    ) -> None:
        same_policy = len({_policy_dtypes(recipe, phase) for recipe in recipes}) == 1
        tolerance = PhaseTolerance(unit_roundoff(recipes, phase), phase.name == FLOAT32, same_policy)
        one, two = (None if recipe is None or not trains(recipe) else recipe for recipe in recipes)
        self._history = StepHistory()
        self._known = Circumstances(labels, phase, alignment, traces, (one, two), self._history, tolerance.roundoff)
        self._judge = JudgePrecision(alignment, judges, tolerance.roundoff)
        self._judged, self._are_judges_equal = "", True
        self._clips = any(recipe is not None and any(recipe.clip) for recipe in recipes)
        self._is_exact_only = False
        self._labels, self._phase, self._tolerance = labels, phase, tolerance
        self._alignment, self._traces = alignment, traces
        self._worst: dict[tuple[str, ...], EntryComparison] = {}
        self._updates = OptimizerUpdates(tolerance)
        self._switches, self._drift = UnitSwitches(traces, tolerance.roundoff), 0.0
        modes = {recipe.policy.mode for recipe in recipes if recipe is not None}
        mixed = phase.name == POLICY and tolerance.same_policy and len(modes) == 1
        self._dtype_mismatches = (
            op_dtypes.find_dtype_mismatches(alignment, labels, traces, is_cast="cast" in modes) if mixed else []
        )
        self._has_one_dtype_table = mixed and op_dtypes.have_same_library(traces)
        self.first: Divergence | None = None
        self.notes: list[str] = []
        self.shape_notes: dict[tuple[str, str], str] = {}

    def step(self, ours: StepEntries, theirs: StepEntries, wide_ours: StepEntries, wide_theirs: StepEntries) -> None:
        """Compare one step of both sides."""
        if ours and theirs:
            ours, theirs = step_entries.add_zero_gradients(self._alignment, ours, theirs)
        self._history.advance(ours, theirs)
        overflowed = has_overflow(ours, theirs)
        self._drift = self._updates.drift(
            {e.module: e.sketch.rms for e in ours.values() if e.what == "output" and e.sketch}
        )
        suspect: Divergence | None = None
        self._switches.begin_step()
        depth = 0
        allowed_gradients: dict[tuple[str, str], float] = {}
        last = ""
        gradient_floor = _GRADIENT_FLOOR_SHARE * max(
            (e.sketch.rms for e in ours.values() if e.what == "gradient" and e.sketch is not None), default=0.0
        )
        last_output: tuple[float, float] | None = None  # last output: allowed distance, norm of its cotangent
        behind: EntryComparison | None = None  # a difference in a parameter's owner, behind all that agrees
        mismatches = op_dtypes.MismatchPlaces(self._dtype_mismatches)
        for entry in order_entries(ours, self._alignment):
            other = theirs.get(self._partner_key(entry))
            if other is None or not self._is_compared(entry):
                continue
            if overflowed and (entry.stage == "backward" or entry.what == "grad_norm"):
                continue  # frameworks differ in where infinities arise; only the step's reaction is compared
            pair = EntryPair(entry, other, (wide_ours.get(entry_key(entry)), wide_theirs.get(entry_key(other))))
            module, is_output = pair.module, entry.what.startswith("output")
            leaf = module not in self._alignment.containers
            depth += is_output and leaf
            found: EntryComparison | None
            if entry.sketch is None:
                found = self._compare_numbers(pair, depth, last_output, allowed_gradients)
            elif entry.what == "parameter":
                found = self._updates.compare_parameter(pair)
            elif entry.stage == "update":
                found = self._updates.compare_slot(pair)
            else:
                floor = gradient_floor * math.sqrt(entry.sketch.size) if entry.what == "gradient" else 0.0
                depths = depth * (1 if entry.stage == "forward" else 2)
                self._switches.observe(pair, depths)
                found = self._compare_arrays(pair, depths, floor)
                if is_output and found is not None and found.counts:
                    found = self._compare_before_activation(pair, found, ours, theirs, depths)
            if found is None:
                continue
            found, mismatch = mismatches.place(found, ours, theirs)
            differs = found.counts
            if entry.stage == "forward" and differs and module in self._alignment.parameter_owners:
                behind = behind or found
            elif entry.stage != "forward" or (leaf and not differs):
                behind = None
            if entry.what == "gradient":
                self._updates.record_gradient(pair, found.allowed)
                allowed_gradients[pair.array] = found.allowed
            if is_output and leaf and not differs:
                last = entry.module
                slope = ours.get((entry.step, "backward", entry.module, "cotangent", ""))
                last_output = None if slope is None or slope.sketch is None else (found.allowed, slope.sketch.norm)
            if differs and not found.kind and not module and is_output:
                suspect = suspect or self._divergence(behind or found, last, ours, theirs)
                continue
            if suspect is not None and differs and not module and entry.stage == "backward":
                continue  # the loss takes another output, so that its gradients differ too
            if differs and suspect is not None and self.first is None and is_downstream_of_output(entry):
                self.first = suspect
            self._record_worst(found)
            if differs and (leaf or found.kind == "operations") and self.first is None:
                self.first = self._divergence(behind or found, last, ours, theirs, mismatch)
        if suspect is not None and self.first is None:
            self._add_note(
                "the models' outputs differ, and neither the losses nor any gradient: the loss functions take "
                "different outputs, such as logits and log-probabilities"
            )

    def limit_to_exact_quantities(self, yes: bool) -> None:
        """Set whether only exact quantities are compared: in float32 without a float64 run to measure rounding."""
        self._is_exact_only = yes
        if yes:
            self._add_note(
                "steps after the first are compared in float32 by their flags and scales alone: the model is too large "
                "to be trained in float64, which would say how far rounding leads"
            )

    def rows(self) -> list[ComparisonRow]:
        """Return the rows of the table."""
        return [_comparison_row(self._phase.title, found) for found in self._worst.values()]

    def moved(self) -> list[bool]:
        """Return whether an update changed anything on either side; nothing where nothing was trained."""
        return [self._updates.has_moved] * bool(self._updates.count()[1])

    def updates(self) -> list[JudgedUpdates]:
        """Return how many updates were judged; nothing where nothing was trained."""
        judged, updated = self._updates.count()
        return [JudgedUpdates(phase=self._phase.title, judged=judged, updated=updated)] * bool(updated)

    def _divergence(
        self, found: EntryComparison, last: str, ours: StepEntries, theirs: StepEntries, observation: str | None = None
    ) -> Divergence:
        """Return the divergence at an entry, or at a layer before it whose output is not compared."""
        between: list[str] = []
        if found.one.stage == "forward" and found.one.sketch is not None:
            shown = step_entries.output_modules(
                e for e in ours.values() if self._partner_key(e) in theirs and self._is_compared(e)
            )
            place = (module_path(last), module_path(found.one.module))
            between = step_entries.hidden_recurrent_cells(self._alignment, shown, *place)
            calls = [] if between else step_entries.one_sided_layers(self._alignment, (ours, theirs), *place)
            if calls:
                between = [path for path, _ in calls]
                observation = observation or "; ".join(f"{self._labels[n]} alone calls {path!r}" for path, n in calls)
        return build_divergence(found, self._known._replace(after=last), between, observation)

    def _partner_key(self, entry: Entry) -> tuple[Any, ...]:
        """Return the key of the other side's entry."""
        activation = self._alignment.activations_after_first.get(entry.module.partition("#")[0])
        if activation is None:
            return entry_key(entry)
        if entry.what == "output":
            return ()
        what = "output" if entry.what == f"output, {activation}" else entry.what
        return entry.step, entry.stage, entry.module, what, entry.name

    def _allowed_distance(
        self, own: tuple[float | None, float | None], depth: int, scale: float, entry: Entry
    ) -> float:
        later = entry.step > 1
        drift = self._drift if later and entry.stage != "update" else 0.0
        allowed = self._tolerance.allowed(
            own, depth, scale, same_inputs=not later, switched=self._switched_share(entry), drift=drift
        )
        narrow = self._judge.common(entry.module.partition("#")[0], forward=entry.stage == "forward")
        return max(allowed, FACTOR * self._tolerance.arithmetic(depth, scale, narrow)) if narrow else allowed

    def _switched_share(self, entry: Entry) -> float | None:
        """Return the share of units of a ReLU or a maximum that rounding has switched before an entry."""
        is_before = entry.step == 1 and entry.stage == "forward"
        return None if is_before or not self._switches.are_possible else self._switches.share

    def _is_compared(self, entry: Entry) -> bool:
        """Return whether an entry is compared: not where frameworks differ by convention."""
        if self._is_exact_only and entry.what not in _EXACT_QUANTITIES:
            return False
        if (
            entry.what == "statistic"
            and entry.name == "variance"
            and entry.module in self._alignment.variance_conventions
        ):
            return False
        recurrent = self._alignment.layer_kinds.get(entry.module.partition("#")[0]) in RECURRENT_KINDS
        if recurrent and entry.what == "parameter" and "bias" in entry.name:
            return False  # only the sum of two biases, or of one with a constant of haiku's, has a meaning
        if recurrent and entry.sketch is not None and entry.what in ("output", "cotangent"):
            return False  # frameworks differ in the time order of outputs of a backward pass over time
        if not self._alignment.merged_biases or entry.step == 0:
            return True
        if entry.step > 1 or entry.what == "grad_norm":  # the sum of both moves twice as far; the norm counts both
            return False
        return entry.stage != "update" or not (self._clips or entry.module in self._alignment.merged_biases)

    def _compare_arrays(self, pair: EntryPair, depth: int, min_scale: float) -> EntryComparison | None:
        one, two = pair.one, pair.two
        a, b = pair.sketches
        if not has_equal_layout(a.shape, b.shape):
            self.shape_notes[one.module, one.what] = (
                f"{one.module or 'the model'} gives {list(a.shape)} in {self._labels[0]} and {list(b.shape)} in "
                f"{self._labels[1]}: its {one.what} is not compared"
            )
            return None
        scale, own, distance = pair.scale, pair.own, pair.distance
        allowed = self._allowed_distance(own, depth, max(scale, min_scale), one)
        if one.what == "gradient" and not self._tolerance.wide and is_rounding_only(pair):
            allowed = max(allowed, FACTOR * max(each for each in own if each is not None))
        kind = ""
        product = self._alignment.layer_kinds.get(pair.module) in _MATMUL_KINDS
        if a.dtype != b.dtype and one.what.startswith("output") and product and self._tolerance.same_policy:
            kind = "dtype" if a.dtype in HALF_DTYPES or b.dtype in HALF_DTYPES else ""
        if self._has_one_dtype_table and one.step == 1 and one.stage == "forward" and not kind:
            if one.what == "input" and not product and op_dtypes.is_narrow_alone(a, b):
                kind = "dtype"
            elif op_dtypes.is_rounded_alone(own, scale, self._tolerance.roundoff):
                kind = "operations"
        is_judged = one.step == 1 and one.what.startswith("output") and self._tolerance.wide
        if is_judged and any(each is not None and each > RANDOMNESS_LIMIT * scale for each in own):
            kind = "randomness"
        if distance > allowed and (step_entries.is_absent(one) or step_entries.is_absent(two)):
            kind = "missing"
        found = EntryComparison(one, two, distance, allowed, scale, own, kind)
        if one.stage == "forward" and one.step == 1 and self._tolerance.wide and not found.counts:
            return prefer_float64_distance(found, pair.wide, self._judge_limit(pair, depth))
        return found

    def _judge_limit(self, pair: EntryPair, depth: int) -> float:
        """Return how far the wider runs may be apart in an output: more where they are rounded themselves, unless they
        were equal up to the module before, and nothing in between is rounded."""
        module, scale, before, was_equal = pair.module, pair.scale, self._judged, self._are_judges_equal
        sketches = [each.sketch for each in pair.wide if each is not None and each.sketch is not None]
        if len(sketches) == len(pair.wide):
            self._are_judges_equal &= sketch_distance(sketches[0], sketches[1]) <= _EQUAL_JUDGES * scale
            self._judged = module
        rounded = self._judge.limit(module)
        if not rounded or (was_equal and self._judge.is_exact_since(before, module)):
            return self._tolerance.arithmetic(depth, scale)
        return FACTOR * self._tolerance.arithmetic(depth, scale, rounded)

    def _compare_before_activation(
        self, pair: EntryPair, comparison: EntryComparison, ours: StepEntries, theirs: StepEntries, depth: int
    ) -> EntryComparison:
        """Return `comparison`, or the comparison before an activation that only one side's recorded output includes."""
        key = pair.one.step, pair.one.stage, pair.one.module
        one: Entry | None = pair.one
        two: Entry | None = pair.two
        if pair.one.what == "output":
            two = theirs.get((*key, BEFORE_ACTIVATION, ""))
        else:
            one = ours.get((*key, "output", ""))
        if one is None or two is None:
            return comparison
        nearer = self._compare_arrays(EntryPair(one, two), depth, 0.0)
        return comparison if nearer is None or nearer.counts else nearer

    def _compare_numbers(
        self,
        pair: EntryPair,
        depth: int,
        last_output: tuple[float, float] | None,
        gradients: Mapping[tuple[str, str], float],
    ) -> EntryComparison:
        one, two = pair.one, pair.two
        assert one.number is not None
        assert two.number is not None
        scale = max(abs(one.number), abs(two.number))
        distance = scalar_distance(one.number, two.number)
        if one.what in _EXACT_QUANTITIES:
            return EntryComparison(one, two, distance, 0.0, scale, (None, None))
        own = tuple(
            None if each is None or each.number is None else scalar_distance(side.number or 0.0, each.number)
            for side, each in zip((one, two), pair.wide, strict=True)
        )
        allowed = self._allowed_distance((own[0], own[1]), depth, scale, one)
        if one.what == "loss" and last_output is not None:
            allowed += last_output[0] * last_output[1]
        if one.what == "grad_norm":
            allowed += math.sqrt(sum(each * each for each in gradients.values()))
        is_first_loss = one.what == "loss" and one.step == 1 and one.stage == "forward" and self._has_one_dtype_table
        half = is_first_loss and op_dtypes.has_half_loss_alone((one.number, two.number), self._tolerance.roundoff)
        return EntryComparison(one, two, distance, allowed, scale, (own[0], own[1]), "dtype" if half else "")

    def _record_worst(self, comparison: EntryComparison) -> None:
        entry = comparison.one
        key = (entry.module, entry.stage, entry.what, entry.name)
        before = self._worst.get(key)
        if before is None or (comparison.counts, comparison.ratio) > (before.counts, before.ratio):
            self._worst[key] = comparison

    def _add_note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _comparison_row(phase: str, comparison: EntryComparison) -> ComparisonRow:
    one, two = comparison.one, comparison.two
    scale = comparison.scale or 1.0
    return ComparisonRow(
        phase=phase,
        module=one.module,
        stage=one.stage,
        what=one.what,
        name=one.name,
        step=one.step,
        dtypes=("", "") if one.sketch is None or two.sketch is None else (one.sketch.dtype, two.sketch.dtype),
        distance=comparison.distance / scale if math.isfinite(comparison.distance) else None,
        allowed=comparison.allowed / scale,
        counts=comparison.counts,
    )
