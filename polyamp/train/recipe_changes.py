"""Differences between the recipe that a checkpoint was saved with and the recipe in the code (S22).

`save` writes `state_settings` into the file, `restore` compares them. For a framework's own optimizer they contain what
its backend reports: the class, and hyperparameters by name as they were at `init`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from polyamp.contract.backend import ResumesOptimizers
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.serialization import to_plain_data as plain_data

RecipeSettings = dict[str, Any]
_MISSING: Final = object()


class SettingChange(NamedTuple):
    """One setting that differs.

    Attributes:
        path: the field, such as "optimizer.learning_rate".
        saved: its value in the file, as text.
        given: its value in the code, as text.
    """

    path: str
    saved: str
    given: str

    def __str__(self) -> str:
        return f"{self.path}: {self.saved} -> {self.given}"


def state_settings(state: Any) -> RecipeSettings:
    """Return the recipe of a state as nested plain values, including every default."""
    return recipe_settings(state.recipe, _native_optimizer_settings(state))


def recipe_settings(recipe: Recipe, native: Mapping[str, Any] | None = None) -> RecipeSettings:
    """Return the same for a recipe; `native` describes an optimizer that is not a polyamp spec."""
    optimizer: Any = recipe.optimizer
    limits = recipe.clip._asdict()
    plain: RecipeSettings = {
        "policy": {name: value for name, value in recipe.policy.to_dict().items() if name != "aliases" or value},
        "scaler": recipe.loss_scaler.to_dict(),
        "optimizer": plain_data(optimizer) if is_spec(optimizer) else dict(native or {}),
        **{f"clip_{name}": plain_data(limit) for name, limit in limits.items() if limit or name == "norm"},
        "accumulate_steps": recipe.accumulate_steps,
        **({} if recipe.ema is None else {"ema": recipe.ema.to_dict()}),
    }
    decoded: RecipeSettings = msgspec.json.decode(msgspec.json.encode(plain))  # as read back from a file
    return decoded


def list_changes(saved: RecipeSettings, given: RecipeSettings) -> list[SettingChange]:
    """Return every setting that differs, in the order of the code's recipe."""
    return list(_differences("", saved, given))


def has_change_in(changes: list[SettingChange], setting: str) -> bool:
    """Whether `setting`, or a part of it, is among the changes."""
    return any(f"{change.path}.".startswith(f"{setting}.") for change in changes)


def _native_optimizer_settings(state: Any) -> dict[str, Any]:
    optimizer = state.recipe.optimizer
    if is_spec(optimizer):
        return {}
    kind = {"type": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"}
    backend = state.backend
    return {**kind, **backend.optimizer_settings(state)} if isinstance(backend, ResumesOptimizers) else kind


def _differences(path: str, saved: Any, given: Any) -> list[SettingChange]:
    if isinstance(saved, list) and isinstance(given, list) and any(isinstance(item, dict) for item in (*saved, *given)):
        saved, given = ({str(number): item for number, item in enumerate(items)} for items in (saved, given))
    if isinstance(saved, dict) and isinstance(given, dict):
        both = [*given, *(name for name in saved if name not in given)]
        if saved.get("type") != given.get("type"):  # the other fields belong to one of the two types only
            both = [name for name in both if name in saved and name in given]
        pairs = [(name, saved.get(name, _MISSING), given.get(name, _MISSING)) for name in both]
        nested = [_differences(f"{path}.{name}" if path else name, old, new) for name, old, new in pairs]
        return [change for changes in nested for change in changes]
    return [] if saved == given else [SettingChange(path, _format_setting(saved), _format_setting(given))]


def _format_setting(value: Any) -> str:
    if value is _MISSING:
        return "(not there)"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_format_setting(item)}' for name, item in value.items())}}}"
    return value if isinstance(value, str) else repr(value)
