"""S9 with complex parameters: ranks under DistributedDataParallel train as one process; `fully_shard` is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import polyamp
from polyamp.errors import UnsupportedError
from tests import ranks
from tests.backends.torch.distributed.training import ENGINES, batches, digest, distance, mean_loss, part, trained

SPECS = {"sgd": polyamp.sgd(0.1, momentum=0.9, weight_decay=1e-3), "adamw": polyamp.adamw(1e-2)}


class Rotated(nn.Module):
    """A real layer between two complex ones, whose gradients are marked as conjugates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))
        self.layer = nn.Linear(5, 5)
        self.last = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer((x.to(torch.complex64) @ self.first.conj()).real)
        found: torch.Tensor = (hidden.to(torch.complex64) @ self.last.conj()).imag
        return found


def replicas(rank: int, world: int) -> dict[str, Any]:
    """Distances from one process, checksums, and which steps were skipped."""
    found: dict[str, Any] = {}
    for name, optimizer in SPECS.items():
        for steps in (1, 2):
            recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, clip_norm=0.5, accumulate_steps=steps)
            alone, expected = trained(Rotated(), recipe, batches(10))
            for engine in ("ddp", "ddp views"):
                own = [part(batch, rank, world) for batch in batches(10)]
                state, results = trained(ENGINES[engine](Rotated(), world), recipe, own)
                apart = distance(list(state.parameters.values()), list(alone.parameters.values()))
                norms = distance([result.grad_norm for result in results], [result.grad_norm for result in expected])
                found[f"{engine} {name} {steps}"] = (apart, norms, digest(state))
    scaler = polyamp.LossScaler(init_scale=2.0**10)
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.adamw(1e-2), scaler=scaler)
    state, step = polyamp.init(ENGINES["ddp"](Rotated(), world), recipe), polyamp.train_step(mean_loss, recipe)
    skipped = []
    for number, batch in enumerate(batches(4)):
        own = part(batch, rank, world)
        if number == 1 and rank == 1:
            own[2][0] = float("inf")
        state, result = step(state, own)
        skipped.append(bool(result.skipped))
    found["skipped"] = (skipped, digest(state))
    return found


def test_s09_complex_parameters_on_two_ranks_equal_one_process() -> None:
    one, other = ranks.run(replicas, 2, 2)
    assert one == other
    assert one.pop("skipped")[0] == [False, True, False, False]
    assert {name: values for name, values in one.items() if not max(values[:2]) < 1e-6} == {}
    assert len(one) == 8


def sharded(rank: int, world: int) -> str:
    """What `init` says."""
    model = fully_shard(Rotated(), mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(UnsupportedError) as raised:
        polyamp.init(model, polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1)))
    return str(raised.value)


def test_s20_complex_parameters_under_fully_shard_are_refused_by_name() -> None:
    for said in ranks.run(sharded, 2, 2):
        assert said.startswith("parameter 'first' is complex, and the model is held by fsdp2")
