"""Reports to test with, made from seeds: a transformer of any size, its differences, curves and failures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from polyamp.parity.report.report import Report
from polyamp.parity.report_data import (
    Comparison,
    ComparisonRow,
    Curve,
    Divergence,
    DivergenceKind,
    Environment,
    Failure,
    SideValues,
)

PHASES = ("float32", "mixed_bfloat16")
SUBLAYERS = (
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.out",
    "norm1",
    "mlp.up",
    "mlp.down",
    "norm2",
)


def modules(count: int) -> list[str]:
    """Paths of a transformer's modules, in the order of its program."""
    blocks = [f"encoder.layers.{number // 8}.{SUBLAYERS[number % 8]}" for number in range(max(count - 2, 0))]
    return ["embedding", *blocks, "head"][:count]


def rows(
    count: int, *, steps: int = 3, parts_at: int | None = None, seed: int = 0, phases: tuple[str, ...] = PHASES
) -> list[ComparisonRow]:
    """A table: output, cotangent and gradient of each module; those from `parts_at` on count, under every phase."""
    generator = np.random.default_rng(seed)
    found = []
    for phase in phases:
        epsilon = 2.0**-8 if "bfloat16" in phase else 2.0**-24
        dtypes = ("bfloat16", "bfloat16") if "bfloat16" in phase else ("float32", "float32")
        for index, module in enumerate(modules(count)):
            for what, stage, name in (
                ("output", "forward", ""),
                ("cotangent", "backward", ""),
                ("gradient", "backward", "kernel"),
            ):
                counts = parts_at is not None and index >= parts_at
                allowed = epsilon * 4 * math.sqrt(index + 1)
                distance = allowed * float(generator.uniform(0.02, 0.3)) * (300 * 0.97**index if counts else 1)
                row: dict[str, Any] = {
                    "module": module,
                    "stage": stage,
                    "what": what,
                    "name": name,
                    "phase": phase,
                    "dtypes": dtypes,
                }
                found.append(
                    ComparisonRow(**row, step=1 + index % steps, distance=distance, allowed=allowed, counts=counts)
                )
    return found


def curves(sides: tuple[str, ...], steps: int, *, seed: int = 0, phases: tuple[str, ...] = PHASES) -> list[Curve]:
    """Loss, norm and scale of each side, alike but for little."""
    found = []
    for phase in phases:
        for number, side in enumerate(sides):
            generator = np.random.default_rng(seed)
            noise = generator.normal(0, 0.05, (2, steps))
            loss = [2.3 * math.exp(-step / 60) + 0.2 + abs(noise[0, step]) + number * 2e-3 for step in range(steps)]
            norm = [1.5 * math.exp(-step / 90) + abs(noise[1, step]) for step in range(steps)]
            scale: list[float | None] = (
                [65536.0 / (2 if step > 5 else 1) for step in range(steps)] if phase != "float32" else [1.0] * steps
            )
            skipped = [6] if phase != "float32" and steps > 6 else []
            found.append(Curve(side=side, phase=phase, loss=loss, grad_norm=norm, scale=scale, skipped=skipped))
    return found


def divergence(**changes: Any) -> Divergence:
    """An epsilon in the second layer's first norm."""
    path, other = "encoder.layers.1.norm1", "Encoder_0/EncoderLayer_1/LayerNorm_0"
    one: dict[str, Any] = {
        "dtype": "float32",
        "shape": (8, 128, 64),
        "rms": 0.99871,
        "largest": 4.0912,
        "zeros": 3,
        "width": "float32",
    }
    usual: dict[str, Any] = {
        "phase": "float32",
        "step": 1,
        "stage": "forward",
        "module": path,
        "what": "output",
        "sides": {
            "torch": SideValues(path=path, mean=0.00121, operations=["layer_norm in float32"], **one),
            "jax": SideValues(
                path=other, mean=0.00121, operations=["rsqrt in float32", "mul in float32"], **{**one, "rms": 0.99842}
            ),
        },
        "distance": 3.1e-4,
        "allowed": 4.2e-6,
        "own": {"torch": 1.1e-7, "jax": 1.3e-7},
        "kind": "epsilon",
        "sentence": "The outputs are apart by one factor per row, as with another epsilon: 1e-5 in torch, 1e-6 in jax.",
        "evidence": [
            "Row by row the quotient of both outputs is constant to 2e-7.",
            "Its square, less 1, is proportional to 1 / variance of the input (r = 0.9999).",
        ],
        "after": "encoder.layers.1.attention.out",
    }
    return Divergence(**{**usual, **changes})


