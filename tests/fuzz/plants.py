"""Planted faults: what a backend could get wrong, put in around the step of one framework by the fuzzer's own test.

A fault is a change of the recipe, of the loss or of the state after a step, so that it does not depend on how a
backend is written. Called by the worker.
"""

from __future__ import annotations

import os
from typing import Any, Final

from polyamp import Recipe
from tests.fuzz.grammar import Description, walk

PLANTS: Final = {
    "late growth": "the scale grows one step late",
    "hysteresis": "hysteresis is not refilled when the scale grows",
    "no clip": "the gradients are clipped after the optimizer, which is not at all",
    "epsilon": "ten times the optimizer's epsilon",
    "skips count": "a schedule counts skipped steps",
    "unused decays": "an unused parameter decays",
    "changed at skips": "a skipped step changes a parameter",
    "summed": "gradients of micro-batches are summed, not averaged",
    "in float32": "the policy is not applied",
    "l2": "AdamW's decay goes into the gradient",
}


def matters(plant: str, description: Description) -> bool:
    """Whether the fault could show in this description at all."""
    scaler, optimizer = description["scaler"], description["optimizer"]
    return {
        "late growth": scaler["kind"] in ("dynamic", "like"),
        "hysteresis": scaler.get("hysteresis", 1) > 1 and len(description["overflows"]) > 1,
        "no clip": description["clip_norm"] is not None,
        "epsilon": "eps" in optimizer,
        "skips count": isinstance(optimizer["learning_rate"], dict) and bool(description["overflows"]),
        "unused decays": any(layer["op"] == "unused" for layer in walk(description["layers"])),
        "changed at skips": bool(description["overflows"]),
        "summed": description["accumulate_steps"] > 1,
        "in float32": description["policy"]["name"] != "float32",
        "l2": optimizer["type"] == "adamw",
    }[plant]


def recipe(plant: str | None, given: Recipe) -> Recipe:
    """The recipe that the faulty backend runs."""
    scaler, spec = given.loss_scaler, given.optimizer
    if plant == "die":
        os._exit(7)
    if plant == "late growth":
        return given.replace(scaler=scaler.replace(growth_interval=scaler.growth_interval + 1))
    if plant == "hysteresis":
        return given.replace(scaler=scaler.replace(hysteresis=1))
    if plant == "no clip":
        return given.replace(clip_norm=None)
    if plant == "epsilon":
        return given.replace(optimizer=spec.replace(eps=spec.eps * 10))
    if plant == "in float32":
        return given.replace(policy="float32", scaler=scaler)
    if plant == "l2":
        from polyamp import adam

        return given.replace(optimizer=adam(spec.learning_rate, spec.betas, spec.eps, spec.weight_decay))
    return given


def factor(plant: str | None, given: Recipe) -> float:
    """What the faulty backend multiplies the gradients, and here the loss, by."""
    return float(given.accumulate_steps) if plant == "summed" else 1.0


def after(plant: str | None, state: Any, result: Any, backend: Any) -> tuple[Any, Any]:
    """The state and the result that the faulty backend ends a step with."""
    skipped = bool(backend.to_numpy(result.skipped))
    if plant == "unused decays":
        arrays = backend.export_state(state)
        moved = {name: value * 0.999 if "unused" in name and name.startswith("model") else value
                 for name, value in arrays.items()}  # fmt: skip
        return backend.import_state(state, moved), result
    if plant == "skips count" and skipped:
        arrays = backend.export_state(state)
        return backend.import_state(state, {**arrays, "step": arrays["step"] + 1}), result
    if plant == "changed at skips" and skipped:
        arrays = backend.export_state(state)
        name = min(name for name in arrays if name.startswith("model"))
        return backend.import_state(state, {**arrays, name: arrays[name] * 0.999}), result
    return state, result
