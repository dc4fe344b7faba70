"""`polyamp_torch.GradScaler` in two processes: an overflow in one of them is a skip in both."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from polyamp_torch.arrays import can_read_without_sync
from polyamp_torch.own_loop import native_scaler
from polyamp_torch.own_loop.torch_only import scaler_state
from tests import ranks

INF = float("inf")


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def iterations(wrap: Any, *, fused: bool, init_scale: float, waits: bool) -> list[tuple[bool, bool]]:
    """Of three steps, whether they were skipped and moved the weights; in the second, one row's gradients overflow.

    Of a sharded weight, the second process alone holds that row.
    """
    for module in (native_scaler, scaler_state):
        vars(module)["can_read_without_sync"] = (lambda device: False) if waits else can_read_without_sync
    torch.manual_seed(0)
    model = wrap(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)
    scaler = native_scaler.GradScaler("cpu", init_scale=init_scale)
    found = []
    for gain in (1.0, INF, 1.0):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        out = model(torch.ones(2, 4))
        scaler.scale((out * torch.tensor([1.0, gain])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(local(a), local(b)) for a, b in zip(before, model.parameters(), strict=True))
        found.append((scaler.step_was_skipped, moved))
    return found


def local(x: Any) -> torch.Tensor:
    part: torch.Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part


CASES = [
    (wrap, fused, scale, waits)
    for wrap in (DistributedDataParallel, sharded)
    for fused in (False, True)
    for scale in (2.0**10, 2.0**-10)
    for waits in (False, True)
]


def worker(rank: int) -> list[list[tuple[bool, bool]]]:
    return [iterations(wrap, fused=fused, init_scale=scale, waits=waits) for wrap, fused, scale, waits in CASES]


def test_an_overflow_in_one_process_is_a_skip_in_all() -> None:
    expected = [[(False, True), (True, False), (False, True)]] * len(CASES)
    assert ranks.run(worker, 2) == [expected, expected]
