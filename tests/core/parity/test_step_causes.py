"""Rules of the step are named from the arrays of two updates, with the number that shows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyamp import Recipe, adamw, rmsprop, schedules, sgd
from polyamp.parity.precisions import FLOAT32, Phase
from polyamp.parity.trace.sketch import sketch
from polyamp.parity.trace.trace import Entry, Stage, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.causes.cause import Cause
from polyamp.parity.verdict.causes.step_causes import explain_step, recipe_differences
from polyamp.parity.verdict.causes.step_history import StepHistory
from polyamp.parity.verdict.step_entries import PhaseTrace
from polyamp.parity.verdict.verdict import compare_traces

Array = np.ndarray[Any, Any]
SHAPES = {"embed": (8, 16), "hidden": (16, 16), "norm": (16,), "head": (16, 5)}
RATE, DECAY, BETAS = 0.01, 0.1, (0.9, 0.999)


def gradients(step: int, size: float = 1.0) -> dict[str, Array]:
    rng = np.random.default_rng(100 + step)
    return {
        name: (number + 1) * 0.1 * rng.standard_normal(shape) for number, (name, shape) in enumerate(SHAPES.items())
    }


def global_norm(grads: dict[str, Array]) -> float:
    return float(np.sqrt(sum(np.sum(each**2) for each in grads.values())))


class Loop:
    """A training of four arrays in float32; keyword arguments are the rules of its step."""

    def __init__(self, kind: str = "sgd", **rules: Any) -> None:
        rng = np.random.default_rng(0)
        self.kind, self.rules = kind, rules
        self.weights = {name: rng.standard_normal(shape).astype("f4") for name, shape in SHAPES.items()}
        self.first = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.second, self.largest = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in "ab")
        self.past: dict[str, Array] = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def entries(self, step: int, grads: dict[str, Array]) -> dict[Any, Entry]:
        found: list[tuple[Stage, str, str, Array]] = []
        slots = {"sgd": {"momentum": self.first}, "plain": {}, "rmsprop": {"square_avg": self.second}}.get(
            self.kind, {"exp_avg": self.first, "exp_avg_sq": self.second}
        )
        for name in SHAPES:
            arrays = {"parameter": self.weights[name]} | {slot: each[name] for slot, each in slots.items() if step}
            found += [("update", name, what, array) for what, array in arrays.items()]
            found += [("backward", name, "gradient", grads[name])] if step else []
        made = [
            Entry(
                step=step, stage=stage, module=name, what=what, name="kernel", sketch=sketch(x.astype("f4"), "float32")
            )
            for stage, name, what, x in found
        ]
        scale = self.rules.get("scale")
        made += [Entry(step=step, stage="step", module="", what="scale", number=scale)] if scale else []
        return {(e.stage, e.module, e.what): e for e in made}

    def step(self, number: int) -> dict[Any, Entry]:
        rule = self._rule
        grads = gradients(number, rule("size", 1.0))
        given = {name: each * rule("factor", 1.0) for name, each in grads.items()}
        if rule("noise"):  # a pass of its own, which rounds in another way than the recorded one
            rng = np.random.default_rng(number)
            given = {name: a * (1.0 + rule("noise") * rng.standard_normal(a.shape)) for name, a in given.items()}
        if rule("norm"):
            factor = rule("norm") / (global_norm(given) + rule("added", 0.0))
            given = {name: each * factor for name, each in given.items()}
        if rule("each"):
            given = {name: each * min(1.0, rule("each") / float(np.linalg.norm(each))) for name, each in given.items()}
        if rule("value"):
            limit = float(rule("value"))
            given = {name: each.clip(-limit, limit) for name, each in given.items()}
        given = {name: each + rule("stale", 0.0) * self.past[name] for name, each in given.items()}
        self.past = grads
        for name, weight in self.weights.items():
            self.weights[name] = self._updated(number, name, weight.astype("f8"), given[name]).astype("f4")
        return self.entries(number, grads)

    def _rule(self, name: str, default: Any = 0.0) -> Any:
        return self.rules.get(name, default)

    def _updated(self, number: int, name: str, weight: Array, grad: Array) -> Array:
        rule = self._rule
        rate = rule("rates", {}).get(name, rule("rate", RATE))
        grad = grad + rule("coupled", 0.0) * weight
        weight = weight * (1.0 - rule("decoupled", 0.0))
        if self.kind in ("sgd", "plain"):
            momentum = rule("momentum", 0.9) if self.kind == "sgd" else 0.0
            dampening = rule("dampening", 0.0) if number > 1 else 0.0
            self.first[name] = momentum * self.first[name] + (1.0 - dampening) * grad
            direction = grad + momentum * self.first[name] if rule("nesterov") else self.first[name]
            return np.asarray(weight - rate * direction)
        first, second = rule("betas", BETAS)
        self.first[name] = first * self.first[name] + (1.0 - first) * grad
        self.second[name] = second * self.second[name] + (1.0 - second) * grad**2
        square = self.second[name]
        if rule("amsgrad"):
            square = self.largest[name] = np.maximum(self.largest[name], square)
        if self.kind == "rmsprop":
            return np.asarray(weight - rate * grad / (np.sqrt(square) + 1e-8))
        count = number + rule("ahead", 0)
        corrections = (1.0 - first**count, 1.0 - second**count) if rule("corrected", True) else (1.0, 1.0)
        square = square / corrections[1]
        root = np.sqrt(square + rule("eps", 1e-8)) if rule("inside") else np.sqrt(square) + rule("eps", 1e-8)
        updated: Array = weight - rate * (self.first[name] / corrections[0]) / root
        return updated * (1.0 - rule("behind", 0.0))


def cause(one: Loop, two: Loop, recipe: Recipe | None = None, steps: int = 1, roundoff: float = 0.0) -> Cause | None:
    history = StepHistory()
    history.advance(one.entries(0, {}), two.entries(0, {}))
    for number in range(1, steps + 1):
        history.advance(one.step(number), two.step(number))
    return explain_step(("one", "two"), steps, (recipe, None), history.updates(), roundoff)


NORM = global_norm(gradients(1))
CLIPPED = Recipe(optimizer=sgd(RATE, momentum=0.9), clip_norm=0.5)
SGD, ADAMW = {"coupled": DECAY}, {"decoupled": RATE * DECAY}
COSINE = Recipe(optimizer=sgd(schedules.cosine(RATE, 4), momentum=0.9))
COSINE_RATE = schedules.cosine(RATE, 4)(1)


@pytest.mark.parametrize(
    ("kind", "ours", "theirs", "recipe", "steps", "sentence", "number"),
    [
        (
            "sgd",
            {"norm": 0.5},
            {},
            CLIPPED,
            1,
            "one clips its gradients to the global norm 0.5, two does not",
            f"{NORM:.4g}",
        ),
        (
            "sgd",
            SGD | {"norm": 0.5},
            SGD | {"each": 0.5},
            CLIPPED,
            1,
            "two clips the gradient of each parameter",
            "norm 0.5 each",
        ),
        (
            "sgd",
            SGD | {"norm": 0.5},
            SGD | {"value": 0.3},
            None,
            1,
            "two clips its gradient by value, one clips to the global norm 0.5",
            "than 0.3",
        ),
        (
            "sgd",
            {"norm": 0.5},
            {"norm": 0.25},
            None,
            1,
            "Both clip by the global norm, to other limits: 0.5 in one, 0.25",
            " 2 times",
        ),
        (
            "sgd",
            {"norm": 1e-4, "size": 1e-3, "added": 1e-6},
            {"norm": 1e-4, "size": 1e-3},
            None,
            1,
            "one adds 1e-06 to the norm by which it clips",
            "1 + 1e-06",
        ),
        (
            "sgd",
            SGD | {"norm": 0.5, "scale": 1024.0},
            SGD | {"norm": 0.5 / 1024, "scale": 1024.0},
            None,
            1,
            "two clips its gradients before it unscales",
            "scale is 1024",
        ),
        (
            "sgd",
            SGD | {"scale": 1024.0},
            SGD | {"factor": 1024.0, "scale": 1024.0},
            None,
            1,
            "two's gradients are not unscaled",
            "1024 times",
        ),
        (
            "sgd",
            {"scale": 1024.0},
            {"factor": 2.0, "scale": 1024.0},
            None,
            1,
            "two adds the gradients of 2 micro-batches (or rows) and does not divide them by 2; or two divides them by "
            "half the loss scale.",
            "2 times",
        ),
        (
            "sgd",
            {"scale": 1024.0},
            {"factor": 0.5, "scale": 1024.0},
            None,
            1,
            "one does not clip them; or two divides them by twice the loss scale.",
            "2 times",
        ),
        (
            "adam",
            ADAMW,
            ADAMW | {"factor": 4.0},
            Recipe(optimizer=adamw(RATE), accumulate_steps=4),
            1,
            "two adds the gradients of 4 micro-batches",
            "accumulate_steps is 4",
        ),
        (
            "sgd",
            SGD,
            SGD | {"stale": 1.0},
            None,
            2,
            "two adds the gradient of the step before",
            "1 times the gradient of step 1",
        ),
        ("sgd", {}, {"nesterov": True}, CLIPPED, 1, "two uses Nesterov's momentum, one does not", "1.9"),
        ("sgd", {}, {"momentum": 0.8}, None, 2, "Another momentum: 0.9 in one, 0.8 in two", ""),
        ("sgd", SGD, SGD | {"dampening": 0.1}, None, 2, "dampening", "0.9 in two"),
        (
            "adam",
            ADAMW,
            {"coupled": DECAY},
            None,
            1,
            "two adds the weight decay to the gradient (coupled, L2), one takes 0.001 times",
            "0.1 times",
        ),
        (
            "adam",
            ADAMW,
            {"decoupled": 0.1 * RATE * DECAY},
            None,
            1,
            "Another decoupled weight decay: two's is 0.1 times",
            "0.001 in one, 0.0001 in two",
        ),
        (
            "adam",
            ADAMW,
            {"decoupled": DECAY},
            Recipe(optimizer=adamw(RATE)),
            1,
            "two does not multiply its weight decay by the learning rate",
            "0.001 in one, 0.1",
        ),
        (
            "adam",
            ADAMW,
            ADAMW | {"corrected": False},
            None,
            1,
            "two has no bias correction of both moments",
            "3.1623 times as large at step 1",
        ),
        (
            "adam",
            ADAMW,
            ADAMW | {"betas": (0.9, 0.95)},
            None,
            1,
            "Another second beta: 0.999 in one, 0.95 in two",
            "0.05 in two",
        ),
        (
            "adam",
            ADAMW,
            ADAMW | {"eps": 1e-2},
            None,
            1,
            "Another epsilon of the optimizer: none that shows in one, about 0.01 added",
            "",
        ),
        ("adam", ADAMW, ADAMW | {"eps": 1e-3, "inside": True}, None, 1, "about 0.001 inside the root in two", ""),
        ("adam", {}, {"amsgrad": True}, None, 2, "AMSGrad", ""),
        ("adam", {}, {"rate": 2 * RATE}, None, 1, "Another learning rate.", "2 times one's"),
        (
            "adam",
            {},
            {"rates": {"head": 0.1 * RATE}},
            None,
            1,
            "Another learning rate for 1 of 4 parameters: head.kernel",
            "0.003162 in one, 0.0003162 in two",
        ),
        ("adam", {}, {"rates": {"head": 0.0}}, None, 1, "two does not train 1 of 4 parameters", "head.kernel"),
        (
            "sgd",
            {"rate": COSINE_RATE},
            {"rate": schedules.cosine(RATE, 3)(1)},
            COSINE,
            2,
            "runs over steps - 1: 3 for 4",
            "0.87868",
        ),
        ("sgd", {"rate": COSINE_RATE}, {"rate": RATE}, COSINE, 2, "one step late", "0.01 explains"),
        ("sgd", {"rate": RATE}, {"rate": COSINE_RATE}, COSINE, 1, "one step early", "0.008536 explains"),
        (
            "rmsprop",
            {"betas": (0.0, 0.99)},
            {"betas": (0.0, 0.9)},
            Recipe(optimizer=rmsprop(RATE)),
            1,
            "Another alpha: 0.99 in one, 0.9 in two",
            "",
        ),
        (
            "plain",
            {"norm": 0.5},
            {},
            Recipe(optimizer=sgd(RATE), clip_norm=0.5),
            1,
            "one clips its gradients to the global norm 0.5",
            "",
        ),
        (
            "plain",
            {},
            {"factor": 2.0},
            Recipe(optimizer=sgd(RATE), accumulate_steps=2),
            1,
            "two adds the gradients of 2 micro-batches",
            "",
        ),
    ],
)
def test_a_rule_has_its_own_sentence_and_number(
    kind: str, ours: Any, theirs: Any, recipe: Recipe | None, steps: int, sentence: str, number: str
) -> None:
    found = cause(Loop(kind, **ours), Loop(kind, **theirs), recipe, steps)
    assert found is not None
    assert sentence in found.sentence
    assert number in " ".join(found.evidence)


@pytest.mark.parametrize("kind", ["sgd", "adam", "plain", "rmsprop"])
@pytest.mark.parametrize("steps", [1, 3])
def test_equal_updates_have_no_cause(kind: str, steps: int) -> None:
    assert cause(Loop(kind, coupled=DECAY), Loop(kind, coupled=DECAY), None, steps) is None


def test_the_side_is_named_that_has_the_rule() -> None:
    swapped = cause(Loop(nesterov=True), Loop(), CLIPPED)
    assert swapped is not None
    assert swapped.sentence == "one uses Nesterov's momentum, two does not."


def test_recipes_that_differ_are_a_sentence_of_settings() -> None:
    other = CLIPPED.replace(clip_norm=None, optimizer=sgd(RATE, momentum=0.8))
    assert recipe_differences(("one", "two"), (CLIPPED, other)) == [
        "The recipes differ: momentum is 0.9 in one and 0.8 in two; clip_norm is 0.5 in one and None in two."
    ]
    assert recipe_differences(("one", "two"), (CLIPPED, CLIPPED.replace(policy="mixed_bfloat16"))) == []
    assert recipe_differences(("one", "two"), (CLIPPED, None)) == []


@pytest.mark.parametrize(
    ("kind", "theirs", "sentence"),
    [
        ("adamw", {"decoupled": 0.0}, "Only one takes a decoupled weight decay from the parameters."),
        ("adamw", {"decoupled": RATE * DECAY, "rate": 2 * RATE}, "Another learning rate"),
        ("sgd", {"momentum": 0.5}, "Another momentum: 0.9"),
    ],
)
def test_rounding_of_a_loops_own_pass_in_16_bits_is_no_other_gradient(
    kind: str, theirs: dict[str, Any], sentence: str
) -> None:
    ours = Loop(kind, **(ADAMW if kind == "adamw" else {}))
    steps = 1 if kind == "adamw" else 2

    found = cause(ours, Loop(kind, noise=6e-3, **theirs), steps=steps, roundoff=2.0**-8)

    assert found is not None
    assert found.sentence.startswith(sentence)
    in_float32 = cause(Loop(kind), Loop(kind, noise=6e-3, **theirs), steps=steps)
    assert in_float32 is not None
    assert "another gradient than that of the batch" in in_float32.sentence


@pytest.mark.parametrize(
    ("ours", "theirs", "steps", "sentence", "number"),
    [
        ({}, {"ahead": 1}, 1, "two's bias correction is one step ahead.", "0.74414 times as large at step 1"),
        ({"ahead": -1}, {}, 2, "one's bias correction is one step behind.", "The correction of step 1"),
        ({"decoupled": 5e-3}, {"behind": 5e-3}, 1, "two takes the decoupled weight decay behind the update, one before "
         "it.", "two takes 0.005 times the parameter from it, and leaves 0.995 times the update."),
        ({"behind": 0.1}, {"decoupled": 0.1}, 1, "one takes the decoupled weight decay behind the update, two before "
         "it.", "leaves 0.9 times the update."),
    ],
)  # fmt: skip
def test_order_and_count_within_a_step(
    ours: dict[str, Any], theirs: dict[str, Any], steps: int, sentence: str, number: str
) -> None:
    if steps == 1:
        found = cause(Loop("adamw", **ours), Loop("adamw", **theirs))
    else:  # alike in the first step, where there is no correction one step behind
        one, two = Loop("adamw"), Loop("adamw")
        history = StepHistory()
        history.advance(one.entries(0, {}), two.entries(0, {}))
        history.advance(one.step(1), two.step(1))
        one.rules, two.rules = ours, theirs
        history.advance(one.step(2), two.step(2))
        found = explain_step(("one", "two"), 2, (None, None), history.updates())

    assert found is not None
    assert found.sentence == sentence
    assert number in " ".join(found.evidence)


def test_without_a_loss_scale_a_factor_of_two_is_not_blamed_on_one() -> None:
    found = cause(Loop(), Loop(factor=2.0))
    assert found is not None
    assert found.sentence == "two adds the gradients of 2 micro-batches (or rows) and does not divide them by 2."


def test_another_loss_scale_is_no_sum_for_a_mean() -> None:
    runs = [
        PhaseTrace(Trace(side="", phase=FLOAT32), lambda scale=scale: [_reported("scale", scale)])
        for scale in (1024.0, 512.0)
    ]
    phases: Any = [(Phase(name=FLOAT32), *runs)]
    first = compare_traces(("one", "two"), phases, Alignment(modules={}), (None, None)).first
    assert first is not None
    assert first.sentence == "The loss scale differs: its first value, or when it grows and backs off."
    assert first.evidence == ["scale: 1024 in one, 512 in two."]


def _reported(what: str, number: float) -> Entry:
    return Entry(step=1, stage="step", module="", what=what, number=number)
