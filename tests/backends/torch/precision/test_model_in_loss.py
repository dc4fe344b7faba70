"""S29: what a method of the model gives in `loss_fn`, and which parameters `loss_fn` reads, eager and compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp

X = np.ones((4, 3), np.float32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.frozen = nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(300.1))

    def encode(self, x: Any) -> Any:
        return self.layer(x)

    def forward(self, x: Any) -> Any:
        return self.frozen(self.encode(x))


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize("compiled", [False, {"backend": "eager"}])
def test_s29_a_method_gives_the_output_dtype_and_parameters_are_the_masters(mode: Any, compiled: Any) -> None:
    seen = []

    def loss_fn(model: Any, x: Any) -> Any:
        own = polyamp.parameters(model)
        seen.append((model.encode(x).dtype, model.scale.dtype, own["scale"].dtype, sorted(own)))
        return (model(x) ** 2).mean() + polyamp.losses.sum_of_squares(own["scale"])

    policy = polyamp.Policy("mixed_float16", mode=mode)
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.25), scaler=polyamp.LossScaler(init_scale=2.0))
    state = polyamp.init(Net(), recipe)
    _, result = polyamp.train_step(loss_fn, recipe, compile=compiled)(state, X)
    read = torch.float32 if mode == "autocast" else torch.float16
    names = ["layer/bias", "layer/weight", "scale"]
    assert seen
    assert all(item == (torch.float32, read, torch.float32, names) for item in seen)
    assert float(result.loss) > 90000.0, "float16 does not reach that far"
    np.testing.assert_allclose(float(state.model.scale.detach()), 300.1 / 2, rtol=1e-6)


def test_s29_outside_of_a_step_a_method_is_under_the_policy() -> None:
    model, x = Net(), torch.full((4, 3), 0.1)
    bound: Any = polyamp.Policy("mixed_bfloat16").autocast(model)
    encoded = bound.encode(x)
    assert encoded.dtype == torch.float32
    assert torch.equal(encoded, encoded.bfloat16().float()), "the product is of bfloat16"
    assert not torch.equal(encoded, model.encode(x))
