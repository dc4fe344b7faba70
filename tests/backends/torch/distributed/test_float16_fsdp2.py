"""`examples/distributed/float16_fsdp2.py`: two ranks learn what one does, and stand still where it does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import polyamp
from examples.distributed import float16_fsdp2 as example
from tests import ranks


def whole(x: Any) -> torch.Tensor:
    full: torch.Tensor = x.full_tensor()
    return full


def worker(rank: int, init_scale: float, steps: int) -> list[Any]:
    """Losses, what was skipped, scales, whether the average stands still, and a part of it, whole."""
    scaler = polyamp.LossScaler(init_scale=init_scale)
    example.RECIPE = example.RECIPE.replace(scaler=scaler)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # whose output is a view
        model, results, average = example.finetune(steps)
    still = all(torch.equal(whole(a), whole(p)) for a, p in zip(average, model.parameters(), strict=True))
    numbers = [
        [float(value) for value in column]
        for column in zip(*((r.loss, r.skipped, r.scale) for r in results), strict=True)
    ]
    return [*numbers, still, whole(average[0]).tolist()]


def test_two_ranks_learn_what_one_does() -> None:
    first, second = ranks.run(worker, 2, 2.0**10, 8)
    (alone,) = ranks.run(worker, 1, 2.0**10, 8)
    assert first == second
    assert first[1] == alone[1] == [0.0] * 8
    assert first[0] == pytest.approx(alone[0], rel=1e-3)
    assert first[0][-1] < first[0][0]
    assert not first[3]


def test_s12_while_the_scale_falls_nothing_moves() -> None:
    first, second = ranks.run(worker, 2, 2.0**24, 2)
    assert first == second
    assert first[1:4] == [[1.0, 1.0], [2.0**23, 2.0**22], True]
