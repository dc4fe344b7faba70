"""S33: a native optimizer's arrays are restored under `fully_shard` before its first step, which would make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import polyamp
from polyamp.contract.sharded_state import ArrayForm
from polyamp.errors import CheckpointError
from polyamp_torch.step.sharded_state import sharded_state
from tests import ranks
from tests.backends.torch.distributed.training import ENGINES, batches, mean_loss, mlp, part


def restored(rank: int, world: int, folder: str) -> dict[str, Any]:
    """What a state that was restored before its first step holds, and the weights of the step that it makes then."""

    def fresh() -> tuple[Any, Any]:
        model = ENGINES["fsdp2"](mlp(), world)
        recipe = polyamp.Recipe(policy="float32", optimizer=torch.optim.AdamW(model.parameters(), 0.1))
        return polyamp.init(model, recipe), polyamp.train_step(mean_loss, recipe)

    first, second, third = (part(batch, rank, world) for batch in batches(3))
    state, step = fresh()
    for batch in (first, second):
        state, _ = step(state, batch)
    polyamp.save(state, folder)
    again, step_again = fresh()
    with sharded_state(again) as parts:
        form = ArrayForm("float32", tuple(again.parameters["0/weight"].shape))
        memory = parts._empty_tensor("optimizer/state/0/weight/exp_avg", form)  # type: ignore[attr-defined]  # of its class
        try:
            parts._empty_tensor("optimizer/state/0/weight/rows", ArrayForm("float32", (5,)))  # type: ignore[attr-defined]
            refused = ""
        except CheckpointError as error:
            refused = str(error)
    again = polyamp.restore(again, folder)
    names = [(name, slot) for name in state.parameters for slot in ("exp_avg", "exp_avg_sq")]
    pairs = [[s.optimizer.state[s.parameters[name]][slot] for s in (state, again)] for name, slot in names]
    state, again = step(state, third)[0], step_again(again, third)[0]
    return {
        "memory": isinstance(memory, DTensor) and memory.placements == again.parameters["0/weight"].placements,
        "refused": refused,
        "divided": all(isinstance(two, DTensor) and one.placements == two.placements for one, two in pairs),
        "slots": all(torch.equal(one.to_local(), two.to_local()) for one, two in pairs),
        "step": all(
            torch.equal(one.to_local(), two.to_local())
            for one, two in zip(state.parameters.values(), again.parameters.values(), strict=True)
        ),
    }


def test_s33_native_slots_are_restored_divided_before_the_first_step(tmp_path: Path) -> None:
    for found in ranks.run(restored, 2, 2, str(tmp_path / "checkpoint")):
        assert "Run one step, and restore into the state that it gives" in found.pop("refused")
        assert found == {"memory": True, "divided": True, "slots": True, "step": True}
