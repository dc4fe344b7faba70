"""`smallest`: a failing description without the layers, options and steps that its failure does not need.

Called by the command when a seed fails.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from tests.fuzz.grammar import Description, walk

BUDGET: Final = 180.0
"""Seconds for one failure."""

Check = Callable[[Description], list[str]]


def kind(finding: str) -> str:
    """What a finding is about: its words, without numbers, names of layers and what depends on the network. Of an error
    it is who raised it, its name and how its message begins."""
    if error := re.match(r"[\w ]+: \w*(?:Error|Exception): [^\d\[({]{,40}", finding):
        return error[0]
    text = re.sub(r"\[.*|\(.*|:(?! S\d).*", "", finding, flags=re.DOTALL)
    return re.sub(r"[\d.]+(e[-+]?\d+)?", "#", text).strip()


def smallest(description: Description, check: Check, *, budget: float = BUDGET) -> tuple[Description, list[str]]:
    """The smallest description found that fails in the same way, and its findings.

    Args:
        description: one that fails.
        check: description -> findings.
        budget: seconds after which the best so far is returned.
    """
    best, findings = description, check(description)
    wanted = {kind(finding) for finding in findings}
    end = time.monotonic() + budget
    seen = [best]
    smaller = bool(findings)
    while smaller:
        smaller = False
        for candidate in candidates(best):
            if time.monotonic() > end:
                return best, findings
            if candidate in seen:
                continue
            seen.append(candidate)
            now = check(candidate)
            if wanted & {kind(finding) for finding in now}:
                best, findings, smaller = candidate, now, True
                break
    return best, findings


def candidates(description: Description) -> Iterator[Description]:
    """Descriptions with one thing less, the largest pieces first."""
    for path in _places(description["layers"]):
        changed = copy.deepcopy(description)
        layers, number = _at(changed["layers"], path)
        yield from _valid(changed, layers.pop(number))
    for path in _places(description["layers"]):
        changed = copy.deepcopy(description)
        layers, number = _at(changed["layers"], path)
        if layers[number]["op"] in ("residual", "region"):
            layers[number : number + 1] = layers[number]["layers"]
            yield changed
    if len(description["heads"]) > 1:
        for number in range(len(description["heads"])):
            changed = copy.deepcopy(description)
            del changed["heads"][number]
            yield changed
    for step in description["overflows"]:
        yield {**description, "overflows": [other for other in description["overflows"] if other != step]}
    if description["powers"]:
        yield {**description, "powers": {}}
    steps = description["steps"] - 1
    if steps > 0:
        yield {**description, "steps": steps, "overflows": [step for step in description["overflows"] if step < steps]}
    yield from _settings(description)


def _settings(description: Description) -> Iterator[Description]:
    simple: dict[str, Any] = {
        "accumulate_steps": 1,
        "listed": False,
        "float64": False,
        "halves": False,
        "resume": None,
        "clip_norm": None,
        "optimizer": {"type": "sgd", "learning_rate": 0.05},
        "scaler": {"kind": "off", "check_finite": True},
    }
    for name, value in simple.items():
        if description[name] != value:
            yield {**description, name: value}
    if description.get("python"):
        yield {**description, "python": False}
    if "ema" in description:
        yield {name: value for name, value in description.items() if name != "ema"}
    for path in _places(description["layers"]):
        changed = copy.deepcopy(description)
        layers, number = _at(changed["layers"], path)
        if layers[number].pop("clamp", False):
            yield changed
    if isinstance(description["optimizer"]["learning_rate"], dict):
        yield {**description, "optimizer": {**description["optimizer"], "learning_rate": 0.05}}
    if description["policy"]["name"] != "float32":
        yield {**description, "policy": {"name": "float32"}}
    kept = {"optimizer": ("type", "learning_rate"), "policy": ("name",), "scaler": ("kind", "name", "init_scale")}
    for table, needed in kept.items():
        for name in description[table]:
            if name not in needed and description[table] != simple.get(table):
                yield {**description, table: {k: v for k, v in description[table].items() if k != name}}
    for framework, usual in {"tensorflow": "functional", "jax": "linen"}.items():
        if description["models"][framework] not in (usual, "function"):
            yield {**description, "models": {**description["models"], framework: usual}}


def _valid(changed: Description, removed: dict[str, Any]) -> Iterator[Description]:
    """The description unless something still asks for what was removed."""
    gone = {layer.get("name") for layer in walk([removed])} - {None}
    asked = {layer.get("of") for layer in walk(changed["layers"])} | {head.get("tied") for head in changed["heads"]}
    globs = {glob.rstrip("*") for glob in changed["policy"].get("overrides", {})}
    if not gone & (asked | globs):
        yield changed


def _places(layers: list[Any], above: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    for number in reversed(range(len(layers))):
        yield (*above, number)
        yield from _places(layers[number].get("layers", []), (*above, number))


def _at(layers: list[Any], path: tuple[int, ...]) -> tuple[list[Any], int]:
    for number in path[:-1]:
        layers = layers[number]["layers"]
    return layers, path[-1]
