"""What two frameworks' records of one description must agree on (S21), and what each must keep to alone.

`findings` is a list of sentences, empty where all is well. Called by the command and the minimiser.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tests.fuzz.grammar import PRODUCTS, Description, walk
from tests.fuzz.worker import Record, decode

FLOAT32: Final = 5e-5
"""S21: relative distance of two float32 curves."""
UNEVEN: Final = 8.0
"""A framework further from its own float32 than this many times another one is doing something else than rounding."""
FLOOR: Final = {"mixed_bfloat16": 0.01, "mixed_float16": 0.00125}
"""Distances that one rounding more or less makes in so small a network; below them `UNEVEN` says nothing. Usual ones
are a third of them and less."""
FLOAT64: Final = (1e-10, 1e-11)
"""Relative and absolute: parameters under a float64 policy, of which Adam's first steps blow up the last digits."""
CUT_OFF: Final = "; its products are cut off, not rounded"
EXACT: Final = ("scale", "skipped", "step")
CURVES: Final = ("loss", "plain", "grad_norm")
ADAPTIVE: Final = (
    *("adam", "adamw", "rmsprop", "adagrad", "lion"),
    *("nadam", "nadamw", "lamb", "adafactor", "muon", "schedule_free"),
)


def findings(description: Description, records: Mapping[str, Record], baselines: Mapping[str, Record]) -> list[str]:
    """What is wrong.

    Args:
        description: what was trained.
        records: framework -> record under the description's policy.
        baselines: framework -> record under float32; the same records where that is the policy. A framework that
            has none is measured from the first, whose float32 curve S21 says is its own too.
    """
    found = [f"{name}: {record['error']}" for name, record in [*records.items(), *_others(baselines, records)]
             if "error" in record]  # fmt: skip
    for name, record in records.items():
        found += [f"{name}: {violation}" for violation in record.get("violations", ())]
        found += _scripted(name, description, record) if "error" not in record else []
    whole = {name: record for name, record in records.items() if "error" not in record}
    wide = {name: record for name, record in baselines.items() if "error" not in record}
    first = next(iter(whole), None)
    for name in whole:
        if first is not None and name != first:
            found += _exact(first, whole[first], name, whole[name])
    for n, one in enumerate(wide):
        found += [text for other in list(wide)[n + 1 :] for text in _exact(one, wide[one], other, wide[other])]
    found += _wide(description, wide)
    if description["policy"]["name"] not in ("float32", "float64") and wide:
        shared = next(iter(wide.values()))
        found += _mixed(description, whole, {name: wide.get(name, shared) for name in whole})
    return list(dict.fromkeys(found))


def _others(baselines: Mapping[str, Record], records: Mapping[str, Record]) -> list[tuple[str, Record]]:
    return [(f"{name} in float32", record) for name, record in baselines.items() if record is not records.get(name)]


def _scripted(name: str, description: Description, record: Record) -> list[str]:
    """Steps that overflow are those that the description says, no more and no fewer."""
    skipped = [step for step, value in enumerate(record["skipped"]) if value]
    if skipped == description["overflows"]:
        return []
    return [f"{name}: skipped the steps {skipped}, scripted were {description['overflows']}"]


def _exact(one: str, a: Record, other: str, b: Record) -> list[str]:
    found = [f"{what} differs: {one} {a[what]}, {other} {b[what]}" for what in EXACT if a[what] != b[what]]
    if a["scale_state"] != b["scale_state"]:
        found.append(f"the loss scale's state differs: {one} {a['scale_state']}, {other} {b['scale_state']}")
    return found


