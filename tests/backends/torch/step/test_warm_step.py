"""What a warm step does on the host beside torch: what never changes between steps is found once."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

import polyamp
import polyamp_torch

_FOLDERS = (*polyamp.__path__, *polyamp_torch.__path__)
_MOST_CALLS = 172
"""Calls of the library's own functions in Python 3.11, where a comprehension is one; later Pythons make fewer."""


def test_a_warm_step_calls_few_functions_of_the_library() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])

    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(1e-3), clip_norm=1.0)
    state, step = polyamp.init(network, recipe), polyamp.train_step(loss_fn, recipe)
    batch = {"x": torch.ones(2, 8), "y": torch.zeros(2, dtype=torch.long)}
    for _ in range(4):
        state, _ = step(state, batch)
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_FOLDERS):
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step(state, batch)
    finally:
        sys.setprofile(before)
    assert 50 < len(calls) <= _MOST_CALLS, calls
