"""Rules S33 and S22: the folder form of a checkpoint, in one process, and a save while another thread steps.

What several processes do with it is for each backend's own tests: how they are started is the framework's.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import polyamp
from polyamp.conformance import resume_process
from polyamp.conformance.problems import advance, batch, changed_arrays, layers, loss_fn, recipe
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import CheckpointError


def manifest_data_folder(path: Path) -> Path:
    """The folder that the manifest names."""
    return path / str(json.loads((path / "polyamp.json").read_text(encoding="utf-8"))["data"])


def test_s33_a_folder_resumes_bit_identically(backend: Backend, harness: Harness, tmp_path: Path) -> None:
    state = resume_process.advance_state(resume_process.fresh_state(harness, "normalized_mlp", seed=0), 0, 4)
    polyamp.save(state, tmp_path / "folder", sharded=True)
    polyamp.save(state, tmp_path / "file")
    straight = backend.export_state(resume_process.advance_state(state, 4, 8))
    for name in ("folder", "file"):
        other = polyamp.restore(resume_process.fresh_state(harness, "normalized_mlp", seed=1), tmp_path / name)
        resumed = backend.export_state(resume_process.advance_state(other, 4, 8))
        assert set(resumed) == set(straight)
        assert [key for key in straight if straight[key].tobytes() != resumed[key].tobytes()] == [], name


@pytest.mark.parametrize("sharded", [False, True])
def test_s22_a_users_values_come_back_beside_the_state(
    backend: Backend, harness: Harness, tmp_path: Path, sharded: bool
) -> None:
    made = recipe()
    state, (result,) = advance(polyamp.init(harness.mlp(layers()), made), [batch(0)])
    polyamp.save(state, tmp_path / "state", sharded=sharded, extra={"best_val_loss": result.loss, "epoch": 1})
    found = polyamp.load_extra(tmp_path / "state")
    assert found == {"best_val_loss": float(result.loss), "epoch": 1}
    assert type(found["best_val_loss"]) is float
    restored = polyamp.restore(polyamp.init(harness.mlp(layers(seed=1)), made), tmp_path / "state")
    assert int(restored.step) == 1


@pytest.mark.parametrize(
    "optimizer",
    [
        polyamp.adamw(0.01, amsgrad=True),
        polyamp.lamb(0.01),
        polyamp.adafactor(0.01),
        polyamp.muon(0.01, adamw_learning_rate=0.003),
        polyamp.schedule_free(polyamp.schedules.linear_warmup(0.01, 2)),
    ],
    ids=lambda optimizer: str(optimizer.tag),
)
def test_s22_slots_of_every_shape_resume_bit_identically(
    backend: Backend, harness: Harness, tmp_path: Path, optimizer: Any
) -> None:
    made = recipe(optimizer=optimizer)
    state, _ = advance(polyamp.init(harness.mlp(layers()), made), [batch(number) for number in range(3)])
    polyamp.save(state, tmp_path / "state")
    straight, _ = advance(state, [batch(3)])
    expected = backend.export_state(straight)
    fresh = polyamp.restore(polyamp.init(harness.mlp(layers(seed=1)), made), tmp_path / "state")
    resumed, _ = advance(fresh, [batch(3)])
    assert changed_arrays(expected, backend.export_state(resumed)) == []


def test_s33_a_folder_is_replaced_in_one_moment(backend: Backend, harness: Harness, tmp_path: Path) -> None:
    first, second = (polyamp.init(harness.mlp(layers(seed=seed)), recipe()) for seed in (0, 1))
    path = tmp_path / "checkpoint"
    polyamp.save(first, path, sharded=True)
    before = manifest_data_folder(path)
    polyamp.save(second, path, sharded=True, dry_run=True)
    assert manifest_data_folder(path) == before
    polyamp.save(second, path, sharded=True)
    assert sorted(each.name for each in path.iterdir()) == sorted([manifest_data_folder(path).name, "polyamp.json"])
    assert not before.exists()
    expected = backend.export_state(second)
    found = backend.export_state(polyamp.restore(polyamp.init(harness.mlp(layers(seed=2)), recipe()), path))
    assert changed_arrays(expected, found) == []


def test_s33_a_folder_that_is_refused_changes_nothing(backend: Backend, harness: Harness, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    polyamp.save(polyamp.init(harness.mlp(layers(seed=1)), recipe()), path, sharded=True)
    state = polyamp.init(harness.mlp(layers()), recipe())
    before = backend.export_state(state)
    deeper = polyamp.init(harness.mlp(layers((4, 5, 5, 3))), recipe())
    with pytest.raises(CheckpointError, match=r"belongs to another model, optimizer or scaler\. missing: "):
        polyamp.restore(deeper, path)
    changed = polyamp.init(harness.mlp(layers()), recipe(clip_norm=3.0))
    with pytest.raises(CheckpointError, match=r"clip_norm: None -> 3\.0"):
        polyamp.restore(changed, path)
    for file in (*manifest_data_folder(path).rglob("*"), path / "polyamp.json"):
        if file.is_dir() or not file.stat().st_size:
            continue
        content = file.read_bytes()
        file.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        with pytest.raises(CheckpointError, match=r"damaged|not a manifest"):
            polyamp.restore(state, path)
        file.write_bytes(content)
    assert changed_arrays(before, backend.export_state(state)) == []
    assert changed_arrays(before, backend.export_state(polyamp.restore(state, path))) != []


def test_s22_a_save_while_another_thread_steps_holds_one_step(
    backend: Backend, harness: Harness, tmp_path: Path
) -> None:
    """Every array of a checkpoint is of one and the same step, or, where a step consumed the state, it says so."""
    made = recipe(
        optimizer=polyamp.adam(0.01),
        scaler=polyamp.LossScaler(init_scale=16.0, growth_interval=2),
    )
    steps = 20

    def fresh() -> Any:
        return polyamp.init(harness.mlp(layers((4, 64, 64, 3))), made)

    def kept(arrays: dict[str, Any]) -> dict[str, bytes]:
        return {name: array.tobytes() for name, array in arrays.items() if not name.startswith("rng/")}

    step = polyamp.train_step(loss_fn, made)
    state, alone = fresh(), []
    for seed in range(steps):
        alone.append(kept(backend.export_state(state)))
        state, _ = step(state, batch(seed))
    alone.append(kept(backend.export_state(state)))
    present, saved = [fresh()], 0

    def run() -> None:
        for seed in range(steps):
            present[0], _ = step(present[0], batch(seed))
            time.sleep(0.002)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() or not saved:
        try:
            polyamp.save(present[0], tmp_path / "checkpoint")
        except CheckpointError as error:
            assert "was donated to a step" in str(error)  # noqa: PT017  # which save it meets is chance
            continue
        arrays = polyamp.train.checkpoint.read(tmp_path / "checkpoint")[1]
        assert kept(arrays) == alone[int(arrays["step"]) + int(arrays["loss_scale/skipped"])]
        saved += 1
    thread.join()