def environment(side: str, backend: str = "", **changes: Any) -> Environment:
    """Where a side ran."""
    backend = backend or side.split()[0]
    versions = {"torch": "2.13.0+cpu", "jax": "0.9.2", "tensorflow": "2.21.1"}
    usual: dict[str, Any] = {
        "side": side,
        "backend": backend,
        "device": "cpu",
        "model": "Transformer",
        "parameters": 1_204_736,
    }
    usual["versions"] = {backend: versions.get(backend, "1.0"), "numpy": "2.4.1", "python": "3.11.2"}
    return Environment(**{**usual, **changes})


RECIPE: dict[str, Any] = {
    "policy": "mixed_bfloat16",
    "scaler": None,
    "optimizer": {"type": "adamw", "learning_rate": 0.001},
    "clip_norm": 1.0,
}


def report(
    sides: tuple[str, ...] = ("torch", "jax"),
    *,
    count: int = 26,
    steps: int = 3,
    parts_at: int | None = None,
    failures: tuple[Failure, ...] = (),
    phases: tuple[str, ...] = PHASES,
    first: Divergence | None = None,
    **changes: Any,
) -> Report:
    """A report of the first side with each other one; the second parts from it where `parts_at` or `first` says so."""
    comparisons = []
    for number, side in enumerate(sides[1:]):
        where = parts_at if number == 0 else None
        found = first if number == 0 else None
        if where is not None and found is None:
            found = divergence(module=modules(count)[where], after=modules(count)[where - 1])
        notes = ["Dropout layers were off on both sides."]
        table = rows(count, steps=steps, parts_at=where, seed=number, phases=phases)
        comparisons.append(Comparison(sides=(sides[0], side), first=found, rows=table, notes=notes))
    usual: dict[str, Any] = {
        "polyamp": "0.1.0",
        "recipes": dict.fromkeys(sides, RECIPE),
        "phases": list(phases),
        "steps": steps,
        "environments": [environment(side) for side in sides],
        "comparisons": comparisons,
        "curves": curves(sides, steps, phases=phases),
        "failures": list(failures),
        "randomness": "off",
        "seconds": 12.4,
        "own_seconds": 4.2,
    }
    return Report(**{**usual, **changes})


def crash(side: str = "jax", **changes: Any) -> Failure:
    """A side that died."""
    usual: dict[str, Any] = {"side": side, "phase": "mixed_bfloat16", "step": 2, "reason": "crashed"}
    usual["message"] = "The process ended with signal 11 (SIGSEGV). Run it by itself with faulthandler to see where."
    return Failure(**{**usual, **changes})


def kinds() -> dict[str, Report]:
    """One report of each sort, by name."""
    long = "encoder.layers_with_a_very_long_name." * 8 + "attention<script>alert(1)</script>"
    broken = SideValues(
        path="encoder.layers.0.mlp.up", dtype="float16", shape=(8, 64), mean=0.1, rms=1.0, largest=6e4, nonfinite=3
    )
    sound = SideValues(path="Encoder_0/Dense_0", dtype="float16", shape=(8, 64), mean=0.1, rms=1.0, largest=6.5e4)
    nan: DivergenceKind = "not finite"
    not_finite = divergence(
        phase="mixed_float16",
        kind=nan,
        distance=None,
        allowed=2e-3,
        sides={"torch": broken, "jax": sound},
        own={},
        sentence="3 of 512 values are inf in torch alone: exp overflows in float16.",
        evidence=[],
    )
    named = divergence(
        module=long,
        sides={"torch": SideValues(path=long, dtype="float32"), "j\x1b[31max\n": SideValues(path=long)},
        sentence="word " * 90,
    )
    return {
        "agrees": report(),
        "parts": report(parts_at=12),
        "large": report(("torch", "jax", "tensorflow"), count=200, steps=200, parts_at=64),
        "one step": report(steps=1, parts_at=3, phases=("float32",)),
        "failure": report(failures=(crash(),)),
        "failure and difference": report(
            ("torch", "jax", "tensorflow"), parts_at=5, failures=(crash("tensorflow"), crash("torch", reason="timeout"))
        ),
        "nan": report(first=not_finite, phases=("float32", "mixed_float16")),
        "long names": report(("torch", "j\x1b[31max\n"), first=named),
        "empty": report(
            comparisons=[],
            curves=[],
            recipes={},
            environments=[],
            failures=(crash(phase="", step=0, reason="missing"),),
        ),
        "nothing": report(comparisons=[], curves=[], recipes={}, environments=[]),
    }
