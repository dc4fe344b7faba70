"""Rule S22 where several threads have one state: a checkpoint is of one step, not of two."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import polyamp
from polyamp.conformance.problems import batch, layers, loss_fn, recipe
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import CheckpointError


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
