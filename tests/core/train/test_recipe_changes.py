"""S22: which settings of two recipes differ, and how `restore` says it; older files and those of later versions."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from array_state import ArrayState, example

import polyamp
from polyamp import CheckpointError, LossScaler, Policy, Recipe, schedules
from polyamp.train import checkpoint, checkpoint_tensors, recipe_changes

BASE = Recipe(policy=Policy("mixed_float16"), optimizer=polyamp.adamw(0.001))
CHANGED: list[tuple[Recipe, list[str]]] = [
    (BASE, []),
    (Recipe(policy=Policy("mixed_float16"), scaler="dynamic", optimizer=polyamp.adamw(1e-3)), []),
    (BASE.replace(optimizer=polyamp.adamw(0.01)), ["optimizer.learning_rate: 0.001 -> 0.01"]),
    (
        BASE.replace(optimizer=polyamp.adamw(schedules.cosine(0.1, 10))),
        ["optimizer.learning_rate: 0.001 -> {type: cosine, peak: 0.1, steps: 10, end: 0.0}"],
    ),
    (BASE.replace(optimizer=polyamp.adamw(0.001, betas=(0.9, 0.95))), ["optimizer.betas: [0.9, 0.999] -> [0.9, 0.95]"]),
    (
        BASE.replace(optimizer=polyamp.adam(0.002)),
        [
            "optimizer.type: adamw -> adam",
            "optimizer.learning_rate: 0.001 -> 0.002",
            "optimizer.weight_decay: 0.01 -> 0.0",
        ],
    ),
    (
        BASE.replace(policy=Policy("mixed_float16", overrides={"head": "float32"}), clip_norm=1),
        ["policy.overrides.head: (not there) -> float32", "clip_norm: None -> 1"],
    ),
    (BASE.replace(scaler=LossScaler(growth_interval=7)), ["scaler.growth_interval: 2000 -> 7"]),
    (BASE.replace(accumulate_steps=4), ["accumulate_steps: 1 -> 4"]),
]


@pytest.mark.parametrize(("given", "said"), CHANGED, ids=range(len(CHANGED)))
def test_s22_every_difference_is_said_with_its_path(given: Recipe, said: list[str], tmp_path: Path) -> None:
    old, new = recipe_changes.recipe_settings(BASE), recipe_changes.recipe_settings(given)
    assert [str(change) for change in recipe_changes.list_changes(old, new)] == said
    saved, state = example(1), example(1)
    saved.recipe, state.recipe = BASE, given
    checkpoint.save(saved, tmp_path / "state")
    if not said:
        assert checkpoint.restore(state, tmp_path / "state").same_as(saved.arrays)
        return
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(state, tmp_path / "state")
    assert [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")] == said
    for on_change in ("accept", "warn"):
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            assert checkpoint.restore(state, tmp_path / "state", on_change=on_change).same_as(saved.arrays)
        assert [said[0] in str(warning.message) for warning in caught_warnings] == [True] * (on_change == "warn")


def rewritten(path: Path, **changed: str | None) -> None:
    """Write a checkpoint's metadata anew, as another version of polyamp would have; None leaves a key out."""
    meta, arrays = checkpoint.read(path)
    from safetensors.numpy import save as to_bytes

    kept = {name: value for name, value in {**meta, **changed}.items() if value is not None}
    content = to_bytes(arrays, metadata={**kept, "digest": checkpoint_tensors.BLANK_DIGEST})
    path.write_bytes(checkpoint_tensors.seal_content(content))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = example(1)
    state.recipe = BASE
    checkpoint.save(state, tmp_path / "state")
    return tmp_path / "state"


def stated(recipe: Recipe) -> ArrayState:
    state = example(1)
    state.recipe = recipe
    return state


def test_s22_a_file_of_an_older_version_is_compared_by_its_recipe(saved: Path) -> None:
    rewritten(saved, settings=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.restore(stated(BASE), saved)
    with pytest.raises(CheckpointError, match=r"clip_norm: None -> 1\.0"):
        checkpoint.restore(stated(BASE.replace(clip_norm=1.0)), saved)


@pytest.mark.parametrize("origin", [0, -1])
def test_s22_a_field_that_an_older_file_does_not_have_is_at_its_default(origin: int, tmp_path: Path) -> None:
    """Checkpoints that were written before warmups had an origin: theirs is 0."""
    rate = schedules.warmup_cosine(0.1, 2, 10)
    checkpoint.save(stated(BASE.replace(optimizer=polyamp.adamw(rate))), tmp_path / "state")
    meta, _ = checkpoint.read(tmp_path / "state")
    older: dict[str, Any] = {name: json.loads(meta[name]) for name in ("settings", "recipe")}
    for settings in older.values():
        assert settings["optimizer"]["learning_rate"].pop("origin") == 0
    rewritten(tmp_path / "state", **{name: json.dumps(settings) for name, settings in older.items()})
    state = stated(BASE.replace(optimizer=polyamp.adamw(rate.replace(origin=origin))))
    if origin == 0:
        checkpoint.restore(state, tmp_path / "state")
        return
    with pytest.raises(CheckpointError, match=r"(?m)^  optimizer\.learning_rate\.origin: 0 -> -1$"):
        checkpoint.restore(state, tmp_path / "state")


def test_s22_an_older_file_that_says_nothing_of_its_recipe_is_restored_with_a_warning(saved: Path) -> None:
    rewritten(saved, settings=None, recipe="")
    with pytest.warns(UserWarning, match="says nothing of its recipe .* nothing could be compared") as told:
        checkpoint.restore(stated(BASE.replace(clip_norm=1.0)), saved)
    assert told[0].filename == __file__  # the line that restores
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.restore(stated(BASE.replace(clip_norm=1.0)), saved, on_change="accept")


def test_s22_a_file_of_a_later_version_is_compared_by_its_settings(saved: Path) -> None:
    meta, _ = checkpoint.read(saved)
    later: dict[str, Any] = json.loads(meta["settings"])
    later["scaler"]["mood"] = "good"
    rewritten(saved, settings=json.dumps(later), recipe='{"policy": "float32", "mood": "good"}')
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(stated(BASE), saved)
    assert [line for line in str(caught.value).splitlines() if line.startswith("  ")] == [
        "  scaler.mood: good -> (not there)"
    ]


def test_s22_a_native_optimizer_without_words_is_compared_by_its_class(tmp_path: Path) -> None:
    class Native:
        pass

    native: Any = Native()
    checkpoint.save(stated(BASE.replace(optimizer=native)), tmp_path / "state")
    checkpoint.restore(stated(BASE.replace(optimizer=Native())), tmp_path / "state")  # type: ignore[arg-type]  # native
    with pytest.raises(CheckpointError, match=r"optimizer\.type: \S*test_recipe_changes\.\S*Native -> adamw"):
        checkpoint.restore(stated(BASE), tmp_path / "state")


def test_s22_on_change_is_checked(saved: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"on_change must be 'error', 'warn' or 'accept'\. Received: on_change='no'"
    ):
        checkpoint.restore(stated(BASE), saved, on_change="no")  # type: ignore[arg-type]  # the error is the point