def distance(a: Any, b: Any, *, least: float = 1e-3) -> float:
    """Largest relative distance of two curves, of their values or of `least`; inf where only one is finite."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    finite = np.isfinite(x)
    if (finite != np.isfinite(y)).any():
        return math.inf
    if not finite.any():
        return 0.0
    x, y = x[finite], y[finite]
    size = np.maximum(np.maximum(np.abs(x), np.abs(y)), least)
    return float((np.abs(x - y) / size).max())


def as_one_batch(wide: Record, whole: Record) -> list[str]:
    """What is wrong with a window whose micro-batches count unequally: its result is that of one batch (S8).

    Args:
        wide: a framework's record in float32.
        whole: the same framework's, of the description that `one_batch` gives.
    """
    if "error" in whole:
        return [f"in one batch: {whole['error']}"]
    found = []
    for what in ("loss", "grad_norm"):
        apart = distance(wide[what], whole[what])
        if apart > FLOAT32 * 4:
            found.append(
                f"S8: {what} is {apart:.1e} from one batch: {_short(wide[what])}, one batch {_short(whole[what])}"
            )
    return found


def one_batch(description: Description) -> Description | None:
    """The description without micro-batches and in float32; None where they are not to count unequally."""
    if not description.get("counts"):
        return None
    return {**description, "accumulate_steps": 1, "listed": False, "policy": {"name": "float32"}}


def _wide(description: Description, wide: Mapping[str, Record]) -> list[str]:
    found = []
    names = list(wide)
    for n, one in enumerate(names):
        for other in names[n + 1 :]:
            a, b = wide[one], wide[other]
            for what in CURVES:
                apart = distance(a[what], b[what], least=1e-30 if what == "grad_norm" else 1e-3)
                if apart > FLOAT32 * (4 if what == "grad_norm" else 1):
                    found.append(
                        f"float32 {what} is {apart:.1e} apart: {one} {_short(a[what])}, {other} {_short(b[what])}"
                    )
            found += _arrays(description, "parameters", one, a, other, b)
            found += _arrays(description, "running", one, a, other, b)
    return found


def _arrays(description: Description, kind: str, one: str, a: Record, other: str, b: Record) -> list[str]:
    """Final arrays agree but for a few elements whose gradient is all but zero, which Adam and its like blow up."""
    if set(a[kind]) != set(b[kind]):
        return [f"names of {kind} differ: {one} {sorted(set(a[kind]) - set(b[kind]))}, {other} "
                f"{sorted(set(b[kind]) - set(a[kind]))}"]  # fmt: skip
    found = []
    single = "float64" if description["policy"]["name"] == "float64" else "float32"
    spared = 0.05 if description["optimizer"]["type"] in ADAPTIVE else 0.0
    for name, value in a[kind].items():
        x, y = decode(value).astype(np.float64), decode(b[kind][name]).astype(np.float64)
        if x.shape != y.shape:
            found.append(f"{kind} {name}: shapes {x.shape} and {y.shape}")
            continue
        relative, absolute = FLOAT64 if description["policy"]["name"] == "float64" else (2e-4, 1e-5)
        off = np.abs(x - y) > relative * np.maximum(np.abs(x), np.abs(y)) + absolute
        if off.sum() > max(spared * off.size, 1 if spared else 0):
            found.append(f"{single} {kind} {name}: {off.sum()} of {off.size} elements differ, by up to "
                         f"{np.abs(x - y).max():.1e}: {one}, {other}")  # fmt: skip
    return found


def _mixed(description: Description, whole: Mapping[str, Record], wide: Mapping[str, Record]) -> list[str]:
    """S21, and that no framework loses far more digits than another."""
    found = []
    names = list(whole)
    for what in ("loss", "plain"):
        own = {name: distance(whole[name][what], wide[name][what]) for name in names}
        for n, one in enumerate(names):
            for other in names[n + 1 :]:
                apart, allowed = distance(whole[one][what], whole[other][what]), 2 * max(own[one], own[other])
                if apart > allowed + FLOAT32:
                    found.append(f"{what} is {apart:.1e} apart, more than {allowed:.1e}: {one} "
                                 f"{_short(whole[one][what])}, {other} {_short(whole[other][what])}")  # fmt: skip
    first = {name: first_steps(whole[name], wide[name]) for name in names}
    floor = FLOOR[description["policy"]["name"]]
    for what in ("plain", "grad_norm"):
        distances = {name: first[name][what] for name in names}
        if not distances:
            continue
        least = min(distances.values())
        found += [
            f"{name} is {value:.1e} from its float32 at the first steps ({what}), another framework only {least:.1e}"
            + CUT_OFF * whole[name].get("cut_off", False)
            for name, value in distances.items()
            if value > UNEVEN * least + floor * (2 if what == "grad_norm" else 1)
        ]
    if names and _has_narrow_product(description) and max(value["plain"] for value in first.values()) > floor / 4:
        found += [f"{name} is no different from its float32" for name in names
                  if name != "reference" and max(first[name].values()) < 1e-6]  # fmt: skip
    return found


def _has_narrow_product(description: Description) -> bool:
    """Whether a matrix product runs in 16 bits: outside cast mode torch and JAX round nothing else."""
    if description["policy"].get("mode") == "cast":
        return True
    wide = {glob.rstrip("*") for glob in description["policy"].get("overrides", {})}
    regions = [layer for layer in walk(description["layers"]) if layer["op"] == "region"]
    wide |= {layer.get("name", "") for region in regions for layer in walk(region["layers"])}
    products = [layer["name"] for layer in walk(description["layers"]) if layer["op"] in PRODUCTS]
    heads = [head.get("tied") or head["name"] for head in description["heads"]]
    return bool({*products, *heads} - wide)


def first_steps(record: Record, wide: Record) -> dict[str, float]:
    """Distances from float32 while both have the same parameters, which is until the first update."""
    applied = next((n for n, skipped in enumerate(record["skipped"]) if not skipped), 0) + 1
    return {what: distance(record[what][:applied], wide[what][:applied]) for what in ("plain", "grad_norm")}


def _short(curve: Any) -> str:
    return "[" + ", ".join(f"{np.mean(value):.7g}" for value in curve) + "]"
