"""Rule S1 where parameters are float64: what acts on them is float64 as well, compared with NumPy's formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import Group, schedules
from polyamp.conformance.problems import layers, recipe
from polyamp.contract.backend import Backend
from polyamp.contract.harness import DenseWeights, Harness
from polyamp.reference.arrays import XP as REFERENCE_XP

Array = np.ndarray[Any, Any]
STEPS = 50
ROWS, INPUTS, OUTPUTS = 2, 3, 2

OPTIMIZERS: list[tuple[Any, Any]] = [
    (polyamp.sgd(schedules.cosine(0.07, 60, 0.003), momentum=0.9, weight_decay=0.03, nesterov=True), True),
    (polyamp.sgd(0.07), False),
    (polyamp.adam(schedules.warmup_cosine(0.03, 7, 60, 0.001), weight_decay=0.03), True),
    (polyamp.adamw(schedules.linear_warmup(0.03, 7, 0.001), weight_decay=0.3), True),
    (polyamp.adamw(0.03, betas=(0.3, 0.4), eps=1e-3), False),
    (polyamp.rmsprop(schedules.step(0.03, 7, 0.7), momentum=0.3, centered=True, weight_decay=0.03), True),
    (polyamp.adagrad(schedules.piecewise((0.03, 0.07), (9,)), lr_decay=0.07, weight_decay=0.03), True),
    (polyamp.lion(schedules.constant(0.003), weight_decay=0.3), True),
    (polyamp.nadam(schedules.linear_warmup(0.03, 7, 0.001), weight_decay=0.03, momentum_decay=0.07), True),
    (polyamp.lamb(schedules.linear_warmup(0.03, 7, 0.001), weight_decay=0.03), True),
    (polyamp.adafactor(schedules.linear_warmup(0.03, 7, 0.001), weight_decay=0.03), True),
    (polyamp.muon(0.03, adamw_learning_rate=0.007, ns_coefficients=(2.0, -1.5, 0.5)), False),
    (polyamp.schedule_free(schedules.linear_warmup(0.03, 7, 0.001), weight_decay=0.03), True),
]
"""Optimizers, and whether gradients are clipped; no number is one of float32."""
GROUPS = [
    Group("**/dense0", learning_rate_scale=0.3),
    Group(kind="bias", weight_decay=0.0, learning_rate=schedules.cosine(0.07, 60)),
]


def wide_layers() -> list[DenseWeights]:
    """Weights in float64 that float32 does not hold."""
    rng = np.random.default_rng(3)
    return [
        DenseWeights(*(part + 1e-9 * rng.normal(size=part.shape) for part in layer))
        for layer in layers((INPUTS, 4, OUTPUTS))
    ]


def wide_batch(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(ROWS, INPUTS)), "y": rng.normal(size=(ROWS, OUTPUTS))}


def squared_distance_loss(model: Any, batch: Any) -> Any:
    """The mean over rows of squared distances, in the dtype of the model's output; `polyamp.losses` are float32."""
    distance = model(batch["x"]) - batch["y"]
    squared = distance * distance
    return sum(squared[row, column] for row in range(ROWS) for column in range(OUTPUTS)) * (1.0 / ROWS)


