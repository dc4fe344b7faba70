"""The six libraries, the process that each runs in, and what every pair of them is asked. Framework-free.

A layer that a library does not have stands in `MISSING` of its file in `layers`, which is read here without importing
it: those files import their frameworks.
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Final

from tests.fixtures.port.common import MODELS
from tests.porting.layers.cases import CASES

LIBRARIES: Final = {
    "torch": "torch",
    "keras": "tensorflow",
    "linen": "jax",
    "nnx": "jax",
    "equinox": "jax",
    "haiku": "jax",
}
"""Library -> the worker that runs it: one process per framework."""
WORKERS: Final = tuple(dict.fromkeys(LIBRARIES.values()))
PAIRS: Final = tuple(itertools.permutations(LIBRARIES, 2))
"""(source, target), every ordered pair."""

TRAINED: Final = "torch"
"""The library whose weights all others train on, and whose curves theirs are compared with: they cost the least."""
STEPS: Final = 10
CURVES: Final = {"keras": "autoencoder", "linen": "vit", "nnx": "resnet", "equinox": "resnet", "haiku": "gpt"}
"""Library -> the model that it trains under both policies."""
BATCH_NORM: Final = ("keras", "linen", "haiku")
"""Libraries that train the ResNet in float32 too: it computes something else in training than in inference."""
ONE_BIAS: Final = ("keras", "equinox", "haiku")
"""Libraries whose taggers are trained against each other's and not against `TRAINED`'s: torch's LSTM has two biases,
both of which an optimizer moves, so that it does not train as those of one bias do from the same function."""
POLICIES: Final = ("float32", "mixed_bfloat16")
NEEDS_BATCH: Final = ("linen", "haiku")
"""Libraries whose arrays do not say what layer they are of, so that a call shows it."""
SHOWN: Final = ("layer/flatten",)
"""Layers whose arrays do not say all to the other side either."""
REFUSED: Final = {("gru", "nnx"): "a recurrent bias, its blocks [2] of 3, has no place in the target"}
"""(layer, target) -> the error: what the target's formula does not have is refused, not approximated."""


def curves(library: str) -> list[tuple[str, str]]:
    """(model, policy) of every training of a library."""
    if library == TRAINED:
        return [(name, policy) for name in dict.fromkeys(["resnet", *CURVES.values()]) for policy in POLICIES]
    more = [("resnet", POLICIES[0])] * (library in BATCH_NORM) + [("tagger", POLICIES[0])] * (library in ONE_BIAS)
    return [*((CURVES[library], policy) for policy in POLICIES), *more]


def compared() -> list[tuple[str, str, str]]:
    """(model, library, library) of float32 curves that have to be one."""
    return [
        *((name, TRAINED, library) for library, name in CURVES.items()),
        *(("resnet", TRAINED, library) for library in BATCH_NORM),
        *(("tagger", ONE_BIAS[0], library) for library in ONE_BIAS[1:]),
    ]


def missing(library: str) -> dict[str, str]:
    """Case -> why the library has no such layer."""
    path = Path(__file__).with_name("layers") / f"{library}_layers.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == "MISSING" for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    return {}


def items(library: str) -> list[str]:
    """What a library has: "layer/dense", ..., "model/gpt", ..."""
    without = missing(library)
    return [*(f"layer/{case}" for case in CASES if case not in without), *(f"model/{name}" for name in MODELS)]


def shared(kind: str) -> list[tuple[str, str, str]]:
    """(name, source, target) of every layer or model that both of an ordered pair have."""
    have = {library: {item for item in items(library) if item.startswith(f"{kind}/")} for library in LIBRARIES}
    names = [f"layer/{case}" for case in CASES] if kind == "layer" else [f"model/{name}" for name in MODELS]
    return [
        (name.partition("/")[2], source, target)
        for name in names
        for source, target in PAIRS
        if name in have[source] & have[target]
    ]
