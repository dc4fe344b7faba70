"""S12 on several ranks: a parameter that the forward pass writes to, under DistributedDataParallel and fully_shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import polyamp
from polyamp.errors import UnsupportedError
from tests import ranks
from tests.backends.torch.distributed.training import ENGINES, ROWS

INF = float("inf")


class Constrained(nn.Module):
    """A max-norm constraint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.w = nn.Linear(6, 3), nn.Parameter(torch.full((3,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.w.clamp_(max=2.0)
        out: torch.Tensor = self.layer(x) * self.w
        return out


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = (model(batch["x"]).float().square().mean(1) * batch["gain"]).mean()
    return loss


def constrained(rank: int, world: int) -> dict[str, Any]:
    """The weights behind a skipped and an applied step, and what is refused."""
    found: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(2 + rank)
    x = torch.randn(ROWS // world, 6, generator=generator)
    for mode in ("autocast", "cast"):
        policy = polyamp.Policy("mixed_bfloat16", mode=mode)
        scaler = polyamp.LossScaler(init_scale=8.0)
        recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.0), scaler=scaler, accumulate_steps=2)
        model = Constrained()
        state: Any = polyamp.init(ENGINES["ddp"](model, world), recipe)
        step = polyamp.train_step(loss_fn, recipe)
        skipped = []
        for gain in (INF if rank == 0 else 1.0, 1.0):
            _, result = step(state, {"x": x, "gain": torch.full((x.shape[0],), gain)})
            skipped.append((bool(result.skipped), model.w.tolist()))
        found[mode] = skipped
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state = polyamp.init(fully_shard(Constrained(), mesh=init_device_mesh("cpu", (world,))), recipe)
    before = [value.tobytes() for value in state.export().values()]
    try:
        polyamp.train_step(loss_fn, recipe)(state, {"x": x, "gain": torch.ones(x.shape[0])})
    except UnsupportedError as error:
        found["refused"] = str(error)
    found["as it was"] = before == [value.tobytes() for value in state.export().values()]
    return found


def test_s12_a_write_in_the_forward_pass_on_two_ranks() -> None:
    found = ranks.run(constrained, 2, 2)
    assert found[0] == found[1]
    for mode in ("autocast", "cast"):
        assert found[0][mode] == [(True, [3.0] * 3), (False, [2.0] * 3)]
    assert "writes to the parameter 'w', which fully_shard gathers" in found[0]["refused"]
    assert found[0]["as it was"]
