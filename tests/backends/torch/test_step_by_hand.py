"""The torch step against the same training written by hand with torch.optim: specs, policies, clip, with skips."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp

SCALE = 256.0
DTYPES = {"mixed_bfloat16": torch.bfloat16, "mixed_float16": torch.float16}
Native = Callable[[Iterable[Any]], torch.optim.Optimizer]

PAIRS: dict[str, tuple[Any, Native]] = {
    "sgd": (
        polyamp.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": (polyamp.adam(0.01, weight_decay=0.01), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01)),
    "adamw": (polyamp.adamw(0.01), lambda p: torch.optim.AdamW(p, 0.01)),
    # its first steps are ten times the rate: at 0.01 the training is chaotic, and rounding doubles with every step
    "rmsprop": (polyamp.rmsprop(1e-4, momentum=0.5), lambda p: torch.optim.RMSprop(p, 1e-4, momentum=0.5)),
    "adagrad": (polyamp.adagrad(0.01, lr_decay=0.1), lambda p: torch.optim.Adagrad(p, 0.01, lr_decay=0.1)),
}


class Network(nn.Module):
    """Layouts that kernels may stumble over: channels_last, transposed and empty parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotation lacks it
        self.hidden = nn.Linear(64, 8)
        self.head = nn.Linear(8, 2)
        self.turned = nn.Parameter(torch.randn(8, 8).t())
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x.reshape(-1, 3, 4, 4))).flatten(1)
        out: torch.Tensor = self.head(torch.tanh(self.hidden(x) @ self.turned)) + self.empty.sum()
        return out


def batches() -> list[dict[str, Any]]:
    """Twelve, of which the fourth and the eighth overflow."""
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(4, 48)).astype(np.float32),
            "y": rng.normal(size=(4, 2)).astype(np.float32),
            "gain": np.full((4, 2), np.inf if number in (3, 7) else 1.0, np.float32),
        }
        for number in range(12)
    ]


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]) * batch["gain"], batch["y"])


def by_hand(native: Native, policy: str, clip_norm: float | None) -> nn.Module:
    model = Network()
    optimizer, scale = native(model.parameters()), SCALE
    for item in batches():
        x, y, gain = (torch.from_numpy(item[name]) for name in ("x", "y", "gain"))
        with torch.autocast(
            "cpu", dtype=DTYPES.get(policy, torch.bfloat16), enabled=policy in DTYPES, cache_enabled=False
        ):
            out = model(x)
        optimizer.zero_grad()
        (((out.float() * gain - y) ** 2).mean() * scale).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        for grad in grads:
            grad /= scale
        if not all(bool(torch.isfinite(grad).all()) for grad in grads):
            scale /= 2.0
            continue
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return model


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("policy", ["float32", *DTYPES])
@pytest.mark.parametrize("name", PAIRS)
def test_ten_updates_and_two_skips_equal_the_loop_by_hand(name: str, policy: str, clip_norm: float | None) -> None:
    spec, native = PAIRS[name]
    recipe = polyamp.Recipe(
        policy=polyamp.Policy(policy, op_list="native"),
        scaler=polyamp.LossScaler(init_scale=SCALE),
        optimizer=spec,
        clip_norm=clip_norm,
    )
    state = polyamp.init(Network(), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    for item in batches():
        state, result = step(state, item)
    assert (int(result.step), float(result.scale)) == (10, SCALE / 4)
    # the two divide and multiply in another order, by some units in the last place of numbers near 1
    for ours, theirs in zip(state.model.parameters(), by_hand(native, policy, clip_norm).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-6)
