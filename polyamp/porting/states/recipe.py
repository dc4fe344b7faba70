"""The recipes of two training states, compared as `restore` compares them (S22). Called by `port_state`.

What names modules and parameters by their paths (overrides, aliases, the globs of parameter groups) has other words in
every framework: of the groups it is compared what became of each parameter, the others are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from polyamp.porting.states.layout import OptimizerLayout
from polyamp.recipe.files import plain
from polyamp.recipe.members import Members
from polyamp.train import changes
from polyamp.train.changes import Change

_PATHS: Final = ("policy.overrides", "policy.aliases", "policy.op_rules")


def of_members(groups: Members) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The sets of hyperparameters of a spec's parameters as plain data, and which parameter has which."""
    distinct = []
    for member in groups.distinct:
        fields = {name: value for name, value in plain(member.spec).items() if name != "groups"}
        fields = {**fields, "learning_rate": plain(member.learning_rate)}
        distinct.append(msgspec.json.decode(msgspec.json.encode(fields)))  # as it comes back from a file
    return distinct, dict(groups.numbers)


def between(
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    optimizers: tuple[OptimizerLayout, OptimizerLayout],
    parameters: Iterable[tuple[str, str]],
) -> list[Change]:
    """What differs, the source's value first.

    Args:
        source: settings of the source without its optimizer; of what it does not know, nothing.
        target: the same of the target.
        optimizers: of both.
        parameters: (leaf of the source, leaf of the target) of everything that is trained on both sides.
    """
    found = changes.between(*_shared({**source, "optimizer": {}}, {**target, "optimizer": {}}))
    found = [change for change in found if not any(change.path.startswith(path) for path in _PATHS)]
    return found + _of_optimizers(*optimizers, parameters)


def _shared(source: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both know: a scaler that is not polyamp's says its rule alone."""
    both = [name for name in target if name in source]
    ours, theirs = ({name: side[name] for name in both} for side in (source, target))
    if "scaler" in both:
        ours["scaler"] = {name: value for name, value in source["scaler"].items() if name in target["scaler"]}
        theirs["scaler"] = {name: value for name, value in target["scaler"].items() if name in source["scaler"]}
    return ours, theirs


def _of_optimizers(
    source: OptimizerLayout, target: OptimizerLayout, parameters: Iterable[tuple[str, str]]
) -> list[Change]:
    """The differences of hyperparameters; of those that only some parameters have, with how many and the first."""
    pairs: dict[tuple[int, int], list[str]] = {}
    for ours, theirs in parameters:
        if ours in source.numbers and theirs in target.numbers:
            pairs.setdefault((source.numbers[ours], target.numbers[theirs]), []).append(theirs)
    found: dict[Change, list[str]] = {}
    for (ours_number, theirs_number), leaves in pairs.items():
        for change in _differences(source.distinct[ours_number], target.distinct[theirs_number]):
            found.setdefault(change, []).extend(leaves)
    every = sum(map(len, pairs.values()))
    return [change if len(leaves) == every else _of_some(change, leaves) for change, leaves in found.items()]


def _of_some(change: Change, leaves: list[str]) -> Change:
    more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
    return change._replace(path=f"{change.path} of {leaves[0]}{more}")


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Change]:
    """Of two sets of hyperparameters. What one side does not know is not compared, Adam without decay is AdamW without,
    and a rate is compared to float32's digits."""
    ours, theirs = _settled(ours), _settled(theirs)
    names = [name for name in {**theirs, **ours} if name in ours and name in theirs and not _alike(ours, theirs, name)]
    return changes.between(
        {"optimizer": {name: ours[name] for name in names}}, {"optimizer": {name: theirs[name] for name in names}}
    )


def _settled(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def _alike(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> bool:
    one, other = ours[name], theirs[name]
    if name == "type" and ("" in (one, other) or {one, other} == {"adam", "adamw"}):
        decays = ours.get("weight_decay"), theirs.get("weight_decay")
        return "" in (one, other) or 0.0 in decays or None in decays  # without decay they are one
    pairs = zip(one, other, strict=False) if isinstance(one, list) and isinstance(other, list) else [(one, other)]
    return one == other or all(_close(a, b) for a, b in pairs)


def _close(one: Any, other: Any) -> bool:
    """Whether two numbers are one in float32."""
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return bool(one == other)
    return abs(one - other) <= 2e-7 * max(abs(one), abs(other))