def schedule_rate(schedule: Any, count: int) -> float:
    """The schedules' definitions in Python's numbers."""
    match schedule:
        case schedules.Cosine():
            share = min(count / schedule.steps, 1.0)
            return float(schedule.end + (schedule.peak - schedule.end) * 0.5 * (1.0 + math.cos(math.pi * share)))
        case schedules.WarmupCosine():
            if count < schedule.warmup_steps:
                return float(schedule.start + (schedule.peak - schedule.start) * count / schedule.warmup_steps)
            share = min((count - schedule.warmup_steps) / (schedule.total_steps - schedule.warmup_steps), 1.0)
            return float(schedule.end + (schedule.peak - schedule.end) * 0.5 * (1.0 + math.cos(math.pi * share)))
        case schedules.LinearWarmup():
            return float(schedule.start + (schedule.peak - schedule.start) * min(count / schedule.steps, 1.0))
        case schedules.Step():
            return float(schedule.initial * schedule.factor ** (count // schedule.every))
        case schedules.Piecewise():
            return float(schedule.values[sum(count >= boundary for boundary in schedule.boundaries)])
        case schedules.Constant():
            return float(schedule.value)
    return float(schedule)


def update_parameter(spec: Any, w: Any, g: Any, slots: dict[str, Any], rate: float, n: int) -> Any:
    """PyTorch's formulas in NumPy's float64; `slots` are changed in place."""

    def slot(name: str) -> Any:
        return slots.setdefault(name, np.zeros_like(w))

    decay = spec.weight_decay
    match spec:
        case polyamp.sgd():
            g = g + decay * w
            if not spec.momentum:
                return w - rate * g
            slots["m"] = spec.momentum * slot("m") + g
            return w - rate * (g + spec.momentum * slots["m"] if spec.nesterov else slots["m"])
        case polyamp.adam() | polyamp.adamw():
            if isinstance(spec, polyamp.adamw):
                w = w - rate * decay * w
            else:
                g = g + decay * w
            one, two = spec.betas
            slots["m"] = one * slot("m") + (1 - one) * g
            slots["v"] = two * slot("v") + (1 - two) * g * g
            return w - rate / (1 - one**n) * slots["m"] / (np.sqrt(slots["v"]) / math.sqrt(1 - two**n) + spec.eps)
        case polyamp.rmsprop():
            g = g + decay * w
            slots["v"] = spec.alpha * slot("v") + (1 - spec.alpha) * g * g
            slots["g"] = spec.alpha * slot("g") + (1 - spec.alpha) * g
            slots["m"] = spec.momentum * slot("m") + g / (np.sqrt(slots["v"] - slots["g"] ** 2) + spec.eps)
            return w - rate * slots["m"]
        case polyamp.adagrad():
            g = g + decay * w
            slots["v"] = slot("v") + g * g
            return w - rate / (1 + (n - 1) * spec.lr_decay) * g / (np.sqrt(slots["v"]) + spec.eps)
        case polyamp.nadam():
            g = g + decay * w
            one, two = spec.betas
            now, ahead = (one * (1 - 0.5 * 0.96 ** (number * spec.momentum_decay)) for number in (n, n + 1))
            slots["product"] = product = slots.get("product", 1.0) * now
            slots["m"] = one * slot("m") + (1 - one) * g
            slots["v"] = two * slot("v") + (1 - two) * g * g
            step = (1 - now) / (1 - product) * g + ahead / (1 - product * ahead) * slots["m"]
            return w - rate * step / (np.sqrt(slots["v"]) / math.sqrt(1 - two**n) + spec.eps)
        case polyamp.lamb() | polyamp.adafactor() | polyamp.muon() | polyamp.schedule_free():
            before = slots or {name: np.zeros(spec.slot_shape(name, w.shape)) for name in spec.slots}
            new, after = spec.update(REFERENCE_XP, w, g, before, np.float64(rate), np.float64(n))
            slots.update(after)
            return np.asarray(new)
    one, two = spec.betas
    direction = np.sign(one * slot("m") + (1 - one) * g)
    slots["m"] = two * slots["m"] + (1 - two) * g
    return w - rate * decay * w - rate * direction


def relative_distance(one: Any, other: Any) -> float:
    """Largest distance of two sets of arrays, relative to their largest number."""
    apart = max(float(np.max(np.abs(one[name] - other[name]))) for name in other)
    return apart / max(float(np.max(np.abs(array))) for array in other.values())


def distance_from_formulas(
    backend: Backend, harness: Harness, made: polyamp.Recipe, *, halves: bool = False, **options: Any
) -> float:
    """How far 50 steps are from NumPy's formulas, which are given the same gradients; `options` are the step's."""
    state = polyamp.init(harness.mlp(wide_layers()), made)
    step, half = (
        polyamp.train_step(squared_distance_loss, made, **options),
        polyamp.value_and_grad(squared_distance_loss),
    )
    host = {name: backend.to_numpy(array) for name, array in polyamp.parameters(state.model).items()}
    slots: dict[str, dict[str, Array]] = {name: {} for name in host}
    for number in range(STEPS):
        parts = [wide_batch(made.accumulate_steps * number + n) for n in range(made.accumulate_steps)]
        found = [dict(backend.named_gradients(half(state, part)[1])) for part in parts]
        grads = {name: np.mean([backend.to_numpy(each[name]) for each in found], axis=0) for name in host}
        assert {grad.dtype.name for grad in grads.values()} == {"float64"}
        norm = math.sqrt(sum(float(np.sum(np.square(grad))) for grad in grads.values()))
        factor = 1.0 if made.clip_norm is None else min(1.0, made.clip_norm / norm)
        for name, grad in grads.items():
            assert state.groups is not None
            member = state.groups.of(name)
            rate = schedule_rate(member.spec.learning_rate, number) * member.scale
            host[name] = update_parameter(member.spec, host[name], grad * factor, slots[name], rate, number + 1)
        if halves:
            _, gradients = half(state, parts[0])
            state, result = polyamp.apply_gradients(state, gradients)
        else:
            state, result = step(state, parts if len(parts) > 1 else parts[0])
        assert not bool(backend.to_numpy(result.skipped))
        assert math.isclose(float(backend.to_numpy(result.grad_norm)), norm, rel_tol=1e-6)
    after = {name: backend.to_numpy(array) for name, array in polyamp.parameters(state.model).items()}
    assert {array.dtype.name for array in after.values()} == {"float64"}
    return relative_distance(after, host)


@pytest.mark.parametrize(
    ("optimizer", "clips"), OPTIMIZERS, ids=[f"{type(o).__name__}{n}" for n, (o, _) in enumerate(OPTIMIZERS)]
)
def test_s01_float64_optimizers_schedules_and_clipping(
    backend: Backend, harness: Harness, optimizer: Any, clips: bool
) -> None:
    """A scale that is no power of two, and a clip at every step."""
    made = recipe(
        polyamp.Policy("float64"),
        optimizer=optimizer,
        scaler=polyamp.LossScaler(init_scale=1000.0),
        clip_norm=0.07 if clips else None,
    )
    with harness.float64():
        assert distance_from_formulas(backend, harness, made) < 1e-14


@pytest.mark.parametrize("optimizer", [polyamp.adamw(0.03), polyamp.sgd(0.07, momentum=0.7)], ids=["AdamW", "SGD"])
def test_s01_float64_parameter_groups(backend: Backend, harness: Harness, optimizer: Any) -> None:
    made = recipe(polyamp.Policy("float64"), optimizer=optimizer.replace(groups=GROUPS), clip_norm=0.07)
    with harness.float64():
        assert distance_from_formulas(backend, harness, made) < 1e-14


def test_s01_float64_halves_and_micro_batches(backend: Backend, harness: Harness) -> None:
    made = recipe(
        polyamp.Policy("float64"),
        optimizer=polyamp.adam(0.03),
        scaler=polyamp.LossScaler(init_scale=1000.0),
        clip_norm=0.07,
    )
    with harness.float64():
        assert distance_from_formulas(backend, harness, made, halves=True) < 1e-14
        assert distance_from_formulas(backend, harness, made.replace(accumulate_steps=3)) < 1e-14


def test_s01_float64_gradients_are_divided_by_the_scale_in_float64(backend: Backend, harness: Harness) -> None:
    with harness.float64():
        found = []
        for scaler in (polyamp.LossScaler.off(), polyamp.LossScaler(init_scale=1000.0)):
            made = recipe(polyamp.Policy("float64"), scaler=scaler)
            _, grads = polyamp.value_and_grad(squared_distance_loss)(
                polyamp.init(harness.mlp(wide_layers()), made), wide_batch(0)
            )
            found.append({name: backend.to_numpy(grad) for name, grad in backend.named_gradients(grads)})
        assert relative_distance(found[1], found[0]) < 1e-15


def test_s01_float64_windows_of_uneven_micro_batches(backend: Backend, harness: Harness) -> None:
    """Their shares of the rows, 1 and 2/3, are no numbers of float32."""
    rng = np.random.default_rng(0)
    whole = {"x": rng.normal(size=(8, INPUTS)), "y": rng.normal(size=(8, OUTPUTS))}

    def mean(model: Any, batch: Any) -> Any:
        rows = batch["y"].shape[0]
        distance = model(batch["x"]) - batch["y"]
        squared = distance * distance
        return sum(squared[row, column] for row in range(rows) for column in range(OUTPUTS)) * (1.0 / rows)

    with harness.float64():
        found = []
        for count in (1, 3):
            made = recipe(polyamp.Policy("float64"), optimizer=polyamp.sgd(0.7), accumulate_steps=count)
            state, _ = polyamp.train_step(mean, made)(polyamp.init(harness.mlp(wide_layers()), made), whole)
            found.append({name: backend.to_numpy(value) for name, value in polyamp.parameters(state.model).items()})
        assert relative_distance(found[1], found[0]) < 1e-15
