"""`compared`: the traces of two sides beside each other, entry by entry, and where they part first.

Called by `compare` and `run`. The traces of a step are in memory at a time, and nothing larger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from polyamp.parity import likeness, ran, unseen
from polyamp.parity.aligned import Agreed
from polyamp.parity.distances import Compared, exactly, far, own_distance
from polyamp.parity.phases import FLOAT32, FLOAT64, POLICY, Phase, epsilon
from polyamp.parity.report import Comparison, Divergence, Row
from polyamp.parity.sketch import apart
from polyamp.parity.tolerances import FACTOR, RANDOM, Judge
from polyamp.parity.trace import BEFORE, Entry, Trace
from polyamp.parity.updates import Updates
from polyamp.porting.matching.differences import RECURRENT
from polyamp.recipe.recipe import Recipe

_EXACT: Final = ("finite", "scale", "applied")
_PRODUCTS: Final = ("dense", "conv", "conv_transpose", "attention", "projections", "lstm", "gru", "simple_rnn")
"""Kinds of layers whose output has the policy's dtype in every framework: matrix products and convolutions. Of
elementwise operations, lookups and normalizations each framework has its own, within S4."""
_NARROW: Final = ("bfloat16", "float16")
_QUIET: Final = 0.1
"""A gradient is compared with its own size, or with this share of the largest of all: it is a sum, and its rounding is
that of its terms, which may cancel out; the gradient of a key's bias is 0 but for rounding."""


_ZEROS: Final = 1 / 64
"""The share of zeros in the gradient by an output that tells of a unit that is switched off."""


_NOTHING: Final = 1e-2
"""The share of a gradient under a policy that its float32 run has where it is rounding alone."""


class Ran(NamedTuple):
    """A side's run of one phase.

    Attributes:
        trace: what is known of it as a whole.
        entries: gives its entries, in the order in which they came, as often as it is asked.
    """

    trace: Trace
    entries: Callable[[], Iterable[Entry]]


def compared(
    labels: tuple[str, str],
    runs: Sequence[tuple[Phase, Ran, Ran]],
    agreed: Agreed,
    recipes: tuple[Recipe | None, Recipe | None],
) -> Comparison:
    """Two sides, phase by phase.

    Args:
        labels: of the first side, of the other.
        runs: what both did in each phase that both began, float64 where both or one of them could.
        agreed: what the sides agreed on.
        recipes: of both.
    """
    by_phase = {phase.name: (phase, one, two) for phase, one, two in runs}
    first: Divergence | None = None
    rows: list[Row] = []
    notes = list(agreed.notes)
    for trace in dict.fromkeys((run.trace.side, run.trace.unseen) for _, *both in runs for run in both):
        notes += [f"{trace[0]}: {trace[1]}"] * bool(trace[1])
    judged = {FLOAT32: FLOAT64, POLICY: FLOAT32}
    for name in (FLOAT32, POLICY):
        if name not in by_phase:
            continue
        phase, one, two = by_phase[name]
        alike = len({_policy(recipe, phase) for recipe in recipes}) == 1
        judge = Judge(epsilon(recipes, phase), name == FLOAT32, alike)
        clips = any(recipe is not None and recipe.clip_norm is not None for recipe in recipes)
        work = _Phase(labels, phase, judge, agreed, (one.trace, two.trace), clips)
        wider = by_phase[judged[name]][1:] if judged[name] in by_phase else ()
        beside = itertools.chain(itertools.zip_longest(*map(_steps, wider), fillvalue={}), itertools.repeat(({}, {})))
        looks = name == FLOAT32 and FLOAT64 in by_phase and by_phase[FLOAT64][0].looks
        for number, (ours, theirs, (wide_ours, wide_theirs)) in enumerate(
            zip(_steps(one), _steps(two), beside, strict=False)
        ):
            work.without_judge(looks and number > 1)
            work.step(ours, theirs, wide_ours, wide_theirs)
            if work.first is not None:
                break  # from here on two different models are trained: all of them would differ, which says nothing
        rows += work.rows()
        notes += [note for note in work.notes if note not in notes]
        first = first or work.first
    return Comparison(sides=labels, first=first, rows=rows, notes=notes)


def _policy(recipe: Recipe | None, phase: Phase) -> Any:
    return None if phase.name != POLICY or recipe is None else (recipe.policy.compute, recipe.policy.output)


def _steps(ran: Ran) -> Iterator[dict[tuple[Any, ...], Entry]]:
    """The entries of each step by what they are of, one step at a time."""
    return map(_keyed, _by_step(ran.entries()))


