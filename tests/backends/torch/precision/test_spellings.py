"""A policy's spelling is taken wherever polyamp_torch takes a policy: one row for each public function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import polyamp
import polyamp_torch
from polyamp.errors import PolicyError
from tests.fixtures.spellings import taking_a_policy


def _product(policy: Any) -> torch.dtype:
    with polyamp_torch.autocast(policy, "cpu"):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def _sharded(policy: Any) -> Any:
    """In a process group of one, on which nothing is sent."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 2)
        polyamp_torch.fully_shard(model, policy)
        return model(torch.ones(1, 2)).dtype
    finally:
        dist.destroy_process_group()


ROWS: dict[str, Any] = {
    "autocast": _product,
    "fully_shard": _sharded,
    "mixed_precision_policy": polyamp_torch.mixed_precision_policy,
}


def test_every_function_has_a_row() -> None:
    assert taking_a_policy(polyamp_torch) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_spelling_is_taken_and_a_slip_is_named(name: str) -> None:
    assert ROWS[name]("fp16") == ROWS[name](polyamp.Policy("fp16"))
    with pytest.raises(PolicyError, match="mixed_float16"):
        ROWS[name]("mixed_flaot16")
