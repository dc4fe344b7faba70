"""Comparison of the recipes of two training states, by the rules of `restore` (S22).

Settings that name modules and parameters by paths (overrides, aliases, the globs of parameter groups) differ between
frameworks. For groups, the resulting settings of each parameter are compared; the others are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from polyamp.porting.states.optimizer_layout import OptimizerLayout
from polyamp.recipe.serialization import to_plain_data
from polyamp.rules.group_members import GroupMembers
from polyamp.train import recipe_changes
from polyamp.train.recipe_changes import SettingChange

_PATHS: Final = ("policy.overrides", "policy.aliases", "policy.op_rules", "ema.exclude")


def member_settings(groups: GroupMembers) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the sets of hyperparameters of a spec's parameters as plain data, and the set index of each parameter."""
    distinct = []
    for member in groups.distinct:
        fields = {name: value for name, value in to_plain_data(member.spec).items() if name != "groups"}
        fields |= {"learning_rate": to_plain_data(member.learning_rate), "trainable_after": member.start}
        distinct.append(msgspec.json.decode(msgspec.json.encode(fields)))  # as read from a file
    return distinct, dict(groups.numbers)


def compare_recipes(
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    optimizers: tuple[OptimizerLayout, OptimizerLayout],
    parameters: Iterable[tuple[str, str]],
) -> list[SettingChange]:
    """Return the differences, the source's value first.

    Args:
        source: settings of the source without its optimizer and without unknown settings.
        target: the same for the target.
        optimizers: optimizer layouts of both.
        parameters: (leaf of the source, leaf of the target) for each parameter that is trained on both sides.
    """
    found = recipe_changes.list_changes(*_shared_settings({**source, "optimizer": {}}, {**target, "optimizer": {}}))
    found = [change for change in found if not any(change.path.startswith(path) for path in _PATHS)]
    return found + _optimizer_changes(*optimizers, parameters)


def _shared_settings(source: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that both sides know: for a scaler that is not polyamp's, only those of its rule."""
    both = [name for name in target if name in source]
    ours, theirs = ({name: side[name] for name in both} for side in (source, target))
    if "scaler" in both:
        ours["scaler"] = {name: value for name, value in source["scaler"].items() if name in target["scaler"]}
        theirs["scaler"] = {name: value for name, value in target["scaler"].items() if name in source["scaler"]}
    return ours, theirs


def _optimizer_changes(
    source: OptimizerLayout, target: OptimizerLayout, parameters: Iterable[tuple[str, str]]
) -> list[SettingChange]:
    """Return the differences of hyperparameters. A difference of only some parameters names the first and their
    number."""
    pairs: dict[tuple[int, int], list[str]] = {}
    for ours, theirs in parameters:
        if ours in source.numbers and theirs in target.numbers:
            pairs.setdefault((source.numbers[ours], target.numbers[theirs]), []).append(theirs)
    found: dict[SettingChange, list[str]] = {}
    for (ours_number, theirs_number), leaves in pairs.items():
        for change in _hyperparameter_changes(source.distinct[ours_number], target.distinct[theirs_number]):
            found.setdefault(change, []).extend(leaves)
    every = sum(map(len, pairs.values()))
    return [change if len(leaves) == every else _limit_to_leaves(change, leaves) for change, leaves in found.items()]


def _limit_to_leaves(change: SettingChange, leaves: list[str]) -> SettingChange:
    more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
    return change._replace(path=f"{change.path} of {leaves[0]}{more}")


def _hyperparameter_changes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[SettingChange]:
    """Compare two sets of hyperparameters. Values that one side does not know are skipped, Adam and AdamW without decay
    are equal, and learning rates are compared with float32 precision."""
    ours, theirs = _normalize_settings(ours), _normalize_settings(theirs)
    names = [
        name
        for name in {**theirs, **ours}
        if name in ours and name in theirs and not _has_same_setting(ours, theirs, name)
    ]
    return recipe_changes.list_changes(
        {"optimizer": {name: ours[name] for name in names}}, {"optimizer": {name: theirs[name] for name in names}}
    )


def _normalize_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def _has_same_setting(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> bool:
    one, other = ours[name], theirs[name]
    if name == "layout":  # that of the framework
        return True
    if name == "type" and ("" in (one, other) or {one, other} == {"adam", "adamw"}):
        decays = ours.get("weight_decay"), theirs.get("weight_decay")
        return "" in (one, other) or 0.0 in decays or None in decays  # without decay they are equal
    pairs = zip(one, other, strict=False) if isinstance(one, list) and isinstance(other, list) else [(one, other)]
    return one == other or all(_is_close(a, b) for a, b in pairs)


def _is_close(one: Any, other: Any) -> bool:
    """Return whether two numbers are equal in float32."""
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return bool(one == other)
    return abs(one - other) <= 2e-7 * max(abs(one), abs(other))
