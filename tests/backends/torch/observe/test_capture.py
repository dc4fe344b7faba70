"""What `watch` sees of a pass, against hooks and gradients by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp_torch.backend import TorchBackend
from polyamp_torch.observe.observer import OBSERVER

Seen = list[tuple[str, str, np.ndarray[Any, Any], str]]


def recipe(policy: str = "float32") -> polyamp.Recipe:
    return polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))


def loss_fn(model: Any, batch: Any) -> Any:
    x, y = batch
    return torch.nn.functional.mse_loss(model(x).float(), y)


def batch(rows: int = 8, inputs: int = 4, outputs: int = 3) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, inputs), "f4"), rng.standard_normal((rows, outputs), "f4")


def watched(model: nn.Module, policy: str = "float32", loss: Any = loss_fn, data: Any = None) -> tuple[Seen, Any]:
    state = polyamp.init(model, recipe(policy))
    seen: Seen = []
    result = OBSERVER.capture_pass(state, loss, batch() if data is None else data, lambda *each: seen.append(each))
    return seen, result


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))


def test_the_backend_gives_it() -> None:
    assert TorchBackend().observer is OBSERVER


def test_aux_beside_the_loss_changes_nothing() -> None:
    plain, expected = watched(mlp())
    seen, found = watched(mlp(), loss=lambda model, batch: (loss_fn(model, batch), {"rows": 8.0}))
    assert found.loss == expected.loss
    assert [each[:2] for each in seen] == [each[:2] for each in plain]


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_outputs_and_cotangents_are_those_of_hooks_by_hand(policy: str) -> None:
    model = mlp()
    seen, result = watched(model, policy)
    x, y = map(torch.from_numpy, batch())
    with torch.autocast("cpu", torch.bfloat16 if "bf" in policy else torch.float16, enabled=policy != "float32"):
        first = model[0](x)
        kept = first.detach().float().clone()
        second = torch.relu(first)
        third = model[2](second)
    for each in (first, second, third):
        each.retain_grad()
    loss = torch.nn.functional.mse_loss(third.float(), y)
    scale = 65536.0 if policy == "mixed_float16" else 1.0
    (loss * scale).backward()
    wanted = [
        ("0", "input", x),
        ("0", "output", kept),
        ("1", "output", second),
        ("2", "input", second),
        ("2", "output", third),
        ("", "output", third),
        ("2", "cotangent", third.grad),
        ("", "cotangent", third.grad),
        ("1", "cotangent", second.grad),
        ("0", "cotangent", first.grad),
    ]
    assert [each[:2] for each in seen] == [each[:2] for each in wanted]
    narrow = {"float32": "float32", "mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}[policy]
    for (path, what, array, dtype), (_, _, value) in zip(seen, wanted, strict=True):
        assert value is not None
        by_hand = value.detach().float().numpy() / (scale if what == "cotangent" else 1.0)
        assert np.array_equal(array, by_hand), (path, what)
        assert (array.dtype, dtype) == (np.float32, narrow if value is not x else "float32")
    assert result.loss == loss.item()
    assert list(result.gradients) == ["0/weight", "0/bias", "2/weight", "2/bias"]
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert np.array_equal(result.gradients[name.replace(".", "/")], (p.grad / scale).numpy()), name