def _by_step(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Entries of one step after those of the one before."""
    number, found = 0, list[Entry]()
    for entry in entries:
        while entry.step > number:
            yield found
            number, found = number + 1, []
        found.append(entry)
    yield found


def _keyed(entries: Iterable[Entry]) -> dict[tuple[Any, ...], Entry]:
    return {entry.key: entry for entry in entries}


Step = Mapping[tuple[Any, ...], Entry]


class _Phase:
    """The steps of one phase."""

    def __init__(
        self,
        labels: tuple[str, str],
        phase: Phase,
        judge: Judge,
        agreed: Agreed,
        traces: tuple[Trace, Trace],
        clips: bool,
    ) -> None:
        self._clips, self._blind = clips, False
        self._labels, self._phase, self._judge = labels, phase, judge
        self._agreed, self._traces = agreed, traces
        self._worst: dict[tuple[str, ...], Compared] = {}
        self._updates = Updates(judge)
        self._kinked, self._drift = False, 0.0
        mixed = phase.name == POLICY and judge.alike
        self._ran = ran.narrower(agreed, labels, traces) if mixed else {}
        self.first: Divergence | None = None
        self.notes: list[str] = []

    def step(self, ours: Step, theirs: Step, wide_ours: Step, wide_theirs: Step) -> None:
        """One step of both."""
        if ours and theirs:
            ours, theirs = unseen.gradients(self._agreed, ours, theirs)
        overflowed = _overflowed(ours, theirs)
        self._drift = self._updates.drift(
            {e.module: e.sketch.rms for e in ours.values() if e.what == "output" and e.sketch}
        )
        suspect: Divergence | None = None
        self._kinked = self._kinked or _has_kinks(ours, theirs)
        depth = 0
        allowed_gradients: dict[tuple[str, str], float] = {}
        last = ""
        quiet = _QUIET * max(
            (e.sketch.rms for e in ours.values() if e.what == "gradient" and e.sketch is not None), default=0.0
        )
        reach: tuple[float, float] | None = None  # of the last output: what is allowed of it, how much the loss follows
        for entry in _ordered(ours, self._agreed):
            other = theirs.get(self._partner(entry))
            if other is None or not self._is_judged(entry):
                continue
            if overflowed and (entry.stage == "backward" or entry.what == "grad_norm"):
                continue  # where in it the infinities arise is each framework's own; what the step makes of it is not
            wide = (wide_ours.get(entry.key), wide_theirs.get(other.key))
            leaf = entry.module.partition("#")[0] not in self._agreed.holders
            depth += entry.what.startswith("output") and leaf
            found: Compared | None
            if entry.sketch is None:
                found = self._number(entry, other, wide, depth, reach, allowed_gradients)
            elif entry.what == "parameter":
                found = self._updates.parameter(entry, other, wide)
            elif entry.stage == "update":
                found = self._updates.kept(entry, other, wide)
            else:
                floor = quiet * math.sqrt(entry.sketch.size) if entry.what == "gradient" else 0.0
                depths = depth * (1 if entry.stage == "forward" else 2)
                found = self._nearer(entry, self._array(entry, other, wide, depths, floor), ours, theirs, wide, depths)
            if found is None:
                continue
            module = entry.module.partition("#")[0]
            if entry.step == 1 and entry.what.startswith("output") and module in self._ran:
                found = found._replace(kind=found.kind or "operations")
            if entry.what == "gradient":
                self._updates.gradient(entry, other, found)
                allowed_gradients[entry.module, entry.name] = found.allowed
            if entry.what.startswith("output") and leaf and not found.counts:
                last = entry.module
                slope = ours.get((entry.step, "backward", entry.module, "cotangent", ""))
                reach = None if slope is None or slope.sketch is None else (found.allowed, slope.sketch.norm)
            if found.counts and not found.kind and not module and entry.what.startswith("output"):
                suspect = suspect or likeness.divergence(
                    found, self._phase, self._labels, self._agreed, self._traces, last
                )
                continue
            if suspect is not None and found.counts and not module and entry.stage == "backward":
                continue  # the gradient by another output is another one
            if found.counts and suspect is not None and self.first is None and _follows(entry):
                self.first = suspect
            self._keep(found)
            if found.counts and (leaf or found.kind == "operations") and self.first is None:
                between = self._between(found, last, ours, theirs)
                self.first = likeness.divergence(
                    found, self._phase, self._labels, self._agreed, self._traces, last, between, self._ran.get(module)
                )

        if suspect is not None and self.first is None:
            self._note(
                "the models' outputs differ, and neither the losses nor any gradient: the loss functions take "
                "different outputs, such as logits and log-probabilities"
            )

    def without_judge(self, yes: bool) -> None:
        """Whether nothing tells how far rounding has led by this step, in a float32 run that has no float64 one."""
        self._blind = yes
        if yes:
            self._note(
                "steps after the first are compared in float32 by their flags and scales alone: the model is too large "
                "to be trained in float64, which would say how far rounding leads"
            )

    def rows(self) -> list[Row]:
        """The table."""
        return [_row(self._phase.shown, found) for found in self._worst.values()]

    def _between(self, found: Compared, last: str, ours: Step, theirs: Step) -> list[str]:
        """The layers that nobody saw, and in one of which the difference may be."""
        if found.one.stage != "forward" or found.one.sketch is None:
            return []
        shown = unseen.modules(e for e in ours.values() if self._partner(e) in theirs and self._is_judged(e))
        module, before = (path.partition("#")[0] for path in (found.one.module, last))
        return unseen.hidden(self._agreed, shown, before, module)

    def _partner(self, entry: Entry) -> tuple[Any, ...]:
        """The key of the other side's entry."""
        module = entry.module.partition("#")[0]
        if entry.what == "output" and module in self._agreed.behind:
            return ()
        what = "output" if entry.what == f"output, {self._agreed.behind.get(module)}" else entry.what
        return entry.step, entry.stage, entry.module, what, entry.name

    def _allowed(self, own: tuple[float | None, float | None], depth: int, scale: float, entry: Entry) -> float:
        later = entry.step > 1
        drift = self._drift if later and entry.stage != "update" else 0.0
        return self._judge.allowed(own, depth, scale, alone=not later, switched=self._switched(entry), drift=drift)

    def _switched(self, entry: Entry) -> bool:
        """Whether units of a ReLU or a maximum may have switched by rounding before an entry."""
        return self._kinked and (entry.step > 1 or entry.stage != "forward")

    def _is_judged(self, entry: Entry) -> bool:
        """Whether anything is to be learned from an entry: not where frameworks have it otherwise by convention."""
        if self._blind and entry.what not in _EXACT:
            return False
        if entry.what == "statistic" and entry.name == "variance" and entry.module in self._agreed.biased:
            return False
        recurrent = self._agreed.kinds.get(entry.module.partition("#")[0]) in RECURRENT
        if recurrent and entry.what == "parameter" and "bias" in entry.name:
            return False  # only the sum of two of them, or with a constant of haiku's, means something
        if recurrent and entry.sketch is not None and entry.what in ("output", "cotangent"):
            return False  # one framework gives what ran backwards as it ran, another turned round
        if not self._agreed.merged or entry.step == 0:
            return True
        if entry.step > 1 or entry.what == "grad_norm":  # their sum has moved twice as far; the norm counts both
            return False
        return entry.stage != "update" or not (self._clips or entry.module in self._agreed.merged)

    def _array(
        self, one: Entry, two: Entry, wide: tuple[Entry | None, Entry | None], depth: int, least: float
    ) -> Compared | None:
        a, b = one.sketch, two.sketch
        assert a is not None
        assert b is not None
        if not _alike(a.shape, b.shape):
            self._note(
                f"{one.module or 'the model'} gives {list(a.shape)} in {self._labels[0]} and {list(b.shape)} in "
                f"{self._labels[1]}: its {one.what} is not compared"
            )
            return None
        scale = max(a.norm, b.norm)
        own = own_distance(one, wide[0]), own_distance(two, wide[1])
        allowed = self._allowed(own, depth, max(scale, least), one)
        if one.what == "gradient" and not self._judge.wide and _vanishes((one, two), wide):
            allowed = max(allowed, FACTOR * max(each for each in own if each is not None))
        kind = ""
        narrow = [each.dtype in _NARROW for each in (a, b)]
        product = self._agreed.kinds.get(one.module.partition("#")[0]) in _PRODUCTS
        if one.what.startswith("output") and product and self._judge.alike and a.dtype != b.dtype and any(narrow):
            kind = "dtype"
        known = [each for each in own if each is not None]
        random = one.step == 1 and one.what.startswith("output") and self._judge.wide
        if random and known and max(known) > RANDOM * scale:
            kind = "randomness"
        distance = apart(a, b)
        if distance > allowed and (unseen.is_absent(one) or unseen.is_absent(two)):
            kind = "missing"
        found = Compared(one, two, distance, allowed, scale, own, kind)
        if one.stage == "forward" and one.step == 1 and self._judge.wide and not found.counts:
            return exactly(found, wide, self._judge.arithmetic(depth, scale))
        return found

    def _nearer(
        self,
        entry: Entry,
        found: Compared | None,
        ours: Step,
        theirs: Step,
        wide: tuple[Entry | None, Entry | None],
        depth: int,
    ) -> Compared | None:
        """What was found, or the same before an activation that one side's layer says it has: some show their output
        before it."""
        if found is None or not found.counts or entry.stage != "forward":
            return found
        key = entry.step, entry.stage, entry.module
        one: Entry | None = entry
        two: Entry | None = found.two
        if entry.what == "output":
            two = theirs.get((*key, BEFORE, ""))
        else:
            one = ours.get((*key, "output", ""))
        if one is None or two is None:
            return found
        nearer = self._array(one, two, (None, None), depth, 0.0)
        return found if nearer is None or nearer.counts else nearer

    def _number(
        self,
        one: Entry,
        two: Entry,
        wide: tuple[Entry | None, Entry | None],
        depth: int,
        reach: tuple[float, float] | None,
        gradients: Mapping[tuple[str, str], float],
    ) -> Compared:
        assert one.number is not None
        assert two.number is not None
        scale = max(abs(one.number), abs(two.number))
        distance = far(one.number, two.number)
        if one.what in _EXACT:
            return Compared(one, two, distance, 0.0, scale, (None, None))
        own = tuple(
            None if each is None or each.number is None else far(side.number or 0.0, each.number)
            for side, each in zip((one, two), wide, strict=True)
        )
        allowed = self._allowed((own[0], own[1]), depth, scale, one)
        if one.what == "loss" and reach is not None:
            allowed += reach[0] * reach[1]
        if one.what == "grad_norm":
            allowed += math.sqrt(sum(each * each for each in gradients.values()))
        return Compared(one, two, distance, allowed, scale, (own[0], own[1]))

    def _keep(self, found: Compared) -> None:
        entry = found.one
        key = (entry.module, entry.stage, entry.what, entry.name)
        before = self._worst.get(key)
        if before is None or (found.counts, found.ratio) > (before.counts, before.ratio):
            self._worst[key] = found

    def _note(self, said: str) -> None:
        if said not in self.notes:
            self.notes.append(said)


def _ordered(step: Step, agreed: Agreed) -> list[Entry]:
    """Entries in the order in which they are judged: as the program made them, but for gradients, which come with the
    cotangents of their modules, from the loss back, and slots, which come before parameters."""
    entries = list(step.values())
    forward = [entry for entry in entries if entry.stage == "forward"]
    place: dict[str, float] = {}
    for number, entry in enumerate(forward):
        place.setdefault(entry.module.partition("#")[0], number)
    place |= unseen.places(agreed, place)
    back = [entry for entry in entries if entry.stage == "backward"]
    order = {id(entry): number for number, entry in enumerate(back)}

    def backward(entry: Entry) -> tuple[float, int, int]:
        module = entry.module.partition("#")[0]
        return (-place.get(module, -1), int(entry.what == "gradient"), order[id(entry)])

    rest = [entry for entry in entries if entry.stage == "step"]
    update = [entry for entry in entries if entry.stage == "update"]
    kept = [entry for entry in update if entry.what not in ("parameter", "statistic")]
    return [*forward, *sorted(back, key=backward), *rest, *kept, *(e for e in update if e not in kept)]


def _follows(entry: Entry) -> bool:
    """Whether an entry hangs on the model's output through the loss."""
    return entry.what == "loss" or (entry.stage == "backward" and bool(entry.module))


def _has_kinks(ours: Step, theirs: Step) -> bool:
    """Whether gradients are exactly 0 in places, as behind a ReLU or a maximum."""
    both = (entry.sketch for step in (ours, theirs) for entry in step.values() if entry.what == "cotangent")
    return any(sketch is not None and sketch.zeros > _ZEROS * sketch.size for sketch in both)


def _overflowed(ours: Step, theirs: Step) -> bool:
    """Whether the gradients of this step are not finite on either side."""
    found = [
        [e.number for e in step.values() if e.what == "grad_norm" and e.number is not None] for step in (ours, theirs)
    ]
    return all(found) and not any(math.isfinite(number) for each in found for number in each)


def _vanishes(sides: tuple[Entry, Entry], wide: tuple[Entry | None, Entry | None]) -> bool:
    """Whether a gradient is nothing but rounding on both sides, as their float32 runs show: that of a convolution's
    bias in front of a batch normalization, whose terms add up to 0. What they leave is each framework's own."""
    return all(
        each is not None
        and each.sketch is not None
        and side.sketch is not None
        and each.sketch.norm <= _NOTHING * side.sketch.norm
        for side, each in zip(sides, wide, strict=True)
    )


def _alike(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes hold the same elements in one order: they are one but for axes of length 1, or flattened."""
    some, others = ([length for length in shape if length != 1] for shape in (one, other))
    return math.prod(some) == math.prod(others) and (some == others or len(some) != len(others))


def _row(phase: str, found: Compared) -> Row:
    one, two = found.one, found.two
    scale = found.scale or 1.0
    return Row(
        phase=phase,
        module=one.module,
        stage=one.stage,
        what=one.what,
        name=one.name,
        step=one.step,
        dtypes=("", "") if one.sketch is None or two.sketch is None else (one.sketch.dtype, two.sketch.dtype),
        distance=found.distance / scale if math.isfinite(found.distance) else None,
        allowed=found.allowed / scale,
        counts=found.counts,
    )
